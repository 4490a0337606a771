"""The stateless node `vision_encoder`: pixels of a request's media -> the rows that replace embeddings.

The rows of a medium are the same in every request, so they are kept for a while (`models.encoder_cache`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from models.base import Item, StatelessResult
from models.checkpoints.progress import Progress, silent
from models.vision_language.halves import Checkpoint, is_of_tower, load_half, tower_half
from models.vision_language.visuals import Visual
from shared.errors import BugError

GPU_IMAGES: Final = 8
"""The most equal images of one forward on a GPU. On a CPU it is one, because batching is not faster there."""


class VisionEncoder:
    """A tower of transformers as a stateless node (`models.base.StatelessNode`). Families define `encode`.

    Attributes:
        max_batch: the most requests of one call.
        model: the half of the model class that has the tower: `model.model.get_image_features`.
    """

    def __init__(self, model: Any) -> None:
        self.max_batch: Final = 16
        self.model: Final = model
        self.device: Final = torch.device(model.device)

    def encode(self, pixels: torch.Tensor, visuals: Sequence[Visual]) -> Sequence[torch.Tensor]:
        """The rows of visuals of one shape, (rows, width) each.

        Args:
            pixels: (n, *shape) of the tower's dtype, those of n visuals.
            visuals: the n visuals, of equal shape and grid.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Encode each item's `pixels`, (n,) float32, of its `visuals`, to `embeds`, (rows, width)."""
        return [self._result(item) for item in items]

    def _result(self, item: Item) -> StatelessResult:
        visuals = msgspec.convert(item.args["visuals"], list[Visual])
        rows, begin = [], 0
        for visual in visuals:
            size = torch.Size(visual.shape).numel()
            pixels = item.inputs["pixels"][begin : begin + size].view(1, *visual.shape)
            begin += size
            found = self.encode(pixels.to(self.model.dtype), [visual])[0]
            if len(found) != visual.rows:
                raise BugError(
                    f"{type(self.model).__name__} made {len(found)} rows of a medium, expected {visual.rows}"
                )
            rows.append(found)
        return StatelessResult(outputs={"embeds": torch.cat(rows)})


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
