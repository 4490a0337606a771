"""Orders of images: the spans of the prompt, the settings of the flow and the size, and the room they need.

Pure: the conductor imports it.
"""

from pathlib import Path
from typing import Final

import msgspec

from models.bagel.options import MAX_SIDE, SIDE_STEP, BagelOptions, FlowSettings, flow_settings
from models.bagel.spans import CFG_IMG, CFG_TEXT, MAIN, Kind, Span, contexts_of, shared_places
from models.room import Room

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

    def room_for(self, thought: int) -> int:
        """The most tokens in the KV cache at a time, if the prompt ends with a thought of so many tokens."""
        contexts = contexts_of([*self.spans, *([Span(Kind.THOUGHT, thought)] if thought else [])])
        by_text = self.flow.text_scale > 1
        others = [
            name
            for name, used in ((CFG_TEXT, by_text), (CFG_IMG, by_text and self.flow.img_scale > 1))
            if used
        ]
        main = contexts[MAIN]
        own = (contexts[name][shared_places(contexts[name], main) :] for name in others)
        places = [*main, *(place for rest in own for place in rest)]
        return sum(place.span.tokens for place in places) + (1 + len(others)) * (self.tokens + 2)


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
