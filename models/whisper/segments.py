"""The tokens of a window as segments, with their times. No torch.

A time token ends a segment where another one follows it: `<|0.00|> text <|2.10|><|2.10|> text <|4.00|>`.
The next window begins where the last whole segment ends; what was written after it is dropped, and heard
again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

TIME_S: Final = 0.02
"""The seconds between two time tokens: a frame of the encoder."""
STRIDE: Final = 2
"""The mel frames of a frame of the encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A segment of a window.

    Attributes:
        start, end: seconds from the beginning of the file.
        first, stop: the range of its tokens in the window.
    """

    start: float
    end: float
    first: int
    stop: int

    def within(self, begin: float, end: float) -> "Part":
        """The segment with its times in this span, in order."""
        start = min(max(self.start, begin), end)
        return replace(self, start=start, end=min(max(self.end, start), end))


def parts_of(tokens: Sequence[int], *, first_time: int, seek: int, frames: int) -> tuple[list[Part], int]:
    """Cut the tokens of a window into segments.

    Args:
        tokens: without the one that ends the text.
        first_time: the token of the time 0.
        seek: the first mel frame of the window.
        frames: the mel frames of the window.

    Returns:
        the segments, and the mel frames until the next window.
    """
    offset = seek * TIME_S / STRIDE
    is_time = [token >= first_time for token in tokens]
    stops = [place + 1 for place in range(len(tokens) - 1) if is_time[place] and is_time[place + 1]]
    if not stops:
        return [_whole(tokens, is_time, first_time, offset, frames)], frames
    ends_alone = is_time[-2:] == [False, True]
    if ends_alone:
        stops.append(len(tokens))
    else:
        stops[-1] += 1  # the second of the last two times shows that the segment is whole
    parts: list[Part] = []
    begin = 0
    for stop in stops:
        last = stop - 1 if stop != stops[-1] or ends_alone else stop - 2
        parts.append(
            Part(
                start=offset + (tokens[begin] - first_time) * TIME_S,
                end=offset + (tokens[last] - first_time) * TIME_S,
                first=begin,
                stop=stop,
            )
        )
        begin = stop
    if ends_alone:
        return parts, frames
    return parts, max(tokens[stops[-1] - 2] - first_time, 1) * STRIDE


def _whole(
    tokens: Sequence[int], is_time: Sequence[bool], first_time: int, offset: float, frames: int
) -> Part:
    """The segment of a window without two times in a row: it ends with its last time, or with the window."""
    times = [place for place, found in enumerate(is_time) if found]
    last = frames // STRIDE
    if times and tokens[times[-1]] != first_time:
        last = tokens[times[-1]] - first_time
    return Part(start=offset, end=offset + last * TIME_S, first=0, stop=len(tokens))
