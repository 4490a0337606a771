"""Handles: references to tensors, which name a tensor and where its bytes were last.

A tensor's *key* is logical and stable: request / attempt / index / walk / edge. Small tensors are inline in
the event and so as durable as the log. Others are in the memory of the worker that made them, which `rank`,
`incarnation` and `locator` identify (ADR 8). This module uses neither numpy nor torch: the conductor passes
handles on without reading the tensors.
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
"""The supported dtypes, in torch's spelling, and their sizes in bytes."""


class Handle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reference to a tensor.

    Attributes:
        data: the bytes of an inline tensor, little-endian and contiguous.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    rank: int | None = None
    incarnation: int | None = None
    locator: bytes | None = None


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes.

    Raises:
        ValueError: the dtype is unknown, or the shape has a negative length.
    """
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(ITEM_BYTES)}")
    if shape and min(shape) < 0:
        raise ValueError(f"expected a shape with lengths >= 0, found {shape}")
    return math.prod(shape) * ITEM_BYTES[dtype]


def inline_ids(key: str, ids: list[int]) -> Handle:
    """Return an inline int32 tensor of token ids, shape `(len(ids),)`."""
    cells = array("i", ids)
    if sys.byteorder == "big":  # pragma: no cover - the wire is little-endian
        cells.byteswap()
    return Handle(key=key, dtype="int32", shape=(len(ids),), data=cells.tobytes())


def read_ids(handle: Handle) -> list[int]:
    """Return the token ids of an inline int32 tensor.

    Raises:
        TensorGone: the tensor is not inline, or its size does not match its shape.
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
