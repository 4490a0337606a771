"""The step as fixed tensors: what the spans of one step mean, in int32 buffers that never move.

Two blocks of memory, each one flat int32 buffer on the host (pinned for a GPU) with a twin on the
device. Per step: token ids, positions, slots, spans, what to sample and how. Per row, rewritten only
when another sequence takes the row: the block table. On the CPU a twin is the buffer itself. Addresses
and strides stay the same from step to step, so a step can be captured; a layer reads these tensors and
runs no Python per request.

A captured step computes as many rows as it was captured for. Those that a step has too few are padding:
spans of one token each in one cell of the pool that is nobody's.

KV length, position and slot are three different things: how many keys a span sees, where a token
stands in its text, and which cell of the pool is its own.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from workers.kv_engine.sampling.logits_processors import LogitAdjustments
from workers.kv_engine.sampling.sampling_rows import SamplingRows, ScoredRows
from workers.kv_engine.sampling.sampling_state import SamplingState
from workers.kv_engine.sequence import Sequence, Span

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The step's B spans on the host, packed one behind the other."""

    query_offsets: Int32s  # (B + 1,)
    kv_lengths: Int32s  # (B,)
    block_tables: Int32s  # (B, blocks)
    block_size: int


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
    adjusted: LogitAdjustments | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadTokens:
    """The tokens of a step of decodes, which nobody has read yet, and whose of them go on.

    Attributes:
        places: which of them is the last token of each span of the step behind.
    """

    tokens: torch.Tensor  # (S,) int64, on the device; below 0 where there is none
    places: list[int]


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

        self._copied: Final = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def upload(self) -> None:
        """Begin to copy the host's side to the device; `wait` before it is written again."""
        if self._copied is not None:
            self._device.copy_(self._host, non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self._device.device))

    def wait(self) -> None:
        """Until the last copy is done: for a step that is not read yet nobody else has waited."""
        if self._copied is not None:
            self._copied.synchronize()


_PARAMS: Final = ("temperature", "top_p", "top_k", "min_p", "seed_low", "seed_high", "sample_index")
"""How a row is sampled: kept on the host by row, and copied for those that a step samples."""


