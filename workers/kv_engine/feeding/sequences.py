"""The fed sequences of one engine: the items that wait for them, and the rows of their next steps.

    begin ── rows of the prompt ── step ── after_tokens ── wait for an item ── next_rows ── step ── ...

The item of a token is the one of its number, whenever it arrives. A sequence without it is held. Called in
the engine's thread.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import torch

from models.feeding import AfterTokens
from shared.errors import BugError, TensorGone
from workers.data_plane.arrays import to_array, to_tensor
from workers.data_plane.port import Array, DeviceArray
from workers.kv_engine.feeding.draws import InnerDraw
from workers.kv_engine.feeding.rows import FedRows
from workers.kv_engine.node import position_axes_of, position_dtype_of
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import Feed, SequenceSpec


@dataclass(slots=True, eq=False)
class FedState:
    """The state of one fed sequence.

    Attributes:
        items: the items that no token has taken yet.
        ended: no further items follow.
        steps_after_end: the tokens that found no item, because the stream had ended.
        pending: (hidden,), the row of the last token without its item; None before the first token, and while
            the token's whole row is known.
        paused: held for another reason than a missing item.
    """

    rows: FedRows
    items: deque[torch.Tensor] = field(default_factory=deque)
    ended: bool = False
    steps_after_end: int = 0
    pending: torch.Tensor | None = None
    paused: bool = False

    @property
    def is_held(self) -> bool:
        """True if the sequence can take part in no step now."""
        return self.paused or (self.pending is not None and not self.items and not self.ended)

    def next_item(self) -> torch.Tensor | int:
        """Take the item of the next token, or the number of steps since the end of the stream."""
        if self.items:
            return self.items.popleft()
        self.steps_after_end += 1
        return self.steps_after_end - 1


class FedSequences:
    """All sequences of an engine whose node is fed.

    Args:
        node: a `workers.kv_engine.stream_nodes.FedNode`.
    """

    def __init__(self, node: Any) -> None:
        self._node = node
        self._draw = InnerDraw(node.name, node.device)

    @torch.inference_mode()
    def begin(self, sequence: Sequence) -> None:
        """Make the rows of a sequence's prompt.

        Raises:
            DalSegnoError: the node refuses the prompt.
            TensorGone: the stream's first items are gone.
        """
        spec = sequence.spec
        feed = spec.feed or Feed()
        if spec.prefix_ids or spec.kv is not None:
            raise BugError(
                f"sequence {spec.key!r} continues another one, but the inputs of node {self._node.name!r} "
                "are made of a stream: expected it to begin with its prompt"
            )
        items = None if feed.items is None else self._on_device(feed.items, spec.key)
        ids = torch.tensor(spec.prompt_ids, dtype=torch.int32, device=self._node.device)
        rows = self._node.prompt_rows(ids, items, feed.args)
        if len(rows) != len(ids):
            raise BugError(
                f"node {self._node.name!r} made {len(rows)} rows for a prompt of {len(ids)} tokens: expected "
                "one for each token"
            )
        positions, following = self._positions(spec)
        sequence.parts = FedRows(
            spec.prompt_ids,
            positions=positions.to("cpu", position_dtype_of(self._node)).numpy(),
            next_position=following,
            rows=rows.to(self._node.dtype).clone(),
        )
        sequence.can_speculate = sequence.can_run_ahead = False  # the next input is more than the token
        sequence.fed = FedState(sequence.parts, ended=feed.ended)

    def feed(self, sequence: Sequence, items: Array | None, *, ended: bool) -> None:
        """Take the stream's next items, stacked; with `ended`, no further ones follow."""
        state = _state_of(sequence)
        if items is not None:
            state.items.extend(self._on_device(items, sequence.spec.key).unbind())
        state.ended |= ended
        _hold(sequence, state)

    def pause(self, sequence: Sequence, *, paused: bool) -> None:
        """Hold a sequence for another reason than a missing item, or let it go on."""
        state = _state_of(sequence)
        state.paused = paused
        _hold(sequence, state)

    @torch.inference_mode()
    def fill(self, spans: Iterable[Span]) -> None:
        """Make the rows of the last tokens of a step's sequences."""
        states = [
            state
            for span in spans
            if (state := _state_of(span.sequence)).pending is not None and span.reaches_end
        ]
        if not states:
            return
        pending = torch.stack([state.pending for state in states if state.pending is not None])
        for state, row in zip(
            states, self._node.next_rows(pending, [state.next_item() for state in states]), strict=True
        ):
            state.rows.append(row)
            state.pending = None

    def after_tokens(
        self, spans: Items[Span], tokens: torch.Tensor, hidden: torch.Tensor, indices: torch.Tensor
    ) -> AfterTokens:
        """Let the node make of sampled tokens what it does; spans without a sampled token are left out.

        Args:
            spans: those of the step's sequences.
            tokens: (S,) int64; negative where no token could be sampled.
            hidden: (T, hidden), the states of the step.
            indices: (S,), those that the tokens were sampled from.
        """
        sequences = [span.sequence for span in spans if span.samples]
        draw = self._draw.of(sequences)
        made: AfterTokens = self._node.after_tokens(
            tokens.clamp(min=0), hidden.index_select(0, indices), draw
        )
        return made

    def take(self, spans: Items[Span], made: AfterTokens) -> list[dict[str, Array]]:
        """Keep the rows of a step's sampled tokens; return the values of each token, by edge."""
        sequences = [span.sequence for span in spans if span.samples]
        values = {name: value.detach().cpu() for name, value in made.values.items()}
        for sequence, row in zip(sequences, made.rows, strict=True):
            state = _state_of(sequence)
            state.pending = row
            _hold(sequence, state)
        return [
            {name: to_array(value[place : place + 1]) for name, value in values.items()}
            for place in range(len(sequences))
        ]

    def _positions(self, spec: SequenceSpec) -> tuple[torch.Tensor, float]:
        own = getattr(self._node, "positions", None)
        if own is not None and spec.parts:
            found: tuple[torch.Tensor, float] = own(spec.prompt_ids, spec.parts)
            return found
        count = len(spec.prompt_ids)
        return torch.arange(count, dtype=torch.int32).repeat(position_axes_of(self._node), 1), count

    def _on_device(self, items: Array | DeviceArray, key: str) -> torch.Tensor:
        try:
            return to_tensor(items, self._node.device)
        except ValueError as error:
            raise TensorGone(f"items of the stream to {key!r} cannot be read: {error}") from error


def _hold(sequence: Sequence, state: FedState) -> None:
    """Hold a sequence that waits for an item, or is paused."""
    sequence.held = state.is_held
    sequence.work.hold(held=sequence.held)


def _state_of(sequence: Sequence) -> FedState:
    assert isinstance(sequence.fed, FedState), "all sequences of a fed node are fed"
    return sequence.fed
