import asyncio
import time
from typing import Any

import pytest

from gateway.requests.resume import StreamPosition
from tests.gateway.generate.test_routes import lines, text_of
from tests.gateway.openai.test_logprobs import token
from tests.gateway.openai.test_routes import events
from tests.gateway.world import CHAT, Performance, deployment

BODY = CHAT | {"stream": True, "request_id": "mine"}
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", BODY),
    ("/v1/completions", {"model": "demo", "prompt": "x", "stream": True, "request_id": "mine"}),
]


async def four(performance: Performance) -> None:
    for word in ("a", "b", "c", "d"):
        performance.say(f"{word}{performance.event.params.choice} ")
        await asyncio.sleep(0)
    performance.finish()


def told(stream: list[dict[str, Any] | str]) -> list[tuple[int, str]]:
    """The index and the text of each event that has one."""
    choices = [event["choices"][0] for event in stream if isinstance(event, dict) and event["choices"]]
    texts = [(one["index"], one["text"] if "text" in one else one["delta"].get("content")) for one in choices]
    return [(index, text) for index, text in texts if text]


def test_a_position_is_written_as_it_is_read() -> None:
    position = StreamPosition.start(3)
    position.advance(0, 3)
    position.begin(1)

    assert str(position) == "3,b,-"
    assert [position.has(0, 3), position.has(0, 4), position.has(1, 0)] == [True, False, False]
    assert [position.has_any(choice) for choice in range(3)] == [True, True, False]
    position.end(2)
    assert str(position) == "3,b,e"
    assert [position.has(2, 10**9), position.has_ended(2), position.has_ended(0)] == [True, True, False]
    position.complete()
    assert str(position) == "end"


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_stream_goes_on_behind_the_last_event_its_client_has(path: str, body: dict[str, Any]) -> None:
    async with deployment(four) as world:
        whole = await world.client.post(path, json=body)
        rest = await world.client.post(path, json=body, headers={"Last-Event-ID": "1"})
        performed = len(world.performances)

    assert told(events(rest)) == told(events(whole))[2:] == [(0, "c0 "), (0, "d0 ")]
    assert [line for line in rest.text.splitlines() if line.startswith("id: ")] == ["id: 2", "id: 3", "id: e"]
    assert events(rest)[-2:] == events(whole)[-2:]
    assert "assistant" not in rest.text
    assert performed == 1


async def test_a_stream_of_choices_has_a_position_in_each() -> None:
    body = BODY | {"n": 3, "stream_options": {"include_usage": True}}
    async with deployment(four) as world:
        whole = await world.client.post("/v1/chat/completions", json=body)
        headers = {"Last-Event-ID": "1,3,-"}
        rest = await world.client.post("/v1/chat/completions", json=body, headers=headers)

    positions = [line for line in whole.text.splitlines() if line.startswith("id: ")]
    assert positions[-2:] == ["id: e,e,e", "id: end"]
    assert sorted(told(events(rest))) == [
        (0, "c0 "), (0, "d0 "), (2, "a2 "), (2, "b2 "), (2, "c2 "), (2, "d2 ")
    ]  # fmt: skip
    assert rest.text.count("assistant") == 1  # choice 2 had not begun
    assert rest.text.count('"finish_reason":"stop"') == 3
    assert events(rest)[-2] == events(whole)[-2]  # the usage is of the whole answer


async def test_whatever_position_a_stream_is_resumed_at_nothing_is_lost_or_told_twice() -> None:
    async with deployment(four) as world:
        whole = await world.client.post("/v1/chat/completions", json=BODY | {"n": 2})
        text = told(events(whole))
        blocks = whole.text.split("\n\n")
        for count, block in enumerate(blocks):
            if not block.startswith("id: "):
                continue
            position = block.splitlines()[0].removeprefix("id: ")
            had = told([event for event in events(whole)[: count + 1] if isinstance(event, dict)])
            rest = await world.client.post(
                "/v1/chat/completions", json=BODY | {"n": 2}, headers={"Last-Event-ID": position}
            )
            assert sorted(had + told(events(rest))) == sorted(text)


