"""The stateless node `vision_encoder`: pixels of a request's media -> the rows that replace embeddings.

The rows of a medium are the same in every request, so they are kept for a while (`models.encoder_cache`).
Those that are missing are computed together, where their shapes are equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from models.base import Item, StatelessResult
from models.checkpoints.progress import Progress, silent
from models.encoder_cache import EncoderCache
from models.vision_language.halves import Checkpoint, is_of_tower, load_half, tower_half
from models.vision_language.visuals import Visual
from shared.errors import BugError

GPU_IMAGES: Final = 8
"""The most images of one forward on a GPU. On a CPU it is one, because batching is not faster there."""
MAX_NUMBERS: Final = 64 << 20
"""The most numbers in the pixels of the requests of one call, unless a single request has more: 256 MiB."""


class VisionEncoder:
    """A tower of transformers as a stateless node (`models.base.StatelessNode`). Families define `encode`.

    Attributes:
        max_batch: the most requests of one call.
        max_cost: the most numbers in the pixels of the requests of one call.
        encoder_cache: the rows of media, by their digest.
        model: the half of the model class that has the tower: `model.model.get_image_features`.
    """

    max_batch = 16
    max_cost = MAX_NUMBERS

    def __init__(self, model: Any) -> None:
        self.model: Final = model
        self.encoder_cache: Final = EncoderCache()
        self._images_at_once = GPU_IMAGES if model.device.type == "cuda" else 1

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        """The rows of each visual, (rows, width).

        Args:
            pixels: (n, *shape) of the tower's dtype, those of n visuals.
            visuals: the n visuals, of equal shape and grid.
        """
        raise NotImplementedError

    def cost(self, item: Item) -> float:
        """The number of numbers in the pixels of a request."""
        return item.inputs["pixels"].numel()

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Encode each item's `pixels`, (n,) float32, of its `visuals`, to `embeds`, (rows, width)."""
        visuals = [msgspec.convert(item.args["visuals"], list[Visual]) for item in items]
        rows: dict[str, torch.Tensor] = {}
        missing: dict[str, tuple[Visual, torch.Tensor]] = {}
        for item, of_item in zip(items, visuals, strict=True):
            for visual, pixels in _with_pixels(of_item, item.inputs["pixels"]):
                if visual.digest in rows or visual.digest in missing:
                    continue
                found = self.encoder_cache.get(visual.digest)
                if found is None:
                    missing[visual.digest] = (visual, pixels)
                else:
                    rows[visual.digest] = found
        rows |= self._encoded(missing)
        return [
            StatelessResult(outputs={"embeds": torch.cat([rows[visual.digest] for visual in of_item])})
            for of_item in visuals
        ]

    def _encoded(self, missing: Mapping[str, tuple[Visual, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The rows of visuals that are not in the cache, by their digest."""
        alike: dict[object, list[tuple[Visual, torch.Tensor]]] = {}
        for visual, pixels in missing.values():
            alike.setdefault((visual.shape, visual.grid, visual.modality), []).append((visual, pixels))
        found: dict[str, torch.Tensor] = {}
        for group in alike.values():
            for begin in range(0, len(group), self._images_at_once):
                batch = group[begin : begin + self._images_at_once]
                visuals = [visual for visual, _ in batch]
                pixels = torch.stack([one for _, one in batch]).to(self.model.dtype)
                for visual, rows in zip(visuals, self.encode(pixels, visuals), strict=True):
                    if len(rows) != visual.rows:
                        raise BugError(
                            f"expected {visual.rows} rows of a medium of the shape {visual.shape}, as its "
                            f"tokens in the prompt, found {len(rows)}"
                        )
                    found[visual.digest] = self.encoder_cache.put(visual.digest, rows)
        return found


def _with_pixels(visuals: Sequence[Visual], pixels: torch.Tensor) -> Iterator[tuple[Visual, torch.Tensor]]:
    """Each visual with its share of the pixels of a request."""
    begin = 0
    for visual in visuals:
        shape = torch.Size(visual.shape)
        yield visual, pixels[begin : begin + shape.numel()].view(shape)
        begin += shape.numel()


def load_tower(
    folder: Path, *, device: str | torch.device = "cpu", dtype: str = "auto", progress: Progress = silent
) -> Any:
    """Load the tower of a checkpoint folder: the model class without its language model.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
    """
    checkpoint = Checkpoint.read(folder)
    of_tower = is_of_tower(checkpoint.model_class, checkpoint.config)
    half = tower_half(checkpoint.model_class)
    return load_half(half, checkpoint, of_tower, device=torch.device(device), dtype=dtype, progress=progress)
