"""The step as fixed tensors: what the spans of one step mean, in int32 buffers that never move.

Two blocks of memory, each one flat int32 buffer on the host (pinned for a GPU) with a twin on the
device. Per step: token ids, positions, slots, spans, what to sample. Per row, rewritten only when
another sequence takes the row: block table and sampling parameters. On the CPU a twin is the buffer
itself. Addresses and strides stay the same from step to step, so a step can be captured; a layer
reads these tensors and runs no Python per request.

KV length, position and slot are three different things: how many keys a span sees, where a token
stands in its text, and which cell of the pool is its own.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.adjust import AdjustedRows
from workers.engine.ledger import Ledger
from workers.engine.scheduler import Span
from workers.engine.sequence import Sequence

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The step's B spans on the host, packed one behind the other."""

    query_offsets: Int32s  # (B + 1,)
    kv_lengths: Int32s  # (B,)
    block_tables: Int32s  # (B, blocks)
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The step's S sampled rows, and what the host knows of them without asking the device.

    Attributes:
        is_random: whether any of them is not greedy.
        has_top_k, has_top_p, has_min_p: whether any of the random ones has one.
        candidates: how many of the likeliest tokens decide every top-k and top-p; None is all of them.
    """

    temperature: torch.Tensor  # (S,) float32
    top_p: torch.Tensor  # (S,) float32
    top_k: torch.Tensor  # (S,) int32
    min_p: torch.Tensor  # (S,) float32
    seed_low: torch.Tensor  # (S,) int32
    seed_high: torch.Tensor  # (S,) int32
    sample_index: torch.Tensor  # (S,) int32
    draw_index: torch.Tensor  # (S,) int32
    is_random: bool
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool
    candidates: int | None

    @property
    def is_filtered(self) -> bool:
        return self.has_top_k or self.has_top_p or self.has_min_p


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Of which tokens it is told what the model thought: R sampled ones, and P of prompts.

    Attributes:
        top: the most of the likeliest tokens that any of them wants named.
    """

    sampled: torch.Tensor  # (R,) int64, of the S sampled rows
    prompt_indices: torch.Tensor  # (P,) int64, packed tokens: behind each stands a prompt's next
    prompt_ids: torch.Tensor  # (P,) int64, that next token
    top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: T tokens of B spans, of which S are sampled behind. Views of the fixed buffers.

    `scored` and `adjusted` are not of the buffers: they come and go with the few that ask.
    """

    token_ids: torch.Tensor  # (T,) int32
    positions: torch.Tensor  # (T,) int32
    slots: torch.Tensor  # (T,) int32
    rows: torch.Tensor  # (B,) int32, indices into block_table
    query_offsets: torch.Tensor  # (B + 1,) int32
    kv_lengths: torch.Tensor  # (B,) int32
    block_table: torch.Tensor  # (rows, blocks) int32
    logit_indices: torch.Tensor  # (S,) int32
    sampling: SamplingRows
    spans: Spans
    scored: ScoredRows | None = None
    adjusted: AdjustedRows | None = None


class _Twins:
    """Named regions of one flat int32 buffer on the host, and of its twin on the device."""

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        total = sum(sizes.values())
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=is_cuda)
        self._device = torch.zeros(total, dtype=torch.int32, device=device) if is_cuda else self._host
        ends = np.cumsum(list(sizes.values())).tolist()
        regions = {
            name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        self.host: Final[dict[str, Int32s]] = {n: self._host.numpy()[at] for n, at in regions.items()}
        self.device: Final = {name: self._device[at] for name, at in regions.items()}

    def upload(self) -> None:
        # The engine reads every step's tokens back before it builds the next, so the pinned buffer is
        # never overwritten while a copy of it is under way.
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


class StepBuilder:
    """Turns spans into a `Step`, in buffers allocated once."""

    def __init__(
        self, *, max_rows: int, max_step_tokens: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._owners: list[tuple[Sequence, int] | None] = [None] * max_rows
        self._written = [0] * max_rows
        tokens = dict.fromkeys(("token_ids", "positions", "slots"), max_step_tokens)
        spans = dict.fromkeys(("rows", "kv_lengths"), max_rows)
        sampled = dict.fromkeys(("logit_indices", "sampled_rows", "draws"), max(max_rows, max_step_tokens))
        self._step = _Twins(tokens | spans | sampled | {"query_offsets": max_rows + 1}, device)
        params = ("temperature", "top_p", "top_k", "min_p", "seed_low", "seed_high", "sample_index")
        self._table = _Twins({"blocks": max_rows * max_blocks} | dict.fromkeys(params, max_rows), device)
        self._blocks = self._table.host["blocks"].reshape(max_rows, max_blocks)
        self._temperature = self._table.host["temperature"].view(np.float32)
        self._top_p = self._table.host["top_p"].view(np.float32)
        self._min_p = self._table.host["min_p"].view(np.float32)
        self._ledger = Ledger(max_rows, device)

    def build(self, spans: Items[Span]) -> Step:
        """The step that computes `spans`; valid until the next call."""
        self._seat(spans)
        starts = np.fromiter((span.start for span in spans), np.int32, len(spans))
        counts = np.fromiter((span.count for span in spans), np.int32, len(spans))
        ids: list[int] = []
        for span in spans:
            ids += span.sequence.ids[span.start : span.start + span.count]
        batch, total = len(spans), len(ids)

        host = self._step.host
        host["rows"][:batch] = [span.sequence.row or 0 for span in spans]
        host["kv_lengths"][:batch] = starts + counts
        offsets = host["query_offsets"][: batch + 1]
        offsets[0] = 0
        np.cumsum(counts, out=offsets[1:])
        host["token_ids"][:total] = ids
        positions = host["positions"][:total]
        positions[:] = np.repeat(starts - offsets[:-1], counts) + np.arange(total, dtype=np.int32)
        blocks = self._blocks[np.repeat(host["rows"][:batch], counts), positions // self._block_size]
        host["slots"][:total] = blocks * self._block_size + positions % self._block_size

        # Behind each guess a token is sampled, too: `sampled` has its span's index once for each.
        sampled = [n for n, span in enumerate(spans) if span.samples for _ in range(1 + span.guesses)]
        before_last = [back for span in spans if span.samples for back in range(span.guesses, -1, -1)]
        host["logit_indices"][: len(sampled)] = offsets[1:][sampled] - 1 - np.array(before_last, np.int32)
        host["sampled_rows"][: len(sampled)] = host["rows"][:batch][sampled]
        host["draws"][: len(sampled)] = [
            spans[n].sequence.generated - back for n, back in zip(sampled, before_last, strict=True)
        ]
        self._step.upload()
        scored = self._scored(spans, offsets, sampled)
        adjusted = self._ledger.rows([spans[index].sequence for index in sampled])
        return self._views(batch, total, len(sampled), scored, adjusted)

    def _seat(self, spans: Items[Span]) -> None:
        """Write the table's row of every sequence that is new in its row."""
        is_changed = False
        for span in spans:
            sequence = span.sequence
            row = sequence.row
            assert row is not None
            if self._owners[row] == (sequence, sequence.seats):
                if self._written[row] != len(sequence.blocks):
                    self._write_blocks(row, sequence.blocks, self._written[row])
                    is_changed = True
                continue
            self._owners[row], is_changed = (sequence, sequence.seats), True
            sampling, host = sequence.spec.sampling, self._table.host
            self._blocks[row] = 0
            self._write_blocks(row, sequence.blocks, 0)
            self._temperature[row], self._top_p[row] = sampling.temperature, sampling.top_p
            self._min_p[row] = sampling.min_p
            host["top_k"][row] = max(sampling.top_k, 0)
            seed = np.array(sampling.seed, np.int64).view(np.uint64)
            host["seed_low"][row] = (seed & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
            host["seed_high"][row] = (seed >> np.uint64(32)).astype(np.uint32).view(np.int32)
            host["sample_index"][row] = sampling.sample_index
        if is_changed:
            self._table.upload()

    def _write_blocks(self, row: int, blocks: list[int], start: int) -> None:
        """Write a row's blocks from the `start`-th on."""
        self._blocks[row, start : len(blocks)] = blocks[start:]
        self._written[row] = len(blocks)

    def _scored(self, spans: Items[Span], offsets: Int32s, sampled: list[int]) -> ScoredRows | None:
        wanted = [span.sequence.spec.logprobs for span in spans]
        if all(count is None for count in wanted):
            return None
        indices: list[int] = []
        ids: list[int] = []
        for offset, span in zip(offsets.tolist(), spans, strict=False):
            scored = span.scored
            indices += range(offset + scored.start - span.start, offset + scored.stop - span.start)
            ids += span.sequence.ids[scored.start + 1 : scored.stop + 1]
        rows = [row for row, index in enumerate(sampled) if wanted[index] is not None]

        def on_device(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self._step.device["rows"].device)

        return ScoredRows(
            sampled=on_device(rows),
            prompt_indices=on_device(indices),
            prompt_ids=on_device(ids),
            top=max(count or 0 for count in wanted),
        )

    def _views(
        self,
        batch: int,
        total: int,
        sampled: int,
        scored: ScoredRows | None,
        adjusted: AdjustedRows | None,
    ) -> Step:
        host, device = self._step.host, self._step.device
        return Step(
            token_ids=device["token_ids"][:total],
            positions=device["positions"][:total],
            slots=device["slots"][:total],
            rows=device["rows"][:batch],
            query_offsets=device["query_offsets"][: batch + 1],
            kv_lengths=device["kv_lengths"][:batch],
            block_table=self._table.device["blocks"].view(self._blocks.shape),
            logit_indices=device["logit_indices"][:sampled],
            sampling=self._sampling_rows(sampled),
            spans=Spans(
                query_offsets=host["query_offsets"][: batch + 1],
                kv_lengths=host["kv_lengths"][:batch],
                block_tables=self._blocks[host["rows"][:batch]],
                block_size=self._block_size,
            ),
            scored=scored,
            adjusted=adjusted,
        )

    def _sampling_rows(self, sampled: int) -> SamplingRows:
        rows = self._step.host["sampled_rows"][:sampled]
        is_random = self._temperature[rows] > 0
        top_k = self._table.host["top_k"][rows]
        has_top_k, has_top_p = is_random & (top_k > 0), is_random & (self._top_p[rows] < 1)
        # A top-p without a top-k beside it may reach far down.
        is_narrow = bool(has_top_k.any()) and not bool((has_top_p & ~has_top_k).any())

        on_device = self._step.device["sampled_rows"][:sampled]
        table = {
            name: part.index_select(0, on_device)
            for name, part in self._table.device.items()
            if name != "blocks"
        }
        return SamplingRows(
            temperature=table["temperature"].view(torch.float32),
            top_p=table["top_p"].view(torch.float32),
            top_k=table["top_k"],
            min_p=table["min_p"].view(torch.float32),
            seed_low=table["seed_low"],
            seed_high=table["seed_high"],
            sample_index=table["sample_index"],
            draw_index=self._step.device["draws"][:sampled],
            is_random=bool(is_random.any()),
            has_top_k=bool(has_top_k.any()),
            has_top_p=bool(has_top_p.any()),
            has_min_p=bool((is_random & (self._min_p[rows] > 0)).any()),
            candidates=int(top_k[has_top_k].max()) if is_narrow else None,
        )