class StepBuilder:
    """Turns spans into a `Step`, in buffers allocated once.

    Args:
        padding_block: of the pool; its first cell is for padding, and nobody else's. None is without padding.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        max_step_tokens: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        padding_block: int | None = None,
    ) -> None:
        self._block_size = block_size
        self._padding_block = padding_block
        self._owners: list[tuple[Sequence, int] | None] = [None] * max_sequences
        self._written = [0] * max_sequences
        tokens = dict.fromkeys(("token_ids", "positions", "slots"), max_step_tokens)
        spans = dict.fromkeys(("rows", "kv_lengths", "places"), max_sequences)
        sampled = dict.fromkeys(("logit_indices", "draws", *_PARAMS), max(max_sequences, max_step_tokens))
        self._step = _Twins(tokens | spans | sampled | {"query_offsets": max_sequences + 1}, device)
        # The last row is padding's.
        self._table = _Twins({"blocks": (max_sequences + 1) * max_blocks}, device)
        self._blocks = self._table.host["blocks"].reshape(max_sequences + 1, max_blocks)
        self._params: Final = {name: np.zeros(max_sequences, np.int32) for name in _PARAMS}
        self._temperature = self._params["temperature"].view(np.float32)
        self._top_p = self._params["top_p"].view(np.float32)
        self._min_p = self._params["min_p"].view(np.float32)
        if padding_block is not None:
            self._blocks[max_sequences, 0] = padding_block
            self._table.upload()
        self._sampling_state = SamplingState(max_sequences, device)

    def build(self, spans: Items[Span], *, rows: int = 0, unread: UnreadTokens | None = None) -> Step:
        """The step that computes `spans`; valid until the next call.

        Where `rows` is given, the buffers hold a step of so many spans of one token each, as `captured` has
        it: those of `spans`, and padding. Every one of `spans` is of one token and sampled then.

        Where `unread` is given, too, these tokens are on the device alone, and what the sequences have in
        their places is not looked at.
        """
        self._step.wait()
        self._table.wait()
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
        sampled = [n for n, span in enumerate(spans) if span.samples for _ in range(1 + span.drafted)]
        before_last = [back for span in spans if span.samples for back in range(span.drafted, -1, -1)]
        host["logit_indices"][: len(sampled)] = offsets[1:][sampled] - 1 - np.array(before_last, np.int32)
        admissions = host["rows"][:batch][sampled]
        for name in _PARAMS:
            host[name][: len(sampled)] = self._params[name][admissions]
        host["draws"][: len(sampled)] = [
            spans[n].sequence.generated - back for n, back in zip(sampled, before_last, strict=True)
        ]
        if rows > batch:
            self._pad(batch, rows)
        if unread is not None:
            host["places"][:batch] = unread.places
        self._step.upload()
        if unread is not None:
            self._feed(unread.tokens, batch)
        scored = self._scored(spans, offsets, sampled)
        adjusted = self._sampling_state.rows([spans[index].sequence for index in sampled])
        return self._views(batch, total, self._sampling_rows(admissions), scored, adjusted)

    def captured(self, rows: int, *, is_random: bool = False, is_filtered: bool = False) -> Step:
        """A step of so many spans of one token, all sampled: what `build` fills in, at the same addresses.

        Args:
            rows: how many.
            is_random: whether they are sampled as rows of which some are not greedy.
            is_filtered: as rows of which some have any filter.
        """
        sampling = self._sampling_views(
            rows,
            is_random=is_random,
            has_top_k=is_filtered,
            has_top_p=is_filtered,
            has_min_p=is_filtered,
            candidates=None,
        )
        return self._views(rows, rows, sampling, None, None)

    def _feed(self, tokens: torch.Tensor, batch: int) -> None:
        """Put the spans' tokens in, of those that were sampled; no model must see one that is none."""
        taken = tokens.index_select(0, self._step.device["places"][:batch])
        self._step.device["token_ids"][:batch].copy_(taken.clamp_(min=0))

    def _pad(self, batch: int, rows: int) -> None:
        """Fill up with padding. How it is sampled is left as it was: nobody reads what comes of it."""
        assert self._padding_block is not None, "padding has no block"
        host = self._step.host
        host["token_ids"][batch:rows] = 0
        host["positions"][batch:rows] = 0
        host["slots"][batch:rows] = self._padding_block * self._block_size
        host["rows"][batch:rows] = len(self._owners)
        host["kv_lengths"][batch:rows] = 1
        host["query_offsets"][batch + 1 : rows + 1] = np.arange(batch + 1, rows + 1)
        host["logit_indices"][batch:rows] = np.arange(batch, rows)

    def _seat(self, spans: Items[Span]) -> None:
        """Write the table's row of every sequence that is new in its row."""
        is_changed = False
        for span in spans:
            sequence = span.sequence
            row = sequence.row
            assert row is not None
            if self._owners[row] == (sequence, sequence.admissions):
                if self._written[row] != len(sequence.blocks):
                    self._write_blocks(row, sequence.blocks, self._written[row])
                    is_changed = True
                continue
            self._owners[row], is_changed = (sequence, sequence.admissions), True
            sampling, params = sequence.spec.sampling, self._params
            self._blocks[row] = 0
            self._write_blocks(row, sequence.blocks, 0)
            self._temperature[row], self._top_p[row] = sampling.temperature, sampling.top_p
            self._min_p[row] = sampling.min_p
            params["top_k"][row] = max(sampling.top_k, 0)
            seed = np.array(sampling.seed, np.int64).view(np.uint64)
            params["seed_low"][row] = (seed & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
            params["seed_high"][row] = (seed >> np.uint64(32)).astype(np.uint32).view(np.int32)
            params["sample_index"][row] = sampling.sample_index
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
            scored = span.scored_positions
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
        sampling: SamplingRows,
        scored: ScoredRows | None,
        adjusted: LogitAdjustments | None,
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
            logit_indices=device["logit_indices"][: len(sampling.draw_index)],
            sampling=sampling,
            spans=Spans(
                query_offsets=host["query_offsets"][: batch + 1],
                kv_lengths=host["kv_lengths"][:batch],
                block_tables=self._blocks[host["rows"][:batch]],
                block_size=self._block_size,
            ),
            scored=scored,
            adjusted=adjusted,
        )

    def _sampling_rows(self, admissions: Int32s) -> SamplingRows:
        """The rows that are sampled, by where their sequences sit."""
        is_random, top_k = self._temperature[admissions] > 0, self._params["top_k"][admissions]
        has_top_k, has_top_p = is_random & (top_k > 0), is_random & (self._top_p[admissions] < 1)
        # A top-p without a top-k beside it may reach far down.
        is_narrow = bool(has_top_k.any()) and not bool((has_top_p & ~has_top_k).any())
        return self._sampling_views(
            len(admissions),
            is_random=bool(is_random.any()),
            has_top_k=bool(has_top_k.any()),
            has_top_p=bool(has_top_p.any()),
            has_min_p=bool((is_random & (self._min_p[admissions] > 0)).any()),
            candidates=int(top_k[has_top_k].max()) if is_narrow else None,
        )

    def _sampling_views(
        self,
        sampled: int,
        *,
        is_random: bool,
        has_top_k: bool,
        has_top_p: bool,
        has_min_p: bool,
        candidates: int | None,
    ) -> SamplingRows:
        device = {name: self._step.device[name][:sampled] for name in (*_PARAMS, "draws")}
        return SamplingRows(
            temperature=device["temperature"].view(torch.float32),
            top_p=device["top_p"].view(torch.float32),
            top_k=device["top_k"],
            min_p=device["min_p"].view(torch.float32),
            seed_low=device["seed_low"],
            seed_high=device["seed_high"],
            sample_index=device["sample_index"],
            draw_index=device["draws"],
            is_random=is_random,
            has_top_k=has_top_k,
            has_top_p=has_top_p,
            has_min_p=has_min_p,
            candidates=candidates,
        )
