import math
from typing import Any

import msgspec
import pytest

from gateway.openai.logprobs import LEAST, TokenList, chat_logprobs, completion_logprobs
from shared.events import LikelyToken, OutputChunk, RequestSubmitted, TokenLogprobs
from tests.gateway.openai.test_routes import events
from tests.gateway.world import CHAT, Performance, deployment

COMPLETION = {"model": "demo", "prompt": "Hi yo", "logprobs": 2}


def token(text: str | bytes, logprob: float | None = -0.5, **top: float) -> TokenLogprobs:
    data = text if isinstance(text, bytes) else text.encode()
    likely = [LikelyToken(id=9, token=word.encode(), logprob=value) for word, value in top.items()]
    return TokenLogprobs(id=1, token=data, logprob=logprob, top=likely)


def chunk(text: str, *tokens: str | bytes, echo: bool = False) -> OutputChunk:
    metadata = {"echo": True} if echo else {}
    return OutputChunk(text=text, logprobs=[token(one) for one in tokens], metadata=metadata)


def listed(chunks: list[OutputChunk], finish_reason: str = "stop") -> list[tuple[int, bytes]]:
    tokens = TokenList()
    found = [one for chunk in chunks for one in tokens.add(chunk)]
    return [(one.offset, one.token.token) for one in found + tokens.end(finish_reason)]


# ---- which tokens are listed, and where ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([chunk("a b", "a", " b")], [(0, b"a"), (1, b" b")]),
        ([chunk("a", "a", "</s>")], [(0, b"a")]),  # the last token ended the answer
        ([chunk("a", "a"), chunk("", "</s>")], [(0, b"a")]),
        ([chunk("", "a"), chunk("a b", " b", "<|end|>")], [(0, b"a"), (1, b" b")]),  # held back
        ([chunk("a", "a", " b", " STOP")], [(0, b"a")]),  # a stop string began with " b"
        ([chunk("a b", "a", " bc")], [(0, b"a"), (1, b" bc")]),  # a stop string in the middle of a token
        ([chunk("é!", b"\xc3", b"\xa9", "!")], [(0, b"\xc3"), (0, b"\xa9"), (1, b"!")]),
        ([chunk("", b"\xc3"), chunk("é", b"\xa9")], [(0, b"\xc3"), (0, b"\xa9")]),
        ([chunk("Hi.", " Hi", ".", "</s>")], [(0, b" Hi"), (2, b".")]),  # SentencePiece's first space
        ([chunk("a", "a", "<s>"), chunk("b", "b")], [(0, b"a"), (1, b"<s>"), (1, b"b")]),  # ignore_eos
    ],
)
def test_a_token_is_listed_with_its_text(
    chunks: list[OutputChunk], expected: list[tuple[int, bytes]]
) -> None:
    assert listed(chunks) == expected


def test_no_offset_is_beyond_the_text() -> None:
    chunks = [chunk("a<", "a", "<s>", "<"), chunk("", "<s>", "<s>")]  # `<s>` is special, with ignore_eos

    found = listed(chunks, "length")

    assert [text for _, text in found] == [b"a", b"<s>", b"<", b"<s>", b"<s>"]
    assert max(offset for offset, _ in found) == 2


def test_what_a_limit_cut_off_is_listed() -> None:
    assert listed([chunk("a", "a"), chunk("", b"\xc3")], "length") == [(0, b"a"), (1, b"\xc3")]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([chunk("Hi yo", "<s>", "Hi", " yo", echo=True)], [(0, b"<s>"), (0, b"Hi"), (2, b" yo")]),
        (
            [chunk("Hi", "Hi yo", echo=True), chunk(" yo", "!", echo=True)],
            [(0, b"Hi yo"), (5, b"!")],
        ),
        ([chunk("<s>Hi yo", "<s>", "Hi", " yo", echo=True)], [(0, b"<s>"), (3, b"Hi"), (5, b" yo")]),
    ],
)
def test_every_token_of_an_echoed_prompt_is_listed_and_the_answer_goes_on_behind_it(
    prompt: list[OutputChunk], expected: list[tuple[int, bytes]]
) -> None:
    length = sum(len(one.text) for one in prompt)

    found = listed([*prompt, chunk(" ok", " ok", "</s>")])

    assert found == [*expected, (length, b" ok")]


