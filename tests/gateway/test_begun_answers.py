"""Answers that a client has begun: the last message is the assistant's, on every route that takes chats."""

from typing import Any

import pytest

from shared.events import RequestSubmitted
from tests.gateway.world import deployment

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Is 91 a prime?"},
    {"role": "assistant", "content": "No, "},
]
CHATS = "/v1/chat/completions"
CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


async def sent(path: str, body: dict[str, Any]) -> tuple[Any, list[RequestSubmitted]]:
    async with deployment(tool_calls="hermes") as world:
        response = await world.client.post(path, json=body)
        events = [event for event in world.events("request") if isinstance(event, RequestSubmitted)]
    return response, events


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, {"continue_final_message": True}),
        (CHATS, {"continue_final_message": True, "add_generation_prompt": False}),
        ("/v1/messages", {"max_tokens": 9}),
        ("/v1/messages/count_tokens", {}),
        ("/api/chat", {}),
        ("/generate", {"continue_final_message": True}),
    ],
)
async def test_the_request_on_the_log_continues_the_last_message(path: str, body: dict[str, Any]) -> None:
    model = {} if path == "/generate" else {"model": "demo"}
    response, [event] = await sent(path, {"messages": TURNS} | model | body)

    assert response.status_code == 200, response.text
    assert event.inputs.messages == TURNS
    assert event.inputs.continue_final_message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, {"messages": TURNS}),
        (CHATS, {"messages": TURNS[:1], "continue_final_message": False}),
        ("/v1/messages", {"messages": TURNS[:1], "max_tokens": 9}),
        ("/api/chat", {"messages": TURNS[:1]}),
        ("/api/chat", {"messages": [TURNS[0], {"role": "assistant", "content": ""}]}),
    ],
)
async def test_other_requests_begin_an_answer(path: str, body: dict[str, Any]) -> None:
    _, [event] = await sent(path, {"model": "demo"} | body)

    assert not event.inputs.continue_final_message
    assert event.inputs.add_generation_prompt


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHATS, {"messages": TURNS[:1], "continue_final_message": True}, "continue_final_message"),
        (
            CHATS,
            {"messages": [TURNS[0], {**TURNS[1], "tool_calls": CALLS}], "continue_final_message": True},
            "continue_final_message",
        ),
        (
            CHATS,
            {"messages": TURNS, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ("/generate", {"text": "x", "continue_final_message": True}, "continue_final_message"),
        (
            "/v1/messages",
            {"messages": [TURNS[0], {"role": "assistant", "content": []}], "max_tokens": 9},
            "messages[1].content",
        ),
    ],
)
async def test_what_cannot_be_continued_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    model = {} if path == "/generate" else {"model": "demo"}
    response, events = await sent(path, model | body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert events == []
