"""Lockstep of a tensor-parallel group: the leader sends each step, and the followers run the same forward.

    leader    number of blocks, dtype, weights  ─┐
    follower  number of blocks, dtype, weights  ─┴─> the smallest number, for all; the others must be equal
    leader    a step                    ──> follower: the same forward, over the same blocks of its pool

A step is an int32 array: the numbers of tokens, spans, blocks per span and tokens per block; then the arrays
of `Step` that a forward reads. Only the leader has the sampling parameters.
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
"""Bytes of the number of blocks."""


class Followers:
    """The leader's connections to its followers."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def agree(self, blocks: int, dtype: torch.dtype, weights: str = "") -> int:
        """Wait until all members have loaded, and return the number of blocks of each member's pool.

        `weights` is the digest of the checkpoint that this member has loaded.

        Raises:
            ConfigError: the members do not compute in the same dtype, so their results cannot be added.
            GroupLostError: the members have loaded different checkpoints.
        """
        answers = [connection.receive() for connection in self._connections]
        for connection, data in zip(self._connections, answers, strict=True):
            other_dtype, _, other_weights = data[_COUNT:].decode(errors="replace").partition(" ")
            if other_dtype != str(dtype):
                raise ConfigError(
                    f"this rank computes in {dtype}, {connection.peer} in {other_dtype}: their processors "
                    "prefer different dtypes, but all must use the same; set model_kwargs.dtype"
                )
            if other_weights != weights:
                raise GroupLostError(
                    f"this rank has loaded the weights {weights[:12]}, {connection.peer} "
                    f"{other_weights[:12]}: their parts do not belong together; expected the same checkpoint "
                    "on the machines of all ranks"
                )
        least = min(blocks, *(int.from_bytes(data[:_COUNT], "little") for data in answers))
        for connection in self._connections:
            connection.send(least.to_bytes(_COUNT, "little"))
        return least

    @contextmanager
    def computing(self, step: Step) -> Iterator[None]:
        """Let the followers run the step's forward concurrently with the code inside.

        Raises:
            GroupLostError: it failed on a member, so the members are no longer in step.
        """
        data = pack_step(step)
        for connection in self._connections:
            connection.send(data)
        try:
            yield
        except GroupLostError:
            raise
        except Exception as error:
            raise GroupLostError(
                f"the leader's forward failed ({type(error).__name__}: {error}), and the progress of the "
                "other members is unknown: the whole group restarts"
            ) from error


class Leader:
    """A follower's connection to its leader."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def agree(self, blocks: int, dtype: torch.dtype, weights: str = "") -> int:
        """Send this member's number of blocks, dtype and digest of weights; return the group's number."""
        self._connection.send(blocks.to_bytes(_COUNT, "little") + f"{dtype} {weights}".encode())
        return int.from_bytes(self._connection.receive(), "little")

    def step(self, device: torch.device) -> Step:
        """Wait for the next step.

        Raises:
            GroupLostError: the leader is lost, or sent an invalid step.
        """
        return unpack_step(self._connection.receive(), device)


def pack_step(step: Step) -> bytes:
    """Return the part of a step that a forward reads, as bytes."""
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


def unpack_step(data: bytearray, device: torch.device) -> Step:
    """Return the step that `pack_step` encoded, without sampling.

    Raises:
        GroupLostError: the data is not a step.
    """
    numbers = np.frombuffer(data, np.int32, len(data) // 4)
    tokens, batch, columns, block_size = numbers[:_HEAD].tolist() if len(numbers) >= _HEAD else (0, 0, 0, 0)
    sizes = [tokens] * 3 + [batch + 1, batch, batch * columns]
    if min(tokens, batch, columns, block_size) < 1 or _HEAD + sum(sizes) != len(numbers):
        raise GroupLostError(
            f"the leader sent {len(data)} bytes that are not a step: expected all members to run one version"
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
