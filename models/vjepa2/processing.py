"""The CPU node of V-JEPA 2: a video or an image to pixels (frames, 3, H, W), and masks (1, latents)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from models.base import CpuResult, MediaReader, TextlessProcessing
from models.checkpoints.files import read_json
from models.media.clips import ClipReader, ClipTransform
from models.vjepa2.graph import MASKS, VJepa2Options
from shared.errors import ClientError
from shared.events import Inputs
from shared.tensors import Handle


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader) -> "VJepa2Processing":
    """Read the configuration of a checkpoint; `max_seq_len` bounds the latents of a clip."""
    config = read_json(checkpoint / "config.json")
    transform = ClipTransform.read(checkpoint, config["crop_size"])
    clips = ClipReader(media=media, transform=transform, frames=config["frames_per_clip"])
    patches = (transform.crop // config["patch_size"]) ** 2
    return VJepa2Processing(clips, config["tubelet_size"], patches, max_seq_len)


class VJepa2Processing(TextlessProcessing):
    """The CPU node of one checkpoint; a tubelet of frames has as many latents as a frame has patches."""

    def __init__(self, clips: ClipReader, tubelet: int, patches: int, max_latents: int) -> None:
        self._clips, self._tubelet, self._patches, self._max_latents = clips, tubelet, patches, max_latents

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        (medium,) = msgspec.convert(args["inputs"], Inputs).files
        options = msgspec.convert(args["options"], VJepa2Options)
        pixels = self._clips.pixels(medium, options.num_frames)
        latents = len(pixels) // self._tubelet * self._patches
        if not 0 < latents <= self._max_latents:
            raise ClientError(f"num_frames: expected 1 to {self._max_latents} latents, found {latents}")
        if options.walk.startswith("rollout") and latents <= self._patches:
            least = 2 * self._tubelet
            found = len(pixels)
            raise ClientError(f"rollout_horizon: expected a clip of at least {least} frames, found {found}")
        wanted = MASKS if options.walk == "predict" else ()
        masks = {name: mask_of(getattr(options, name), name, latents) for name in wanted}
        return CpuResult(facts={"latents": latents}, outputs={"pixels": pixels, **masks})


def mask_of(mask: list[Any] | None, name: str, latents: int) -> Any:
    """The numbers of latents in a mask, (1, numbers) int64; all latents without one."""
    found = np.arange(latents) if mask is None else np.hstack([np.array(one, np.int64) for one in mask])
    if found.size == 0 or found.max() >= latents:
        raise ClientError(f"{name}: expected numbers of latents, from 0 to {latents - 1}")
    return found[None]
