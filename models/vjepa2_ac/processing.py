"""The CPU node of V-JEPA 2-AC: pixels, actions, states and goals. Whatever does not fit is refused here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from models.base import CpuResult, MediaReader, TextlessProcessing
from models.media.clips import ClipReader, ClipTransform
from models.vjepa2_ac.controls import clip_controls, goal_of, pose_of, rollout_controls
from models.vjepa2_ac.options import VJepa2AcOptions
from models.vjepa2_ac.settings import AcSettings
from shared.errors import ClientError
from shared.events import Inputs
from shared.tensors import Handle


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader) -> "VJepa2AcProcessing":
    """Read the sizes of a checkpoint; `max_seq_len` bounds the tokens of a clip, and of a rollout."""
    settings = AcSettings.read(checkpoint)
    transform = ClipTransform.read(checkpoint, settings.crop_size)
    clips = ClipReader(media=media, transform=transform, frames=settings.frames_per_clip)
    return VJepa2AcProcessing(clips, settings, max_seq_len)


class VJepa2AcProcessing(TextlessProcessing):
    """The CPU node of one checkpoint."""

    def __init__(self, clips: ClipReader, settings: AcSettings, max_tokens: int) -> None:
        self._clips: Final = clips
        self._settings: Final = settings
        self._max_tokens: Final = max_tokens

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        options = msgspec.convert(args["options"], VJepa2AcOptions)
        files = msgspec.convert(args["inputs"], Inputs).files
        if options.is_of_frames:
            # What follows from a frame alone is checked before a file is decoded.
            self._check_room(options.horizon, args["kv_tokens"])
            outputs = self._of_frames(options)
            pixels = np.concatenate([self._clips.pixels(file, 1) for file in files])
            latents = len(pixels) * self._settings.patches
        else:
            pixels = self._clip(self._clips.pixels(files[0], options.num_frames))
            steps = len(pixels) // self._settings.tubelet_size
            latents = steps * self._settings.patches
            self._check_length(steps)
            outputs = self._of_clip(options, steps, latents)
        return CpuResult(facts={"latents": latents}, outputs={"pixels": pixels, **outputs})

    def _clip(self, pixels: Any) -> Any:
        """The frames of whole latents: a last odd frame is left out."""
        tubelet = self._settings.tubelet_size
        return pixels[: len(pixels) // tubelet * tubelet]

    def _of_clip(self, options: VJepa2AcOptions, steps: int, latents: int) -> dict[str, Any]:
        if options.walk == "encode":
            return {}
        found = {"controls": clip_controls(options, self._settings, steps)}
        if options.walk == "score":
            found["goal_hidden"] = goal_of(options, latents, self._settings.hidden_size)
        return found

    def _of_frames(self, options: VJepa2AcOptions) -> dict[str, Any]:
        if not options.cem:
            return {"controls": rollout_controls(options, self._settings)}
        found = {"controls": pose_of(options, self._settings)}
        if options.walk == "plan":
            found["goal_hidden"] = goal_of(options, self._settings.patches, self._settings.hidden_size)
        return found

    def _check_length(self, steps: int) -> None:
        found = steps * self._settings.frame_tokens
        if not 0 < found <= self._max_tokens:
            most = self._max_tokens // self._settings.frame_tokens * self._settings.tubelet_size
            raise ClientError(
                f"num_frames: expected {self._settings.tubelet_size} to {most} frames, found "
                f"{steps * self._settings.tubelet_size}"
            )

    def _check_room(self, horizon: int, kv_tokens: int) -> None:
        """Refuse a rollout that does not fit into the KV cache.

        Raises:
            ClientError: it does not.
        """
        needed = horizon * self._settings.frame_tokens
        limit = min(kv_tokens, self._max_tokens)
        if needed > limit:
            raise ClientError(
                f"rollout_horizon: {horizon} frames need {needed} tokens of the KV cache, expected at most "
                f"{limit}: ask for at most {limit // self._settings.frame_tokens}",
                code="context_length_exceeded",
            )
