"""Per-row sampling state on the device: tokens with a bias, penalty or ban, and their counts.

Only rows that adjust logits have a state: a list of distinct tokens with their marks
(`workers.kv_engine.sampling.logits_processors`). It is built from the sequence's ids when the sequence is
first sampled, including those of an earlier attempt, so a resumed answer is penalised as if it had not been
interrupted. After that each step writes only the changes of its one new token. In a step that is launched
ahead (`workers.kv_engine.gpu.run_ahead`), the last token is on the device only, and is counted there.

A state takes 12 bytes per token. The table has the width of the widest state, rounded up to a power of two,
for every row: 256 rows of up to 4096 distinct tokens take 12 MiB. Counts for a vocabulary of 150k would
take 148 MiB, and 43 ms to apply to 32 rows; here 32 prompts of 1000 tokens take 0.8 ms, and of 4000 tokens
1.8 ms (one core; 2026-11). The table is allocated at the first adjusted row. Without adjusted rows a step
costs a microsecond.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from workers.kv_engine.sampling.logits_processors import (
    BAD_WORD,
    COUNT_ONE,
    EARLY_END,
    ENDS,
    ENDS_BAD_WORD,
    IN_PROMPT,
    LogitAdjustments,
)
from workers.kv_engine.sequence import Sequence
from workers.machine.transfers import upload

_NARROWEST: Final = 64
_MOST_GROWTH: Final = 1e9
"""It is enough to choose the token, and finite for any logit."""
_NO_PLACE: Final = -1
_PLANES: Final = 3
"""Ids, marks, and the bits of biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadTokens:
    """The sampled tokens of a step of decodes that is not read yet: the inputs of the next step.

    Attributes:
        places: for each span of the next step, the index of its token.
    """

    tokens: torch.Tensor  # (S,) int64, on the device; negative if no token was sampled
    places: list[int]


