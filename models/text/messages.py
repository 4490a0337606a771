"""Messages of a chat, in the form that chat templates take."""

from collections.abc import Callable
from typing import Any

import msgspec

from shared.errors import ClientError


def flatten_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with `content` as one string each, and with the arguments of tool calls as objects.

    Raises:
        ClientError: a message is malformed, or has a part that is no text.
    """
    return plain_messages(messages, _joined)


def plain_messages(
    messages: list[dict[str, Any]], content_of: Callable[[str, list[object]], Any]
) -> list[dict[str, Any]]:
    """The messages with the arguments of tool calls as objects, and `content_of(where, parts)` for parts.

    `where` names the content in error messages.

    Raises:
        ClientError: a message is malformed.
    """
    return [_plain(place, message, content_of) for place, message in enumerate(messages)]


def _plain(
    place: int, message: dict[str, Any], content_of: Callable[[str, list[object]], Any]
) -> dict[str, Any]:
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise ClientError(f"messages[{place}].tool_calls: expected a list, found {type(calls).__name__}")
        where = f"messages[{place}].tool_calls"
        message = {**message, "tool_calls": [_flatten_call(f"{where}[{n}]", c) for n, c in enumerate(calls)]}
    elif "tool_calls" in message:
        message = {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(message.get("role"), str):
        raise ClientError(f"messages[{place}]: expected a string in 'role', found {message.get('role')!r}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        if content is None and not message.get("tool_calls"):
            raise ClientError(f"messages[{place}]: expected text in 'content', found none")
        return message
    if not isinstance(content, list):
        raise ClientError(
            f"messages[{place}].content: expected a string or a list of parts, found {type(content).__name__}"
        )
    return {**message, "content": content_of(f"messages[{place}].content", content)}


def _joined(where: str, parts: list[object]) -> str:
    return "".join(text_of_part(f"{where}[{number}]", part) for number, part in enumerate(parts))


def _flatten_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise ClientError(
            f"{where}: expected a call such as {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _object_in(arguments)
    if not isinstance(arguments, dict):
        raise ClientError(
            f"{where}.function.arguments: expected a JSON object, found {type(arguments).__name__}"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _object_in(arguments: str) -> dict[str, Any]:
    """The JSON object that a model wrote as a call's arguments; an empty one if it wrote something else.

    A model may write what is no JSON, or no object. A client returns it as it is, and the conversation has to
    go on; a template can only read an object. Other servers render an empty one as well.
    """
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}


def text_of_part(where: str, part: object) -> str:
    """The text of a part of a message; `where` names it in error messages.

    Raises:
        ClientError: the part is malformed, or no text.
    """
    if not isinstance(part, dict):
        raise ClientError(f"{where}: expected a part such as {{'type': 'text', 'text': ...}}")
    if part.get("type") != "text":
        raise ClientError(
            f"{where}: this model reads text only; found a part of type {part.get('type')!r}",
            code="unsupported_modality",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise ClientError(f"{where}: expected a string in 'text', found {type(text).__name__}")
    return text
