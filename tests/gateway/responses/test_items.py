"""Input items as messages of a chat, and messages as items."""

from typing import Any

import pytest

from gateway.errors import InvalidParamError
from gateway.responses.items import Chat, add_items, items_of


def messages(found: Any) -> list[dict[str, Any]]:
    chat = Chat()
    add_items(chat, found)
    assert len(chat.places) == len(chat.messages)
    return chat.messages


def call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "now", "arguments": "{}"}}


TEXT = {"type": "input_text", "text": "x"}
THOUGHT = [{"type": "reasoning_text", "text": "t"}]
SAID = [{"type": "output_text", "text": "a"}]
CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}


@pytest.mark.parametrize(
    ("found", "chat"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        ([{"role": "developer", "content": "a"}], [{"role": "developer", "content": "a"}]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"},
                                          {"type": "input_text", "text": "b"}]}],
            [{"role": "user", "content": "ab"}],
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"},
                                          {"type": "input_text", "text": "b"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}},
                                          {"type": "text", "text": "b"}]}],
        ),
        (
            [CALL, {**CALL, "call_id": "c2"},
             {"type": "function_call_output", "call_id": "c1", "output": "12"},
             {"type": "function_call_output", "call_id": "c2", "output": [TEXT]}],
            [{"role": "assistant", "content": None, "tool_calls": [call("c1"), call("c2")]},
             {"role": "tool", "tool_call_id": "c1", "content": "12"},
             {"role": "tool", "tool_call_id": "c2", "content": "x"}],
        ),
        (
            [{"type": "reasoning", "id": "r", "summary": [], "content": THOUGHT},
             {"type": "message", "role": "assistant", "content": SAID}, CALL],
            [{"role": "assistant", "content": "a", "reasoning_content": "t", "tool_calls": [call("c1")]}],
        ),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, CALL],
            [{"role": "assistant", "content": None, "reasoning_content": "s", "tool_calls": [call("c1")]}],
        ),
        (
            [{"type": "reasoning", "summary": [], "content": THOUGHT}],
            [{"role": "assistant", "content": "", "reasoning_content": "t"}],
        ),
    ],
)  # fmt: skip
def test_items_are_a_chat(found: Any, chat: list[dict[str, Any]]) -> None:
    assert messages(found) == chat


def test_a_reply_goes_to_its_own_message() -> None:
    found = messages([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}, CALL])

    assert [message["role"] for message in found] == ["assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("found", "param"),
    [
        (5, "input"),
        (["a"], "input[0]"),
        ([{"role": "tool", "content": "a"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": "a", "name": "b"}], "input[0].name"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"type": "function_call", "name": "a", "arguments": "{}"}], "input[0].call_id"),
        ([{"type": "reasoning", "summary": "x"}], "input[0].summary"),
        ([{"type": "reasoning", "summary": ["x"]}], "input[0].summary[0].text"),
        ([{"role": "user", "content": [{"type": "input_file", "file_url": "http://x"}]}],
         "input[0].content[0].file_url"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(found: Any, param: str) -> None:
    with pytest.raises(InvalidParamError) as caught:
        messages(found)
    assert caught.value.param == param


def test_a_chat_is_items_again() -> None:
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "t", "tool_calls": [call("c1")]},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
    ]

    items = items_of(chat, "r")

    assert [item["type"] for item in items] == [
        "message", "reasoning", "message", "function_call", "function_call_output",
    ]  # fmt: skip
    assert len({item["id"] for item in items}) == len(items)
    assert messages(items) == chat
