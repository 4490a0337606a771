"""Previews of a picture that is being made: the colours of its latents so far, nearly right.

To a first approximation a latent is a point of a colour, linear in its channels. The colours are measured
once, from the VAE's decoder: those of flat latents, one channel up and down at a time.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import torch

IMAGE: Final = "image"
_FLAT: Final = 2
_LARGEST: Final = 128
"""Pixels of a preview's longer side, at most."""


class Previews:
    """Linear colours of latents.

    Args:
        weight: (channels, 3), the red, green and blue that each channel adds, in -1 to 1.
        base: (3,), the colour of a latent of zeros.
    """

    def __init__(self, weight: torch.Tensor, base: torch.Tensor) -> None:
        self._weight, self._base = weight, base

    @classmethod
    @torch.inference_mode()
    def measured(cls, decode: Callable[[torch.Tensor], torch.Tensor], channels: int) -> Self:
        """Measure the colours of a decoder.

        Args:
            channels: of the latents.
            decode: latents as a scheduler has them, (n, channels, 2, 2) -> pixels (n, 3, H, W), -1 to 1.
        """
        units = torch.eye(channels)
        probes = torch.cat([torch.zeros(1, channels), units, -units])
        flat = probes[:, :, None, None].expand(-1, -1, _FLAT, _FLAT)
        colors = torch.stack([decode(one[None])[0] for one in flat]).float().mean((-2, -1)).cpu()
        base, up, down = colors[0], colors[1 : channels + 1], colors[channels + 1 :]
        return cls((up - down) / 2, base)

    def of(
        self, pipeline: Any, latents: torch.Tensor, arguments: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """The preview of a step, by modality: pixels (H, W, 3) uint8, on the CPU; none of unknown latents."""
        grid = _grid(pipeline, latents, arguments)
        if grid is None or grid.shape[0] != len(self._weight):
            return {}
        step = max(1, -(-max(grid.shape[1:]) // _LARGEST))
        cells = grid[:, ::step, ::step].float().cpu().permute(1, 2, 0)
        pixels = cells @ self._weight + self._base
        return {IMAGE: ((pixels * 0.5 + 0.5).clamp(0, 1) * 255).to(torch.uint8)}


def _grid(pipeline: Any, latents: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """The latents of one picture, (channels, h, w); those of a video's middle. None if they are in a row."""
    if latents.ndim == 3 and hasattr(pipeline, "_unpack_latents") and hasattr(pipeline, "image_processor"):
        latents = pipeline._unpack_latents(  # noqa: SLF001 - no public name
            latents, arguments["height"], arguments["width"], pipeline.vae_scale_factor
        )
    if latents.ndim == 5:
        latents = latents[:, :, latents.shape[2] // 2]
    return latents[0] if latents.ndim == 4 else None
