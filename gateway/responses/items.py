"""Input items of responses as messages of a chat, and messages as items.

    message                 ->  a message of its role; input_text, output_text, input_image, input_file
    reasoning               ->  `reasoning_content` of the assistant's message behind it
    function_call           ->  `tool_calls` of the assistant's message before it, or of a new one
    function_call_output    ->  a message of the role tool

The place of each message in the body is kept, so that errors name what the client wrote.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import check_names, string_in, wrong_value
from shared.validation_errors import described

ROLES: Final = ("user", "assistant", "system", "developer")
_MESSAGE: Final = ("type", "id", "role", "content", "status", "phase")
_CALL: Final = ("type", "id", "call_id", "name", "arguments", "status", "namespace")
_OUTPUT: Final = ("type", "id", "call_id", "output", "status")
_REASONING: Final = ("type", "id", "summary", "content", "encrypted_content", "status")
_TEXT: Final = ("type", "text", "annotations", "logprobs")
_IMAGE: Final = ("type", "image_url", "file_id", "detail")
_FILE: Final = ("type", "file_id", "file_data", "filename", "file_url")
_KINDS: Final = "message, reasoning, function_call or function_call_output"


@dataclass(slots=True)
class Chat:
    """A chat in the form of OpenAI's older route; `places` has the place of each message in the body."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    _thought: str = ""
    _thought_place: str = ""

    def add(self, place: str, message: dict[str, Any]) -> None:
        """Add a message. One of the assistant takes the reasoning before it."""
        if self._thought and message["role"] == "assistant":
            message = {**message, "reasoning_content": self._thought}
        self._thought = ""
        self.messages.append(message)
        self.places.append(place)

    def think(self, place: str, text: str) -> None:
        """Keep reasoning for the assistant's message behind it."""
        self._thought += text
        self._thought_place = place

    def call(self, place: str, call: dict[str, Any]) -> None:
        """Add a function call to the assistant's last message, or to a new one."""
        last = self.messages[-1] if self.messages and not self._thought else None
        if last is None or last["role"] != "assistant":
            self.add(place, {"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            last["tool_calls"] = [*last.get("tool_calls", []), call]

    def end(self) -> None:
        """End the chat: reasoning without a message behind it is an empty message."""
        if self._thought:
            self.add(self._thought_place, {"role": "assistant", "content": ""})


def add_items(chat: Chat, found: object) -> None:
    """Add the input of a response to a chat: a text, or items.

    Raises:
        InvalidParamError: an item is malformed, or not supported.
    """
    if isinstance(found, str):
        chat.add("input", {"role": "user", "content": found})
        return
    if not isinstance(found, list):
        raise InvalidParamError(
            "input", f"input: expected a string or an array of items, found {described(found)}"
        )
    for number, item in enumerate(found):
        place = f"input[{number}]"
        if not isinstance(item, dict):
            raise InvalidParamError(place, f"{place}: expected an object, found {described(item)}")
        _add(chat, place, item)
    chat.end()


def _add(chat: Chat, place: str, item: Mapping[str, Any]) -> None:
    match item.get("type", "message"):
        case "message":
            check_names(place, item, _MESSAGE)
            role = item.get("role")
            if role not in ROLES:
                raise wrong_value(f"{place}.role", f"one of {', '.join(ROLES)}", role)
            chat.add(place, {"role": role, "content": _content(f"{place}.content", item.get("content"))})
        case "function_call":
            check_names(place, item, _CALL)
            function = {
                "name": string_in(place, item, "name"),
                "arguments": string_in(place, item, "arguments"),
            }
            chat.call(
                place, {"id": string_in(place, item, "call_id"), "type": "function", "function": function}
            )
        case "function_call_output":
            check_names(place, item, _OUTPUT)
            output = _content(f"{place}.output", item.get("output"))
            chat.add(
                place,
                {"role": "tool", "tool_call_id": string_in(place, item, "call_id"), "content": output},
            )
        case "reasoning":
            check_names(place, item, _REASONING)
            chat.think(place, _reasoning(place, item))
        case kind:
            raise NotSupportedError(f"{place}.type", kind, _KINDS)


def _reasoning(place: str, item: Mapping[str, Any]) -> str:
    """The text of reasoning; of one that has none the summary."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise wrong_value(f"{place}.{name}", "an array", parts)
        if parts:
            return "".join(string_in(f"{place}.{name}[{n}]", part, "text") for n, part in enumerate(parts))
    return ""


def _content(where: str, found: object) -> Any:
    """A content: a text, or parts. Texts alone are one text."""
    if isinstance(found, str):
        return found
    if not isinstance(found, list):
        raise wrong_value(where, "a string or an array of parts", found)
    parts = [_part(f"{where}[{number}]", part) for number, part in enumerate(found)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(where: str, part: object) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise wrong_value(where, "an object with a type", part)
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            check_names(where, part, _TEXT)
            for name in ("annotations", "logprobs"):
                if not isinstance(part.get(name) or [], list):
                    raise wrong_value(f"{where}.{name}", "an array", part[name])
            return {"type": "text", "text": string_in(where, part, "text")}
        case "refusal":
            check_names(where, part, ("type", "refusal"))
            return {"type": "text", "text": string_in(where, part, "refusal")}
        case "input_image":
            check_names(where, part, _IMAGE)
            if part.get("file_id") is not None:
                return {"type": "file", "file": {"file_id": part["file_id"]}}
            return {"type": "image_url", "image_url": {"url": string_in(where, part, "image_url")}}
        case "input_file":
            check_names(where, part, _FILE)
            if part.get("file_url") is not None:
                raise NotSupportedError(f"{where}.file_url", part["file_url"], "file_id or file_data")
            kept = {name: part[name] for name in ("file_id", "file_data", "filename") if part.get(name)}
            return {"type": "file", "file": kept}
        case kind:
            raise NotSupportedError(f"{where}.type", kind, "input_text, input_image or input_file")


def items_of(messages: Sequence[Mapping[str, Any]], prefix: str) -> list[dict[str, Any]]:
    """The messages of a chat as items with ids that begin with `prefix`."""
    found: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        item_id = f"{prefix}-{number}"
        role, content = message["role"], message.get("content")
        if role == "tool":
            found.append(
                {
                    "type": "function_call_output", "id": f"fco-{item_id}", "status": "completed",
                    "call_id": message.get("tool_call_id", ""), "output": _texts(content),
                }
            )  # fmt: skip
            continue
        if thought := message.get("reasoning_content"):
            found.append(reasoning_item(f"rs-{item_id}", thought))
        if content:
            kind = "output_text" if role == "assistant" else "input_text"
            parts: list[dict[str, Any]] = [{"type": kind, "text": _texts(content)}]
            if role == "assistant":
                parts = [{**part, "annotations": [], "logprobs": []} for part in parts]
            found.append(
                {"type": "message", "id": f"msg-{item_id}", "role": role, "status": "completed",
                 "content": parts}
            )  # fmt: skip
        for place, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            found.append(
                call_item(f"fc-{item_id}-{place}", call["id"], function["name"], function["arguments"])
            )
    return found


def _texts(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


def reasoning_item(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    """Reasoning; empty while it is being written."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}


def call_item(
    item_id: str, call_id: str, name: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    """A function call."""
    return {
        "type": "function_call", "id": item_id, "call_id": call_id, "name": name, "arguments": arguments,
        "status": status,
    }  # fmt: skip
