"""Audio tokens, frames and samples of Orpheus: the codes of tokens, and the samples that a window yields.

Seven audio tokens are a *frame*, one code each at three levels of SNAC; a frame is 2048 samples:

    token of the frame    0    1    2    3    4    5    6
    level                 0    1    2    2    1    2    2

The model has 4096 tokens for each place in a frame, in consecutive blocks, so the code of a token is
`(token - FIRST_AUDIO) % CODES`. A token in another place than the one it was trained for is still a code.

A frame needs frames on both sides to sound right. So SNAC decodes windows of four frames, and of each window
only the second frame is emitted: it has one frame before it and two after it. The frames at both ends are
emitted with the adjacent window:

    frames          0   1   2   3   4   5   6
    first chunk    [0   1] (2) (3)                also frame 0, which has no frame before it
    later ones         (1) [2] (3) (4)
                           (2) [3] (4) (5)
                               (3) [4] (5) (6)
    final chunk                    (4) [5   6]    all remaining frames: three frames, or a whole short text

So n frames yield n * 2048 samples, for every n. The tokens of an incomplete frame are dropped.
"""

from typing import Final

from models.base import ChunkOf

FRAME_TOKENS: Final = 7
FRAME_SAMPLES: Final = 2048
WINDOW_TOKENS: Final = 4 * FRAME_TOKENS
STRIDE_TOKENS: Final = FRAME_TOKENS
SAMPLE_RATE: Final = 24_000

CODES: Final = 4096
"""The number of codes per level."""
LEVELS: Final = ((0,), (1, 4), (2, 3, 5, 6))
"""The tokens of a frame that are codes of each level, in order of time."""
FIRST_AUDIO: Final = 128_266
END_AUDIO: Final = FIRST_AUDIO + FRAME_TOKENS * CODES
"""The id after the last audio token."""


def samples_of(chunk: ChunkOf, frames: int) -> slice:
    """The samples to emit of a decoded chunk with that number of whole frames."""
    begin = FRAME_SAMPLES if chunk.number > 0 else 0
    end = frames * FRAME_SAMPLES if chunk.last else 2 * FRAME_SAMPLES
    return slice(begin, end)
