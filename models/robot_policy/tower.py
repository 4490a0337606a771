"""The stateless node `vit_encoder`: the images of a robot's cameras -> rows of the prefix."""

from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch

from models.base import Item, StatelessResult

GPU_IMAGES: Final = 24
"""The most images of one forward on a GPU. On a CPU it is one, because batching is not faster there."""


class CameraEncoder:
    """SigLIP and PaliGemma's projector (`models.base.StatelessNode`).

    `pixels` (cameras, 3, H, W) float32 -> `rows` (cameras x rows of an image, hidden).

    Args:
        model: PaliGemma's class without its language model.
    """

    max_batch = 16

    def __init__(self, model: Any) -> None:
        self._model = model
        self.max_cost: Final = GPU_IMAGES
        self._at_once = GPU_IMAGES if model.device.type == "cuda" else 1

    def group(self, item: Item) -> Hashable:
        """The shape of an image."""
        return item.inputs["pixels"].shape[1:]

    def cost(self, item: Item) -> float:
        """The number of images."""
        return len(item.inputs["pixels"])

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Encode the images of all items."""
        pixels = torch.cat([item.inputs["pixels"] for item in items]).to(self._model.dtype)
        rows = torch.cat([self._encoded(some) for some in torch.split(pixels, self._at_once)])
        shares = torch.split(rows, [len(item.inputs["pixels"]) for item in items])
        return [StatelessResult(outputs={"rows": share.flatten(0, 1).clone()}) for share in shares]

    def _encoded(self, pixels: torch.Tensor) -> torch.Tensor:
        """(n, 3, H, W) -> (n, rows, hidden)."""
        rows: torch.Tensor = self._model.model.get_image_features(pixels).pooler_output
        return rows
