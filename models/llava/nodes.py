"""The torch nodes of LLaVA: `llm`, and `vision_encoder` with the projector."""

from collections.abc import Sequence
from typing import Final

import torch

from models.vision_language.nodes import examine, loader
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual

__all__ = ["LlavaEncoder", "examine", "load"]


class LlavaEncoder(VisionEncoder):
    """A tower whose images have one size, or Pixtral's, which is told the size of each."""

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        body = self.model.model
        sizes = None
        if self.model.config.vision_config.model_type == "pixtral":
            sizes = torch.tensor([visual.shape[-2:] for visual in visuals])
        found: Sequence[torch.Tensor] = body.get_image_features(pixels, image_sizes=sizes).pooler_output
        return found


load: Final = loader(LlavaEncoder)
