"""The torch nodes of InternVL: `llm`, and `vision_encoder` with the projector."""

from collections.abc import Sequence
from typing import Final

import torch

from models.vision_language.nodes import examine, loader
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual

__all__ = ["InternVLEncoder", "examine", "load"]


class InternVLEncoder(VisionEncoder):
    """A tower over tiles of one size."""

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        tiles = self.model.model.get_image_features(pixels.flatten(0, 1)).pooler_output
        rows: torch.Tensor = tiles.reshape(len(visuals), -1, tiles.shape[-1])
        return [*rows]


load: Final = loader(InternVLEncoder)