@pytest.mark.slow
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("includes_usage", [False, True])
@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_what_was_had_and_what_comes_are_the_whole_stream_to_the_byte_wherever_it_broke(
    path: str, body: dict[str, Any], includes_usage: bool, logprobs: bool
) -> None:
    async def spoken(performance: Performance) -> None:
        performance.say_tokens("ab", [token("a"), token("b")])
        performance.say_tokens("", [token(b"\xe2")])  # a part of a character: no text yet
        performance.say_tokens("€", [token(b"\x82\xac")])
        performance.say_tokens("c", [token("c"), token("<end>")])
        performance.finish()

    asked = body | {"stream_options": {"include_usage": includes_usage}}
    if logprobs:
        asked["logprobs"] = True if "messages" in body else 1
    async with deployment(spoken) as world:
        whole = (await world.client.post(path, json=asked)).content
        ends = [place + 2 for place in range(len(whole)) if whole.startswith(b"\n\n", place)]
        for end in ends[:-1]:  # a client with [DONE] has all of it
            had = whole[:end]
            position = [line for line in had.split(b"\n") if line.startswith(b"id: ")][-1].removeprefix(
                b"id: "
            )
            rest = await world.client.post(path, json=asked, headers={b"last-event-id": position})
            assert had + rest.content == whole

    assert len(ends) == 5 + includes_usage + ("messages" in body)


async def test_a_request_says_the_same_time_to_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployment(four) as world:
        first = await world.client.post("/v1/chat/completions", json=BODY | {"stream": False})
        monkeypatch.setattr(time, "time", lambda: 4e9)
        again = await world.client.post("/v1/chat/completions", json=BODY | {"stream": False})

    assert first.content == again.content


async def test_offsets_go_on_in_a_stream_that_is_resumed() -> None:
    async def scored(performance: Performance) -> None:
        performance.say_tokens("ab", [token("a"), token("b")])
        performance.say_tokens("cd", [token("cd")])
        performance.finish()

    body = {"model": "demo", "prompt": "x", "stream": True, "request_id": "mine", "logprobs": 0}
    async with deployment(scored) as world:
        await world.client.post("/v1/completions", json=body)
        rest = await world.client.post("/v1/completions", json=body, headers={"Last-Event-ID": "0"})

    first = events(rest)[0]
    assert isinstance(first, dict)
    assert first["choices"][0]["logprobs"]["text_offset"] == [2]


@pytest.mark.parametrize(
    ("url", "headers"), [("/generate?after=1", {}), ("/generate", {"Last-Event-ID": "1"})]
)
async def test_lines_go_on_behind_the_index_their_client_has(url: str, headers: dict[str, str]) -> None:
    body = {"text": "x", "request_id": "mine"}
    async with deployment(four) as world:
        whole = await world.client.post("/generate", json=body)
        rest = await world.client.post(url, json=body, headers=headers)

    assert text_of(lines(rest)) == "c0 d0 "
    assert [line["metadata"].get("index") for line in lines(rest)] == [2, 3, None]
    assert lines(rest)[-1] == lines(whole)[-1]


async def test_what_was_told_to_the_end_is_only_ended() -> None:
    async with deployment(four) as world:
        await world.client.post("/generate", json={"text": "x", "request_id": "mine"})
        rest = await world.client.post("/generate?after=3", json={"text": "x", "request_id": "mine"})

    [end] = lines(rest)
    assert end["metadata"]["finish_reason"] == "stop"
    assert end["metadata"]["usage"]["completion_tokens"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "position", "message"),
    [
        ({}, "x", "expected the index of a chunk, found 'x'"),
        ({}, "-1", "expected the index of a chunk"),
        ({}, "1,2", "expected the index of a chunk"),
        ({}, "²", "expected the index of a chunk"),
        ({}, "9" * 19, "expected the index of a chunk"),
        ({"n": 2}, "1", "expected 2 indices of chunks or '-', by choice"),
        ({"n": 2}, "1,", "expected 2 indices"),
        ({"stream": False}, "1", "expected none for an answer that is not streamed"),
        ({"request_id": None}, "1", "expected the request_id of the stream to resume"),
    ],
)
async def test_a_position_that_is_none_is_refused(
    change: dict[str, Any], position: str, message: str
) -> None:
    async with deployment(four) as world:
        headers = {b"last-event-id": position.encode("latin-1")}
        response = await world.client.post("/v1/chat/completions", json=BODY | change, headers=headers)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "last-event-id"
    assert message in response.json()["error"]["message"]