# ---- how they are written ------------------------------------------------------------------------------


def test_a_chat_gives_text_and_bytes() -> None:
    [one] = TokenList().add(OutputChunk(text="é", logprobs=[token(b"\xc3", -1.0, a=-0.1)]))

    assert chat_logprobs([one]) == {
        "content": [
            {
                "token": "\N{REPLACEMENT CHARACTER}",
                "bytes": [0xC3],
                "logprob": -1.0,
                "top_logprobs": [{"token": "a", "bytes": [97], "logprob": -0.1}],
            }
        ],
        "refusal": None,
    }


def test_a_completion_writes_bytes_that_are_no_text_as_bytes() -> None:
    said = OutputChunk(text="é", logprobs=[token(b"\xc3", -1.0, a=-0.1), token(b"\xa9", -2.0)])

    assert completion_logprobs(TokenList().add(said)) == {
        "text_offset": [0, 0],
        "token_logprobs": [-1.0, -2.0],
        "tokens": ["bytes:\\xc3", "bytes:\\xa9"],
        "top_logprobs": [{"a": -0.1, "bytes:\\xc3": -1.0}, {"bytes:\\xa9": -2.0}],
    }


def test_what_json_cannot_say_of_a_probability_is_openais_least() -> None:
    found = completion_logprobs(TokenList().add(OutputChunk(text="a", logprobs=[token("a", -math.inf)])))

    assert found["token_logprobs"] == [LEAST]
    assert msgspec.json.decode(msgspec.json.encode(found)) == found


def test_tokens_are_written_as_their_ids() -> None:
    said = TokenList().add(OutputChunk(text="é", logprobs=[token(b"\xc3", -1.0, a=-0.1), token(b"\xa9")]))

    completion, chat = completion_logprobs(said, as_ids=True), chat_logprobs(said, as_ids=True)

    assert completion["tokens"] == ["token_id:1", "token_id:1"]
    assert completion["top_logprobs"] == [{"token_id:9": -0.1, "token_id:1": -1.0}, {"token_id:1": -0.5}]
    assert [one["token"] for one in chat["content"]] == ["token_id:1", "token_id:1"]
    assert chat["content"][0]["top_logprobs"] == [{"token": "token_id:9", "bytes": [97], "logprob": -0.1}]


# ---- over HTTP -----------------------------------------------------------------------------------------


async def scored(performance: Performance) -> None:
    """Answer in three chunks; the first one has no text."""
    params = performance.event.params
    prompt = [token("Hi", None), token(" yo", -3.0, a=-0.1)] if params.logprobs is not None else None
    if params.echo:
        performance.say_prompt("Hi yo", prompt)
    if params.max_tokens == 0:
        performance.finish("length")
        return
    if params.logprobs is None:
        performance.say("Héllo.")
    else:
        performance.say_tokens("H", [token("H", -0.25, H=-0.25, h=-2.0), token(b"\xc3", -1.0)])
        performance.say_tokens("", [token(b"\xa9")])
        performance.say_tokens("éllo.", [token("llo", -0.125), token("."), token("<|im_end|>")])
    performance.finish()


def tokens_of(logprobs: dict[str, Any]) -> list[str]:
    return [one["token"] for one in logprobs["content"]]


