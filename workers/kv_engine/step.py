"""The tensors of a step: token ids, positions, slots, spans and sampling parameters, in fixed buffers.

There are two flat int32 buffers on the host (pinned for a GPU), each with a mirror on the device. One is
written and copied for each step: token ids, positions, slots, spans, and the parameters of sampling. The
other holds the block table, of which a step changes some entries. The changes travel in the first buffer, and
are written to the table on the device; only if they are too many, the whole table is copied. On a CPU the
mirror is the buffer itself. Addresses and strides stay the same from step to step, so a step can be recorded
and replayed; a layer reads these tensors and runs no Python per request.

A recorded step computes the number of rows that it was recorded for. If a step has fewer, the rest is
padding: spans of one token each, in a pool cell that no sequence uses.

KV length, position and slot are different: the number of keys that a span attends to, the position by which
a token's queries and keys are rotated, and the cell of the pool that holds its keys and values. The slot
follows from the index of the token in its sequence. So does the position, except behind media in models whose
positions have several axes (`PromptParts.positions_of`).
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import ref

import numpy as np
import numpy.typing as npt
import torch

from shared.errors import BugError
from workers.kv_engine.prompt_parts import Positions
from workers.kv_engine.sampling.logits_processors import LogitAdjustments
from workers.kv_engine.sampling.sampling_rows import SamplingRows, ScoredRows
from workers.kv_engine.sampling.sampling_state import SamplingState, UnreadTokens
from workers.kv_engine.sequence import Sequence, Span
from workers.machine.transfers import upload

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The B spans of a step on the host, in the order of the packed tokens."""

    query_offsets: Int32s  # (B + 1,)
    kv_lengths: Int32s  # (B,)
    block_tables: Int32s  # (B, blocks)
    block_size: int
    key_ends: Int32s | None = None  # (T,), as in `Step`
    full_starts: Int32s | None = None  # (T,), as in `Step`
    first_keys: Int32s | None = None  # (B,), the first key that a span's tokens see; None: 0
    states: "StateMoves | None" = None  # of a node with recurrent states
    prompt_lengths: Int32s | None = None  # (B,), tokens of the prompts, in a step of a node with indexers


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMoves:
    """The slots of the recurrent states that the B spans of a step read and write.

    Attributes:
        sources: (B,), from which each span continues; -1 for the first tokens of a sequence.
        rows: (B,), that keep the state after each span.
        copies: (K, 3), a span, a number of its tokens, and the slot of the snapshot after these; by span, and
            within one by tokens.
    """

    sources: Int32s
    rows: Int32s
    copies: Int32s


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTokens:
    """The tokens of a step on the host, until the next step is built; ids that are not read yet are 0."""

    token_ids: Int32s  # (T,)
    positions: Int32s  # (axes, T); the bits of float32 for a node with such positions
    slots: Int32s  # (T,)
    long_factors: Int32s | None  # (T,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: T tokens of B spans, after S of which a token is sampled. Views of the fixed buffers.

    `scored` and `adjusted` are separate tensors, and None if no sequence requests them.
    """

    token_ids: torch.Tensor  # (T,) int32
    positions: torch.Tensor  # (T,) int32, or (axes, T) for a node with several position axes; or float32
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
    key_ends: torch.Tensor | None = None  # (T,) int32, keys of its sequence that a token sees; None: causal
    full_starts: torch.Tensor | None = None  # (T,) int32, first token of a token's full part, or itself
    row_values: torch.Tensor | None = None  # (N, width), they replace the embeddings of N tokens
    row_indices: torch.Tensor | None = None  # (N,) int64, those tokens
    routes: torch.Tensor | None = None  # (T,) int8, the set of weights of each token; None: 0 for all
    long_factors: torch.Tensor | None = None  # (T,) int32, 1: of a sequence with long rotary factors
    host: HostTokens | None = None  # of a step that a builder made, before programs changed it


class _MirroredBuffer:
    """Named regions of one flat int32 buffer on the host, and of its mirror on the device."""

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

    @property
    def has_copy(self) -> bool:
        """True if the mirror is memory of its own."""
        return self._device is not self._host

    def upload(self) -> None:
        """Start the copy of the host buffer to the device; `wait` before writing to it again."""
        if self._copied is not None:
            self._device.copy_(self._host, non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self._device.device))

    def wait(self) -> None:
        """Wait for the end of the last copy: reading the step, which also waits for it, may come later."""
        if self._copied is not None:
            self._copied.synchronize()


_MOST_TABLE_CHANGES: Final = 1024
"""Entries of the block table that a step changes one by one: 16,384 tokens of a prompt in blocks of 16."""
_PARAMS: Final = ("temperature", "top_p", "top_k", "min_p", "seed_low", "seed_high", "sample_index")
"""The sampling parameters, kept by row on the host; each step copies those of its sampled rows."""


class StepBuilder:
    """Builds a `Step` of spans, in buffers that are allocated once.

    Args:
        padding_block: a block of the pool whose first cell is used for padding only; None is without padding.
        position_axes: the number of positions of a token.
        position_dtype: int32, or float32, which has as many bytes.
        has_states: the node has recurrent states.
        has_indexers: layers of the node attend to the keys that an indexer chooses.
        has_long_factors: the node has long rotary factors.
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
        position_axes: int = 1,
        position_dtype: torch.dtype = torch.int32,
        has_states: bool = False,
        has_indexers: bool = False,
        has_long_factors: bool = False,
    ) -> None:
        self._has_states = has_states
        self._has_indexers = has_indexers
        self._has_long_factors = has_long_factors
        self._axes = position_axes
        self._position_dtype = position_dtype
        self._block_size = block_size
        self._padding_block = padding_block
        # Weak, because a sequence that has ended holds the rows of its media.
        self._row_owners: list[tuple[ref[Sequence], int] | None] = [None] * max_sequences
        self._written = [0] * max_sequences
        tokens = dict.fromkeys(("token_ids", "slots"), max_step_tokens)
        tokens["positions"] = position_axes * max_step_tokens
        if has_long_factors:
            tokens["long_factors"] = max_step_tokens
        # A recorded step with prompts has up to two spans more (`_prompt_spans`).
        spans = dict.fromkeys(("rows", "kv_lengths", "places"), max_sequences + 2)
        sampled = dict.fromkeys(("logit_indices", "draws", *_PARAMS), max(max_sequences, max_step_tokens))
        changes = dict.fromkeys(("changed_places", "changed_blocks"), _MOST_TABLE_CHANGES)
        self._step = _MirroredBuffer(
            tokens | spans | sampled | changes | {"query_offsets": max_sequences + 3}, device
        )
        # The last row is for padding.
        self._table = _MirroredBuffer({"blocks": (max_sequences + 1) * max_blocks}, device)
        self._table_changes: list[Int32s] = []  # entries of the flat table, not on the device yet
        self._blocks = self._table.host["blocks"].reshape(max_sequences + 1, max_blocks)
        self._params: Final = {name: np.zeros(max_sequences, np.int32) for name in _PARAMS}
        self._temperature = self._params["temperature"].view(np.float32)
        self._top_p = self._params["top_p"].view(np.float32)
        self._min_p = self._params["min_p"].view(np.float32)
        if padding_block is not None:
            self._blocks[max_sequences, 0] = padding_block
            self._table.upload()
        self._sampling_state = SamplingState(max_sequences, device)

    def build(
        self, spans: Items[Span], *, rows: int = 0, tokens: int = 0, unread: UnreadTokens | None = None
    ) -> Step:
        """Return the step that computes `spans`; valid until the next call.

        Args:
            spans: at most `max_sequences` spans.
            rows: pad the step to so many spans of one token each, for a replay (`captured`); each of `spans`
                is then one token that is sampled after. 0 is without padding.
            tokens: pad the step to so many tokens, for a replay of its layers (`captured_prompt`).
            unread: the tokens of the spans are on the device alone; those in the sequences are placeholders.
        """
        self._step.wait()
        self._table.wait()
        self._write_rows(spans)
        indices = self._write_tokens(spans)
        batch, total = len(spans), len(indices)
        host = self._step.host
        offsets = host["query_offsets"][: batch + 1]
        with_parts = [
            (offset, span)
            for offset, span in zip(offsets.tolist(), spans, strict=False)
            if span.sequence.parts is not None
        ]
        self._write_positions(indices, with_parts, width=max(rows, tokens, total))
        sampled = self._write_sampled(spans, offsets)
        if unread is not None:
            host["places"][:batch] = unread.places
        self._upload(batch, total, rows, tokens)
        if unread is not None:
            self._feed(unread.tokens, batch)
        scored = self._scored(spans, offsets, sampled)
        adjusted = self._sampling_state.adjustments(
            [spans[index].sequence for index in sampled], unread=unread
        )
        sampling = self._sampling_rows(host["rows"][:batch][sampled])
        step = self._views(batch, total, sampling, scored, adjusted, width=max(rows, tokens))
        if self._has_states:
            step = replace(step, spans=replace(step.spans, states=_state_moves(spans)))
        if self._has_indexers:
            lengths = [len(span.sequence.spec.prompt_ids) for span in spans]
            step = replace(step, spans=replace(step.spans, prompt_lengths=np.array(lengths, np.int32)))
        changed = [
            (offset, span)
            for offset, span in with_parts
            if span.sequence.parts is not None and span.sequence.parts.changes(span.start, span.count)
        ]
        return with_prompt_parts(step, changed, indices) if changed else step

    def adopt(self, step: Step, *, rows: int = 0, tokens: int = 0) -> None:
        """Write a step that another member of the TP group built, for a replay.

        Args:
            step: on the CPU, of the same node; it has the same number of blocks and tokens per block.
            rows: as in `build`.
            tokens: as in `build`.
        """
        self._step.wait()
        self._table.wait()
        host, spans = self._step.host, step.spans
        batch, total = len(spans.kv_lengths), len(step.token_ids)
        for name in ("token_ids", "slots", *(["long_factors"] if self._has_long_factors else [])):
            host[name][:total] = getattr(step, name).numpy()
        host["rows"][:batch] = np.arange(batch)
        host["kv_lengths"][:batch] = spans.kv_lengths
        host["query_offsets"][: batch + 1] = spans.query_offsets
        width = max(rows, tokens, total)
        positions = host["positions"][: self._axes * width].reshape(self._axes, width)
        positions[:, :total] = step.positions.view(torch.int32).numpy().reshape(self._axes, total)
        self._adopt_blocks(spans.block_tables)
        self._upload(batch, total, rows, tokens)

    def _upload(self, batch: int, total: int, rows: int, tokens: int) -> None:
        """Pad what was written for a replay, and start its copy to the device."""
        if rows > batch:
            self._pad(batch, rows)
        if tokens:
            self._pad_tokens(batch, total, tokens)
        table_changes = self._write_table_changes()
        self._step.upload()
        self._send_table(table_changes)

    def _adopt_blocks(self, tables: Int32s) -> None:
        """Write the first blocks of the first rows, (B, columns)."""
        known = self._blocks[: len(tables), : tables.shape[1]]
        rows, columns = np.nonzero(known != tables)
        known[rows, columns] = tables[rows, columns]
        if self._table.has_copy:
            self._table_changes.append((rows * self._blocks.shape[1] + columns).astype(np.int32))

    def captured(self, rows: int, *, is_random: bool = False, is_filtered: bool = False) -> Step:
        """Return a step of `rows` sampled spans of one token each, at the addresses that `build` writes to.

        With `is_random` it is prepared for rows that are not greedy, with `is_filtered` for rows with top-k,
        top-p or min-p.
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

    def captured_prompt(self, tokens: int) -> Step:
        """Return a step of so many tokens, sampled nowhere, at the addresses that `build` writes to."""
        sampling = self._sampling_views(
            0, is_random=False, has_top_k=False, has_top_p=False, has_min_p=False, candidates=None
        )
        return self._views(self._prompt_spans(tokens), tokens, sampling, None, None)

    def _prompt_spans(self, tokens: int) -> int:
        """The spans of a recorded step with prompts: one per sequence, and one for padding.

        They are not as many as the tokens: a step with as many spans as tokens is one of decodes.
        """
        spans = len(self._row_owners) + 1
        return spans + 1 if spans == tokens else spans

    def _write_tokens(self, spans: Items[Span]) -> Int32s:
        """Write spans, ids and slots; return the index of each token in its sequence, (T,)."""
        starts = np.fromiter((span.start for span in spans), np.int32, len(spans))
        counts = np.fromiter((span.count for span in spans), np.int32, len(spans))
        ids: list[int] = []
        for span in spans:
            ids += span.sequence.ids[span.start : span.start + span.count]
        batch, total, host = len(spans), len(ids), self._step.host
        host["rows"][:batch] = [span.sequence.row or 0 for span in spans]
        host["kv_lengths"][:batch] = starts + counts
        offsets = host["query_offsets"][: batch + 1]
        offsets[0] = 0
        np.cumsum(counts, out=offsets[1:])
        host["token_ids"][:total] = ids
        indices: Int32s = np.repeat(starts - offsets[:-1], counts) + np.arange(total, dtype=np.int32)
        blocks = self._blocks[np.repeat(host["rows"][:batch], counts), indices // self._block_size]
        host["slots"][:total] = blocks * self._block_size + indices % self._block_size
        if self._has_long_factors:
            host["long_factors"][:total] = np.repeat([span.sequence.long_factors for span in spans], counts)
        return indices

    def _write_positions(self, indices: Int32s, with_parts: Items[tuple[int, Span]], *, width: int) -> None:
        """Write the positions of tokens, `width` on each axis with padding.

        `with_parts` are the spans of sequences with parts, each with the index of its first token.
        """
        written = self._step.host["positions"][: self._axes * width].reshape(self._axes, width)
        positions: Positions = written.view(np.float32) if self._position_dtype.is_floating_point else written
        positions[:, : len(indices)] = indices
        for offset, span in with_parts:
            parts, here = span.sequence.parts, slice(offset, offset + span.count)
            assert parts is not None
            if span.start >= len(span.sequence.spec.prompt_ids):
                positions[:, here] += np.asarray(parts.shift, positions.dtype)
            else:
                positions[:, here] = parts.positions_of(span.start, span.count)

    def _write_sampled(self, spans: Items[Span], offsets: Int32s) -> list[int]:
        """Write what sampling reads; return the index of a span once for each token sampled after it."""
        host = self._step.host
        # A token is sampled after each draft, too.
        sampled = [n for n, span in enumerate(spans) if span.samples for _ in range(1 + span.drafted)]
        before_last = [back for span in spans if span.samples for back in range(span.drafted, -1, -1)]
        host["logit_indices"][: len(sampled)] = offsets[1:][sampled] - 1 - np.array(before_last, np.int32)
        rows = host["rows"][: len(spans)][sampled]
        for name in _PARAMS:
            host[name][: len(sampled)] = self._params[name][rows]
        host["draws"][: len(sampled)] = [
            spans[n].sequence.generated - back for n, back in zip(sampled, before_last, strict=True)
        ]
        return sampled

    def _feed(self, tokens: torch.Tensor, batch: int) -> None:
        """Write the input tokens on the device; a negative one, of a failed sequence, becomes 0."""
        taken = tokens.index_select(0, self._step.device["places"][:batch])
        self._step.device["token_ids"][:batch].copy_(taken.clamp_(min=0))

    def _pad(self, batch: int, rows: int) -> None:
        """Write padding into the rows after the batch. Their sampling parameters do not matter."""
        self._pad_inputs(batch, rows)
        host = self._step.host
        host["rows"][batch:rows] = len(self._row_owners)
        host["kv_lengths"][batch:rows] = 1
        host["query_offsets"][batch + 1 : rows + 1] = np.arange(batch + 1, rows + 1)
        host["logit_indices"][batch:rows] = np.arange(batch, rows)

    def _pad_tokens(self, batch: int, total: int, tokens: int) -> None:
        """Write empty spans, and at last the tokens of the padding, which see no key."""
        self._pad_inputs(total, tokens)
        host, spans = self._step.host, self._prompt_spans(tokens)
        host["rows"][batch:spans] = len(self._row_owners)
        host["kv_lengths"][batch:spans] = 0
        host["query_offsets"][batch:spans] = total
        host["query_offsets"][spans] = tokens

    def _pad_inputs(self, total: int, tokens: int) -> None:
        """Write tokens in the pool's cell for padding behind those of the step."""
        assert self._padding_block is not None, "made without a padding block"
        host = self._step.host
        host["token_ids"][total:tokens] = 0
        host["positions"][: self._axes * tokens].reshape(self._axes, tokens)[:, total:] = 0
        host["slots"][total:tokens] = self._padding_block * self._block_size
        if self._has_long_factors:
            host["long_factors"][total:tokens] = 0

    def _write_rows(self, spans: Items[Span]) -> None:
        """Write the block table and sampling parameters of the sequences that are new in their rows."""
        for span in spans:
            sequence = span.sequence
            row = sequence.row
            assert row is not None
            owner = self._row_owners[row]
            if owner is not None and owner[0]() is sequence and owner[1] == sequence.admissions:
                if self._written[row] != len(sequence.blocks):
                    self._write_blocks(row, sequence.blocks, self._written[row])
                continue
            self._row_owners[row] = ref(sequence), sequence.admissions
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

    def _write_blocks(self, row: int, blocks: list[int], start: int) -> None:
        """Write the block table of a row, from the `start`-th block on."""
        self._blocks[row, start : len(blocks)] = blocks[start:]
        self._written[row] = len(blocks)
        if self._table.has_copy and start < len(blocks):
            first = row * self._blocks.shape[1]
            self._table_changes.append(np.arange(first + start, first + len(blocks), dtype=np.int32))

    def _write_table_changes(self) -> int | None:
        """Write the changes of the block table for the device, and return their number.

        None: the whole table is to be copied. Of a row with another sequence, entries behind the sequence's
        blocks stay as they were on the device: no span reaches them.
        """
        changes, self._table_changes = self._table_changes, []
        count = sum(map(len, changes))
        if not count:
            return 0
        if count > _MOST_TABLE_CHANGES:
            return None
        places = np.concatenate(changes)
        self._step.host["changed_places"][:count] = places
        self._step.host["changed_blocks"][:count] = self._table.host["blocks"][places]
        return count

    def _send_table(self, count: int | None) -> None:
        """Bring the block table on the device up to date; `count` is of `_write_table_changes`."""
        if count is None:
            self._table.upload()
        elif count:
            places, blocks = (
                self._step.device[name][:count] for name in ("changed_places", "changed_blocks")
            )
            self._table.device["blocks"].index_copy_(0, places.long(), blocks)

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
            return upload(np.array(values, np.int64), self._step.device["rows"].device)

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
        *,
        width: int = 0,
    ) -> Step:
        host, device = self._step.host, self._step.device
        positions = device["positions"][: self._axes * max(width, total)].view(self._position_dtype)
        if self._axes > 1:
            positions = positions.view(self._axes, -1)
        return Step(
            token_ids=device["token_ids"][:total],
            positions=positions[..., :total],
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
            long_factors=device["long_factors"][:total] if self._has_long_factors else None,
            host=HostTokens(
                token_ids=host["token_ids"][:total],
                positions=host["positions"][: positions.numel()].reshape(self._axes, -1)[:, :total],
                slots=host["slots"][:total],
                long_factors=host["long_factors"][:total] if self._has_long_factors else None,
            ),
        )

    def _sampling_rows(self, sampled_rows: Int32s) -> SamplingRows:
        """Return the sampling parameters of the sampled rows; `sampled_rows` has the row of each."""
        is_random, top_k = self._temperature[sampled_rows] > 0, self._params["top_k"][sampled_rows]
        has_top_k, has_top_p = is_random & (top_k > 0), is_random & (self._top_p[sampled_rows] < 1)
        # A top-p without a top-k may need any number of candidates.
        is_narrow = bool(has_top_k.any()) and not bool((has_top_p & ~has_top_k).any())
        return self._sampling_views(
            len(sampled_rows),
            is_random=bool(is_random.any()),
            has_top_k=bool(has_top_k.any()),
            has_top_p=bool(has_top_p.any()),
            has_min_p=bool((is_random & (self._min_p[sampled_rows] > 0)).any()),
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


def _state_moves(spans: Items[Span]) -> StateMoves:
    """Return the slots of the recurrent states of spans."""
    rows = [span.sequence.row or 0 for span in spans]
    sources = [
        span.snapshot if span.snapshot is not None else row if span.start else -1
        for span, row in zip(spans, rows, strict=True)
    ]
    copies = [(number, *copy) for number, span in enumerate(spans) for copy in span.snapshots or ()]
    return StateMoves(
        sources=np.array(sources, np.int32),
        rows=np.array(rows, np.int32),
        copies=np.array(copies, np.int32).reshape(-1, 3),
    )


def with_prompt_parts(step: Step, spans: Items[tuple[int, Span]], indices: Int32s) -> Step:
    """Return the step with the ranges of keys, the rows and the routes of its prompts' parts.

    Args:
        step: the step.
        spans: the spans of sequences with parts, each with the index of its first token in the step.
        indices: (T,), the index of each token in its sequence.
    """
    values: list[torch.Tensor] = []
    taking: list[npt.NDArray[np.int64]] = []
    ends, starts, is_causal = indices + 1, indices.copy(), True
    routes = np.zeros(len(indices), np.int8)
    for offset, span in spans:
        parts = span.sequence.parts
        assert parts is not None
        rows, places = parts.rows_in(span.start, span.count)
        if len(places):
            if parts.rows is None:
                raise BugError(
                    f"sequence {span.sequence.spec.key!r}: the rows of its media are needed, and did not come"
                )
            values.append(parts.rows[rows])
            taking.append(places + offset)
        if parts.has_full(span.start, span.count):
            here = slice(offset, offset + span.count)
            ends[here], starts[here] = parts.key_ranges(span.start, span.count)
            is_causal = False
        routes[offset : offset + span.count] = parts.routes_of(span.start, span.count)
    device = step.slots.device
    changes: dict[str, Any] = {}
    if routes.any():
        changes["routes"] = upload(routes, device)
    if values:
        changes["row_values"] = torch.cat(values)
        changes["row_indices"] = upload(np.concatenate(taking), device)
    if not is_causal:
        changes["spans"] = replace(step.spans, key_ends=ends, full_starts=starts)
        changes["key_ends"] = upload(ends, device)
        changes["full_starts"] = upload(starts, device)
    return replace(step, **changes)
