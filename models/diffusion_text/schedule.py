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
    for left in range(steps, 0, -1):
        shares.append(round((tokens - sum(shares)) * _share(left, steps)))
    return [share for share in shares if share]


def _share(left: int, steps: int) -> float:
    """The share of the masks that the next of `left` steps fills in: 1 / left.

    In single precision, as published: where a half is rounded, the error of a float decides.
    """
    now, next_ = (np.float32(1) - (np.float32(1) - np.float32(time / steps)) for time in (left, left - 1))
    return 1 - float(next_ / now)
