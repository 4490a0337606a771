"""Prompts of BAGEL: the texts and images of a request in order, as published. Pure.

Each text is `<|im_start|>` TEXT `<|im_end|>`, whoever says it, and an answer follows another `<|im_start|>`.
The published code has no roles. The text of a thought is put back in the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.bagel.spans import Kind
from models.text.messages import plain_messages, text_of_part
from models.vision_language.chats import placed, with_messages
from shared.errors import ClientError
from shared.events import Inputs

MAX_THOUGHT: Final = 1000
"""The most tokens of a thought by default, as published."""
THINK_BEFORE_TEXT: Final = (
    "You should first think about the reasoning process in the mind and then provide the user with the "
    "answer. \nThe reasoning process is enclosed within <think> </think> tags, i.e. <think> reasoning "
    "process here </think> answer here"
)
THINK_BEFORE_IMAGE: Final = (
    "You should first think about the planning process in the mind and then generate the image. \n"
    "The planning process is enclosed within <think> </think> tags, i.e. <think> planning process here "
    "</think> image here"
)
"""The system prompts that the model was trained with, to the letter."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A text, or an image by its index in the request's files."""

    text: str = ""
    file: int = -1
    is_system: bool = False

    @property
    def is_image(self) -> bool:
        """True for an image."""
        return self.file >= 0


def pieces_of(inputs: Inputs, *, think_before: str = "") -> list[Piece]:
    """The pieces of a request's prompt, in order; images come before a text that is no chat.

    Args:
        inputs: a chat, or a text with files.
        think_before: a system prompt that asks for thoughts; empty for none.

    Raises:
        ClientError: there is nothing in it, or something that this model does not take.
    """
    if inputs.token_ids is not None or inputs.tools:
        what = "tools" if inputs.tools else "token_ids"
        raise ClientError(f"{what}: expected messages or a text, which is all that this model takes")
    kinds = {medium.modality for medium in inputs.files} - {"image"}
    if kinds:
        raise ClientError(
            f"files: this model reads text and image; found {min(kinds)!r}", code="unsupported_modality"
        )
    found = [Piece(think_before, is_system=True)] if think_before else []
    if inputs.text is not None and not inputs.chat:
        found += [Piece(file=number) for number in range(len(inputs.files))]
        found += [Piece(inputs.text)] if inputs.text else []
    else:
        found += _of_messages(with_messages(inputs))
    if not any(not piece.is_system for piece in found):
        raise ClientError("the prompt is empty: expected a text or an image")
    return found


def ids_of_text(ids: Sequence[int], *, start: int, end: int) -> list[int]:
    """The tokens of a text in a prompt."""
    return [start, *ids, end]


def said(ids: Sequence[int], *, start: int, end: int) -> list[int]:
    """The tokens of an answer up to the first special one, as published."""
    stops = [place for place, one in enumerate(ids) if one in (start, end)]
    return list(ids[: stops[0]] if stops else ids)


def kinds_of(pieces: Sequence[Piece], *, draws: bool) -> list[tuple[Kind, Piece]]:
    """The spans of a prompt: an image is read by both encoders if one is drawn, otherwise by the ViT."""
    found: list[tuple[Kind, Piece]] = []
    for piece in pieces:
        if piece.is_image:
            found += [(Kind.VAE, piece)] if draws else []
            found.append((Kind.VIT, piece))
        else:
            found.append((Kind.SYSTEM if piece.is_system else Kind.TEXT, piece))
    return found


def _of_messages(inputs: Inputs) -> list[Piece]:
    placed(inputs)
    messages = plain_messages(inputs.messages or [], _parts)
    return [piece for message in messages for piece in _of_message(message)]


def _of_message(message: Mapping[str, Any]) -> list[Piece]:
    content = message.get("content") or ""
    is_system = message["role"] in ("system", "developer")
    pieces = [Piece(content)] if isinstance(content, str) else content
    return [
        piece if piece.is_image else Piece(piece.text, is_system=is_system)
        for piece in pieces
        if piece.is_image or piece.text
    ]


def _parts(where: str, parts: list[object]) -> list[Piece]:
    return [_part(f"{where}[{number}]", part) for number, part in enumerate(parts)]


def _part(where: str, part: object) -> Piece:
    if isinstance(part, Mapping) and part.get("type") == "image":
        return Piece(file=int(part["file"]))
    return Piece(text_of_part(where, part))
