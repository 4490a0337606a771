"""The VAE of a pipeline: latents to frames, by the class's own processor, and sound where it makes any."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from models.base import Item, StatelessResult
from models.diffusion_pipelines.packing import unpack
from models.diffusion_pipelines.pipeline_run import SOUND, TIMESTEP, Z
from models.diffusion_pipelines.run_checkpoint import LATENTS
from shared.errors import ClientError

FRAMES = "frames"
_VIDEO_DIMENSIONS = 5


class VaeDecoder:
    """`latents`, packed -> `frames` (T, H, W, 3) uint8, and `sound` (channels, samples) float32.

    Args:
        pipeline: with its VAE; its denoiser is a description.
        safety_checker: `on` for a class that checks what it has made.
        tiling, slicing: decode in tiles, or picture by picture, in less memory.
    """

    max_batch = 1

    def __init__(
        self, pipeline: Any, *, safety_checker: str = "none", tiling: bool = False, slicing: bool = False
    ) -> None:
        self._safety_checker = safety_checker
        self._pipeline = pipeline
        self._vae = pipeline.vae
        if tiling:
            self._vae.enable_tiling()
        if slicing:
            self._vae.enable_slicing()

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        return [self._decoded(item) for item in items]

    def _decoded(self, item: Item) -> StatelessResult:
        device = next(self._vae.parameters()).device
        found = unpack(item.inputs[LATENTS], device)
        z = found[Z].to(self._vae.dtype)
        further = (found[TIMESTEP],) if TIMESTEP in found else ()
        pixels = self._vae.decode(z, *further, return_dict=False)[0]
        frames = self._checked(frames_of(self._pipeline, pixels), device)
        sound, rate = self._sound(found.get(SOUND))
        facts = frame_facts(frames) | {
            "safety_checker": self._safety_checker,
            "flagged": False,
            "sound_rate": rate,
        }
        return StatelessResult(outputs={FRAMES: frames, SOUND: sound}, facts=facts)

    def _checked(self, frames: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Frames as the pipeline's own safety checker leaves them.

        Raises:
            ClientError: it does not let them pass.
        """
        check = getattr(self._pipeline, "_apply_video_safety_check", None)
        if self._safety_checker != "on" or check is None:
            return frames
        try:
            shown = check(frames.numpy().astype(np.float32) / 255, output_type="np", device=device)
        except ValueError as error:
            raise ClientError(f"the result is withheld: {error}", code="content_filter") from error
        return uint8_of(shown)

    def _sound(self, latents: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        """Samples, (channels, samples), and their rate; none for a picture without sound."""
        if latents is None:
            return torch.zeros(0, 0), 0
        waves = self._pipeline.decode_sound(latents).float()
        return waves.reshape(waves.shape[-2], -1), int(self._pipeline.sound_tokenizer.config.sampling_rate)


def frames_of(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The frames of decoded pixels, (T, H, W, 3) uint8 on the CPU, by the pipeline's own processor.

    Args:
        pipeline: whose processor it is.
        pixels: (1, 3, H, W), or of a video (1, 3, T, H, W).
    """
    if getattr(pipeline, "video_processor", None) is not None:
        shown = pipeline.video_processor.postprocess_video(pixels.float(), output_type="np")[0]
    else:
        flat = pixels[:, :, 0] if pixels.ndim == _VIDEO_DIMENSIONS else pixels
        shown = pipeline.image_processor.postprocess(flat.float(), output_type="np")
    return uint8_of(shown)


def uint8_of(shown: Any) -> torch.Tensor:
    """Pixels of 0 to 1 as bytes, rounded as diffusers rounds them."""
    return torch.from_numpy((np.asarray(shown, dtype=np.float32) * 255).round().astype(np.uint8))


def frame_facts(frames: torch.Tensor) -> dict[str, Any]:
    """The facts of frames (T, H, W, 3)."""
    count, height, width = (int(size) for size in frames.shape[:3])
    return {"frames": count, "height": height, "width": width}
