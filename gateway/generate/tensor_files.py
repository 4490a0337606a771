"""Tensors as files: npz and safetensors, written piece by piece. No tensor library is needed.

npz has no bfloat16 and no 8-bit floats. bfloat16 becomes float32, which is exact; the bytes of 8-bit floats
are given as uint8, and the metadata of the answer has their dtype. safetensors has all of them.
"""

import io
import struct
import zipfile
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from shared.tensors import ITEM_BYTES

TensorFormat: TypeAlias = Literal["raw", "npz", "safetensors"]
TENSOR_FORMATS: Final = ("raw", "npz", "safetensors")
_NPY_TYPES: Final[Mapping[str, str]] = {
    "bool": "|b1", "uint8": "|u1", "int8": "|i1", "int16": "<i2", "int32": "<i4", "int64": "<i8",
    "float16": "<f2", "float32": "<f4", "float64": "<f8", "bfloat16": "<f4",
    "float8_e4m3fn": "|u1", "float8_e5m2": "|u1",
}  # fmt: skip
_SAFETENSORS_TYPES: Final[Mapping[str, str]] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_NPY_ALIGN: Final = 64
_SAFETENSORS_ALIGN: Final = 8
_ZIP64_BYTES: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class TensorHead:
    """The name, dtype and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def tensor_head(modality: str, metadata: Mapping[str, Any]) -> TensorHead | None:
    """The head of a tensor in the answer; None for text, for an encoded file and for samples of sound."""
    dtype, shape = metadata.get("dtype"), metadata.get("shape")
    is_encoded = "content_type" in metadata or "format" in metadata
    if modality == "text" or is_encoded or not isinstance(dtype, str) or not isinstance(shape, list):
        return None
    if dtype not in ITEM_BYTES:
        return None
    return TensorHead(modality, dtype, tuple(shape))


def file_of(form: TensorFormat, head: TensorHead, data: Iterable[bytes], nbytes: int) -> Iterator[bytes]:
    """The bytes of a file with one tensor, from its `data`, little-endian, of `nbytes` bytes."""
    if form == "npz":
        return _npz(head, data, nbytes)
    if form == "safetensors":
        return _safetensors(head, data, nbytes)
    return iter(data)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a safetensors file; `dtype` as that format names it, such as `F32`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def safetensors_header(entries: Iterable[TensorEntry]) -> bytes:
    """The bytes of a safetensors file before the data of its tensors, which follow one another."""
    header: dict[str, Any] = {}
    end = 0
    for one in entries:
        start, end = end, end + one.nbytes
        header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [start, end]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _SAFETENSORS_ALIGN)
    return struct.pack("<Q", len(text)) + text


def base64_of(data: Iterable[bytes]) -> Iterator[bytes]:
    """The Base64 text of bytes that arrive in pieces."""
    rest = b""
    for piece in data:
        rest += piece
        whole = len(rest) - len(rest) % 3
        yield b64encode(rest[:whole])
        rest = rest[whole:]
    yield b64encode(rest)


def _safetensors(head: TensorHead, data: Iterable[bytes], nbytes: int) -> Iterator[bytes]:
    yield safetensors_header([TensorEntry(head.name, _SAFETENSORS_TYPES[head.dtype], head.shape, nbytes)])
    yield from data


def _npz(head: TensorHead, data: Iterable[bytes], nbytes: int) -> Iterator[bytes]:
    sink = _Sink()
    with zipfile.ZipFile(sink, "w") as archive:
        member = zipfile.ZipInfo(f"{head.name}.npy")
        with archive.open(member, "w", force_zip64=2 * nbytes >= _ZIP64_BYTES) as file:
            file.write(_npy_header(head))
            for piece in data:
                file.write(_widened(piece) if head.dtype == "bfloat16" else piece)
                yield sink.take()
    yield sink.take()


def _npy_header(head: TensorHead) -> bytes:
    """The header of an npy file, version 1.0."""
    fields = {"descr": _NPY_TYPES[head.dtype], "fortran_order": False, "shape": head.shape}
    text = repr(fields).encode()
    padding = -(len(text) + 11) % _NPY_ALIGN
    text += b" " * padding + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _widened(bfloat16: bytes) -> bytes:
    """The same numbers as float32: bfloat16 is its upper half."""
    wide = bytearray(2 * len(bfloat16))
    wide[2::4], wide[3::4] = bfloat16[0::2], bfloat16[1::2]
    return bytes(wide)


class _Sink(io.RawIOBase):
    """The target of a zip archive, from which it is taken piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken
