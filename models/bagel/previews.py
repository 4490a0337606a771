"""Previews of an image that is being drawn: what its latents show so far, in colours that are nearly right.

The velocity of a step points from the image to the noise, so that the image a flow is heading for is known in
every step. The decoder of the autoencoder is on another node, and too slow for a preview. To a first
approximation each latent is a point of a colour, linear in its channels (`measured_colors`).
"""

from collections.abc import Callable

import torch

from models.bagel.folder import LATENT_PATCH

_RGB = 3


class LatentColors:
    """Linear colours of latents.

    Args:
        weight: (channels, 3), what each channel adds to red, green and blue, in -1 to 1.
        base: (3,), the colour of a latent of zeros.
    """

    def __init__(self, weight: torch.Tensor, base: torch.Tensor) -> None:
        self._weight, self._base = weight, base

    def image(self, tokens: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Pixels of latent tokens, (h * w, 4 * channels) -> (2 h, 2 w, 3) uint8, on the CPU."""
        patch, (height, width) = LATENT_PATCH, grid
        cells = tokens.float().cpu().view(height, width, patch, patch, -1)
        colors = cells @ self._weight + self._base
        pixels = colors.permute(0, 2, 1, 3, 4).reshape(height * patch, width * patch, _RGB)
        return ((pixels * 0.5 + 0.5).clamp(0, 1) * 255).to(torch.uint8)


@torch.inference_mode()
def measured_colors(decode: Callable[[torch.Tensor], torch.Tensor], channels: int) -> LatentColors:
    """Measure the colours of a decoder: those of flat latents, one channel up and down at a time.

    Args:
        decode: latents as the language model has them, (n, channels, 2, 2) -> pixels (n, 3, H, W), -1 to 1.
        channels: of the latents.
    """
    units = torch.eye(channels)
    probes = torch.cat([torch.zeros(1, channels), units, -units])
    colors = decode(probes[:, :, None, None].expand(-1, -1, 2, 2)).float().mean((2, 3))
    base, up, down = colors[0], colors[1 : channels + 1], colors[channels + 1 :]
    return LatentColors((up - down) / 2, base)


def is_shown(step: int, steps: int, wanted: int) -> bool:
    """Return whether a preview is due after `step` steps: `wanted` of them, evenly, none after the last."""
    return step in {round(steps * part / (wanted + 1)) for part in range(1, wanted + 1)} - {0, steps}


def previews_of(
    colors: LatentColors | None,
    latents: torch.Tensor,
    velocity: torch.Tensor,
    time: float,
    grid: tuple[int, int],
) -> dict[str, torch.Tensor]:
    """The preview of a step, by modality; none where the colours are not known.

    Args:
        colors: of the checkpoint's decoder.
        latents: (n, channels), before the step.
        velocity: (n, channels), of the step.
        time: of these latents: 1 is noise, 0 the image.
        grid: rows and columns of the latents.
    """
    if colors is None:
        return {}
    return {"image": colors.image(latents - velocity * time, grid)}
