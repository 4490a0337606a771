"""The rows of an answer: its chunks put together, and divided into one result for each entry of the body."""

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from models.base import VECTORS
from shared.errors import DalSegnoError
from shared.events import OutputChunk
from shared.output_pieces import PieceAssembler, whole_metadata

Vector: TypeAlias = "array[float]"
"""Numbers as float32."""


class UnexpectedOutputError(DalSegnoError):
    """The model's output does not fit the request: its family is at fault."""

    code = "unexpected_output"
    status = 500


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of an entry: one vector, or those of a multi-vector model."""

    vectors: list[Vector]
    is_multi: bool = False


@dataclass(slots=True)
class Outputs:
    """The outputs of one modality, of all requests of an answer; and the number of vectors of each entry.

    Attributes:
        orders: for each request, the entries of the body in the order of its rows.
    """

    modality: str
    orders: Sequence[Sequence[int]]
    _pieces: dict[tuple[int, str], PieceAssembler[bytes]] = field(default_factory=dict)
    _found: dict[tuple[int, str], tuple[bytes, Mapping[str, Any]]] = field(default_factory=dict)

    def push(self, choice: int, chunk: OutputChunk) -> None:
        """Add a chunk of the request `choice`."""
        if chunk.modality not in (self.modality, VECTORS):
            return
        place = (choice, chunk.modality)
        pieces = self._pieces.setdefault(place, PieceAssembler())
        whole = pieces.push(chunk.metadata, chunk.data or b"")
        if whole is not None:
            self._found[place] = (b"".join(whole), whole_metadata(chunk.metadata))

    def embeddings(self) -> list[Embedding]:
        """The embedding of each entry, in the order of the body.

        Raises:
            UnexpectedOutputError: there is not one for each.
        """
        return self._in_order([self._embeddings_of(choice) for choice in range(len(self.orders))])

    def scores(self) -> list[float]:
        """The score of each entry, in the order of the body.

        Raises:
            UnexpectedOutputError: there is not one for each.
        """
        return self._in_order([list(_numbers(self._output(choice)[0])) for choice in range(len(self.orders))])

    def _in_order(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        rows: dict[int, Any] = {}
        for order, part in zip(self.orders, parts, strict=True):
            if len(order) != len(part):
                raise UnexpectedOutputError(
                    f"expected {len(order)} rows of {self.modality}, one for each text, found {len(part)}"
                )
            rows.update(zip(order, part, strict=True))
        return [rows[index] for index in range(len(rows))]

    def _embeddings_of(self, choice: int) -> list[Embedding]:
        data, metadata = self._output(choice)
        numbers, shape = _numbers(data), metadata["shape"]
        size = shape[-1]
        rows = [numbers[start : start + size] for start in range(0, len(numbers), size)] if size else []
        counts = self._found.get((choice, VECTORS))
        if counts is None:
            return [Embedding([row]) for row in rows]
        found, first = [], 0
        for count in _numbers(counts[0], "i"):
            found.append(Embedding(rows[first : first + count], is_multi=True))
            first += count
        return found

    def _output(self, choice: int) -> tuple[bytes, Mapping[str, Any]]:
        found = self._found.get((choice, self.modality))
        if found is None:
            raise UnexpectedOutputError(f"expected an output {self.modality} of the model, found none")
        return found


def _numbers(data: bytes, kind: str = "f") -> "array[Any]":
    """The float32 or int32 (`i`) numbers in little-endian bytes."""
    numbers = array(kind, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
