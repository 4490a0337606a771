"""The ids of tokens and the counts so far, as vLLM adds them to OpenAI's answers."""

import json
from typing import Any, Final

import httpx
import pytest

from shared.events import RequestSubmitted
from tests.gateway.world import Performance, World, deployment

PATHS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "demo", "prompt": "hi"},
}
PROMPT: Final = [7, 8, 9]


async def answer(performance: Performance) -> None:
    """A prompt in two pieces, three tokens of which one has no text, and the end."""
    if performance.event.params.echo:
        text = "hi" if performance.event.params.echo is True else ""
        for part, ids in ((text[:1], PROMPT[:2]), (text[1:], PROMPT[2:])):
            performance.output(performance.chunk(part, [], metadata={"echo": True, "token_ids": ids}))
    for text, ids in (("a", [1]), ("", [2]), ("bc", [3])):
        performance.say(text, ids)
    performance.finish()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def echoes(world: World) -> set[Any]:
    return {one.params.echo for one in world.events("request") if isinstance(one, RequestSubmitted)}


async def asked(path: str, **fields: Any) -> tuple[httpx.Response, set[Any]]:
    async with deployment(answer) as world:
        response = await world.client.post(path, json=PATHS[path] | fields)
        assert response.status_code == 200, response.text
        return response, echoes(world)


@pytest.mark.parametrize("path", PATHS)
async def test_a_document_has_the_ids_of_the_prompt_and_of_each_answer(path: str) -> None:
    response, echoed = await asked(path, return_token_ids=True, n=2)
    plain, not_echoed = await asked(path, n=2)
    body, choices = response.json(), response.json()["choices"]

    assert (echoed, not_echoed) == ({"ids"}, {False})
    assert [one["token_ids"] for one in choices] == [[1, 2, 3]] * 2
    if path == "/v1/completions":
        assert [one["prompt_token_ids"] for one in choices] == [PROMPT] * 2
        assert [one["text"] for one in choices] == ["abc"] * 2
    else:
        assert body["prompt_token_ids"] == PROMPT
        assert [one["message"]["content"] for one in choices] == ["abc"] * 2
    assert "token_ids" not in plain.text


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_has_the_ids_with_each_piece(path: str) -> None:
    response, _ = await asked(path, return_token_ids=True, stream=True)
    found = events(response)
    pieces = [one["choices"][0] for one in found]
    ids = [one["token_ids"] for one in pieces]

    if path == "/v1/completions":
        assert ids == [[1], [2], [3], []]
        assert [one.get("prompt_token_ids") for one in pieces] == [PROMPT, None, None, None]
        assert [one["text"] for one in pieces] == ["a", "", "bc", ""]
    else:
        assert ids == [[], [1], [2], [3], []]
        assert [one.get("prompt_token_ids") for one in found] == [PROMPT, None, None, None, None]
        assert [one["delta"].get("content") for one in pieces] == ["", "a", None, "bc", None]


@pytest.mark.parametrize("path", PATHS)
async def test_every_event_counts_the_tokens_so_far(path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response, echoed = await asked(path, stream=True, stream_options=options, return_token_ids=True)
    *pieces, last = events(response)
    counts = [(one["usage"]["prompt_tokens"], one["usage"]["completion_tokens"]) for one in pieces]

    assert echoed == {"ids"}
    assert counts == [(3, 0)] * (path != "/v1/completions") + [(3, 1), (3, 2), (3, 3), (3, 3)]
    assert [one["usage"]["total_tokens"] for one in pieces] == [sum(one) for one in counts]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


@pytest.mark.parametrize("include_usage", [None, False])
async def test_counts_need_the_usage_as_in_vllm(include_usage: bool | None) -> None:
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    response, echoed = await asked("/v1/chat/completions", stream=True, stream_options=options)

    assert echoed == {False}
    assert "usage" not in response.text


async def test_an_echoed_prompt_is_shown_with_its_ids() -> None:
    fields: dict[str, Any] = {"echo": True, "return_token_ids": True}
    whole, echoed = await asked("/v1/completions", **fields)
    streamed, _ = await asked("/v1/completions", **fields, stream=True)
    [choice] = whole.json()["choices"]
    pieces = [one["choices"][0] for one in events(streamed)]

    assert echoed == {True}
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == ("hiabc", PROMPT, [1, 2, 3])
    assert [one.get("prompt_token_ids") for one in pieces] == [[7, 8], [9], None, None, None, None]
    assert [one["token_ids"] for one in pieces] == [[], [], [1], [2], [3], []]


@pytest.mark.parametrize("path", PATHS)
async def test_a_resumed_stream_goes_on_to_the_byte(path: str) -> None:
    body = PATHS[path] | {
        "request_id": "r",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
    async with deployment(answer) as world:
        whole = (await world.client.post(path, json=body)).text
        blocks = whole.split("\n\n")
        for count, block in enumerate(blocks[:-2], 1):
            position = block.splitlines()[0].removeprefix("id: ")
            rest = await world.client.post(path, json=body, headers={"last-event-id": position})
            assert "\n\n".join([*blocks[:count], rest.text]) == whole
