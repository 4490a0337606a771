import json
from typing import Any

import pytest

from gateway.requests.span_contents import input_messages, output_messages
from shared.events import Inputs
from shared.events.inputs import Media

ROOM = 10_000


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


def read(document: str) -> Any:
    return json.loads(document)


def test_a_chat_keeps_its_roles_and_tool_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    inputs = Inputs(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image", "file": 0}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ]
    )

    assert read(input_messages([inputs], ROOM)) == [
        {"role": "system", "parts": [text("Be brief.")]},
        {"role": "user", "parts": [text("What?"), {"type": "image"}]},
        {"role": "assistant", "parts": [
            {"type": "tool_call", "id": "c1", "name": "add", "arguments": '{"a":1}'}
        ]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "3"}]},
    ]  # fmt: skip


def test_what_is_no_message_is_left_out() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    broken: list[dict[str, Any]] = [
        {"role": nested, "content": nested},
        {"role": "user", "content": ["text", {"type": "text", "text": nested}, {"type": nested}]},
        {"role": "assistant", "tool_calls": ["x", {"function": "f"}, {"function": {"arguments": nested}}]},
        {"role": "tool", "content": 5, "tool_call_id": nested},
    ]

    call = {"type": "tool_call", "id": "", "name": "", "arguments": ""}
    assert read(input_messages([Inputs(messages=broken)], ROOM)) == [
        {"role": "", "parts": []},
        {"role": "user", "parts": [text(""), {"type": ""}]},
        {"role": "assistant", "parts": [call]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "", "response": ""}]},
    ]


def test_other_prompts_are_messages_of_a_user() -> None:
    image = Media(modality="image", digest="0" * 64)
    prompts = [
        Inputs(text="one", files=[image]),
        Inputs(token_ids=[1, 2]),
        Inputs(texts=["three", [4]], queries=["two"]),
    ]

    assert read(input_messages(prompts, ROOM)) == [
        {"role": "user", "parts": [{"type": "image"}, text("one")]},
        {"role": "user", "parts": [{"type": "token_ids"}]},
        {"role": "user", "parts": [text("two"), text("three")]},
    ]


def test_the_newest_messages_are_kept() -> None:
    chat = [{"role": "user", "content": f"{number} " + "x" * 90} for number in range(10)]
    document = input_messages([Inputs(messages=chat)], 400)

    kept = read(document)
    assert len(document) <= 400
    assert [message["parts"][0]["content"][0] for message in kept] == ["7", "8", "9"]
    assert kept[1]["parts"] == [text("8 " + "x" * 90)]
    assert kept[0]["parts"][0]["content"].endswith("x…")


@pytest.mark.parametrize("character", ["a", "\x00", "é", "語", "😀", '"', "\\"])
@pytest.mark.parametrize("limit", [256, 257, 300, 1000])
def test_a_document_is_as_large_as_allowed_and_no_larger(character: str, limit: int) -> None:
    for document in (
        input_messages([Inputs(text=character * 5000)], limit),
        output_messages([(character * 5000, "stop")], limit),
        input_messages([Inputs(text=character * 50 + "a" * 5000)], limit),
    ):
        [message] = read(document)
        assert limit - 12 <= len(document.encode()) <= limit
        assert set(message["parts"][0]["content"][50:]) <= {character, "a", "…"}


def test_a_result_that_has_no_room_is_left_out() -> None:
    chat = [{"role": "tool", "tool_call_id": "c1", "content": "x" * 500}, {"role": "user", "content": "y"}]

    assert read(input_messages([Inputs(messages=chat)], 256)) == [{"role": "user", "parts": [text("y")]}]


def test_an_answer_without_text_has_no_parts() -> None:
    assert read(output_messages([("", "stop"), ("so", "length")], ROOM)) == [
        {"role": "assistant", "parts": [], "finish_reason": "stop"},
        {"role": "assistant", "parts": [text("so")], "finish_reason": "length"},
    ]


def test_half_a_surrogate_pair_is_escaped() -> None:
    assert input_messages([Inputs(text="a\ud800")], ROOM).encode().count(b"\\ud800") == 1
