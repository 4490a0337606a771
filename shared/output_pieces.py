"""Large outputs in pieces: how a tensor of any size becomes output chunks, and chunks a tensor again. Pure.

A tensor above `PIECE_BYTES` is emitted as several chunks. Each has the `dtype` and `shape` of the whole in
its metadata, and in addition

    tensor    the node and the edge that emitted it
    piece     the number of the piece, from 0
    pieces    the number of all pieces

The pieces of one tensor follow one another among the chunks of that node. If a worker dies between two
pieces, and its successor cannot compute the same bytes (`on_resume="keep"`), the tensor is emitted again from
piece 0. So every reader applies one rule: **piece 0 begins a tensor and voids an incomplete one of that
name** (ADR 34). No reader ever combines pieces of two computations.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

PIECE_BYTES: Final = 512 * 1024
"""The largest piece: below the payload limit of every NATS server (1 MB by default)."""
TENSOR: Final = "tensor"
PIECE: Final = "piece"
PIECES: Final = "pieces"


@dataclass(frozen=True, slots=True)
class Piece:
    """The place of a chunk in its tensor: its number, and the number of all pieces."""

    tensor: str
    index: int
    count: int

    @property
    def metadata(self) -> dict[str, Any]:
        """The fields of the chunk's metadata."""
        return {TENSOR: self.tensor, PIECE: self.index, PIECES: self.count}


def piece_of(metadata: Mapping[str, Any]) -> Piece | None:
    """The place of a chunk with this metadata in its tensor; None if it is no piece."""
    match metadata:
        case {"tensor": str(tensor), "piece": int(index), "pieces": int(count)} if 0 <= index < count:
            return Piece(tensor, index, count)
    return None


def piece_spans(tensor: str, nbytes: int, piece_bytes: int) -> list[tuple[Piece, int, int]]:
    """The pieces of a tensor of `nbytes` bytes, each with its first byte and the byte after its last."""
    starts = range(0, nbytes, piece_bytes)
    return [
        (Piece(tensor, index, len(starts)), start, min(start + piece_bytes, nbytes))
        for index, start in enumerate(starts)
    ]


def whole_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a whole tensor, from that of one of its pieces."""
    return {name: value for name, value in metadata.items() if name not in (TENSOR, PIECE, PIECES)}


@dataclass(slots=True)
class PieceAssembler(Generic[T]):
    """Groups an output's chunks, in their order, into whole values.

    A reader passes each chunk's metadata, and an item of its own choice: the chunk, its bytes, a file.
    """

    _open: dict[str, list[T]] = field(default_factory=dict)

    def push(self, metadata: Mapping[str, Any], item: T) -> list[T] | None:
        """Add a chunk; return the items of the value that it completes, or None.

        A chunk that is no piece is complete by itself. A piece whose predecessors are missing is dropped: it
        belongs to a tensor that began before this reader did.
        """
        piece = piece_of(metadata)
        if piece is None:
            return [item]
        if piece.index == 0:
            self._open[piece.tensor] = []
        items = self._open.get(piece.tensor)
        if items is None or len(items) != piece.index:
            self._open.pop(piece.tensor, None)
            return None
        items.append(item)
        return self._open.pop(piece.tensor) if piece.index + 1 == piece.count else None

    @property
    def incomplete(self) -> list[list[T]]:
        """The items of tensors that are not complete yet."""
        return list(self._open.values())


def without_void_pieces(chunks: Iterable[tuple[Mapping[str, Any], T]]) -> list[T]:
    """The items of complete values, in the order in which they were completed."""
    assembler, found = PieceAssembler[T](), list[T]()
    for metadata, item in chunks:
        found += assembler.push(metadata, item) or ()
    return found
