"""Members of a shared copy in step: the leader says what the next forward is of, the followers run it too.

    leader    room for blocks, dtype   ─┐
    follower  room for blocks, dtype   ─┴─> the least room, which all take; the dtype has to be the same
    leader    a step                   ──> follower: the same forward, over the same blocks of its own pool

A step is int32 numbers: how many tokens, spans, blocks of a span, and tokens of a block; then the arrays of
`Step` that a forward reads. What is sampled, and how, the leader alone knows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from configs.deployment import ConfigError
from workers.kv_engine.parallel.connection import Connection, GroupLostError
from workers.kv_engine.sampling.sampling_rows import SamplingRows
from workers.kv_engine.step import Int32s, Spans, Step

_HEAD: Final = 4
_COUNT: Final = 8
"""Bytes of how many blocks there are."""


class Followers:
    """Those who compute with this engine, as its leader has them."""

    def __init__(self, lines: Sequence[Connection]) -> None:
        self._lines = lines

    def agree(self, blocks: int, dtype: torch.dtype) -> int:
        """How many blocks each member's pool has, when all have loaded; waits for that.

        Raises:
            ConfigError: the members do not compute in the same dtype, and cannot add up what they compute.
        """
        told = [line.receive() for line in self._lines]
        for line, data in zip(self._lines, told, strict=True):
            if data[_COUNT:] != str(dtype).encode():
                raise ConfigError(
                    f"this rank computes in {dtype}, {line.who} in {data[_COUNT:].decode(errors='replace')}: "
                    "their processors suit different ones; name one in model_kwargs.dtype"
                )
        least = min(blocks, *(int.from_bytes(data[:_COUNT], "little") for data in told))
        for line in self._lines:
            line.send(least.to_bytes(_COUNT, "little"))
        return least

    @contextmanager
    def computing(self, step: Step) -> Iterator[None]:
        """Have the others run the step's forward beside the one inside.

        Raises:
            GroupLostError: that failed here or there: the members are in step no more.
        """
        data = packed(step)
        for line in self._lines:
            line.send(data)
        try:
            yield
        except GroupLostError:
            raise
        except Exception as error:
            raise GroupLostError(
                f"the leader's forward failed ({type(error).__name__}: {error}), and nobody knows how far "
                "the others got: all members of the copy begin anew"
            ) from error


class Leader:
    """Who says what is computed, as a follower has it."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def agree(self, blocks: int, dtype: torch.dtype) -> int:
        """How many blocks each member's pool has, when all have loaded; waits for that."""
        self._line.send(blocks.to_bytes(_COUNT, "little") + str(dtype).encode())
        return int.from_bytes(self._line.receive(), "little")

    def step(self, device: torch.device) -> Step:
        """Wait for the next step.

        Raises:
            GroupLostError: there will be none, or what came is none.
        """
        return unpacked(self._line.receive(), device)


def packed(step: Step) -> bytes:
    """What a forward reads of a step."""
    spans = step.spans
    columns = -(-int(spans.kv_lengths.max()) // spans.block_size)
    head = np.array([len(step.token_ids), len(spans.kv_lengths), columns, spans.block_size], np.int32)
    arrays = [
        *(tensor.cpu().numpy() for tensor in (step.token_ids, step.positions, step.slots)),
        spans.query_offsets,
        spans.kv_lengths,
        spans.block_tables[:, :columns],
    ]
    return head.tobytes() + b"".join(np.ascontiguousarray(array, np.int32).tobytes() for array in arrays)


def unpacked(data: bytearray, device: torch.device) -> Step:
    """A step that samples nothing, of what `packed` made.

    Raises:
        GroupLostError: that is no step.
    """
    numbers = np.frombuffer(data, np.int32, len(data) // 4)
    tokens, batch, columns, block_size = numbers[:_HEAD].tolist() if len(numbers) >= _HEAD else (0, 0, 0, 0)
    sizes = [tokens] * 3 + [batch + 1, batch, batch * columns]
    if min(tokens, batch, columns, block_size) < 1 or _HEAD + sum(sizes) != len(numbers):
        raise GroupLostError(
            f"the leader sent {len(data)} bytes that are no step: are all members of one version?"
        )
    parts: list[Int32s] = np.split(numbers[_HEAD:], np.cumsum(sizes)[:-1])
    token_ids, positions, slots, query_offsets, kv_lengths = (
        torch.from_numpy(part).to(device) for part in parts[:5]
    )
    tables = parts[5].reshape(batch, columns)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    return Step(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        rows=torch.arange(batch, dtype=torch.int32, device=device),
        query_offsets=query_offsets,
        kv_lengths=kv_lengths,
        block_table=torch.from_numpy(tables).to(device),
        logit_indices=nothing,
        sampling=_no_sampling(nothing),
        spans=Spans(query_offsets=parts[3], kv_lengths=parts[4], block_tables=tables, block_size=block_size),
    )


def _no_sampling(nothing: torch.Tensor) -> SamplingRows:
    floats = nothing.view(torch.float32)
    return SamplingRows(
        temperature=floats,
        top_p=floats,
        top_k=nothing,
        min_p=floats,
        seed_low=nothing,
        seed_high=nothing,
        sample_index=nothing,
        draw_index=nothing,
        is_random=False,
        has_top_k=False,
        has_top_p=False,
        has_min_p=False,
        candidates=None,
    )
