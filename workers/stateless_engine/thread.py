"""The stateless engine's thread: it alone runs the nodes; the event loop is beside it.

`fire` hands a firing over and waits for what it comes to. So many firings are under way at most; whoever
brings one more waits until one of them has ended. The thread takes all that wait, chooses a batch
(`MicroScheduler`), runs it, and wakes the loop once with what it came to. An idle thread blocks on its
mailbox.

The nodes are made in the thread too, for it loads them there. No torch is imported here.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any, Final, Protocol

from models.base import ChunkOf
from shared.errors import BugError, CapacityError, DalSegnoError, WorkerError
from shared.telemetry import timeline
from workers.data_plane.port import Array
from workers.stateless_engine.firing import Firing, FiringResult, StatelessStats
from workers.stateless_engine.scheduler import MicroScheduler
from workers.threads.mailbox import Mailbox

_LOGGER: Final = logging.getLogger(__name__)

CAPACITY: Final = 1024
"""Firings under way at a time, those that run included."""
CLOSE_S: Final = 5.0
"""How long a batch may take that is waited for at the end; one that hangs ends with the process."""


class Nodes(Protocol):
    """What the thread drives (see `workers.stateless_engine.nodes.StatelessNodes`)."""

    @property
    def max_batch(self) -> Mapping[str, int]:
        """The nodes there are, and how many firings each takes together."""
        ...

    def run(self, node: str, firings: Sequence[Firing]) -> list[FiringResult | DalSegnoError]:
        """What each firing came to; one that fails does not raise."""
        ...


@dataclass(frozen=True, slots=True)
class _Order:
    firing: Firing
    fired: "asyncio.Future[FiringResult]"


class StatelessThread:
    """Runs stateless nodes beside the event loop.

    Args:
        make_nodes: loads them; called in the thread.
    """

    def __init__(self, make_nodes: Callable[[], Nodes]) -> None:
        self._make_nodes = make_nodes
        self._inbox: Mailbox[_Order] = Mailbox(CAPACITY)
        self._room = asyncio.Semaphore(CAPACITY)
        self._under_way: set[asyncio.Future[FiringResult]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = Thread(target=self._run, name="stateless", daemon=True)
        self._ready: Future[Nodes] = Future()
        self._ended: Future[None] = Future()
        self._stats = StatelessStats()
        self._timeline = timeline.recording()

    # ---- the loop's side ---------------------------------------------------------------------------
    async def start(self) -> Nodes:
        """Start the thread, and wait until the nodes are made; what making them raises is raised here.

        They are the thread's own: read their constants, call nothing.
        """
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return await asyncio.shield(asyncio.wrap_future(self._ready))

    async def wait(self) -> None:
        """Wait until the thread has ended; raise what it died of."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def close(self) -> None:
        """Stop after the batch that is running; firings that are unfinished fail.

        Nodes that are still loading are not waited for: the thread ends by itself when they are there, or
        with the process.
        """
        self._inbox.close()
        if self._ready.done() and self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, CLOSE_S)
        self._give_up("is closed")

    async def fire(
        self,
        node: str,
        inputs: Mapping[str, Array],
        args: Mapping[str, Any],
        *,
        seed: int,
        path: tuple[int, ...] = (),
        chunk: ChunkOf | None = None,
    ) -> FiringResult:
        """Fire a node once; a firing that is cancelled before its batch begins is not run.

        Raises:
            DalSegnoError: the firing failed; others beside it did not.
            CapacityError: the engine is closed.
            BugError: there is no such node here.
        """
        assert self._loop is not None, "started"
        known = self._ready.result().max_batch
        if node not in known:
            raise BugError(f"node {node!r} is not a stateless node of this rank; it has {sorted(known)}")
        firing = Firing(node=node, inputs=inputs, args=args, seed=seed, path=path, chunk=chunk)
        async with self._room:
            fired: asyncio.Future[FiringResult] = self._loop.create_future()
            # Cancelled ones stay in the mailbox until the thread looks into it, and take their place there.
            if not self._inbox.try_put(_Order(firing, fired)):
                what = "is closed" if self._inbox.is_closed else f"has {CAPACITY} firings queued"
                raise CapacityError(f"the stateless engine {what}; try again later")
            self._under_way.add(fired)
            try:
                return await fired
            finally:
                self._under_way.discard(fired)

    def stats(self) -> StatelessStats:
        """Its counters: the living object, not a copy."""
        return self._stats

    def _deliver(self, orders: Sequence[_Order], results: Sequence[FiringResult | DalSegnoError]) -> None:
        for order, result in zip(orders, results, strict=True):
            if order.fired.done():
                continue  # cancelled meanwhile
            if isinstance(result, DalSegnoError):
                order.fired.set_exception(result)
            else:
                order.fired.set_result(result)

    def _give_up(self, why: str) -> None:
        for fired in self._under_way:
            if not fired.done():
                fired.set_exception(WorkerError(f"the stateless engine {why}"))

    # ---- the thread's side -------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            nodes = self._make_nodes()
            waiting: MicroScheduler[_Order] = MicroScheduler(nodes.max_batch)
        except BaseException as error:  # noqa: BLE001 - raised again by `start`
            self._ready.set_exception(error)
            self._ended.set_result(None)
            return
        self._ready.set_result(nodes)
        try:
            while not self._inbox.is_closed:
                for order in self._inbox.take(wait=not len(waiting)):
                    waiting.add(order.firing.node, order)
                self._run_batch(nodes, waiting)
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            _LOGGER.critical("the stateless engine's thread died: %s: %s", type(error).__name__, error)
            self._inbox.close()
            self._ended.set_exception(error)
            self._on_loop(self._give_up, "has died")
            return
        self._ended.set_result(None)

    def _run_batch(self, nodes: Nodes, waiting: MicroScheduler[_Order]) -> None:
        taken = waiting.take()
        self._stats.waiting = len(waiting)
        if taken is None or self._inbox.is_closed:
            return
        node, orders = taken
        orders = [order for order in orders if not order.fired.cancelled()]
        if not orders:
            return
        begun_s = time.perf_counter()
        results = nodes.run(node, [order.firing for order in orders])
        ended_s = time.perf_counter()
        self._stats.busy_s += ended_s - begun_s
        if self._timeline is not None:
            self._timeline.slice(node, begun_s, ended_s, firings=len(orders))
        self._stats.batches += 1
        self._stats.firings += len(orders)
        self._stats.failed += sum(isinstance(result, DalSegnoError) for result in results)
        self._on_loop(self._deliver, orders, results)

    def _on_loop(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)
