"""Samples of audio: the rates that are allowed, and blocks joined to one array. Imports no decoder."""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from models.media.kinds import MediaError

MIN_RATE: Final = 1_000
MAX_RATE: Final = 384_000
"""The sample rates that audio is resampled to."""
MAX_SAMPLE: Final = 2.0**31
"""The largest size of a sample: louder ones than 1 occur, but far larger ones overflow in models."""

Samples: TypeAlias = npt.NDArray[np.float32]
"""(N,) float32 from -1 to 1: one channel."""


def check_rate(rate: int) -> None:
    """Check a rate that a family asks for.

    Raises:
        ValueError: it is none.
    """
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError(f"expected a rate from {MIN_RATE} to {MAX_RATE} samples per second, found {rate}")


def check_samples(block: Samples) -> None:
    """Check samples of a file: files of floats may have any value.

    Raises:
        MediaError: one is no number, or is larger than the largest of whole numbers of 32 bits.
    """
    largest = float(np.abs(block).max(initial=0.0))  # NaN if there is one
    if not largest <= MAX_SAMPLE:
        raise MediaError(f"expected samples from -1 to 1, found one of size {largest:g}")


def join(blocks: Sequence[Samples]) -> Samples:
    """Join blocks of samples.

    Raises:
        MediaError: there are none.
    """
    if not blocks:
        raise MediaError("expected audio with samples, found none")
    return np.concatenate(blocks)
