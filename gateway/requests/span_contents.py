"""Requests and answers as attributes of a span, by OpenTelemetry's conventions. Pure.

    gen_ai.input.messages    [{"role":"user","parts":[{"type":"text","content":"What does len do?"}]}]
    gen_ai.output.messages   [{"role":"assistant","parts":[...],"finish_reason":"stop"}]

Only used if the operator asks for it (`traces.contents`). Each document has at most `limit` bytes. Of a chat
that is larger, the newest messages are kept; a text that does not fit is cut at its end, and `…` marks it.
A part without text that does not fit is left out. Media and token ids are named by their type alone.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from shared.events import Inputs

_CUT: Final = "…"
_TEXT: Final = "text"
_encode_unicode: Final = msgspec.json.Encoder().encode


def input_messages(prompts: Sequence[Inputs], limit: int) -> str:
    """Return the messages of all prompts, as a JSON document of at most `limit` bytes."""
    return _document([message for inputs in prompts for message in _messages(inputs)], limit)


def output_messages(answers: Sequence[tuple[str, str]], limit: int) -> str:
    """Return the answers, each a text and a finish reason, as a JSON document of at most `limit` bytes."""
    return _document(
        [
            {"role": "assistant", "parts": [_text(text)] if text else [], "finish_reason": reason}
            for text, reason in answers
        ],
        limit,
    )


def _messages(inputs: Inputs) -> Iterator[dict[str, Any]]:
    media = [{"type": medium.modality} for medium in inputs.files]
    if inputs.messages is not None:
        for message in inputs.messages:
            yield {"role": _string(message.get("role")), "parts": list(_parts(message))}
        return
    texts = [text for text in (inputs.text, *inputs.queries, *(inputs.texts or ())) if isinstance(text, str)]
    parts = [*media, *map(_text, texts)]
    if inputs.token_ids is not None:
        parts.append({"type": "token_ids"})
    yield {"role": "user", "parts": parts}


def _parts(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a message in OpenAI's format. Not all routes check it; what has no form is left out.

    Nothing is copied but strings: a value that is nested too deep is refused later, when it is submitted.
    """
    content = message.get("content")
    if message.get("role") == "tool":
        yield {
            "type": "tool_call_response",
            "id": _string(message.get("tool_call_id")),
            "response": "".join(part.get("content", "") for part in _content(content)),
        }
        return
    yield from _content(content)
    for call in _objects(message.get("tool_calls")):
        function = call.get("function")
        if isinstance(function, dict):
            yield {
                "type": "tool_call",
                "id": _string(call.get("id")),
                "name": _string(function.get("name")),
                "arguments": _string(function.get("arguments")),
            }


def _content(content: object) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        yield _text(content)
        return
    for part in _objects(content):
        kind = _string(part.get("type"))
        yield _text(_string(part.get(_TEXT))) if kind == _TEXT else {"type": kind}


def _objects(found: object) -> list[dict[str, Any]]:
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _string(found: object) -> str:
    return found if isinstance(found, str) else ""


def _text(content: str) -> dict[str, Any]:
    return {"type": _TEXT, "content": content}


def _encode(found: object) -> bytes:
    try:
        return _encode_unicode(found)
    except UnicodeEncodeError:  # half a surrogate pair: the request is about to be refused
        return json.dumps(found).encode()


def _document(messages: list[dict[str, Any]], limit: int) -> str:
    """Return the newest messages that fit into `limit` bytes; the oldest of them may be cut."""
    kept: list[bytes] = []
    left = limit - len("[]")
    for message in reversed(messages):
        data = _encode(message)
        if len(data) + 1 <= left:
            kept.append(data)
            left -= len(data) + 1  # with a comma
            continue
        cut = _cut(message, left)
        if cut is not None:
            kept.append(cut)
        break
    return (b"[" + b",".join(reversed(kept)) + b"]").decode()


def _cut(message: dict[str, Any], limit: int) -> bytes | None:
    """Return a message of at most `limit` bytes with the first of its parts; None if there is no room."""
    parts = [_shortened(part, limit) for part in message["parts"]]
    while parts:
        data = _encode({**message, "parts": parts})
        excess = len(data) - limit
        if excess <= 0:
            return data
        text = parts[-1].get("content", "").removesuffix(_CUT)
        size = len(_encode(text))
        fitting = min(len(text) - 1, len(text) * (size - excess - len(_CUT.encode())) // size)
        if fitting > 0:
            parts[-1] = _shortened(_text(text), fitting)
        else:
            parts.pop()
    return None


def _shortened(part: dict[str, Any], chars: int) -> dict[str, Any]:
    """Return a part with so many characters of its text."""
    text = part.get("content", "")
    return part if len(text) <= chars else _text(text[:chars] + _CUT)
