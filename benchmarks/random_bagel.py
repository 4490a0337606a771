"""A BAGEL of random weights in the published layout, of the published size or of one for a CPU."""

from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from tests.tiny.bagel import BagelShape, Draw, write_bagel

SHAPES: Final = {
    "small": BagelShape(
        hidden=768, inner=3072, layers=4, heads=12, kv_heads=2, vae_widths=(32, 32, 64, 64), vocabulary=512
    ),
    "published": BagelShape(
        hidden=3584,
        inner=18_944,
        layers=28,
        heads=28,
        kv_heads=4,
        vocabulary=152_064,
        rope_theta=1_000_000.0,
        vit_hidden=1152,
        vit_inner=4304,
        vit_layers=27,
        vit_heads=16,
        vae_widths=(128, 256, 512, 512),
    ),
}
_DTYPES: Final = {"small": torch.float32, "published": torch.bfloat16}


class _TorchDraw(Draw):
    """Random tensors of torch, drawn where that is fastest."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._dtype = dtype
        torch.manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, centre: float = 0.0) -> Any:
        drawn = torch.randn(shape, dtype=self._dtype, device=self._device)
        return drawn.mul_(scale).add_(centre).cpu()

    def save(self, tensors: dict[str, Any], path: Path) -> None:
        save_file(tensors, path)


def write_random_bagel(folder: Path, shape: str) -> Path:
    """Write a checkpoint of one of the `SHAPES` into an empty folder: 30 GB of the published one."""
    return write_bagel(folder, _TorchDraw(_DTYPES[shape]), SHAPES[shape])
