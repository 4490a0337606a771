"""The stateless engine's thread: it owns the stateless nodes and their device, next to the event loop.

`fire` sends one firing and waits for its result. At most `CAPACITY` firings are under way; further callers
wait. The thread takes all waiting firings, chooses a batch (`MicroScheduler`), runs it, and wakes the loop
once with the results. Between two batches each stepped node computes one forward of its runs
(`stepped_runs`). An idle thread blocks on its mailbox.

The nodes are loaded in the thread, too. Imports no torch.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from models.base import ChunkOf
from models.encoder_cache import CacheCounters
from shared.errors import BugError, CapacityError, DalSegnoError, WorkerError
from shared.meters import EncoderMeters, StepMeters
from shared.telemetry import timeline
from workers.data_plane.port import Array, DeviceArray, PublishOnDevice
from workers.stateless_engine.firing import FiringReport, FiringResult, StatelessFiring, StatelessStats
from workers.stateless_engine.scheduler import BatchKey, MicroScheduler
from workers.stateless_engine.stepped_runs import PendingRun, SteppedRuns, Stepper
from workers.threads.engine_work import EngineWork
from workers.threads.mailbox import Mailbox
from workers.threads.owner_thread import OwnerThread

_LOGGER: Final = logging.getLogger(__name__)

CAPACITY: Final = 1024
"""The most firings under way, those that are running included."""


class NodeRunner(Protocol):
    """The nodes that the thread runs (`workers.stateless_engine.nodes.StatelessNodes`)."""

    @property
    def max_batch(self) -> Mapping[str, int]:
        """The largest batch of each node, by its name."""
        ...

    @property
    def max_cost(self) -> Mapping[str, float]:
        """The largest cost of a batch, for the nodes that state one."""
        ...

    @property
    def steppers(self) -> Mapping[str, Stepper]:
        """The stepped nodes, by name; the other members are about the other nodes."""
        ...

    def batch_key(self, firing: StatelessFiring) -> BatchKey:
        """The group and the cost of a firing.

        Raises:
            DalSegnoError: the node cannot tell them; the firing has failed.
        """
        ...

    def encoder_caches(self) -> Sequence[CacheCounters]:
        """The counters of the nodes that have an encoder cache; read by other threads, too."""
        ...

    def run(self, node: str, firings: Sequence[StatelessFiring]) -> list[FiringResult | DalSegnoError]:
        """Return the result or the error of each firing."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _PendingFiring:
    """A firing that a caller waits for; `report` takes the reports of a stepped run, on the loop."""

    firing: StatelessFiring
    result: "asyncio.Future[FiringResult]"
    report: Callable[[FiringReport], None] | None = None

    @property
    def is_cancelled(self) -> bool:
        return self.result.cancelled()


