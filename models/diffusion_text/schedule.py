"""The number of tokens that each denoising step of a block fills in at least, as published. No torch.

even      LLaDA2's: equal shares, the first ones larger by one
linear    dllm-hub's, of its linear noise: a share of what is left, rounded
"""

from collections.abc import Callable

import numpy as np

Schedule = Callable[[int, int], list[int]]
"""(tokens, steps): the least numbers of tokens by step. Their sum is the number of tokens; none is 0."""


def even(tokens: int, steps: int) -> list[int]:
    """Return equal shares: `even(8, 3)` is 3, 3, 2."""
    share, rest = divmod(tokens, steps)
    return [share + (step < rest) for step in range(min(steps, tokens))]


def linear(tokens: int, steps: int) -> list[int]:
    """Return shares of what is left, rounded: `linear(8, 3)` is 3, 2, 3. Steps without one are left out."""
    shares: list[int] = []
    left = tokens
    for part in _parts(steps):
        share = round(left * part)
        left -= share
        shares.append(share)
    return [share for share in shares if share]


def _parts(steps: int) -> list[float]:
    """The part of the masks that each step fills in: 1 / (the steps that are left).

    In single precision, as published: where a half is rounded, the error of a float decides.
    """
    times = np.float32(1) - (np.arange(steps, -1, -1) / steps).astype(np.float32)
    left = np.float32(1) - times
    parts: list[float] = (1 - (left[1:] / left[:-1]).astype(np.float64)).tolist()
    return parts