class SamplingState:
    """The states of `max_sequences` rows."""

    def __init__(self, max_sequences: int, device: torch.device) -> None:
        self._states: list[_SequenceState | None] = [None] * max_sequences
        self._table = torch.zeros(_PLANES, max_sequences, 0, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """The size of the table in the device's memory."""
        return self._table.nbytes

    def adjustments(
        self, sampled: Items[Sequence], *, unread: UnreadTokens | None = None
    ) -> LogitAdjustments | None:
        """Return the adjustments of the sampled rows, up to their last tokens; None if there are none.

        With `unread`, the last token of each of them is a placeholder.
        """
        adjusted = [place for place, sequence in enumerate(sampled) if sequence.adjusts_logits]
        if not adjusted:
            return None
        states = [self._state(sampled[place], has_placeholder=unread is not None) for place in adjusted]
        width = max(len(state.ids) for state in states)
        self._write(states, width)
        return self._read(adjusted, states, width, unread)

    def _state(self, sequence: Sequence, *, has_placeholder: bool) -> "_SequenceState":
        """Return the sequence's state, updated to its last known token."""
        row = sequence.row
        assert row is not None
        state = self._states[row]
        if state is None or state.sequence is not sequence:
            state = self._states[row] = _SequenceState(sequence, row)
        state.update(has_placeholder=has_placeholder)
        return state

    def _write(self, states: Iterable["_SequenceState"], width: int) -> None:
        """Write the changes of the states to the device's table."""
        _, rows, capacity = self._table.shape
        if width > capacity:
            wider = max(_NARROWEST, 1 << (width - 1).bit_length())
            self._table = torch.nn.functional.pad(self._table, (0, wider - capacity))
            capacity = wider
        slots = [(state.row * capacity + slot, state, slot) for state in states for slot in state.changed]
        at = np.array([flat for flat, _, _ in slots], np.int64)
        values = np.empty((_PLANES, len(slots)), np.int32)
        values[0] = [state.ids[slot] for _, state, slot in slots]
        values[1] = [state.marks[slot] for _, state, slot in slots]
        values[2] = np.array([state.bias[slot] for _, state, slot in slots], np.float32).view(np.int32)
        self._table.view(_PLANES, rows * capacity).index_copy_(
            1, self._on_device(at), self._on_device(values)
        )
        for state in states:
            state.changed.clear()

    def _read(
        self,
        adjusted: list[int],
        states: list["_SequenceState"],
        width: int,
        unread: UnreadTokens | None,
    ) -> LogitAdjustments:
        rows = self._on_device(
            np.array([adjusted, [state.row for state in states], [len(state.ids) for state in states]])
        )
        params = [state.sequence.spec.sampling for state in states]
        rates = [
            [given.repetition_penalty, given.presence_penalty, given.frequency_penalty, state.growth]
            for state, given in zip(states, params, strict=True)
        ]
        penalties = self._on_device(np.array(rates, np.float32))
        slots = torch.arange(width, device=rows.device)
        # After its end a state repeats its first slot.
        slots = torch.where(slots < rows[2][:, None], slots, 0)
        ids, marks, bias = self._table[:, rows[1], :width].gather(-1, slots.expand(_PLANES, -1, -1))
        bias = bias.view(torch.float32)
        if unread is not None:
            places = [
                unread.places[place] if state.is_counted else _NO_PLACE
                for place, state in zip(adjusted, states, strict=True)
            ]
            taken = _taken(unread.tokens, self._on_device(np.array(places)))
            ids, marks, bias = _counted(ids, marks, bias, taken)
        return LogitAdjustments(
            rows=rows[0],
            ids=ids.long(),
            marks=marks,
            bias=bias,
            repetition=penalties[:, 0:1],
            presence=penalties[:, 1:2],
            frequency=penalties[:, 2:3],
            growth=penalties[:, 3:4],
        )

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return upload(values, self._table.device)


def _taken(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The tokens at the places, (A, 1); negative without a token, or without a place."""
    return torch.where(places >= 0, tokens.index_select(0, places.clamp(min=0)), _NO_PLACE)[:, None]


def _counted(
    ids: torch.Tensor, marks: torch.Tensor, bias: torch.Tensor, taken: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count one more token per row, (A, 1) `taken` if not negative: (A, N) to (A, N + 1).

    A token without a slot gets the last one, which else repeats the first.
    """
    is_here = (ids == taken) & (taken >= 0)
    marks = marks + is_here * COUNT_ONE
    is_new = (taken >= 0) & ~is_here.any(-1, keepdim=True)
    last = (
        torch.where(is_new, taken, ids[:, :1]).to(ids.dtype),
        torch.where(is_new, COUNT_ONE, marks[:, :1]).to(marks.dtype),
        torch.where(is_new, 0.0, bias[:, :1]).to(bias.dtype),
    )
    ids, marks, bias = (torch.cat(pair, -1) for pair in zip((ids, marks, bias), last, strict=True))
    return ids, marks, bias


class _SequenceState:
    """The adjusted tokens of one sequence, by slot.

    Attributes:
        ids, marks, bias: of each slot; there is at least one slot.
        changed: slots that are not yet written to the device.
        is_counted: whether its generated tokens are counted.
    """

    def __init__(self, sequence: Sequence, row: int) -> None:
        spec, sampling = sequence.spec, sequence.spec.sampling
        self.sequence = sequence
        self.row = row
        self.ids: list[int] = []
        self.marks: list[int] = []
        self.bias: list[float] = []
        self.changed: set[int] = set()
        self._slots: dict[int, int] = {}
        prompt_ids = _penalized_prompt(sequence)
        self._slot(prompt_ids[0] if prompt_ids else 0)
        for token_id, bias in sampling.logit_bias:
            self.bias[self._slot(token_id)] = bias
        if sampling.repetition_penalty != 1:
            self._mark(dict.fromkeys(prompt_ids), IN_PROMPT)
        self.is_counted = bool(
            sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        )
        self._read = len(spec.prompt_ids)
        self._forbids_end = spec.delays_end
        self._mark(spec.end_ids if self._forbids_end else (), EARLY_END)
        self._mark(spec.decaying_ids, ENDS)
        # As in transformers, an end token is not a bad word by itself.
        self._mark(
            (word[0] for word in sampling.bad_words if len(word) == 1 and word[0] not in spec.eos_ids),
            BAD_WORD,
        )
        self._words: dict[int, list[tuple[list[int], int]]] = {}  # by their second-last token
        for word in sampling.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self._completing: list[int] = []

    def update(self, *, has_placeholder: bool) -> None:
        """Read the tokens that were generated since the last call, without a placeholder at the end."""
        ids = self.sequence.ids
        known = len(ids) - has_placeholder
        if self.is_counted:
            for token_id in ids[self._read : known]:
                self._count(token_id, COUNT_ONE)
            self._read = known
        if self._forbids_end and self.sequence.generated >= self.sequence.spec.sampling.min_tokens:
            self._unmark(self.sequence.spec.end_ids, EARLY_END)
            self._forbids_end = False
        if self._words:
            assert not has_placeholder, "bad words of several tokens need the last one"
            self._unmark(self._completing, ENDS_BAD_WORD)
            candidates = self._words.get(ids[-1], ())
            self._completing = [last for begin, last in candidates if ids[-len(begin) :] == begin]
            self._mark(self._completing, ENDS_BAD_WORD)

    @property
    def growth(self) -> float:
        """What the length of the answer adds to the logits of its ends, in multiples of their sizes."""
        start, factor = self.sequence.spec.sampling.length_decay or (0, 1.0)
        beyond = max(0, self.sequence.generated - start)
        try:
            return min(factor**beyond - 1, _MOST_GROWTH)
        except OverflowError:
            return _MOST_GROWTH

    def _count(self, token_id: int, amount: int) -> None:
        slot = self._slot(token_id)
        self.marks[slot] += amount
        self.changed.add(slot)

    def _mark(self, token_ids: Iterable[int], bit: int) -> None:
        for token_id in token_ids:
            slot = self._slot(token_id)
            self.marks[slot] |= bit
            self.changed.add(slot)

    def _unmark(self, token_ids: Iterable[int], bit: int) -> None:
        for token_id in token_ids:
            slot = self._slot(token_id)
            self.marks[slot] &= ~bit
            self.changed.add(slot)

    def _slot(self, token_id: int) -> int:
        """Return the token's slot; add one if it has none."""
        slot = self._slots.setdefault(token_id, len(self.ids))
        if slot == len(self.ids):
            self.ids.append(token_id)
            self.marks.append(0)
            self.bias.append(0.0)
            self.changed.add(slot)
        return slot


def _penalized_prompt(sequence: Sequence) -> Items[int]:
    """The tokens of a prompt that count as repeated."""
    spec = sequence.spec
    if sequence.fed is None:
        return spec.prompt_ids
    # The prompt of a fed sequence is rows; its ids may be of another vocabulary, such as the thinker's.
    return spec.feed.penalized_ids if spec.feed is not None else ()
