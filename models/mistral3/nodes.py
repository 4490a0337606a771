"""The torch nodes of Mistral 3: `llm`, and `vision_encoder` with the projector."""

from collections.abc import Sequence
from typing import Final

import torch

from models.vision_language.nodes import examine, loader
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual

__all__ = ["Mistral3Encoder", "examine", "load"]


class Mistral3Encoder(VisionEncoder):
    """Pixtral's tower, which is told the size of each image."""

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        sizes = [visual.shape[-2:] for visual in visuals]
        if [visual.rows for visual in visuals] == [1]:
            # Transformers loses a dimension where there is a single row in all.
            pixels, sizes = torch.cat([pixels, pixels]), [*sizes, *sizes]
        found = self.model.model.get_image_features(pixels, torch.tensor(sizes)).pooler_output
        return list(found[: len(visuals)])


load: Final = loader(Mistral3Encoder)
