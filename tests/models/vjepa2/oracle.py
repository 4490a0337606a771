"""The oracle of V-JEPA 2: transformers' own model, on pixels made by a restatement of its processor."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers import VJEPA2Model

from models.media.in_process import InProcessReader
from shared.events import Media
from tests.models.media import samples
from tests.tiny.vjepa2 import tiny_vjepa2

Features = npt.NDArray[np.float32]

FILES = {
    "clip": samples.video("mp4", frames=12, size=(96, 80)),
    "other": samples.video("mp4", frames=10, size=(64, 64)),
    "short": samples.video("webm", frames=4, size=(64, 64)),
    "picture": samples.image("PNG", samples.picture(100, 70)),
}


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def medium(name: str) -> Media:
    data = FILES[name]
    modality = "image" if name == "picture" else "video"
    return Media(modality=modality, digest=digest_of(data), size=len(data), name=name)


def reader() -> InProcessReader:
    return InProcessReader({digest_of(data): data for data in FILES.values()})


@cache
def model() -> Any:
    return VJEPA2Model.from_pretrained(tiny_vjepa2()).eval()


def features(name: str, options: Mapping[str, Any]) -> Features:
    """The latents that transformers' model computes, (1, latents, width)."""
    pixels = torch.from_numpy(pixels_of(name, options.get("num_frames")))[None]
    every = range(len(pixels[0]) // 2 * 16)
    masks = {
        key: [torch.tensor(options.get(key, every)).reshape(1, -1)] for key in ("context_mask", "target_mask")
    }
    with torch.inference_mode():
        found = model()(pixels, skip_predictor=options.get("skip_predictor", False), **masks)
    rows = found.predictor_output.last_hidden_state if found.predictor_output else found.last_hidden_state
    return np.asarray(rows)


def pixels_of(name: str, frames: int | None) -> Features:
    if name == "picture":
        chosen: Sequence[Any] = [reader().image(medium(name))] * (frames or 16)
    else:
        video = reader().video(medium(name), choose=lambda info: range(info.frames)).frames
        count = min(frames or 8, len(video))
        chosen = video[torch.arange(0, len(video), len(video) / count).int().numpy()[:count]]
    return np.stack([_normalised(frame) for frame in chosen])


def _normalised(frame: npt.NDArray[np.uint8]) -> Features:
    height, width = frame.shape[:2]
    size = (73 * width // min(height, width), 73 * height // min(height, width))
    resized = np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR))
    left, top = (size[0] - 64) // 2, (size[1] - 64) // 2
    square = resized[top : top + 64, left : left + 64] / 255
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    found: Features = ((square - mean) / std).transpose(2, 0, 1).astype(np.float32)
    return found


@torch.inference_mode()
def rollout(name: str, horizon: int) -> Features:
    """A restatement of the published rollout on transformers' modules: (horizon, 16, width).

    The clip's latents are the context; two frames are predicted a second behind it, at four frames a second;
    the context moves on by them.
    """
    context = model().encoder(torch.from_numpy(pixels_of(name, None))[None]).last_hidden_state
    seen = torch.arange(context.shape[1])[None]
    wanted = context.shape[1] + 2 * 16 + torch.arange(16)[None]
    found = []
    for _ in range(horizon):
        found.append(model().predictor(context, [seen], [wanted]).last_hidden_state)
        context = torch.cat([context[:, 16:], found[-1]], dim=1)
    return np.concatenate(found)
