"""Calls of programs that people use, with nothing but the address set: recorded, or as their sources say.

To record another: put a proxy between the program and `dalsegno serve`, and add what it sends to
recorded_calls.json, with long texts cut.
"""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.ollama.routes import OLLAMA_VERSION
from tests.gateway.openai.test_sdk import saying
from tests.gateway.world import deployment

CALLS: Final[list[dict[str, Any]]] = json.loads(Path(__file__).with_name("recorded_calls.json").read_text())
ANSWER: Final = "It counts."


def text_of(path: str, body: str) -> str:
    """The text of an answer, whole or streamed, of any of the APIs."""
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith(("{", "data: "))]
    return "".join(_piece(path, json.loads(one)) for one in events if one != "[DONE]")


def _piece(path: str, found: dict[str, Any]) -> str:
    match path:
        case "/v1/chat/completions" | "/v1/completions":
            [choice] = found["choices"] or [{}]
            message = choice.get("message") or choice.get("delta") or choice
            return str(message.get("content") or message.get("text") or "")
        case "/v1/messages":
            blocks = [found.get("delta", {}), *found.get("content", [])]
            return "".join(one.get("text", "") for one in blocks)
        case "/v1/responses":
            return "".join(part["text"] for item in found["output"] for part in item["content"])
        case "/api/chat":
            return str(found["message"]["content"])
        case _:
            return str(found["response"])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call['client'].partition(',')[0]} {call['path']}")
async def test_a_recorded_call_is_answered(call: dict[str, Any]) -> None:
    async with deployment(saying(ANSWER, 4), tool_calls="hermes") as world:
        response = await world.client.request(
            call["method"],
            call["path"],
            content=None if call["body"] is None else json.dumps(call["body"]),
            headers=call["headers"],
        )

    assert response.status_code == 200, response.text
    if call["method"] == "POST" and call["path"] != "/api/show":
        assert text_of(call["path"], response.text) == ANSWER


def test_the_version_is_one_that_clients_of_ollama_accept() -> None:
    """Copilot in VS Code asks for 0.6.4 or later, other programs for the first with Anthropic's route."""
    assert tuple(map(int, OLLAMA_VERSION.split("."))) >= (0, 14, 2)
