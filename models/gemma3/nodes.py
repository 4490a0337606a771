"""The torch nodes of Gemma 3 with images: `llm`, and `vision_encoder` with the projector."""

from collections.abc import Sequence
from typing import Final

import torch

from models.vision_language.decoder import VlmDecoder
from models.vision_language.nodes import examine, loader
from models.vision_language.tower import VisionEncoder
from models.vision_language.visuals import Visual

__all__ = ["Gemma3Decoder", "Gemma3Encoder", "examine", "load"]


class Gemma3Encoder(VisionEncoder):
    """A tower over images of one size: the whole image, and perhaps parts of it."""

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        images = self.model.model.get_image_features(pixels.flatten(0, 1)).pooler_output
        rows: torch.Tensor = images.reshape(len(visuals), -1, images.shape[-1])
        return [*rows]


class Gemma3Decoder(VlmDecoder):
    """Gemma 3, in which the tokens of an image see one another; a layer's window bounds that, too."""

    masks = frozenset({"causal", "full"})


load: Final = loader(Gemma3Encoder, Gemma3Decoder)
