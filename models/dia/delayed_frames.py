"""Frames whose codes were chosen in different steps: gathered, and given in chunks.

step          1    2    3    ...         with delays 0, 1, 2
code 0        a0   b0   c0
code 1        bos  a1   b1               frame a is a0 a1 a2
code 2        bos  bos  a2
"""

from typing import Final

import torch


class DelayedFrames:
    """The codes of a request's steps.

    Args:
        delays: of each code of a frame, in steps; the first has none.
        first: the frames of the first chunk; each next one has twice as many, up to `most`.
        around: the frames on both sides of a chunk that its sound depends on.

    Attributes:
        rows: the codes of each step, (channels,); those of the first one are no frame's.
    """

    def __init__(self, delays: torch.Tensor, *, first: int, most: int, around: int) -> None:
        self.rows: Final[list[torch.Tensor]] = []
        self._delays = delays
        self._longest = int(delays.max())
        self._size = first
        self._most = most
        self._around = around
        self._sent = 0

    @property
    def known(self) -> int:
        """The frames of which all codes are chosen."""
        return max(0, len(self.rows) - 1 - self._longest)

    def chunk(self) -> dict[str, torch.Tensor] | None:
        """The next chunk; None if it, and the frames behind it, are not all known."""
        if self.known < self._sent + self._size + self._around:
            return None
        found = self._outputs(self._sent + self._size, self.known, is_last=False)
        self._size = min(2 * self._size, self._most)
        return found

    def last(self, frames: int) -> dict[str, torch.Tensor]:
        """The rest of all `frames`."""
        return self._outputs(frames, frames, is_last=True)

    def _outputs(self, end: int, known: int, *, is_last: bool) -> dict[str, torch.Tensor]:
        """The frames from those that were sent to `end`, and those around them among the known ones.

        Returns:
            `codes`, (frames, channels) int32, and `span`, (3,) int64: the frames before the fresh ones, the
            fresh ones, and 1 if they are the last.
        """
        begin = max(0, self._sent - self._around)
        steps = torch.arange(begin, min(end + self._around, known))[:, None] + 1 + self._delays
        codes = torch.stack(self.rows)[steps, torch.arange(len(self._delays))]
        span = torch.tensor([self._sent - begin, end - self._sent, int(is_last)])
        self._sent = end
        return {"codes": codes.int(), "span": span}
