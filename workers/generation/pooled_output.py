"""What a prompt comes to that is not answered, as chunks: an embedding in one, its hidden states in pieces.

What an earlier attempt put out stands: the last bits of a state may depend on what is computed beside it, so
the rest is taken from what was computed now, and the beginning from the log.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from models.base import EMBEDDING, HIDDEN_STATES
from shared.events import OutputChunk
from workers.data_plane.port import Array

MAX_PIECE_BYTES: Final = 256 << 10
"""So much of a prompt's states is in one chunk; at least one token's."""


def released_array(released: Sequence[OutputChunk], tokens: int) -> Array | None:
    """What a prompt of so many tokens came to, if earlier attempts put out all of it."""
    if not released:
        return None
    shapes = [chunk.metadata["shape"] for chunk in released]
    shape = tuple(shapes[0]) if len(shapes[0]) == 1 else (sum(rows for rows, _ in shapes), shapes[0][1])
    if len(shape) > 1 and shape[0] < tokens:
        return None
    data = np.frombuffer(b"".join(chunk.data or b"" for chunk in released), np.uint8)
    return Array(dtype=released[0].metadata["dtype"], shape=shape, data=data)


def array_chunks(array: Array, released: Sequence[OutputChunk]) -> Iterator[dict[str, Any]]:
    """The chunks: fields of `OutputChunk`. Those that were `released` come first, as they were."""
    stands = b"".join(chunk.data or b"" for chunk in released)
    data = stands + array.data.tobytes()[len(stands) :]
    if len(array.shape) == 1:
        yield {
            "modality": EMBEDDING,
            "data": data,
            "metadata": {"dtype": array.dtype, "shape": list(array.shape)},
        }
        return
    tokens, size = array.shape
    row_bytes = len(data) // tokens
    rows = max(1, MAX_PIECE_BYTES // row_bytes)
    for first in range(0, tokens, rows):
        count = min(rows, tokens - first)
        yield {
            "modality": HIDDEN_STATES,
            "data": data[first * row_bytes : (first + count) * row_bytes],
            "metadata": {"dtype": array.dtype, "shape": [count, size], "first": first},
        }
