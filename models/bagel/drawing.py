"""Orders of images: the spans of the prompt, the settings of the flow and the size, and the room they need.

Pure: the conductor imports it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from models.bagel.options import MAX_SIDE, SIDE_STEP, BagelOptions, FlowSettings, flow_settings
from models.bagel.spans import CFG_IMG, CFG_TEXT, MAIN, Kind, Place, Span, contexts_of, shared_places
from models.room import Room

LOOP: Final = "steps"
"""The loop of a flow over three language models."""
ROOM: Final = "room"
"""The edge from one of them to the next one: it has its room in the KV cache."""
CHECKPOINT_STEPS: Final = 5
"""The steps from one checkpoint of a flow to the next: 1 MiB each, of an image of 1024 x 1024."""
_PROMPT: Final = 100
"""The tokens of a text, in estimates."""
_VIT_ROWS: Final = 70
"""The most patches in a row of an image that is looked at, and rows of them."""


class FlowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the walks that draw; they have further ones for their other nodes.

    Attributes:
        spans: of the prompt without the thought, whose tokens follow.
        width, height: of the image, in pixels.
        choice: the number of the image among several of one question: each has the next seed, as M* does it.
    """

    spans: list[Span]
    flow: FlowSettings
    width: int
    height: int
    choice: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of its latents."""
        return self.height // SIDE_STEP, self.width // SIDE_STEP

    @property
    def tokens(self) -> int:
        """The latents of the image."""
        rows, columns = self.grid
        return rows * columns

    def spans_of(self, prompt_tokens: int) -> list[Span]:
        """The spans of a prompt of so many tokens."""
        thought = prompt_tokens - sum(span.tokens for span in self.spans)
        return [*self.spans, Span(Kind.THOUGHT, thought)] if thought else list(self.spans)

    def room_for(self, thought: int, *, is_spread: bool = False) -> int:
        """The most tokens in a KV cache at a time.

        Args:
            thought: the tokens of a text that the prompt ends with; 0 for none.
            is_spread: each branch of guidance has a cache of its own; the room is that of the largest one.
        """
        contexts = contexts_of([*self.spans, *([Span(Kind.THOUGHT, thought)] if thought else [])])
        main, *others = self._computed(contexts)
        latents = self.tokens + 2
        if is_spread:
            return latents + max(_tokens_of(places) for places in (main, *others))
        own = (_tokens_of(places[shared_places(places, main) :]) for places in others)
        return _tokens_of(main) + sum(own) + (1 + len(others)) * latents

    def _computed(self, contexts: Mapping[str, tuple[Place, ...]]) -> list[tuple[Place, ...]]:
        """The contexts of the branches that guidance uses, without equal ones; `main` is the first."""
        by_text = self.flow.text_scale > 1
        used = {MAIN: True, CFG_TEXT: by_text, CFG_IMG: by_text and self.flow.img_scale > 1}
        return list(dict.fromkeys(contexts[name] for name, is_used in used.items() if is_used))


def _tokens_of(places: Iterable[Place]) -> int:
    return sum(place.span.tokens for place in places)


def room_of(_: Path) -> list[Room]:
    """The room of the largest images with the default guidance, behind a prompt of `_PROMPT` tokens."""
    latents = (MAX_SIDE // SIDE_STEP) ** 2
    text, image = (
        Span(Kind.TEXT, _PROMPT),
        f"{MAX_SIDE} x {MAX_SIDE} pixels, for a prompt of {_PROMPT} tokens",
    )
    sources = [Span(Kind.VAE, latents + 2, "vae"), Span(Kind.VIT, _VIT_ROWS**2 + 2, "vit")]
    return [
        Room(what=what, tokens=_largest(spans, is_edit=is_edit).room_for(0))
        for what, spans, is_edit in (
            (f"an image of {image}", [text], False),
            (f"an edit of an image of {image}", [*sources, text], True),
        )
    ]


def _largest(spans: list[Span], *, is_edit: bool) -> FlowRequest:
    flow = flow_settings(BagelOptions(), is_edit=is_edit)
    return FlowRequest(spans=spans, flow=flow, width=MAX_SIDE, height=MAX_SIDE)
