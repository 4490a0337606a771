"""The torch nodes of Qwen2.5-VL: `llm`, and `vision_encoder`, whose layers mostly attend within windows."""

from collections.abc import Sequence
from typing import Final

import torch

from models.vision_language.axes import GridDecoder
from models.vision_language.nodes import examine, loader
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual

__all__ = ["Qwen2VLEncoder", "examine", "load"]


class Qwen2VLEncoder(VisionEncoder):
    """A tower over the patches of images and videos."""

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        grids = torch.tensor([visual.grid for visual in visuals], device=pixels.device)
        found: Sequence[torch.Tensor] = self.model.model.get_image_features(
            pixels.flatten(0, 1), grids
        ).pooler_output
        return found


load: Final = loader(Qwen2VLEncoder, GridDecoder)
