"""The process of a worker: loads the nodes of its rank, joins, and runs the orders that it reads.

    log ──records──> Inbox ──actions──> OrderExecutor ──> engines' threads, CPU threads
                                            ├──tensors──> TensorStore <──> other workers
                                            └──events──> EventWriter ──> log

The decisions are in `workers.orders.inbox`, the work in `workers.execution.executor`. While the log is
unavailable, steps continue and their events wait in the log's outbox. On cancellation the process accepts no
more orders, finishes running steps within a time limit, and leaves. The rank's next incarnation repeats
unfinished steps.

One process may have several incarnations. When the conductor gives one up (`worker.lost`), it ends, and the
next one begins at once with the loaded model and an empty store. When a newer process supersedes it, the
process ends.
"""

import asyncio
import contextlib
import logging
import os
import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from configs.deployment import DeploymentConfig
from models.checkpoints.hub_cache import origin
from shared import faults
from shared.epoch_fence import EpochFence
from shared.errors import WorkerError
from shared.events import MalformedEventError, ProcessEnd, WorkerJoined, WorkerLeaving
from shared.ids import Rank
from shared.log.nats import heartbeat_connection, jetstream
from shared.log.nats.credentials import ANONYMOUS, Credentials
from shared.log.port import Log
from shared.meters import EdgeMeters, GuideMeters, PrefixMeters, TensorMeters, WorkerMeters
from shared.subject_rules import read_event
from shared.subjects import Subjects
from shared.telemetry.log_fields import quoting
from workers import settings
from workers.data_plane.port import TensorStore
from workers.execution.executor import OrderExecutor
from workers.execution.node_executor import HostedModel, MediaCopies
from workers.generation.engine_client import EngineClient
from workers.guides.guide_queue import GuideQueue
from workers.kv_engine.counters import EngineStats
from workers.loading.model import Loaded, LocalModel, Model
from workers.loading.tensor_store import open_tensors
from workers.loading.weights import RankWeights, rank_digest
from workers.machine.cpu_pool import CpuPool
from workers.media import assembly as media_assembly
from workers.membership.event_writer import EventWriter
from workers.membership.heartbeat import Heartbeat
from workers.membership.incarnation import FINAL_EVENTS_S, SupersededError, repeat_join, until_cancelled
from workers.membership.peers import PeerIncarnations, PeerJoined, PeerLeft
from workers.orders.inbox import (
    AttemptEnded,
    Inbox,
    IncarnationBegun,
    IncarnationLost,
    IncarnationSuperseded,
    RequestEnded,
    StartOrder,
    StopOrder,
    Unreadable,
)
from workers.orders.out_of_order_buffer import OutOfOrderBuffer, ReceivedEdge
from workers.settings import EngineSettings
from workers.streams.edge_counters import EdgeCounters
from workers.tensor_parallel import group
from workers.tensor_parallel.follower_process import FollowerEnginePort, FollowerProcess
from workers.tensor_parallel.group import GroupMembership

_LOGGER: Final = logging.getLogger(__name__)

DRAIN_S: Final = 5.0
"""The time limit for running steps at the end; the launcher kills the process after twice that."""
ABANDON_S: Final = 10.0
"""The time limit for the engine to drop its sequences, which takes a step; after it, the process ends."""
CPU_THREADS: Final = 4


