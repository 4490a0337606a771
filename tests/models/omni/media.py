"""Pictures, sounds and videos, by a seed."""

import numpy as np

from tests.models.omni.serving import Array


def picture(seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)


def sound(seed: int, seconds: float = 1.1) -> Array:
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * 16_000)) / 16_000
    return (
        np.sin(2 * np.pi * (200 + 150 * seed) * time) * 0.5 + 0.05 * rng.standard_normal(len(time))
    ).astype(np.float32)


def film(seed: int, frames: int = 8) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (frames, 64, 64, 3), dtype=np.uint8)
