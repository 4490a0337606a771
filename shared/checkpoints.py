"""Checkpoints of long node calls: the state of a program as chunks of a request's output, and back. Pure.

A worker stores the state of a run now and then. If it dies, the next attempt continues after the newest state
that is complete in the log (ADR 45). The chunks of a checkpoint are advisory: they are no part of the answer,
count in no totals, and clients do not get them. One checkpoint is one tensor in pieces
(`shared.output_pieces`), whose name is its *place*: the node call that it belongs to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from shared.events import OutputChunk
from shared.output_pieces import PIECE_BYTES, PieceAssembler, piece_spans

CHECKPOINT: Final = "checkpoint"
"""The modality of the chunks of a checkpoint."""


class StoredArray(msgspec.Struct, frozen=True, array_like=True):
    """An array of a state: dtype, shape and bytes, as `workers.data_plane.port.Array`."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


State = Mapping[str, StoredArray]
"""The arrays of a state, by name."""


def is_checkpoint(chunk: OutputChunk) -> bool:
    """Return whether a chunk belongs to a checkpoint."""
    return chunk.advisory and chunk.modality == CHECKPOINT


def contents(place: str, state: State) -> Iterator[dict[str, Any]]:
    """The chunks of a checkpoint, in their order, as fields of `OutputChunk`."""
    data = msgspec.msgpack.encode(state)
    for piece, start, stop in piece_spans(place, len(data), PIECE_BYTES):
        yield {"modality": CHECKPOINT, "data": data[start:stop], "metadata": piece.metadata}


@dataclass(slots=True)
class Checkpoints:
    """The newest complete checkpoint of each place, folded from valid chunks in log order."""

    _assembler: PieceAssembler[OutputChunk] = field(default_factory=PieceAssembler)
    _newest: dict[str, list[OutputChunk]] = field(default_factory=dict)

    def fold(self, chunk: OutputChunk) -> None:
        """Fold a chunk of a checkpoint."""
        whole = self._assembler.push(chunk.metadata, chunk)
        if whole is not None and "tensor" in chunk.metadata:
            self._newest[chunk.metadata["tensor"]] = whole

    def states(self, since: int = 0) -> dict[str, State]:
        """The states by place, without those of attempts before `since`; one that is damaged is left out."""
        found: dict[str, State] = {}
        for place, chunks in self._newest.items():
            if chunks[0].attempt < since:
                continue
            data = b"".join(chunk.data or b"" for chunk in chunks)
            try:
                found[place] = msgspec.msgpack.decode(data, type=dict[str, StoredArray])
            except msgspec.DecodeError:
                continue  # the run starts from its inputs
        return found