class EngineStuckError(WorkerError):
    """The engine does not return from a step; only a new process can continue."""

    code = "stuck"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The log's address, the deployment, and this process's rank.

    Attributes:
        ended: the rank's processes before this one, if a launcher restarted it.
    """

    config: DeploymentConfig
    rank: int
    nats_url: str
    credentials: Credentials = ANONYMOUS
    prefix: str = "ds"
    ended: Sequence[ProcessEnd] = ()


async def run(options: WorkerOptions) -> None:
    """Load, join and work until cancelled; then finish the running steps, and leave.

    Raises:
        ConfigError, CheckpointError: the model cannot be served.
        LogUnavailableError: the log cannot be reached.
        SupersededError: another process has taken this rank.
        EngineStuckError: the conductor gave this rank up, and its engine does not stop.
    """
    engine_settings = settings.of(options.config)
    subjects = Subjects(options.prefix)
    heartbeat = Heartbeat(
        subjects.heartbeat("worker", str(options.rank)),
        lambda: heartbeat_connection.open_heartbeat_connection(
            options.nats_url,
            credentials=options.credentials,
            name=f"worker {options.rank} heartbeat",
            timeout_s=jetstream.ROLE_PATIENCE_S,
        ),
    )
    log = await jetstream.connect(
        options.nats_url,
        credentials=options.credentials,
        subjects=subjects,
        name=f"worker {options.rank}",
        durability=options.config.nats.durability,
        timeout_s=jetstream.ROLE_PATIENCE_S,
        on_change=_log_connection,
    )
    try:
        if options.rank in options.config.leaders:
            await _work(options, engine_settings, log, subjects, heartbeat)
        else:
            await live(_follower(options, engine_settings, log, subjects), heartbeat)
    finally:
        log.on_change = None
        await log.close()


async def _work(
    options: WorkerOptions,
    engine_settings: EngineSettings,
    log: Log,
    subjects: Subjects,
    heartbeat: Heartbeat,
) -> None:
    """Run a rank that reads orders, with a store for its tensors."""
    config, rank = options.config, Rank(options.rank)
    store = open_tensors(config, rank)
    try:
        is_shared = len(config.tp_group_of(rank)) > 1
        gather = partial(group.gather, log, subjects, config, rank) if is_shared else None
        async with media_assembly.opened(
            config,
            rank,
            options.nats_url,
            options.credentials,
            subjects,
            patience_s=jetstream.ROLE_PATIENCE_S,
        ) as media:
            reader = None if media is None else media.reader
            model = LocalModel(config, engine_settings, rank, store.allocate, gather, reader)
            copies = None if media is None else media.copies
            worker = Worker(log, subjects, config, rank, model, store, copies, ended=options.ended)
            await live(worker, heartbeat)
    finally:
        await store.close()


def _follower(
    options: WorkerOptions, engine_settings: EngineSettings, log: Log, subjects: Subjects
) -> FollowerProcess:
    def make(copy: GroupMembership, on_progress: Callable[[float], None]) -> FollowerEnginePort:
        from workers.loading.engines import make_follower_engine  # noqa: PLC0415 - torch: see `workers.loading.engines`

        def tell(done: int, total: int, _: str) -> None:
            on_progress(done / max(total, 1))

        config, rank = options.config, options.rank
        weights = RankWeights.open(config, engine_settings, rank)
        weights.begin()
        try:
            engine = make_follower_engine(config, engine_settings, rank, tell, copy, weights.digest_of)
            weights.loaded()  # a leader that has loaded other bytes than this rank ends the group
        finally:
            weights.close()
        return engine

    return FollowerProcess(log, subjects, options.config, Rank(options.rank), make, ended=options.ended)


class _Living(Protocol):
    """A rank's work: `Worker`, or `FollowerProcess`."""

    async def run(self) -> None: ...
    def vital_signs(self) -> Mapping[str, Any]: ...


async def live(worker: _Living, heartbeat: Heartbeat) -> None:
    """Run a rank until cancelled, and send heartbeats meanwhile."""
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(heartbeat.run(worker.vital_signs), name="heartbeat")
        try:
            await worker.run()
        finally:
            beating.cancel()


