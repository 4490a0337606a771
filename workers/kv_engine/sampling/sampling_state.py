"""The ledger: what each row says of its tokens, kept on the device from step to step.

Only rows that ask for it have a page: a list of the distinct tokens something is said of, with what is
said (`workers.kv_engine.sampling.logits_processors`). A page is made of the sequence's own ids when it is
first sampled, those
of an earlier attempt included, so an answer that is resumed is penalised as if nothing had happened. From
then on a step writes what changed by its one new token: a few numbers.

A page takes 12 bytes per token, and the ledger as many as the widest page, rounded up to a power of two,
for every row there is: 256 rows of up to 4096 distinct tokens take 12 MiB. Counts for a vocabulary of 150k
would take 148 MiB, and 43 ms to apply to 32 rows; 32 prompts of 1000 tokens take 0.8 ms like this, of 4000
1.8 ms (one core; 2026-11). Before the first row that asks there is no table, and while none asks a step
pays a microsecond.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Final

import numpy as np
import torch

from workers.kv_engine.sampling.logits_processors import (
    BANNED,
    COMPLETES,
    HELD,
    IN_PROMPT,
    ONCE,
    LogitAdjustments,
)
from workers.kv_engine.sequence import Sequence

_NARROWEST: Final = 64
_PLANES: Final = 3
"""Ids, facts, and the bits of biases."""


class SamplingState:
    """The pages of `max_sequences` rows."""

    def __init__(self, max_sequences: int, device: torch.device) -> None:
        self._pages: list[_Page | None] = [None] * max_sequences
        self._table = torch.zeros(_PLANES, max_sequences, 0, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """How much of the device's memory it takes."""
        return self._table.nbytes

    def rows(self, sampled: Items[Sequence]) -> LogitAdjustments | None:
        """What the rows that are sampled say, each up to its last token; None where none says anything."""
        asking = [place for place, sequence in enumerate(sampled) if sequence.adjusts_logits]
        if not asking:
            return None
        pages = [self._page(sampled[place]) for place in asking]
        width = max(len(page.ids) for page in pages)
        self._write(pages, width)
        return self._read(asking, pages, width)

    def _page(self, sequence: Sequence) -> "_Page":
        """The sequence's page, as of its last token."""
        row = sequence.row
        assert row is not None
        page = self._pages[row]
        if page is None or page.sequence is not sequence:
            page = self._pages[row] = _Page(sequence, row)
        page.turn()
        return page

    def _write(self, pages: Iterable["_Page"], width: int) -> None:
        """Bring the device's table up to the pages."""
        _, rows, has = self._table.shape
        if width > has:
            wider = max(_NARROWEST, 1 << (width - 1).bit_length())
            self._table = torch.nn.functional.pad(self._table, (0, wider - has))
            has = wider
        slots = [(page.row * has + slot, page, slot) for page in pages for slot in page.changed]
        at = np.array([flat for flat, _, _ in slots], np.int64)
        values = np.empty((_PLANES, len(slots)), np.int32)
        values[0] = [page.ids[slot] for _, page, slot in slots]
        values[1] = [page.facts[slot] for _, page, slot in slots]
        values[2] = np.array([page.bias[slot] for _, page, slot in slots], np.float32).view(np.int32)
        self._table.view(_PLANES, rows * has).index_copy_(1, self._on_device(at), self._on_device(values))
        for page in pages:
            page.changed.clear()

    def _read(self, asking: list[int], pages: list["_Page"], width: int) -> LogitAdjustments:
        rows = self._on_device(
            np.array([asking, [page.row for page in pages], [len(page.ids) for page in pages]])
        )
        wishes = [page.sequence.spec.sampling for page in pages]
        penalties = self._on_device(
            np.array(
                [[w.repetition_penalty, w.presence_penalty, w.frequency_penalty] for w in wishes], np.float32
            )
        )
        slots = torch.arange(width, device=rows.device)
        slots = torch.where(slots < rows[2][:, None], slots, 0)  # behind its end a page repeats its first
        ids, facts, bias = self._table[:, rows[1], :width].gather(-1, slots.expand(_PLANES, -1, -1))
        return LogitAdjustments(
            rows=rows[0],
            ids=ids.long(),
            facts=facts,
            bias=bias.view(torch.float32),
            repetition=penalties[:, 0:1],
            presence=penalties[:, 1:2],
            frequency=penalties[:, 2:3],
        )

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._table.device)


class _Page:
    """What one sequence says of its tokens, by slot.

    Attributes:
        ids, facts, bias: of each slot; a page has one at least.
        changed: the slots the device does not know as they are.
    """

    def __init__(self, sequence: Sequence, row: int) -> None:
        spec, sampling = sequence.spec, sequence.spec.sampling
        self.sequence = sequence
        self.row = row
        self.ids: list[int] = []
        self.facts: list[int] = []
        self.bias: list[float] = []
        self.changed: set[int] = set()
        self._slots: dict[int, int] = {}
        self._slot(sequence.ids[0])
        for token_id, bias in sampling.logit_bias:
            self.bias[self._slot(token_id)] = bias
        if sampling.repetition_penalty != 1:
            self._mark(dict.fromkeys(spec.prompt_ids), IN_PROMPT)
        self._is_counted = bool(
            sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        )
        self._read = len(spec.prompt_ids)
        self._is_held = spec.delays_end
        self._mark(spec.ends if self._is_held else (), HELD)
        # As in transformers, an end is no bad word by itself.
        self._mark(
            (word[0] for word in sampling.bad_words if len(word) == 1 and word[0] not in spec.eos_ids), BANNED
        )
        self._words: dict[int, list[tuple[list[int], int]]] = {}  # by the last token but one
        for word in sampling.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self._completing: list[int] = []

    def turn(self) -> None:
        """Take what was generated since."""
        ids = self.sequence.ids
        if self._is_counted:
            for token_id in ids[self._read :]:
                self._touch(token_id, ONCE)
            self._read = len(ids)
        if self._is_held and self.sequence.generated >= self.sequence.spec.sampling.min_tokens:
            self._unmark(self.sequence.spec.ends, HELD)
            self._is_held = False
        if self._words:
            self._unmark(self._completing, COMPLETES)
            candidates = self._words.get(ids[-1], ())
            self._completing = [last for begin, last in candidates if ids[-len(begin) :] == begin]
            self._mark(self._completing, COMPLETES)

    def _touch(self, token_id: int, amount: int) -> None:
        slot = self._slot(token_id)
        self.facts[slot] += amount
        self.changed.add(slot)

    def _mark(self, token_ids: Iterable[int], bit: int) -> None:
        for token_id in token_ids:
            slot = self._slot(token_id)
            self.facts[slot] |= bit
            self.changed.add(slot)

    def _unmark(self, token_ids: Iterable[int], bit: int) -> None:
        for token_id in token_ids:
            slot = self._slot(token_id)
            self.facts[slot] &= ~bit
            self.changed.add(slot)

    def _slot(self, token_id: int) -> int:
        """The token's own slot; a new one if it has none."""
        slot = self._slots.setdefault(token_id, len(self.ids))
        if slot == len(self.ids):
            self.ids.append(token_id)
            self.facts.append(0)
            self.bias.append(0.0)
            self.changed.add(slot)
        return slot
