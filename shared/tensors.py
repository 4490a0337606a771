"""Tensors are named, handles are hints.

A tensor's *key* is logical and stable: request / attempt / index / walk / edge. A `Handle` says where its
bytes were last seen. Small values ride inline in the event and so are as durable as the log; others are in
the memory of the worker that made them, which `rank`, `incarnation` and `locator` say (ADR 8). No numpy and
no torch here: the conductor carries handles without opening them.
"""

import math
import sys
from array import array
from collections.abc import Mapping
from typing import Final

import msgspec

from shared.errors import TensorGone

ITEM_BYTES: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""What a tensor may be made of, as torch spells it, and the bytes of one."""


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


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor.

    Raises:
        ValueError: a dtype that is unknown, or a shape that no tensor has.
    """
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(ITEM_BYTES)}")
    if shape and min(shape) < 0:
        raise ValueError(f"a shape has lengths of 0 and more, found {shape}")
    return math.prod(shape) * ITEM_BYTES[dtype]


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
    expected = 4 * handle.shape[0] if handle.dtype == "int32" and len(handle.shape) == 1 else -1
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
