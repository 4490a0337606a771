"""Output of requests that only compute a prompt: an embedding in one chunk, hidden states in several.

Bytes that an earlier attempt released stay valid. If it released all of them, a later attempt computes
nothing. Otherwise it computes the whole output again, and the released bytes replace the beginning of the new
ones, because the last bits of a state may depend on the other sequences of the same batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from models.base import EMBEDDING, HIDDEN_STATES
from shared.events import OutputChunk
from workers.data_plane.port import Array

MAX_PIECE_BYTES: Final = 256 << 10
"""The most bytes of hidden states in a chunk; a chunk holds the states of at least one token."""


def fully_released_array(released: Sequence[OutputChunk], tokens: int) -> Array | None:
    """The output of a prompt of `tokens` tokens, if earlier attempts released all of it; else None."""
    if not released:
        return None
    shapes = [chunk.metadata["shape"] for chunk in released]
    shape = tuple(shapes[0]) if len(shapes[0]) == 1 else (sum(rows for rows, _ in shapes), shapes[0][1])
    if len(shape) > 1 and shape[0] < tokens:
        return None
    data = np.frombuffer(b"".join(chunk.data or b"" for chunk in released), np.uint8)
    return Array(dtype=released[0].metadata["dtype"], shape=shape, data=data)


def array_chunks(array: Array, released: Sequence[OutputChunk]) -> Iterator[dict[str, Any]]:
    """Return all chunks of an output, as fields of `OutputChunk`.

    `array` is the whole output. The bytes of the `released` chunks replace its beginning.
    """
    prefix = b"".join(chunk.data or b"" for chunk in released)
    data = prefix + array.data.tobytes()[len(prefix) :]
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
