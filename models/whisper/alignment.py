"""Times of tokens: dynamic time warping over weights of the cross-attention. No torch.

The chosen heads follow the speech. Their weights are normalised over the tokens, smoothed by a median filter
over the frames, and averaged. The path through them from the first token and frame to the last, which never
goes back, gives each token a frame. The rules are transformers' (`_extract_token_timestamps`).
"""

import numpy as np
import numpy.typing as npt

from models.whisper.segments import TIME_S

Floats = npt.NDArray[np.float32]


def token_times(weights: Floats, *, frames: int, width: int) -> list[float]:
    """The seconds of tokens, and of one more, which has no weights.

    Args:
        weights: (heads, tokens, frames).
        frames: those that have sound.
        width: of the median filter.
    """
    cut = weights[:, :, : max(frames, 1)].astype(np.float64)
    deviation = cut.std(axis=1, keepdims=True)
    normal = np.divide(cut - cut.mean(axis=1, keepdims=True), deviation, where=deviation > 0, out=cut * 0)
    rows, columns = path(-_smooth(normal, width).mean(axis=0))
    jumps = np.diff(rows, prepend=-1) > 0
    times: list[float] = (columns[jumps] * TIME_S).tolist()
    return [*times, times[-1]]


def _smooth(weights: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """The median of `width` neighbours along the last axis, mirrored at its ends."""
    half = width // 2
    if weights.shape[-1] <= half:
        return weights
    padded = np.pad(weights, ((0, 0), (0, 0), (half, half)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    found: npt.NDArray[np.float64] = np.median(windows, axis=-1)
    return found


def path(costs: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The cheapest monotonic path through costs, (N, M): the row and the column of each of its places.

    All places of an anti-diagonal are computed at once: their predecessors are on the two before it.
    """
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    step = np.full((rows + 1, columns + 1), -1, np.int8)
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        kind = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        total[i, j] = costs[i - 1, j - 1] + np.choose(kind, [both, down, right])
        step[i, j] = kind
    step[0, :], step[:, 0] = 2, 1
    return _back(step, rows, columns)


def _back(step: npt.NDArray[np.int8], i: int, j: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Follow the steps back from the last place."""
    places = []
    while i > 0 and j > 0:
        places.append((i - 1, j - 1))
        kind = step[i, j]
        i, j = i - (kind != 2), j - (kind != 1)
    found = np.array(places[::-1], np.intp)
    return found[:, 0], found[:, 1]
