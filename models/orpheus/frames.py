"""Tokens, frames and samples: what a token of Orpheus means, and which window gives which samples.

Seven audio tokens are a *frame*, one code each for the three levels of SNAC, and a frame is 2048 samples:

    token of the frame    0    1    2    3    4    5    6
    level                 0    1    2    2    1    2    2

The model has 4096 tokens for each place in a frame. They come one block after the other, so that the place
falls out of `(token - FIRST_AUDIO) % CODES`; a token that stands in another place than the one it was
trained for still is a code.

A frame sounds right with frames on both sides, so SNAC decodes windows of four, and of each only the second
is taken: it has one before it and two behind. What is at the ends has no such neighbours and comes with the
window next to it:

    frames          0   1   2   3   4   5   6
    first chunk    [0   1] (2) (3)                the beginning too: nothing comes before it
    later ones         (1) [2] (3) (4)
                           (2) [3] (4) (5)
                               (3) [4] (5) (6)
    final chunk                    (4) [5   6]    all that no window gave; three frames, or a whole short text

So n frames are n * 2048 samples, whatever n is. Tokens of a frame that was not finished are dropped.
"""

from typing import Final

from models.base import ChunkOf

FRAME_TOKENS: Final = 7
FRAME_SAMPLES: Final = 2048
WINDOW_TOKENS: Final = 4 * FRAME_TOKENS
STRIDE_TOKENS: Final = FRAME_TOKENS
SAMPLE_RATE: Final = 24_000

CODES: Final = 4096
"""How many codes each level has."""
LEVELS: Final = ((0,), (1, 4), (2, 3, 5, 6))
"""Which tokens of a frame are codes of which level, in the order of time."""
FIRST_AUDIO: Final = 128_266
END_AUDIO: Final = FIRST_AUDIO + FRAME_TOKENS * CODES
"""One behind the last audio token."""


def samples_of(chunk: ChunkOf, frames: int) -> slice:
    """Which samples of a decoded chunk of so many whole frames are put out."""
    begin = FRAME_SAMPLES if chunk.number > 0 else 0
    end = frames * FRAME_SAMPLES if chunk.last else 2 * FRAME_SAMPLES
    return slice(begin, end)
