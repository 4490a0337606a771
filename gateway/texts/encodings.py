"""The encodings of embeddings. Pure.

    float     numbers
    base64    of the numbers as little-endian float32
    int8      round(127 * x / m), -127 to 127; m is the largest absolute value of the vector
    uint8     int8 + 128, 1 to 255
    ubinary   a bit for each dimension, set if x > 0; eight in a byte, the first is the most significant
    binary    ubinary - 128, -128 to 127

`int8` keeps the direction of each vector, whatever the other texts of the request are: compare such vectors
by their cosine. With `ranges`, the smallest and largest number of each dimension, it is
`quantize_embeddings` of sentence-transformers: (x - smallest) / ((largest - smallest) / 255), minus 128 for
`int8`, without the fraction. Numbers outside of the range become its ends. `binary` and `ubinary` are those
of sentence-transformers, Cohere and Jina. A length that is no multiple of eight is filled with zero bits.
"""

import sys
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from gateway.errors import InvalidParamError
from gateway.texts.rows import Embedding, Vector

Encoding = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]
Ranges = tuple[list[float], list[float]]
"""The smallest and the largest number of each dimension."""
Encoded = str | list[int] | list[float]
RANGES: Final = "quantization_ranges"
_LARGEST: Final = 127
_STEPS: Final = 255
_OFFSET: Final = 128


def encode(embedding: Embedding, encoding: Encoding, ranges: Ranges | None = None) -> Encoded | list[Encoded]:
    """Encode an embedding; that of a multi-vector model is a list of its encoded vectors.

    Raises:
        InvalidParamError: `ranges` are not those of vectors of this length.
    """
    found = [_encoded(vector, encoding, ranges) for vector in embedding.vectors]
    return found if embedding.is_multi else found[0]


def _encoded(vector: Vector, encoding: Encoding, ranges: Ranges | None) -> Encoded:
    if ranges is not None:
        return _in_ranges(vector, ranges, _OFFSET if encoding == "int8" else 0)
    return _ENCODERS[encoding](vector)


def _base64(vector: Vector) -> str:
    little = vector
    if sys.byteorder == "big":
        little = vector[:]
        little.byteswap()
    return b64encode(little.tobytes()).decode()


def _int8(vector: Vector) -> list[int]:
    largest = max(map(abs, vector), default=0.0)
    scale = _LARGEST / largest if largest else 0.0
    return [round(x * scale) for x in vector]


def _uint8(vector: Vector) -> list[int]:
    return [x + _OFFSET for x in _int8(vector)]


def _ubinary(vector: Vector) -> list[int]:
    bits = "".join("1" if x > 0 else "0" for x in vector)
    return [int(bits[start : start + 8].ljust(8, "0"), 2) for start in range(0, len(bits), 8)]


def _binary(vector: Vector) -> list[int]:
    return [x - _OFFSET for x in _ubinary(vector)]


_ENCODERS: Final[Mapping[Encoding, Callable[[Vector], Encoded]]] = {
    "float": lambda vector: vector.tolist(),
    "base64": _base64,
    "int8": _int8,
    "uint8": _uint8,
    "binary": _binary,
    "ubinary": _ubinary,
}


def _in_ranges(vector: Vector, ranges: Ranges, offset: int) -> list[int]:
    smallest, largest = ranges
    if len(smallest) != len(vector):
        raise InvalidParamError(
            RANGES,
            f"{RANGES}: expected two lists of {len(vector)} numbers, as the embeddings have, "
            f"found lists of {len(smallest)}",
        )
    return [
        int(min(max((x - low) / ((high - low) / _STEPS), 0.0), _STEPS) - offset)
        for x, low, high in zip(vector, smallest, largest, strict=True)
    ]


def check_ranges(ranges: Sequence[Sequence[float]] | None, encoding: Encoding) -> Ranges | None:
    """Return the ranges of a request, checked.

    Raises:
        InvalidParamError: they are malformed, or the encoding has no ranges.
    """
    if ranges is None:
        return None
    if encoding not in ("int8", "uint8"):
        raise InvalidParamError(RANGES, f"{RANGES}: expected none with the encoding {encoding}")
    if len(ranges) != 2 or len(ranges[0]) != len(ranges[1]):
        raise InvalidParamError(
            RANGES,
            f"{RANGES}: expected two lists of equal length, the smallest and the largest number of each "
            f"dimension, found {len(ranges)} lists of {', '.join(str(len(one)) for one in ranges)}",
        )
    for number, (low, high) in enumerate(zip(*ranges, strict=True)):
        if not (high - low) / _STEPS > 0:  # also of two numbers that are too close for a step
            raise InvalidParamError(
                f"{RANGES}[1][{number}]",
                f"{RANGES}[1][{number}]: expected more than {low:g}, the smallest number of the dimension, "
                f"found {high:g}",
            )
    return list(ranges[0]), list(ranges[1])
