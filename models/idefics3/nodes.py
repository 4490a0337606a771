"""The torch nodes of Idefics3: `llm`, and `vision_encoder` with the projector."""

from collections.abc import Sequence
from typing import Final

import torch

from models.vision_language.nodes import examine, loader
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual

__all__ = ["Idefics3Encoder", "examine", "load"]


class Idefics3Encoder(VisionEncoder):
    """A tower over tiles of one size."""

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = self.model.model.get_image_features(pixels).pooler_output
        return found


load: Final = loader(Idefics3Encoder)
