"""Chats with media, in the form that a checkpoint's template takes, and the order in which it places them.

Templates differ: some take the content of a message as a list of parts only, some as a string only, most take
both. The template itself is asked, when it is loaded.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from models.text.chat_prompts import ChatPrompts
from models.text.chat_template import ChatTemplate, ChatTemplateError
from models.text.messages import plain_messages, text_of_part
from shared.errors import ClientError
from shared.events import Inputs, Media

_PROBE: Final = "dalsegno"
_TEXT: Final = {"type": "text", "text": _PROBE}


class MediaChatPrompts(ChatPrompts):
    """Renders chats whose messages may have parts that are media. Re-entrant."""

    def __init__(self, template: ChatTemplate | None, tool_template: ChatTemplate | None) -> None:
        super().__init__(template, tool_template)
        self._takes_strings: Final = template is None or _renders(template, _PROBE)
        self._takes_parts: Final = template is not None and _renders(template, [_TEXT])

    def plain(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        plain = plain_messages(messages, self._content_of)
        if self._takes_strings:
            return plain
        return [_in_parts(message) for message in plain]

    def _content_of(self, where: str, parts: list[object]) -> Any:
        found = [_part(f"{where}[{number}]", part) for number, part in enumerate(parts)]
        if self._takes_parts:
            return found
        if any(part["type"] != "text" for part in found):
            raise ChatTemplateError(
                f"{where}: the chat template of this model takes text only; serve it with the "
                "chat_template.jinja of a checkpoint that was made for media"
            )
        return "".join(part["text"] for part in found)


def with_messages(inputs: Inputs) -> Inputs:
    """The inputs with a chat of one user message, if they are a text with media: the media come first."""
    if inputs.text is None or not inputs.chat:
        return inputs
    parts: list[dict[str, Any]] = [
        {"type": medium.modality, "file": number} for number, medium in enumerate(inputs.files)
    ]
    parts += [{"type": "text", "text": inputs.text}] if inputs.text else []
    return msgspec.structs.replace(inputs, text=None, messages=[{"role": "user", "content": parts}])


def placed(inputs: Inputs) -> list[tuple[str, int]]:
    """The media of a prompt in the order of its messages: modality, and index in `files`.

    Media of a raw prompt are in the order of `files`.

    Raises:
        ClientError: a part names no file, or one of another modality, or a file is in no message.
    """
    if inputs.messages is None:
        return [(medium.modality, number) for number, medium in enumerate(inputs.files)]
    found: list[tuple[str, int]] = []
    for place, message in enumerate(inputs.messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and part.get("type") != "text":
                where = f"messages[{place}].content[{number}]"
                found.append((str(part.get("type")), _file_of(where, part, inputs.files)))
    unplaced = sorted(set(range(len(inputs.files))) - {number for _, number in found})
    if unplaced:
        raise ClientError(
            f"files[{unplaced[0]}]: expected a part of a message that places it, such as "
            f"{{'type': 'image', 'file': {unplaced[0]}}}, found none"
        )
    return found


def _file_of(where: str, part: Mapping[str, Any], files: list[Media]) -> int:
    number = part.get("file")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(files):
        raise ClientError(
            f"{where}: expected a text, or in 'file' the index of one of {len(files)} files of the request, "
            f"found a part of type {part.get('type')!r:.80} with the file {number!r:.80}"
        )
    if files[number].modality != part.get("type"):
        raise ClientError(
            f"{where}: expected {files[number].modality!r} in 'type', which files[{number}] is, "
            f"found {part.get('type')!r:.80}",
            code="unsupported_modality",
        )
    return number


def _part(where: str, part: object) -> dict[str, Any]:
    """A part as templates take it: a text, or the place of a medium."""
    if isinstance(part, Mapping) and part.get("type") in ("image", "video", "audio"):
        return {"type": part["type"]}
    return {"type": "text", "text": text_of_part(where, part)}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _renders(template: ChatTemplate, content: object) -> bool:
    """Return whether the template renders a content as its text."""
    try:
        text = template.render([{"role": "user", "content": content}])
    except ChatTemplateError:
        return False
    return _PROBE in text and "'type'" not in text
