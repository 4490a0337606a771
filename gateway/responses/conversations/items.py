"""Items as clients send them, checked, and in the form in which they are kept and shown."""

import secrets
from collections.abc import Sequence
from typing import Any, Final

from gateway.responses.items import Chat, add_items

_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def kept_items(found: object) -> list[dict[str, Any]]:
    """Return the items of an input, a text or an array, with ids of their own.

    Raises:
        InvalidParamError: an item is malformed, or not supported.
    """
    add_items(Chat(), found)
    if isinstance(found, str):
        found = [{"role": "user", "content": found}]
    assert isinstance(found, list), "checked"
    return [_kept(item) for item in found]


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat with these items."""
    chat = Chat()
    add_items(chat, list(items))
    return chat.messages


def _kept(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    kept = {**item, "type": kind, "id": f"{_PREFIXES[kind]}-{secrets.token_hex(12)}", "status": "completed"}
    if kind == "message" and isinstance(item["content"], str):
        is_own = item["role"] == "assistant"
        part: dict[str, Any] = {"type": "output_text" if is_own else "input_text", "text": item["content"]}
        kept["content"] = [{**part, "annotations": [], "logprobs": []} if is_own else part]
    if kind == "reasoning":
        kept.setdefault("summary", [])
    return kept
