"""Lockstep of a tensor-parallel group: the leader sends each step, and the followers run the same forward.

    leader    number of blocks, dtype, weights  ─┐
    follower  number of blocks, dtype, weights  ─┴─> the smallest number, for all; the others must be equal
    leader    a step                    ──> follower: the same forward, over the same blocks of its pool
    leader    an order                  ──> follower: keys and values of its pool are read or written
                                                      (`workers.kv_engine.parallel.shared_cells`)

A step is an int32 array: the numbers of tokens, of spans, of blocks per span and tokens per block, of
position axes, of tokens with a range of keys (all or none), of rows, of int32 numbers per row, of spans with
recurrent states (all or none), of their snapshots, of spans with the lengths of their prompts (all or none),
and of tokens with a choice of rotary factors (all or none); then the arrays of `Step` that a forward reads,
the bytes of the rows last. Only the leader has sampling parameters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from configs.deployment import ConfigError
from workers.kv_engine.parallel.connection import Connection, GroupLostError
from workers.kv_engine.parallel.shared_cells import CellOrder, order_of
from workers.kv_engine.sampling.sampling_rows import SamplingRows
from workers.kv_engine.step import Int32s, Spans, StateMoves, Step

_HEAD: Final = 12
_COUNT: Final = 8
"""Bytes of the number of blocks."""


class Followers:
    """The leader's connections to its followers.

    Attributes:
        connections: in the order of their parts.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections: Final = connections

    def agree(self, blocks: int, dtype: torch.dtype, weights: str = "") -> int:
        """Wait until all members have loaded, and return the number of blocks of each member's pool.

        `weights` is the digest of the checkpoint that this member has loaded.

        Raises:
            ConfigError: the members do not compute in the same dtype, so their results cannot be added.
            GroupLostError: the members have loaded different checkpoints.
        """
        answers = [connection.receive() for connection in self.connections]
        for connection, data in zip(self.connections, answers, strict=True):
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
        for connection in self.connections:
            connection.send(least.to_bytes(_COUNT, "little"))
        return least

    @contextmanager
    def computing(self, step: Step) -> Iterator[None]:
        """Let the followers run the step's forward concurrently with the code inside.

        Raises:
            GroupLostError: it failed on a member, so the members are no longer in step.
        """
        data = pack_step(step)
        for connection in self.connections:
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
        self.connection: Final = connection

    def agree(self, blocks: int, dtype: torch.dtype, weights: str = "") -> int:
        """Send this member's number of blocks, dtype and digest of weights; return the group's number."""
        self.connection.send(blocks.to_bytes(_COUNT, "little") + f"{dtype} {weights}".encode())
        return int.from_bytes(self.connection.receive(), "little")

    def next(self, device: torch.device, dtype: torch.dtype) -> Step | CellOrder:
        """Wait for the next step or order. `dtype` is the node's, which rows of media have.

        Raises:
            GroupLostError: the leader is lost, or sent an invalid step.
        """
        data = self.connection.receive()
        return order_of(data, device) or unpack_step(data, device, dtype)


