"""The torch nodes of PaliGemma: `llm`, and `vision_encoder` with the projector."""

from collections.abc import Sequence
from typing import Final

import torch

from models.vision_language.decoder import VlmDecoder
from models.vision_language.nodes import examine, loader
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual

__all__ = ["PaliGemmaDecoder", "PaliGemmaEncoder", "examine", "load"]


class PaliGemmaEncoder(VisionEncoder):
    """A tower over images of one size."""

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        rows: torch.Tensor = self.model.model.get_image_features(pixels).pooler_output
        return [*rows]


class PaliGemmaDecoder(VlmDecoder):
    """Gemma, or Gemma 2, in which the tokens of a prompt see one another, in layers with a window, too.

    Its own class counts positions from 1. Here they count from 0: only their differences matter.
    """

    masks = frozenset({"causal", "full"})
    full_ignores_window = True


load: Final = loader(PaliGemmaEncoder, PaliGemmaDecoder)
