"""Orders of images: the spans of the prompt, the settings of the flow and the size, and the room they need.

Pure: the conductor imports it.
"""

import msgspec

from models.bagel.options import SIDE_STEP, FlowSettings
from models.bagel.spans import CFG_IMG, CFG_TEXT, MAIN, Kind, Span, contexts_of, shared_places


class FlowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the walks that draw; they have further ones for their other nodes.

    Attributes:
        spans: of the prompt without the thought, whose tokens follow.
        width, height: of the image, in pixels.
    """

    spans: list[Span]
    flow: FlowSettings
    width: int
    height: int

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