def pack_step(step: Step) -> bytes:
    """Return the part of a step that a forward reads, as bytes."""
    spans = step.spans
    columns = -(-int(spans.kv_lengths.max()) // spans.block_size)
    tokens, positions = len(step.token_ids), step.positions.cpu().numpy()
    ranges = [] if spans.key_ends is None else [spans.key_ends, spans.full_starts]
    rows = _pack_rows(step)
    head = [tokens, len(spans.kv_lengths), columns, spans.block_size]
    axes = positions.size // tokens
    # Negative for positions of float32, which are sent by their bits.
    head += [-axes if positions.dtype == np.float32 else axes, tokens if ranges else 0, *rows.shape]
    moves = spans.states
    head += [0, 0] if moves is None else [len(moves.rows), len(moves.copies)]
    prompts = spans.prompt_lengths
    head.append(0 if prompts is None else len(prompts))
    factors: Any = [] if step.long_factors is None else step.long_factors.cpu().numpy()
    head.append(len(factors))
    arrays: list[Any] = [
        head,
        *(
            step.token_ids.cpu().numpy(),
            np.ascontiguousarray(positions).view(np.int32),
            step.slots.cpu().numpy(),
        ),
        *(spans.query_offsets, spans.kv_lengths, spans.block_tables[:, :columns]),
        *ranges,
        [] if step.row_indices is None else step.row_indices.cpu().numpy(),
        *([] if moves is None else [moves.sources, moves.rows, moves.copies]),
        [] if prompts is None else prompts,
        factors,
    ]
    packed = b"".join(np.ascontiguousarray(array, np.int32).tobytes() for array in arrays)
    return packed + rows.tobytes()


def _pack_rows(step: Step) -> npt.NDArray[np.int32]:
    """The bytes of the rows as int32 numbers, (N, numbers per row); hidden sizes are even."""
    if step.row_values is None:
        return np.zeros((0, 0), np.int32)
    return step.row_values.contiguous().cpu().view(torch.int32).numpy()


def unpack_step(data: bytearray, device: torch.device, dtype: torch.dtype = torch.float32) -> Step:
    """Return the step that `pack_step` encoded, without sampling. `dtype` is that of its rows.

    Raises:
        GroupLostError: the data is not a step.
    """
    numbers = np.frombuffer(data, np.int32, len(data) // 4)
    head = numbers[:_HEAD].tolist() if len(numbers) >= _HEAD else [0] * _HEAD
    tokens, batch, columns, block_size, axes, ranged, rows, width, stateful, copies, prompts, factored = head
    position_dtype, axes = torch.float32 if axes < 0 else torch.int32, abs(axes)
    sizes = [tokens, axes * tokens, tokens, batch + 1, batch, batch * columns]
    sizes += [ranged, ranged, rows, stateful, stateful, 3 * copies, prompts, factored, rows * width]
    if min(tokens, batch, columns, block_size, axes) < 1 or _HEAD + sum(sizes) != len(numbers):
        raise GroupLostError(
            f"the leader sent {len(data)} bytes that are not a step: expected all members to run one version"
        )
    parts: list[Int32s] = np.split(numbers[_HEAD:], np.cumsum(sizes)[:-1])

    def on_device(part: Int32s) -> torch.Tensor:
        return torch.from_numpy(part).to(device)

    tables, nothing = parts[5].reshape(batch, columns), torch.zeros(0, dtype=torch.int32, device=device)
    return Step(
        token_ids=on_device(parts[0]),
        positions=on_device(parts[1] if axes == 1 else parts[1].reshape(axes, tokens)).view(position_dtype),
        slots=on_device(parts[2]),
        rows=torch.arange(batch, dtype=torch.int32, device=device),
        query_offsets=on_device(parts[3]),
        kv_lengths=on_device(parts[4]),
        block_table=on_device(tables),
        logit_indices=nothing,
        sampling=_no_sampling(nothing),
        spans=Spans(
            query_offsets=parts[3],
            kv_lengths=parts[4],
            block_tables=tables,
            block_size=block_size,
            key_ends=parts[6] if ranged else None,
            full_starts=parts[7] if ranged else None,
            states=(
                StateMoves(sources=parts[9], rows=parts[10], copies=parts[11].reshape(-1, 3))
                if stateful
                else None
            ),
            prompt_lengths=parts[12] if prompts else None,
        ),
        key_ends=on_device(parts[6]) if ranged else None,
        full_starts=on_device(parts[7]) if ranged else None,
        long_factors=on_device(parts[13]) if factored else None,
        row_values=on_device(parts[14]).reshape(rows, width).view(dtype) if rows else None,
        row_indices=on_device(parts[8]).long() if rows else None,
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
