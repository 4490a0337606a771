"""The chain of walks of one order, run in sequence on this rank.

A walk's input that its call does not give is the value that an earlier walk of the chain emitted under that
name. The results of a walk are kept for the request; all other tensors are freed as soon as no rank can read
them. The chain knows neither the log nor other orders: it posts chunks and sends edges through functions.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from shared.errors import CapacityError
from shared.events import (
    NodeFired,
    NodeReady,
    NodeWork,
    OutputTotals,
    StreamTotals,
    TensorsReleased,
    WalkResult,
)
from shared.telemetry import tracing
from shared.telemetry.tracing import INVALID_SPAN, Span
from workers.data_plane.step_tensors import StepTensors
from workers.execution.kv_nodes import KvNodes
from workers.execution.loop_checkpoints import LoopCheckpoints
from workers.execution.node_executor import HostedModel, NodeExecutor
from workers.execution.node_works import NodeWorks
from workers.execution.output_tracks import OutputTracks
from workers.execution.program_runs import ProgramRuns
from workers.execution.run_checkpoints import RunCheckpoints
from workers.execution.step_placement import StepPlacement
from workers.execution.step_streams import StepStreams
from workers.execution.step_values import StepValues
from workers.execution.track_states import Recovered
from workers.execution.walk_execution import PeerFiring, Send, StepParts, WalkExecution
from workers.generation.output_chunks import PostChunk
from workers.generation.sequence_handle import SequenceHandle
from workers.orders.inbox import StepKey
from workers.streams.attempt_streams import AttemptStreams

MAX_PENDING_FIRINGS: Final = 4096
"""The most firings of other ranks that may wait for the firings before them."""
_TRACED_FACTS: Final = ("prompt_tokens", "completion_tokens", "finish_reason")
"""Facts of a walk that its span shows; none of them quotes a client."""


class WalkChain:
    """One order's walks, one after the other.

    Args:
        recovered: the request's output at the start of the step.
        spawn: runs a coroutine in the background.
        streams: the streams of the attempt; None where the model has none.
    """

    def __init__(
        self,
        hosted: HostedModel,
        key: StepKey,
        ready: NodeReady,
        placement: StepPlacement,
        *,
        recovered: Recovered,
        post: PostChunk,
        send: Send,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        streams: AttemptStreams | None = None,
    ) -> None:
        self._key = key
        self._ready = ready
        self._placement = placement
        self._send = send
        self._spawn = spawn
        self._tensors = StepTensors(hosted.store, key, placement.rank)
        self._works = NodeWorks(key.request_id)
        self._step_streams = StepStreams(streams, key, placement, self._tensors)
        self.tracks = OutputTracks(
            key, placement.tracks, recovered.tracks, post, choice=_choice_of(ready), kept=placement.kept
        )
        self._values = StepValues(hosted.graph, placement, self._tensors, self.tracks)
        self._kv_nodes = self._new_kv_nodes(hosted, recovered, streams)
        self._loops = LoopCheckpoints(
            key.step,
            placement.walks,
            ready.walks,
            found=recovered.checkpoints,
            tensors=self._tensors,
            reports=self._values,
        )
        checkpoints = RunCheckpoints(key.step, ready.walks, recovered.checkpoints, self._values)
        self._programs = ProgramRuns(key, ready, hosted.engine, self._values.advise, checkpoints, self._works)
        self._parts = self._shared_parts(hosted, checkpoints, streams)
        self._walk: WalkExecution | None = None
        self._pending: list[PeerFiring] = []  # firings for walks that have not started here

    def _new_kv_nodes(
        self, hosted: HostedModel, recovered: Recovered, streams: AttemptStreams | None
    ) -> KvNodes:
        return KvNodes(
            key=self._key,
            ready=self._ready,
            placement=self._placement,
            processing=hosted.processing,
            guides=hosted.guides,
            engine=hosted.engine,
            store=hosted.store,
            tensors=self._tensors,
            tracks=self.tracks,
            recovered=recovered.tracks,
            on_item=self._step_streams.on_item,
            on_tensors=self._step_streams.on_tensors,
            streams=streams,
            read=self._report_read,
            works=self._works,
        )

    def _shared_parts(
        self, hosted: HostedModel, checkpoints: RunCheckpoints, streams: AttemptStreams | None
    ) -> StepParts:
        """The parts that all walks share."""
        nodes = NodeExecutor(
            hosted,
            self._ready,
            self._placement,
            tensors=self._tensors,
            kv_nodes=self._kv_nodes,
            programs=self._programs,
            streams=self._step_streams,
            checkpoints=checkpoints,
            advise=self._values.advise,
            works=self._works,
        )
        return StepParts(
            key=self._key,
            placement=self._placement,
            nodes=nodes,
            kv_nodes=self._kv_nodes,
            tensors=self._tensors,
            values=self._values,
            loops=self._loops,
            step_streams=self._step_streams,
            tracks=self.tracks,
            streams=streams,
            send=self._send,
        )

    @property
    def sequences(self) -> Mapping[str, SequenceHandle]:
        """The step's sequences in the engine, by node."""
        return self._kv_nodes.sequences

    @property
    def engine_keys(self) -> list[str]:
        """The keys of the step's sequences and runs of programs in the engine."""
        return [*(sequence.key for sequence in self.sequences.values()), *self._programs.keys]

    async def run(self, span: Span = INVALID_SPAN) -> tuple[list[WalkResult], dict[str, float]]:
        """Run all walks; return their results, and the seconds each took. Each has a child span of `span`."""
        clock = asyncio.get_running_loop().time
        results: list[WalkResult] = []
        durations_s: dict[str, float] = {}
        for index, call in enumerate(self._ready.walks):
            begun_s = clock()
            with tracing.ending(tracing.start_child(span, f"walk {call.name}")) as child:
                self._step_streams.begin(index, call.args)
                inputs = self._loops.begun(index, self._values.inputs(self._placement.walks[index], call))
                walk = WalkExecution(self._parts, index, call.args, inputs, self._pending_for(index))
                self._walk = walk
                result = await walk.run()
                await self._programs.end_walk(index)
                facts = {
                    f"dalsegno.{name}": result.facts[name] for name in _TRACED_FACTS if name in result.facts
                }
                child.set_attributes(facts)
            results.append(result)
            durations_s[call.name] = durations_s.get(call.name, 0.0) + clock() - begun_s
            self._step_streams.walk_done(index)
        self._step_streams.end(self._placement.streams_to_end)
        return results, durations_s

    def work(self) -> dict[str, NodeWork]:
        """The work of this rank's nodes so far, by name."""
        return self._works.report()

    async def wait_stored(self) -> dict[str, OutputTotals]:
        """Wait until all output and all stream items are stored; return the totals of each track."""
        totals = await self.tracks.wait_stored()
        await self._step_streams.wait_stored()
        return totals

    def stream_totals(self) -> dict[str, StreamTotals]:
        """The totals of the streams that this rank's nodes consumed in this step."""
        return self._step_streams.totals()

    def receive(self, event: NodeFired | TensorsReleased, rank: int) -> None:
        """Take an event of another rank of the step."""
        if isinstance(event, TensorsReleased):
            self._tensors.returned(event.keys)
            return
        walk = self._walk
        if walk is None or event.walk > walk.index:
            self._pending.append((event, rank))
        elif event.walk == walk.index:
            walk.receive((event, rank))
        if walk is not None and len(self._pending) + len(walk.pending) > MAX_PENDING_FIRINGS:
            walk.fail(
                CapacityError(
                    f"expected at most {MAX_PENDING_FIRINGS} firings of other ranks to wait for those before "
                    "them, found more; try again later"
                )
            )

    def close(self) -> None:
        """Stop all output and free all tensors of the step.

        The values are dropped here: objects of a step refer to one another, and are collected much later.
        """
        self._walk = None
        self._values.close()
        self.tracks.close()
        self._tensors.close()

    def _pending_for(self, index: int) -> list[PeerFiring]:
        if not self._pending:
            return []
        due = [firing for firing in self._pending if firing[0].walk == index]
        self._pending = [firing for firing in self._pending if firing[0].walk > index]
        return due

    def _report_read(self, rank: int, keys: Sequence[str]) -> None:
        """Report to the owning rank that tensors were read. It is a hint; its loss is harmless."""
        name = f"{self._key.request_id}.released.{self._key.attempt}.{self._key.step}"
        event = TensorsReleased(
            id=f"{name}.{self._placement.rank}.{'.'.join(keys)}", index=self._key.step, keys=list(keys)
        )
        self._spawn(self._send(rank, event))


def _choice_of(ready: NodeReady) -> int:
    """The index of the choice (of several answers to one request) that the order computes."""
    return max((call.choice for call in ready.walks), default=0)
