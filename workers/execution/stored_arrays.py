"""Arrays as checkpoints store them, and back."""

from collections.abc import Mapping

import numpy as np

from shared.checkpoints import State, StoredArray
from workers.data_plane.port import Array


def stored(arrays: Mapping[str, Array]) -> State:
    """The state of these arrays, with copies of their bytes."""
    return {name: StoredArray(one.dtype, one.shape, one.data.tobytes()) for name, one in arrays.items()}


def array_of(stored: StoredArray) -> Array:
    """A stored array."""
    return Array(dtype=stored.dtype, shape=stored.shape, data=np.frombuffer(stored.data, np.uint8))