class StatelessThread(OwnerThread[NodeRunner]):
    """Runs stateless nodes in their own thread.

    Args:
        make_nodes: loads the nodes; called in the thread.
    """

    def __init__(self, make_nodes: Callable[[], NodeRunner]) -> None:
        super().__init__("stateless", self._make_nodes, self._serve_nodes, self._die)
        self._load = make_nodes
        self._waiting: MicroScheduler[_PendingFiring] = MicroScheduler({})
        self._stepped: dict[str, SteppedRuns] = {}
        self._inbox: Mailbox[_PendingFiring] = Mailbox(CAPACITY)
        self._room = asyncio.Semaphore(CAPACITY)
        self._under_way: set[asyncio.Future[FiringResult]] = set()
        self._stats = StatelessStats()
        self._timeline = timeline.recording()

    # ---- called on the event loop ------------------------------------------------------------------
    async def close(self) -> None:
        """Stop after the current batch; unfinished firings fail.

        Nodes that are still loading are not waited for: the thread ends after the load, or with the process.
        """
        self._inbox.close()
        await self.join()
        self._fail_all("is closed")

    async def fire(
        self,
        node: str,
        inputs: Mapping[str, Array | DeviceArray],
        args: Mapping[str, Any],
        *,
        seed: int,
        path: tuple[int, ...] = (),
        chunk: ChunkOf | None = None,
        publish: Mapping[str, PublishOnDevice] | None = None,
        state: Mapping[str, Array] | None = None,
        report: Callable[[FiringReport], None] | None = None,
        work: EngineWork | None = None,
    ) -> FiringResult:
        """Run a node once; a firing that is cancelled before its batch or its next step starts is not run.

        The execution of a stepped node goes on from `state`, if that is not empty, and calls `report`.

        Raises:
            DalSegnoError: the firing failed; the others of its batch are not affected.
            CapacityError: the engine is closed.
            BugError: this rank has no such node.
        """
        self._check_known(node)
        firing = StatelessFiring(
            node=node,
            inputs=inputs,
            args=args,
            seed=seed,
            path=path,
            chunk=chunk,
            publish=publish or {},
            state=state or {},
            work=work or EngineWork(),
        )
        firing.work.queue()
        async with self._room:
            result: asyncio.Future[FiringResult] = asyncio.get_running_loop().create_future()
            self._put(_PendingFiring(firing, result, report))
            self._under_way.add(result)
            try:
                return await result
            finally:
                self._under_way.discard(result)

    def _check_known(self, node: str) -> None:
        nodes = self.made
        assert nodes is not None, "started"
        known = {*nodes.max_batch, *nodes.steppers}
        if node not in known:
            raise BugError(f"node {node!r} is not a stateless node of this rank; it has {sorted(known)}")

    def _put(self, pending: _PendingFiring) -> None:
        # A cancelled firing takes up room in the mailbox until the thread reads it.
        if not self._inbox.try_put(pending):
            reason = "is closed" if self._inbox.is_closed else f"has {CAPACITY} firings queued"
            raise CapacityError(f"the stateless engine {reason}; try again later")

    def stats(self) -> StatelessStats:
        """Return the engine's own counters, not a copy."""
        return self._stats

    def encoder_caches(self) -> EncoderMeters:
        """Return the sums of the counters of all encoder caches."""
        caches = self.made.encoder_caches() if self.made is not None else ()
        return EncoderMeters(
            hits=sum(one.hits for one in caches),
            misses=sum(one.misses for one in caches),
            evicted=sum(one.evicted for one in caches),
            entries=sum(one.entries for one in caches),
            nbytes=sum(one.nbytes for one in caches),
        )

    def stepped_nodes(self) -> dict[str, StepMeters]:
        """Return the counters of the stepped nodes, by name; not copies."""
        return {node: runs.meters for node, runs in self._stepped.items()}

    def _deliver(
        self, batch: Sequence[_PendingFiring], results: Sequence[FiringResult | DalSegnoError]
    ) -> None:
        for pending, result in zip(batch, results, strict=True):
            if pending.result.done():
                continue  # cancelled meanwhile
            if isinstance(result, DalSegnoError):
                pending.result.set_exception(result)
            else:
                pending.result.set_result(result)

    @staticmethod
    def _deliver_report(pending: _PendingFiring, report: FiringReport) -> None:
        if pending.report is not None and not pending.result.done():
            pending.report(report)

    def _fail_all(self, reason: str) -> None:
        for result in self._under_way:
            if not result.done():
                result.set_exception(WorkerError(f"the stateless engine {reason}"))

    # ---- called in the thread ----------------------------------------------------------------------
    def _make_nodes(self) -> NodeRunner:
        nodes = self._load()
        self._waiting = MicroScheduler(nodes.max_batch, nodes.max_cost)
        self._stepped = {
            name: SteppedRuns(stepper, report=self._report, end=self._end_run)
            for name, stepper in nodes.steppers.items()
        }
        return nodes

    def _serve_nodes(self, nodes: NodeRunner) -> None:
        try:
            while not self._inbox.is_closed:
                has_work = len(self._waiting) or any(map(len, self._stepped.values()))
                for pending in self._inbox.take(wait=not has_work):
                    self._add(nodes, pending)
                self._run_batch(nodes)
                self._run_steps()
        finally:
            for runs in self._stepped.values():
                runs.close()

    def _add(self, nodes: NodeRunner, pending: _PendingFiring) -> None:
        if (runs := self._stepped.get(pending.firing.node)) is not None:
            runs.add(pending)
            return
        try:
            key = nodes.batch_key(pending.firing)
        except DalSegnoError as error:
            self._stats.failed += 1
            self.on_loop(self._deliver, [pending], [error])
            return
        self._waiting.add(pending.firing.node, pending, key)

    def _die(self, error: BaseException) -> None:
        _LOGGER.critical("the stateless engine's thread died: %s: %s", type(error).__name__, error)
        self._inbox.close()
        self.on_loop(self._fail_all, "has died")

    def _run_batch(self, nodes: NodeRunner) -> None:
        taken = self._waiting.take()
        self._stats.waiting = len(self._waiting)
        if taken is None or self._inbox.is_closed:
            return
        node, batch = taken
        batch = [pending for pending in batch if not pending.result.cancelled()]
        if not batch:
            return
        begun_s = time.perf_counter()
        for pending in batch:
            pending.firing.work.admit()
            pending.firing.work.count_step(len(batch))
        results = nodes.run(node, [pending.firing for pending in batch])
        ended_s = time.perf_counter()
        self._stats.busy_s += ended_s - begun_s
        if self._timeline is not None:
            self._timeline.slice(node, begun_s, ended_s, firings=len(batch))
        self._stats.batches += 1
        self._stats.firings += len(batch)
        self._stats.failed += sum(isinstance(result, DalSegnoError) for result in results)
        self.on_loop(self._deliver, batch, results)

    def _run_steps(self) -> None:
        """Compute one forward of each stepped node that has runs."""
        for node, runs in self._stepped.items():
            if not len(runs) or self._inbox.is_closed:
                continue
            begun_s = time.perf_counter()
            calls = runs.step()
            ended_s = time.perf_counter()
            if self._timeline is not None and calls:
                self._timeline.slice(node, begun_s, ended_s, calls=calls)
            self._stats.busy_s += ended_s - begun_s

    def _report(self, pending: PendingRun, report: FiringReport) -> None:
        self.on_loop(self._deliver_report, pending, report)

    def _end_run(self, pending: PendingRun, result: FiringResult | DalSegnoError) -> None:
        self._stats.firings += 1
        self._stats.failed += isinstance(result, DalSegnoError)
        self.on_loop(self._deliver, [pending], [result])
