"""Tensors are named, handles are hints.

A tensor's *key* is logical and stable: request / attempt / index / walk / edge. A `Handle` says where
its bytes were last seen. Small values ride inline in the event and so are as durable as the log; the
other places (arena, CUDA IPC, TCP) come with the data plane and will fill `rank`, `incarnation` and
`locator`. No numpy and no torch here: the conductor carries handles without opening them.
"""

import sys
from array import array

import msgspec

from shared.errors import TensorGone

_ITEM_BYTES = {"int32": 4}


class Handle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a tensor's bytes were last seen.

    `data` holds the bytes themselves, little-endian and contiguous, when the tensor rides inline.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    rank: int | None = None
    incarnation: int | None = None
    locator: bytes | None = None


def inline_ids(key: str, ids: list[int]) -> Handle:
    """A one-dimensional int32 tensor of token ids, shape `(len(ids),)`, carried inline."""
    cells = array("i", ids)
    if sys.byteorder == "big":  # pragma: no cover - the wire is little-endian
        cells.byteswap()
    return Handle(key=key, dtype="int32", shape=(len(ids),), data=cells.tobytes())


def read_ids(handle: Handle) -> list[int]:
    """The token ids of an inline int32 tensor.

    Raises:
        TensorGone: the bytes do not ride inline, or do not fit the declared shape.
    """
    expected = _ITEM_BYTES.get(handle.dtype, 0) * handle.shape[0] if len(handle.shape) == 1 else -1
    if handle.data is None or len(handle.data) != expected:
        found = "no inline bytes" if handle.data is None else f"{len(handle.data)} bytes"
        raise TensorGone(
            f"tensor {handle.key}: expected {handle.dtype}{list(handle.shape)} inline, found {found}"
        )
    cells = array("i")
    cells.frombytes(handle.data)
    if sys.byteorder == "big":  # pragma: no cover - the wire is little-endian
        cells.byteswap()
    return cells.tolist()
