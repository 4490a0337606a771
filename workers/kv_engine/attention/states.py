"""Recurrent states beside the KV pool: slots of fixed size, and the layers that continue from them.

    slot = row          the state of the sequence in this row of the step's tables
    slots after these   snapshots at the ends of cached blocks (`workers.kv_engine.cache.state_snapshots`)

A step's tokens are packed, but a recurrent module takes sequences of one length. So a step is cut into
pieces: the tokens of a span, up to the next snapshot if one is to be taken in the middle. Pieces of equal
length are computed together: all decodes are one batch. A span's second piece waits for the first.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from models.base import KVLayout
from models.transformers_lm.recurrent import Recurrence
from workers.kv_engine.step import Spans


class StatePool:
    """The recurrent states of every layer, tensors of (slots, ...).

    Attributes:
        layers: the states of each layer; none of a layer without.
    """

    def __init__(self, layout: KVLayout, *, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layers: Final = [
            [
                torch.zeros(
                    slots, *one.shape, device=device, dtype=torch.float32 if one.is_float32 else dtype
                )
                for one in shapes
            ]
            for shapes in layout.states
        ]

    def in_slot(self, slot: int) -> Iterator[torch.Tensor]:
        """Yield what a slot holds, layer by layer."""
        for states in self.layers:
            for state in states:
                yield state[slot]


@dataclass(frozen=True, slots=True)
class _Batch:
    """B pieces of N tokens each.

    Attributes:
        tokens: (B * N,) int64, their tokens in the step.
        sources: (B,) int64, the slots from which they continue; None if they begin their sequences.
        rows: (B,) int64, the slots that keep the states after them.
        copied: (K,) int64, those of the B pieces whose states are copied to the snapshots `copies`, (K,).
    """

    pieces: int
    tokens: torch.Tensor
    sources: torch.Tensor | None
    rows: torch.Tensor
    copied: torch.Tensor
    copies: torch.Tensor


class StateMixer:
    """Computes the recurrent layers of one step over a pool of states."""

    def __init__(self, pool: StatePool, spans: Spans, device: torch.device) -> None:
        self._pool: Final = pool
        self._batches: Final = [*_batches(spans, device)]

    def mix(self, recurrence: Recurrence, hidden: torch.Tensor) -> torch.Tensor:
        """Return a layer's outputs for packed tokens, (1, T, width) of that shape (`recurrent.mixing_by`)."""
        states, out = self._pool.layers[recurrence.layer], torch.empty_like(hidden)
        for batch in self._batches:
            given = None
            if batch.sources is not None:
                given = [state.index_select(0, batch.sources) for state in states]
            tokens = hidden[0].index_select(0, batch.tokens)
            output, found = recurrence.run(tokens.view(batch.pieces, -1, tokens.shape[-1]), given)
            out[0].index_copy_(0, batch.tokens, output.flatten(0, 1))
            for state, after in zip(states, found, strict=True):
                state.index_copy_(0, batch.rows, after.to(state.dtype))
                if len(batch.copied):
                    state.index_copy_(0, batch.copies, after.index_select(0, batch.copied).to(state.dtype))
        return out


@dataclass(frozen=True, slots=True)
class _Piece:
    """`count` tokens of a span; `source` is negative for a sequence's first tokens, `copy` for no copy."""

    first: int
    count: int
    source: int
    row: int
    copy: int


def _batches(spans: Spans, device: torch.device) -> Iterator[_Batch]:
    """Yield the batches of a step: every piece comes after those before it in its span."""
    alike: dict[tuple[int, int, bool], list[_Piece]] = defaultdict(list)
    for place in range(len(spans.kv_lengths)):
        for depth, piece in enumerate(_pieces(spans, place)):
            alike[depth, piece.count, piece.source < 0].append(piece)
    for (_, count, begins), pieces in sorted(alike.items(), key=lambda entry: entry[0]):
        firsts = _on(device, [piece.first for piece in pieces])
        copied = [number for number, piece in enumerate(pieces) if piece.copy >= 0]
        yield _Batch(
            pieces=len(pieces),
            tokens=(firsts[:, None] + torch.arange(count, device=device)).flatten(),
            sources=None if begins else _on(device, [piece.source for piece in pieces]),
            rows=_on(device, [piece.row for piece in pieces]),
            copied=_on(device, copied),
            copies=_on(device, [pieces[number].copy for number in copied]),
        )


def _pieces(spans: Spans, place: int) -> Iterator[_Piece]:
    """Yield the pieces of a span."""
    moves = spans.states
    assert moves is not None, "a step of a node with recurrent states has them"
    first, end = int(spans.query_offsets[place]), int(spans.query_offsets[place + 1])
    source, row = int(moves.sources[place]), int(moves.rows[place])
    for _, count, slot in moves.copies[moves.copies[:, 0] == place].tolist():
        stop = int(spans.query_offsets[place]) + count
        yield _Piece(first, stop - first, source, row, slot)
        first, source = stop, row
    if first < end:
        yield _Piece(first, end - first, source, row, -1)


def _on(device: torch.device, numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