async def test_a_chat_lists_its_tokens_whole_and_streamed_alike() -> None:
    asked = CHAT | {"logprobs": True, "top_logprobs": 2}
    async with deployment(scored) as world:
        whole = (await world.client.post("/v1/chat/completions", json=asked)).json()
        stream = await world.client.post("/v1/chat/completions", json=asked | {"stream": True})
        [first, _] = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]

    assert first.params.logprobs == 2
    [choice] = whole["choices"]
    told = [event["choices"][0] for event in events(stream) if isinstance(event, dict)]
    streamed = [one for piece in told if piece["logprobs"] for one in piece["logprobs"]["content"]]
    assert choice["message"]["content"] == "Héllo."
    assert choice["logprobs"]["content"] == streamed
    assert b"".join(bytes(one["bytes"]) for one in streamed).decode() == "Héllo."
    assert [one["token"] for one in streamed[0]["top_logprobs"]] == ["H", "h"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_client_asks_for_tokens_as_ids(path: str) -> None:
    body = CHAT | {"logprobs": True} if "chat" in path else COMPLETION
    async with deployment(scored) as world:
        response = await world.client.post(path, json=body | {"return_tokens_as_token_ids": True})

    found = response.json()["choices"][0]["logprobs"]
    texts = [one["token"] for one in found["content"]] if "chat" in path else found["tokens"]
    assert texts == ["token_id:1"] * 5


async def test_a_chat_without_top_logprobs_names_no_others() -> None:
    async with deployment(scored) as world:
        await world.client.post("/v1/chat/completions", json=CHAT | {"logprobs": True})
        plain = (await world.client.post("/v1/chat/completions", json=CHAT | {"logprobs": False})).json()
        params = [event.params for event in world.events("request") if isinstance(event, RequestSubmitted)]

    assert [one.logprobs for one in params] == [0, None]
    assert plain["choices"][0]["logprobs"] is None


async def test_a_completion_lists_its_tokens_whole_and_streamed_alike() -> None:
    async with deployment(scored) as world:
        whole = (await world.client.post("/v1/completions", json=COMPLETION)).json()
        stream = await world.client.post("/v1/completions", json=COMPLETION | {"stream": True})

    found = whole["choices"][0]["logprobs"]
    assert found["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xa9", "llo", "."]
    assert found["text_offset"] == [0, 1, 1, 2, 5]
    told = [event["choices"][0]["logprobs"] for event in events(stream) if isinstance(event, dict)]
    for name, values in found.items():
        assert [value for one in told if one for value in one[name]] == values


async def test_an_echo_comes_first_and_counts_once() -> None:
    async with deployment(scored) as world:
        plain = (await world.client.post("/v1/completions", json=COMPLETION | {"echo": True})).json()
        streamed = events(
            await world.client.post("/v1/completions", json=COMPLETION | {"echo": True, "stream": True})
        )

    [choice] = plain["choices"]
    assert choice["text"] == "Hi yoHéllo."
    assert choice["logprobs"]["tokens"][:2] == ["Hi", " yo"]
    assert choice["logprobs"]["token_logprobs"][:2] == [None, -3.0]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"a": -0.1, " yo": -3.0}]
    assert choice["logprobs"]["text_offset"] == [0, 2, 5, 6, 6, 7, 10]
    assert plain["usage"]["prompt_tokens"] == 7
    assert plain["usage"]["completion_tokens"] == 6
    assert isinstance(streamed[0], dict)
    assert streamed[0]["choices"][0]["text"] == "Hi yo"


async def test_a_prompt_may_be_scored_without_an_answer() -> None:
    async with deployment(scored) as world:
        asked = COMPLETION | {"echo": True, "max_tokens": 0}
        response = await world.client.post("/v1/completions", json=asked)
        [event] = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]

    [choice] = response.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hi yo", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0]
    assert response.json()["usage"]["completion_tokens"] == 0
    assert (event.params.max_tokens, event.params.echo, event.params.logprobs) == (0, True, 2)


async def test_an_echo_without_log_probabilities_is_text_alone() -> None:
    async with deployment(scored) as world:
        asked = {"model": "demo", "prompt": "Hi yo", "echo": True}
        [choice] = (await world.client.post("/v1/completions", json=asked)).json()["choices"]

    assert (choice["text"], choice["logprobs"]) == ("Hi yoHéllo.", None)
