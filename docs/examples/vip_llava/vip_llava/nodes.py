"""The torch nodes of ViP-LLaVA."""

from collections.abc import Sequence

import torch

from models.vision_language.nodes import examine, loader
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual

__all__ = ["examine", "load"]


class VipLlavaEncoder(VisionEncoder):
    """The tower: images of one size to the rows that replace their tokens' embeddings."""

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        found: torch.Tensor = self.model.model.get_image_features(
            pixels, vision_feature_layer=self.model.config.vision_feature_layer
        ).pooler_output
        return list(found)


load = loader(VipLlavaEncoder)
