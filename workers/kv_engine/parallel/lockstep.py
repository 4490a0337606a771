"""Lockstep of a tensor-parallel group: the leader sends each step, and the followers run the same forward.

    leader    number of blocks, dtype, weights  ─┐
    follower  number of blocks, dtype, weights  ─┴─> the smallest number, for all; the others must be equal
    leader    can steps be recorded?   <──> follower: only if all can; questions follow at each recording
                                                      (`workers.kv_engine.parallel.follower_graphs`)
    leader    a step                    ──> follower: the same forward, over the same blocks of its pool
    leader    an order                  ──> follower: keys and values of its pool are read or written
                                                      (`workers.kv_engine.parallel.shared_cells`)

A step is an int32 array: the numbers of tokens, of spans, of blocks per span and tokens per block, of
position axes, of tokens with a range of keys (all or none), of rows, of int32 numbers per row, of spans with
recurrent states (all or none), of their snapshots, of spans with the lengths of their prompts (all or none),
of tokens with a choice of rotary factors (all or none), and the size of the recording that all members replay
(`RecordingSize`); then the arrays of `Step` that a forward reads, the bytes of the rows last. Only the leader
has sampling parameters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from configs.deployment import ConfigError
from workers.kv_engine.gpu.cuda_graphs import Answers
from workers.kv_engine.parallel.connection import Connection, GroupLostError
from workers.kv_engine.parallel.shared_cells import CellOrder, order_of
from workers.kv_engine.sampling.sampling_rows import SamplingRows
from workers.kv_engine.step import Int32s, Spans, StateMoves, Step

_HEAD: Final = 14
_NUMBER: Final = 4
"""Bytes of a number."""
_COUNT: Final = 8
"""Bytes of the number of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSize:
    """The recording of a step that members replay, by its size; both 0: the step runs unrecorded.

    Attributes:
        rows: of decodes, as `workers.kv_engine.gpu.cuda_graphs.DecodeGraphs` records them.
        tokens: of a step with prompts, as `workers.kv_engine.gpu.prompt_graphs.PromptGraphs` does.
    """

    rows: int = 0
    tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.rows or self.tokens)


UNRECORDED: Final = RecordingSize()
CAN_RECORD: Final = "can steps be recorded"
"""The first question of a group (`Followers.ask`)."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step that members replay: on the CPU, with the size of its recording."""

    step: Step
    size: RecordingSize


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

    def ask(self, question: str, answer: bool) -> Answers:
        """See `workers.kv_engine.gpu.cuda_graphs.Group`; the followers ask by their `Leader`."""
        answers = [answer, *(_answer(one.receive(), question, one.peer) for one in self.connections)]
        found = Answers(sum(answers), len(answers))
        for connection in self.connections:
            connection.send(bytes([found.yes, found.members]) + question.encode())
        return found

    def lost(self, why: str) -> GroupLostError:
        """See `Group`."""
        return _lost(why)

    @contextmanager
    def computing(self, step: Step, size: RecordingSize = UNRECORDED) -> Iterator[None]:
        """Let the followers run the step's forward concurrently with the code inside.

        With a size, they replay their recording of it.

        Raises:
            GroupLostError: it failed on a member, so the members are no longer in step.
        """
        data = pack_step(step, size)
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

    def ask(self, question: str, answer: bool) -> Answers:
        """See `Group`."""
        self.connection.send(bytes([answer]) + question.encode())
        reply = self.connection.receive()
        _answer(reply[1:], question, self.connection.peer)
        return Answers(reply[0], reply[1])

    def lost(self, why: str) -> GroupLostError:
        """See `Group`."""
        return _lost(why)

    def next(self, device: torch.device, dtype: torch.dtype) -> Step | ReplayedStep | CellOrder:
        """Wait for the next step or order. `dtype` is the node's, which rows of media have.

        Raises:
            GroupLostError: the leader is lost, or sent an invalid step.
        """
        data = self.connection.receive()
        if (order := order_of(data, device)) is not None:
            return order
        size = _size_of(data)
        if size:
            return ReplayedStep(unpack_step(data, torch.device("cpu"), dtype), size)
        return unpack_step(data, device, dtype)


def _lost(why: str) -> GroupLostError:
    return GroupLostError(f"{why}: the whole group restarts")


def _answer(data: bytearray, question: str, peer: str) -> bool:
    """Return a member's answer to a question.

    Raises:
        GroupLostError: it is one to another question, or none.
    """
    if data[1:] != question.encode():
        raise _lost(
            f"{peer} sent {len(data)} bytes where this rank asks {question!r}; they are not at the same place"
        )
    return bool(data[0])


def pack_step(step: Step, size: RecordingSize = UNRECORDED) -> bytes:
    """Return the part of a step that a forward reads, as bytes."""
    spans, host = step.spans, step.host
    assert host is not None, "a group computes only what a builder made"
    columns = -(-int(spans.kv_lengths.max()) // spans.block_size)
    tokens = len(host.token_ids)
    ranges = [] if spans.key_ends is None else [spans.key_ends, spans.full_starts]
    rows = _pack_rows(step)
    head = [tokens, len(spans.kv_lengths), columns, spans.block_size]
    axes = len(host.positions)
    # Negative for positions of float32, which are sent by their bits.
    head += [-axes if step.positions.is_floating_point() else axes, tokens if ranges else 0, *rows.shape]
    moves = spans.states
    head += [0, 0] if moves is None else [len(moves.rows), len(moves.copies)]
    prompts = spans.prompt_lengths
    head.append(0 if prompts is None else len(prompts))
    factors: Any = [] if host.long_factors is None else host.long_factors
    head += [len(factors), size.rows, size.tokens]
    arrays: list[Any] = [
        head,
        *(host.token_ids, host.positions, host.slots),
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


def _size_of(data: bytearray) -> RecordingSize:
    """Return the size of the recording in a leader's message; `unpack_step` checks its length."""
    if len(data) < _HEAD * _NUMBER:
        return UNRECORDED
    rows, tokens = np.frombuffer(data, np.int32, 2, offset=(_HEAD - 2) * _NUMBER).tolist()
    return RecordingSize(rows=rows, tokens=tokens)


def unpack_step(data: bytearray, device: torch.device, dtype: torch.dtype = torch.float32) -> Step:
    """Return the step that `pack_step` encoded, without sampling. `dtype` is that of its rows.

    Raises:
        GroupLostError: the data is not a step.
    """
    numbers = np.frombuffer(data, np.int32, len(data) // 4)
    head = numbers[:_HEAD].tolist() if len(numbers) >= _HEAD else [0] * _HEAD
    tokens, batch, columns, block_size, axes, ranged, rows, width, stateful, copies, prompts, factored, *_ = (
        head
    )
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
