"""Anthropic's messages as those of OpenAI, which the chat machinery and chat templates know.

    user       text, image       ->  user       text, image_url
               tool_result       ->  tool       content
    assistant  text, thinking    ->  assistant  content, reasoning_content
               tool_use                         tool_calls

Messages of one role that follow one another are one turn, as they are for Anthropic. The place of each
message in the body is kept, so that errors name what the client wrote.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import check_names, string_in, wrong_value
from shared.validation_errors import described

ROLES: Final = ("user", "assistant", "system")
_TEXT: Final = ("type", "text", "cache_control", "citations")
_IMAGE: Final = ("type", "source", "cache_control")
_RESULT: Final = ("type", "tool_use_id", "content", "is_error", "cache_control")
_USE: Final = ("type", "id", "name", "input", "cache_control", "caller")
_THOUGHT: Final = ("type", "thinking", "signature")
_FAILED: Final = "The tool failed."
"""What a model is told of a tool that failed without a word."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat in OpenAI's form; `places` has the place of each message in the body."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, place: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.places.append(place)


def chat_of(system: object, messages: Sequence[Mapping[str, Any]]) -> Chat:
    """Return a chat in OpenAI's form.

    Raises:
        InvalidParamError: a message or a block is malformed, or not supported.
    """
    chat = Chat()
    if system is not None and (text := _system(system)):
        chat.add("system", {"role": "system", "content": text})
    last: str | None = None
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        check_names(place, message, ("role", "content"))
        role = message.get("role")
        if role not in ROLES:
            raise wrong_value(f"{place}.role", ", ".join(ROLES), role)
        blocks = _blocks(f"{place}.content", message.get("content"))
        joins = role == last
        if role == "user":
            _user(chat, place, blocks, joins=joins)
        elif role == "assistant":
            _assistant(chat, place, blocks, joins=joins)
        else:
            chat.add(place, {"role": "system", "content": _joined(blocks)})
        last = role
    return chat


def _system(found: object) -> str:
    return _joined(_blocks("system", found))


def _joined(blocks: "_Blocks") -> str:
    return "\n".join(_text(place, block) for place, block in blocks)


_Blocks = list[tuple[str, Mapping[str, Any]]]


def _blocks(where: str, found: object) -> _Blocks:
    """The blocks of a content, each with its place; a string is one block of text."""
    if isinstance(found, str):
        return [(where, {"type": "text", "text": found})]
    if not isinstance(found, list):
        raise InvalidParamError(
            where, f"{where}: expected a string or an array of blocks, found {described(found)}"
        )
    for number, block in enumerate(found):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            place = f"{where}[{number}]"
            raise InvalidParamError(
                place, f"{place}: expected an object with a type, found {described(block)}"
            )
    return [(f"{where}[{number}]", block) for number, block in enumerate(found)]


# ---- the user's --------------------------------------------------------------------------------------------


def _user(chat: Chat, place: str, blocks: _Blocks, *, joins: bool) -> None:
    parts: list[dict[str, Any]] = []
    for where, block in blocks:
        if block["type"] == "tool_result":
            if parts:
                raise InvalidParamError(
                    where, f"{where}: expected tool_result blocks before all others of a message"
                )
            chat.add(place, _result(where, block))
            joins = False
        else:
            parts.append(_part(where, block))
    if not parts:
        return
    content: Any = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    if joins and chat.messages and chat.messages[-1]["role"] == "user":
        content = [*_as_parts(chat.messages.pop()["content"]), *parts]
        place = chat.places.pop()
    chat.add(place, {"role": "user", "content": content})


def _as_parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _part(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    match block["type"]:
        case "text":
            return {"type": "text", "text": _text(where, block)}
        case "image":
            return _image(where, block)
        case kind:
            raise NotSupportedError(f"{where}.type", kind, "text, image or tool_result")


def _result(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    check_names(where, block, _RESULT)
    content = block.get("content")
    parts = (
        [] if content is None else [_part(place, one) for place, one in _blocks(f"{where}.content", content)]
    )
    if not parts and block.get("is_error"):
        parts = [{"type": "text", "text": _FAILED}]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    found: Any = "\n".join(texts) if len(texts) == len(parts) else parts
    return {"role": "tool", "tool_call_id": string_in(where, block, "tool_use_id"), "content": found}


def _image(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    check_names(where, block, _IMAGE)
    source = block.get("source")
    if not isinstance(source, dict):
        raise InvalidParamError(
            f"{where}.source", f"{where}.source: expected an object, found {described(source)}"
        )
    place = f"{where}.source"
    match source.get("type"):
        case "base64":
            check_names(place, source, ("type", "media_type", "data"))
            url = f"data:{string_in(place, source, 'media_type')};base64,{string_in(place, source, 'data')}"
        case "url":
            check_names(place, source, ("type", "url"))
            url = string_in(place, source, "url")
        case "file":
            check_names(place, source, ("type", "file_id"))
            return {"type": "file", "file": {"file_id": string_in(place, source, "file_id")}}
        case kind:
            raise wrong_value(f"{place}.type", "base64, url or file", kind)
    return {"type": "image_url", "image_url": {"url": url}}


# ---- the assistant's ---------------------------------------------------------------------------------------


def _assistant(chat: Chat, place: str, blocks: _Blocks, *, joins: bool) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if joins and chat.messages:
        message, place = chat.messages.pop(), chat.places.pop()
    for where, block in blocks:
        match block["type"]:
            case "text":
                message["content"] = (message["content"] or "") + _text(where, block)
            case "thinking":
                check_names(where, block, _THOUGHT)
                thought = string_in(where, block, "thinking")
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case "tool_use":
                message.setdefault("tool_calls", []).append(_call(where, block))
            case kind:
                raise NotSupportedError(f"{where}.type", kind, "text, thinking or tool_use")
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    chat.add(place, message)


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    check_names(where, block, _USE)
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidParamError(
            f"{where}.input", f"{where}.input: expected an object, found {described(arguments)}"
        )
    return {
        "id": string_in(where, block, "id"),
        "type": "function",
        "function": {
            "name": string_in(where, block, "name"),
            "arguments": json.dumps(arguments, ensure_ascii=False),
        },
    }


# ---- blocks ------------------------------------------------------------------------------------------------


def _text(where: str, block: Mapping[str, Any]) -> str:
    if block["type"] != "text":
        raise NotSupportedError(f"{where}.type", block["type"], "text")
    check_names(where, block, _TEXT)
    return string_in(where, block, "text")
