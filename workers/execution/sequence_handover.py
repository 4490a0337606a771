"""Handover of a sequence from one rank to another (disaggregated prefill and decode).

The first rank exports the keys and values, the sampled tokens and their scores with its `NodeFired`. The
second rank folds the tokens, emits their output, and submits the sequence to its engine with those keys and
values.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shared.events import SequenceHandover, TokenLogprobs
from shared.tensors import Handle
from workers.data_plane.port import Array, TensorStore
from workers.data_plane.step_tensors import StepTensors, check, put
from workers.generation.sequence_handle import HandoverHandle, SequenceHandle
from workers.kv_engine.outputs import TokenScore

ReportRead = Callable[[int, Sequence[str]], None]
"""Reports to the rank that owns them that tensors were read: (rank, tensor keys)."""


@dataclass(frozen=True, slots=True)
class ArrivedSequence:
    """A sequence that `rank` has handed over to this one."""

    state: SequenceHandover
    rank: int


class SequenceHandovers:
    """Both ends of the handovers in one step."""

    def __init__(self, store: TensorStore, tensors: StepTensors, report_read: ReportRead) -> None:
        self._store = store
        self._tensors = tensors
        self._report_read = report_read

    async def export(self, sequence: HandoverHandle, key: str) -> SequenceHandover | None:
        """The state of an ended sequence for the next rank; None if an earlier attempt had ended it.

        `key` is the key prefix of its tensors.
        """
        if sequence.kv is None:
            return None
        self._tensors.lend(sequence.kv)
        scores: Handle | None = None
        if sequence.prompt_scores:
            array = encode_scores(sequence.prompt_scores)
            scores = await put(self._store, f"{key}/prompt_scores", array, self._tensors.open_scope())
            self._tensors.lend(scores)
        return SequenceHandover(
            kv=sequence.kv,
            token_ids=sequence.token_ids,
            logprobs=sequence.logprobs,
            prompt_scores=scores,
        )

    async def take_over(self, sequence: SequenceHandle, arrived: ArrivedSequence) -> None:
        """Fold the tokens that the other rank sampled, and emit their output."""
        state = arrived.state
        if state.prompt_scores is not None and sequence.echo is not None:
            sequence.push_prompt_scores(decode_scores(await self._tensors.read(state.prompt_scores)))
            self._tensors.check([state.prompt_scores])
        logprobs: Sequence[TokenLogprobs | None] = state.logprobs or [None] * len(state.token_ids)
        for token_id, token_logprobs in zip(state.token_ids, logprobs, strict=True):
            sequence.push(token_id, token_logprobs)
        done = [handle for handle in (state.prompt_scores,) if handle is not None]
        if sequence.ended.done():
            done.append(state.kv)  # no engine step will read it
        if keys := [handle.key for handle in done if handle.data is None]:
            self._report_read(arrived.rank, keys)

    def on_kv_read(self, arrived: ArrivedSequence) -> Callable[[], None]:
        """The function that the engine thread calls after it has copied the keys and values."""
        loop, store, kv = asyncio.get_running_loop(), self._store, arrived.state.kv

        def on_kv_read() -> None:
            check(store, kv)
            loop.call_soon_threadsafe(self._report_read, arrived.rank, [kv.key])

        return on_kv_read


def encode_scores(scores: Sequence[TokenScore]) -> Array:
    """Scores as a tensor: int32 (tokens, 1 + top, 2), each entry a token id and the bits of a float32."""
    entries = [[(score.token_id, score.logprob), *score.top] for score in scores]
    cells = np.empty((len(entries), len(entries[0]), 2), dtype="<i4")
    cells[:, :, 0] = [[token_id for token_id, _ in row] for row in entries]
    floats = np.array([[logprob for _, logprob in row] for row in entries], dtype="<f4")
    cells[:, :, 1] = floats.view("<i4")
    return Array(dtype="int32", shape=cells.shape, data=cells.reshape(-1).view(np.uint8))


def decode_scores(array: Array) -> list[TokenScore]:
    """The scores in a tensor of `encode_scores`."""
    cells = array.data.view("<i4").reshape(array.shape)
    ids: list[list[int]] = cells[:, :, 0].tolist()
    floats: list[list[float]] = np.ascontiguousarray(cells[:, :, 1]).view("<f4").tolist()
    return [
        TokenScore(token_id=names[0], logprob=values[0], top=tuple(zip(names[1:], values[1:], strict=True)))
        for names, values in zip(ids, floats, strict=True)
    ]