class Worker:
    """The worker of one rank: hosts `model`, and keeps tensors for other ranks in `store`.

    It communicates by the log only; tensors are read where the log says.
    """

    def __init__(
        self,
        log: Log,
        subjects: Subjects,
        config: DeploymentConfig,
        rank: Rank,
        model: Model,
        store: TensorStore,
        copies: MediaCopies | None = None,
        *,
        ended: Sequence[ProcessEnd] = (),
    ) -> None:
        self._log = log
        self._subjects = subjects
        self._config = config
        self._rank = rank
        self._model = model
        self._store = store
        self._copies = copies
        self._ended = ended
        self._counts = EdgeCounters()
        self._guides: GuideQueue | None = None
        self._out_of_order = OutOfOrderBuffer()
        self._state = "loading"
        self._incarnation: int | None = None

    async def run(self) -> None:
        """Work until cancelled, then leave."""
        await until_cancelled(self._work, "work")

    # ---- from loading to leaving -------------------------------------------------------------------
    async def _work(self, stopping: asyncio.Event) -> None:
        engine_client = EngineClient()
        async with asyncio.TaskGroup() as tasks:
            stop = tasks.create_task(stopping.wait(), name="stopping")
            loading = tasks.create_task(self._model.load(engine_client), name="load")
            await asyncio.wait([stop, loading], return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
                return
            stop.cancel()
        loaded = loading.result()
        engine_client.engine = loaded.engine
        pool = CpuPool(CPU_THREADS, large=self._config.media.decoders)
        hosted = HostedModel(
            graph=loaded.graph,
            processing=loaded.processing,
            engine=engine_client,
            pool=pool,
            store=self._store,
            stateless=loaded.stateless,
            copies=self._copies,
        )
        self._guides = hosted.guides
        try:
            async with asyncio.TaskGroup() as tasks:
                engine = tasks.create_task(self._model.wait(), name="engine")
                while not stopping.is_set():
                    await self._live(hosted, loaded, stopping)
                    if not stopping.is_set():
                        await self._settle(pool)
                engine.cancel()
        finally:
            await self._model.close()
            pool.close()

    # ---- one incarnation ---------------------------------------------------------------------------
    async def _live(self, hosted: HostedModel, loaded: Loaded, stopping: asyncio.Event) -> None:
        """Run one incarnation: join, work until stopped or given up, leave."""
        self._state, self._incarnation = "loading", None
        start_seq = (await self._log.state()).last_seq + 1
        writer = EventWriter(self._log, self._rank, loaded.check_weights)
        joined = WorkerJoined(
            id=f"{writer.name}.joined.{secrets.token_hex(8)}",
            rank=self._rank,
            model=self._config.name,
            nodes=self._config.nodes_of(self._rank),
            device=loaded.device,
            kv_tokens=loaded.kv_tokens,
            max_seq_len=self._config.max_seq_len,
            host=platform.node(),
            pid=os.getpid(),
            cards=self._store.endpoints if len(self._config.leaders) > 1 else {},
            tool_calls=loaded.processing.tool_calls,
            reasoning=getattr(loaded.processing, "reasoning", ""),
            weights=rank_digest(loaded.weights),
            node_weights=dict(loaded.weights),
            revision=str(origin(Path(self._config.checkpoint)) or ""),
            ended=list(self._ended),
        )
        self._ended = ()
        self._out_of_order = OutOfOrderBuffer()
        inbox = Inbox(
            self._subjects,
            self._rank,
            joined.id,
            peers=await self._read_peers(start_seq - 1),
            epoch=(await EpochFence.read(self._log, self._subjects)).epoch,
            out_of_order=self._out_of_order,
        )
        faults.reach("worker.joined.posting")
        await writer.post_when_possible(self._subjects.worker(self._rank), joined)
        faults.reach("worker.joined.posted")
        async with asyncio.TaskGroup() as tasks:
            executor = OrderExecutor(
                hosted,
                log=self._log,
                subjects=self._subjects,
                writer=writer,
                tasks=tasks,
                counts=self._counts,
            )
            reading = tasks.create_task(self._read(inbox, writer, executor, start_seq), name="read")
            staying = tasks.create_task(
                repeat_join(joined, writer, self._subjects, lambda: self._incarnation), name="stay known"
            )
            stop = tasks.create_task(stopping.wait(), name="stopping")
            await asyncio.wait([reading, stop], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await self._leave(executor, writer, joined)
            else:
                await self._abandon(executor, ABANDON_S)
            for task in (reading, staying, stop):
                task.cancel()

    async def _read(self, inbox: Inbox, writer: EventWriter, executor: OrderExecutor, start_seq: int) -> None:
        """Execute the orders in the log; return when this incarnation has ended."""
        async with aclosing(self._log.read(self._subjects.for_worker(self._rank), start_seq)) as records:
            async for record in records:
                match inbox.fold(record):
                    case StartOrder() as start if self._state == "ready":
                        faults.reach("worker.order.read")
                        executor.start(start, record.seq)
                    case StopOrder() as stop:
                        faults.reach("worker.stop.read")
                        executor.stop(stop)
                    case AttemptEnded() as ended:
                        executor.end_attempt(ended)
                    case ReceivedEdge() as edge:
                        executor.receive(edge)
                    case RequestEnded() as ended:
                        executor.end_request(ended)
                    case PeerJoined(rank, incarnation, endpoints):
                        self._store.add_peer(rank, incarnation, endpoints)
                    case PeerLeft(rank, incarnation):
                        self._store.remove_peer(rank, incarnation)
                    case IncarnationBegun(incarnation):
                        self._incarnation = writer.incarnation = incarnation
                        self._store.begin_incarnation(self._rank, incarnation)
                        if self._state == "loading":
                            self._state = "ready"
                        _LOGGER.info("rank %d joined as incarnation %d", self._rank, incarnation)
                        faults.reach("worker.joined.read")
                    case IncarnationSuperseded(incarnation):
                        raise SupersededError(self._rank, incarnation, self._incarnation)
                    case IncarnationLost(reason):
                        _LOGGER.warning("the conductor gave this rank up (%s): joining again", reason)
                        self._state, self._incarnation = "loading", None
                        return
                    case Unreadable(note, quotation):
                        _LOGGER.warning(note, extra=quoting(quotation) if quotation else None)
                    case StartOrder() | None:
                        pass  # nothing new, or too late: the next incarnation receives the order again

    async def _leave(self, executor: OrderExecutor, writer: EventWriter, joined: WorkerJoined) -> None:
        """Finish the running steps, publish `worker.leaving`, and wait until it is stored."""
        self._state = "draining"
        if executor.running:
            _LOGGER.info("draining: %d steps are running, for at most %g s", executor.running, DRAIN_S)
        if not await executor.wait_idle(DRAIN_S):
            _LOGGER.warning("steps left to the rank's next incarnation: %d", executor.running)
        try:
            await self._abandon(executor, FINAL_EVENTS_S)
        except EngineStuckError as error:
            _LOGGER.warning("%s", error)
        if self._incarnation is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_EVENTS_S):
                faults.reach("worker.leaving.posting")
                leaving = WorkerLeaving(
                    id=f"{writer.name}.leaving.{self._incarnation}",
                    rank=self._rank,
                    tool_calls=joined.tool_calls,
                    reasoning=joined.reasoning,
                )
                await writer.post_when_possible(self._subjects.worker(self._rank), leaving)
                await self._log.drain()

    @staticmethod
    async def _abandon(executor: OrderExecutor, patience_s: float) -> None:
        """Drop all steps without publishing their ends.

        Raises:
            EngineStuckError: the engine does not.
        """
        try:
            async with asyncio.timeout(patience_s):
                await executor.abandon()
        except TimeoutError:
            message = f"the engine did not drop its sequences within {patience_s:g} s: it hangs"
            raise EngineStuckError(message) from None

    @staticmethod
    async def _settle(pool: CpuPool) -> None:
        """Wait for CPU nodes of the ended incarnation, so that the next one begins alone.

        Raises:
            EngineStuckError: it does not end.
        """
        try:
            async with asyncio.timeout(ABANDON_S):
                await pool.idle()
        except TimeoutError:
            message = f"CPU nodes did not end within {ABANDON_S:g} s: only a new process can continue"
            raise EngineStuckError(message) from None

    async def _read_peers(self, end_seq: int) -> PeerIncarnations:
        """Return the incarnations of all ranks so far; add the current ones of the others to the store."""
        peers = PeerIncarnations()
        async with aclosing(self._log.history([self._subjects.worker_any()], 1, end_seq)) as records:
            async for record in records:
                with contextlib.suppress(MalformedEventError):
                    _, event = read_event(record, self._subjects)
                    if isinstance(event, WorkerJoined):
                        peers.joined(event, record.seq)
                    elif isinstance(event, WorkerLeaving):
                        peers.ended(event)
        for peer in peers.current.values():
            if peer.rank != self._rank:
                self._store.add_peer(peer.rank, peer.incarnation, peer.endpoints)
        return peers

    # ---- heartbeats -------------------------------------------------------------------------------------
    def vital_signs(self) -> dict[str, Any]:
        """Return the content of a heartbeat."""
        counters = self._model.counters() or EngineStats()
        work = counters.work
        return {
            "state": self._state,
            "progress": self._model.progress,
            "rank": self._rank,
            "incarnation": self._incarnation,
            "model": self._config.name,
            "pid": os.getpid(),
            "kernels": counters.kernels,
            "steps": counters.forwards,
            "running": counters.running,
            "held": counters.held,
            "waiting": counters.waiting,
            "kv_used": counters.kv_used,
            "kv_total": counters.kv_total,
            "meters": WorkerMeters(
                log=self._log.stats(),
                sequences=work.sequences,
                computed_tokens=work.computed_tokens,
                sampled_tokens=work.sampled_tokens,
                batch_rows=work.batch_rows,
                step_s=work.step_s,
                tensors=self._tensor_meters(),
                edges=EdgeMeters(
                    told=self._counts.sent,
                    heard=self._counts.received,
                    early=self._out_of_order.count,
                    early_bytes=self._out_of_order.nbytes,
                    items=self._counts.items,
                    chunks=self._counts.chunks,
                ),
                prefix=PrefixMeters(
                    asked=counters.cache.queries,
                    hit=counters.cache.hits,
                    kept=counters.kv_evictable,
                    preempted=counters.cache.preemptions,
                    guessed=counters.cache.drafted,
                    stood=counters.cache.accepted,
                ),
                guides=self._guides.meters() if self._guides is not None else GuideMeters(),
                encoders=self._model.encoder_caches(),
                stepped=self._model.stepped_nodes(),
            ),
        }

    def _tensor_meters(self) -> TensorMeters:
        stats = self._store.stats()
        return TensorMeters(
            total_bytes=stats.total_bytes,
            free_bytes=stats.free_bytes,
            slots=stats.slots,
            puts=stats.puts,
            gets=stats.gets,
            gone=stats.gone,
            refused=stats.refused,
            fetched_bytes=stats.fetched_bytes,
        )


def _log_connection(connected: bool) -> None:
    if connected:
        _LOGGER.info("the log is available again")
    else:
        _LOGGER.warning("the log is unavailable: steps continue, their events wait")
