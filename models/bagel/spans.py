"""The spans of a prompt, and the three contexts of guidance that they make. Pure.

    system text ── text or image ── ... ── last text ── thought
    main        all of it
    cfg_text    without the last text, if no image follows it; without the thought
    cfg_img     the texts alone; without the thought

A text is between `<|im_start|>` and `<|im_end|>`, each of its tokens at a position of its own. An image is
between `<|vision_start|>` and `<|vision_end|>`; all of its tokens have one position, and see one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from models.sequence_request import PromptPart
from shared.events import digest_of

MAIN: Final = "main"
CFG_TEXT: Final = "cfg_text"
CFG_IMG: Final = "cfg_img"
LATENTS: Final = "latents"
"""The modality of a prompt's part (`PromptPart.modality`) that holds the latents of an image."""
BRANCHES: Final = {
    "LLM": (MAIN, "v_main"),
    "LLM_cfg_text": (CFG_TEXT, "v_text"),
    "LLM_cfg_img": (CFG_IMG, "v_img"),
}
"""The context that each node computes where three of them share a flow, and the edge with its velocity."""


class Kind(StrEnum):
    """The content of a span: `vit` is an image to be understood, `vae` the latents of one to be changed."""

    SYSTEM = "system"
    TEXT = "text"
    VIT = "vit"
    VAE = "vae"
    THOUGHT = "thought"

    @property
    def is_image(self) -> bool:
        """True for both forms of an image."""
        return self in (Kind.VIT, Kind.VAE)


class Span(msgspec.Struct, frozen=True):
    """A run of tokens of a prompt.

    Attributes:
        tokens: their number.
        digest: names the rows of an image (hex); empty for a text.
    """

    kind: Kind
    tokens: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """A span in a context.

    Attributes:
        first: the index of its first token in the prompt.
        first_row: for an image, the index of its first row among those of all images.
        position: the rotary position of its first token, in the context.
    """

    span: Span
    first: int
    first_row: int
    position: int

    @property
    def next_position(self) -> int:
        """The position after the span."""
        return self.position + (1 if self.span.kind.is_image else self.span.tokens)


def contexts_of(spans: Sequence[Span]) -> dict[str, tuple[Place, ...]]:
    """The three contexts of a prompt, by name."""
    texts = (Kind.SYSTEM, Kind.TEXT)
    numbers = range(len(spans))
    asked = [n for n in numbers if spans[n].kind is not Kind.THOUGHT]
    before = asked[:-1] if asked and spans[asked[-1]].kind is Kind.TEXT else asked
    return {
        MAIN: _placed(spans, numbers),
        CFG_TEXT: _placed(spans, before),
        CFG_IMG: _placed(spans, [n for n in numbers if spans[n].kind in texts]),
    }


def shared_places(one: Sequence[Place], other: Sequence[Place]) -> int:
    """The number of spans with which two contexts begin alike."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same


def parts_of(spans: Sequence[Span], *, seed: int) -> list[PromptPart]:
    """The images of a prompt, as parts for the KV node. Latents are drawn by the request's `seed`."""
    found, start = list[PromptPart](), 0
    for span in spans:
        if span.kind.is_image:
            found.append(
                PromptPart(
                    start=start,
                    count=span.tokens,
                    digest=span.digest if span.kind is Kind.VIT else digest_of((span.digest, seed)),
                    full=True,
                    modality="image" if span.kind is Kind.VIT else LATENTS,
                )
            )
        start += span.tokens
    return found


def _placed(spans: Sequence[Span], wanted: Sequence[int]) -> tuple[Place, ...]:
    found, first, row, position = list[Place](), 0, 0, 0
    for number, span in enumerate(spans):
        if number in wanted:
            found.append(Place(span, first, row, position))
            position = found[-1].next_position
        first += span.tokens
        row += span.tokens if span.kind.is_image else 0
    return tuple(found)
