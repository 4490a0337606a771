"""msgpack with arrays, as openpi's clients write and read it (`openpi_client.msgpack_numpy`). No numpy.

    array     {b"__ndarray__": true, b"data": bytes, b"dtype": "<f4", b"shape": [3, 2]}
    number    {b"__npgeneric__": true, b"data": 1.5, b"dtype": "<f8"}

An observation is a map of these, of plain numbers, of lists of numbers, of texts, and of maps. It becomes one
text, the instruction, and a safetensors file of all arrays; nested names are joined by slashes.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from gateway.generate.tensor_files import TensorEntry, safetensors_header
from shared.errors import ClientError

PROMPTS: Final = ("prompt", "task")
"""The names of the instruction."""
_ARRAY: Final = b"__ndarray__"
_NUMBER: Final = b"__npgeneric__"
_MAX_ARRAYS: Final = 256
_MAX_NAME: Final = 256
_MAX_DIMS: Final = 16
_TYPES: Final[Mapping[str, tuple[str, int]]] = {
    "|b1": ("BOOL", 1), "|u1": ("U8", 1), "|i1": ("I8", 1), "<u2": ("U16", 2), "<i2": ("I16", 2),
    "<u4": ("U32", 4), "<i4": ("I32", 4), "<u8": ("U64", 8), "<i8": ("I64", 8),
    "<f2": ("F16", 2), "<f4": ("F32", 4), "<f8": ("F64", 8),
}  # fmt: skip
"""numpy's names of types, with safetensors' names and sizes in bytes."""


class ObservationError(ClientError):
    """A message is no observation."""

    code = "invalid_observation"


@dataclass(frozen=True, slots=True)
class Array:
    """An array: `dtype` as numpy writes it, such as `<f4`; `data` in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Observation:
    """The instruction, and a robot's arrays by name."""

    prompt: str
    arrays: Mapping[str, Array]


def unpack(message: bytes) -> Observation:
    """Read an observation.

    Raises:
        ObservationError: the message is no msgpack, or not a map of arrays, numbers and texts.
    """
    try:
        found = msgpack.unpackb(message)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ObservationError(f"expected a msgpack map, found something else: {error}") from error
    if not isinstance(found, dict):
        raise ObservationError(f"expected a msgpack map, found {type(found).__name__}")
    arrays: dict[str, Array] = {}
    prompt = ""
    for name, value in _flat(found, ""):
        if name in PROMPTS:
            prompt = _instruction(name, value)
        elif not (value is None or isinstance(value, str | bytes)):
            arrays[name] = _array(name, value)
    if len(arrays) > _MAX_ARRAYS:
        raise ObservationError(f"expected at most {_MAX_ARRAYS} arrays, found {len(arrays)}")
    return Observation(prompt, arrays)


def pack(answer: Mapping[str, Any]) -> bytes:
    """Write an answer, in which arrays are `Array`."""
    packed: bytes = msgpack.packb(answer, default=_packed_array)
    return packed


def file_of(arrays: Mapping[str, Array]) -> bytes:
    """The bytes of a safetensors file with these arrays."""
    entries = (
        TensorEntry(name, _TYPES[array.dtype][0], array.shape, len(array.data))
        for name, array in arrays.items()
    )
    return b"".join([safetensors_header(entries), *(array.data for array in arrays.values())])


def _flat(found: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The values of nested maps, each with its name."""
    for key, value in found.items():
        name = f"{prefix}{_text('the name of a value', key)}"
        if len(name) > _MAX_NAME or name == "__metadata__":
            raise ObservationError(f"expected names of up to {_MAX_NAME} characters, found {name[:80]!r}")
        if isinstance(value, dict) and _ARRAY not in value and _NUMBER not in value:
            yield from _flat(value, f"{name}/")
        else:
            yield name, value


def _text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise ObservationError(f"{name}: expected UTF-8, found other bytes") from error
    raise ObservationError(f"{name}: expected a text, found {type(value).__name__}")


def _instruction(name: str, value: object) -> str:
    """The text of an instruction, which may be a numpy array of one text."""
    match value:
        case {b"__ndarray__": True, b"data": bytes(data), b"dtype": str(dtype)} if dtype.startswith("<U"):
            return data.decode("utf-32-le", "replace").rstrip("\0")
        case _:
            return _text(name, value)


def _array(name: str, value: object) -> Array:
    match value:
        case {b"__ndarray__": True, b"data": bytes(data), b"dtype": str(dtype), b"shape": [*shape]}:
            return _checked(name, dtype, shape, data)
        case {b"__npgeneric__": True, b"data": int() | float() as number}:
            return _of_numbers(name, [number], ())
        case bool() | int() | float():
            return _of_numbers(name, [value], ())
        case [*numbers]:
            return _of_numbers(name, numbers, (len(numbers),))
        case _:
            raise ObservationError(
                f"{name}: expected an array of numbers as msgpack_numpy packs it, a number, a list of "
                f"numbers or a text, found {type(value).__name__}"
            )


def _checked(name: str, dtype: str, shape: list[Any], data: bytes) -> Array:
    if dtype not in _TYPES:
        raise ObservationError(f"{name}: expected one of {', '.join(_TYPES)} as dtype, found {dtype[:40]!r}")
    is_shape = len(shape) <= _MAX_DIMS and all(type(one) is int and one >= 0 for one in shape)
    expected = math.prod(shape) * _TYPES[dtype][1] if is_shape else -1
    if len(data) != expected:
        raise ObservationError(
            f"{name}: expected the bytes of {dtype} {tuple(shape[:_MAX_DIMS])}, found {len(data)} bytes"
        )
    return Array(dtype, tuple(shape), data)


def _of_numbers(name: str, numbers: list[Any], shape: tuple[int, ...]) -> Array:
    try:
        return Array("<f8", shape, struct.pack(f"<{len(numbers)}d", *numbers))
    except (struct.error, OverflowError) as error:
        raise ObservationError(f"{name}: expected numbers, found something else: {error}") from error


def _packed_array(value: object) -> dict[bytes, Any]:
    assert isinstance(value, Array)
    return {_ARRAY: True, b"data": value.data, b"dtype": value.dtype, b"shape": value.shape}
