"""The conductor's process: a thin shell between the log and the pure core.

It reads the log, after a snapshot if there is one, and follows it. When no conductor leads
(`conductor.liveness`), it claims the next epoch. It leads from the moment it reads its own claim, because
then it has folded everything before it: it publishes decisions that are not recorded yet and continues. It
records lost workers and passed time limits (`conductor.timers`) as events; the core decides what follows
from them. When it reads a higher epoch, it becomes a standby.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from conductor import epochs
from conductor.core.cluster import Cluster
from conductor.core.react import Deadline
from conductor.core.schedule import Deployment
from conductor.deployment import deployment_of
from conductor.digests import fold_digest
from conductor.liveness import Echoes, LeaderLiveness, WorkerLiveness
from conductor.sealing.assembly import sealer_of
from conductor.sealing.sealer import Sealer, View
from conductor.snapshots import Snapshots
from conductor.timers import Timers
from conductor.writer import DecisionWriter
from configs.deployment import DeploymentConfig, RecoverySettings
from models import registry
from shared import faults
from shared.errors import CapacityError
from shared.events import ProcessEnd
from shared.log.capacity_watch import CapacityWatch
from shared.log.nats import jetstream
from shared.log.nats.credentials import ANONYMOUS, Credentials
from shared.log.nats.reader_watch import ReaderWatch
from shared.log.port import Log, LogState, LogUnavailableError, StoredRecord, WrongLastSequenceError
from shared.meters import ConductorMeters
from shared.subjects import Subjects
from shared.telemetry.log_fields import quoting

_LOGGER = logging.getLogger("conductor")
HEARTBEAT_S: Final = 0.25
"""Seconds between heartbeats at most; fewer for short limits."""
_HEARTBEATS_IN_SILENCE: Final = 6
"""Heartbeats within the shortest time limit for silence; half of them may be late."""
_DEADLINE_CHECK_S: Final = 0.1
_DEADLINE_CHECK_FACTOR: Final = 100
"""At most one check of the time limits per this many durations of a check, for thousands of limits."""
_PROBE_S: Final = 0.5
_ENDING_NOW: Final = 256
"""The last requests that ended: those whose end is not in the log yet are among them."""
_RECORDS_AT_ONCE: Final = 500
"""Records that are folded at once before heartbeats are sent and received again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorOptions:
    """Location of the log, and the deployment.

    Attributes:
        alone: no other conductor can lead, so it need not wait for one.
        ended: the processes before this one, if a launcher restarted it.
    """

    config: DeploymentConfig
    nats_url: str
    credentials: Credentials = ANONYMOUS
    prefix: str = "ds"
    alone: bool = False
    ended: Sequence[ProcessEnd] = ()


async def run(options: ConductorOptions) -> None:
    """Follow and lead until cancelled."""
    config, subjects = options.config, Subjects(options.prefix)
    name = f"c-{secrets.token_hex(4)}"
    log = await jetstream.connect(
        options.nats_url,
        credentials=options.credentials,
        subjects=subjects,
        name=f"conductor {name}",
        durability=config.nats.durability,
        timeout_s=jetstream.ROLE_PATIENCE_S,
    )
    readers = ReaderWatch(
        options.nats_url,
        subjects.stream,
        max_consumers=config.nats.max_consumers,
        per_key=config.nats.max_consumers_per_key,
    )
    try:
        await readers.open(options.credentials, f"conductor {name}")
        deployment = deployment_of(config, max_event_bytes=log.max_payload)
        snapshots, cluster = None, None
        if config.data_dir is not None and config.recovery.snapshot_every:
            snapshots = Snapshots(Path(config.data_dir) / "conductor", fold_digest=fold_digest(deployment))
            cluster = await snapshots.read(log, registry.graph, subjects)
        await Conductor(
            log,
            cluster or Cluster(registry.graph, subjects),
            deployment,
            subjects,
            name,
            recovery=config.recovery,
            snapshots=snapshots,
            readers=readers,
            sealer=await sealer_of(config, log, subjects),
            alone=options.alone,
            ended=options.ended,
        ).run()
    finally:
        await readers.close()
        await log.close()


class Conductor:
    """One conductor: `cluster` is the pure state, `log` and `snapshots` are all it touches."""

    def __init__(
        self,
        log: Log,
        cluster: Cluster,
        deployment: Deployment,
        subjects: Subjects,
        name: str,
        *,
        recovery: RecoverySettings = RecoverySettings(),  # noqa: B008 - frozen
        snapshots: Snapshots | None = None,
        readers: ReaderWatch | None = None,
        sealer: Sealer | None = None,
        alone: bool = False,
        ended: Sequence[ProcessEnd] = (),
    ) -> None:
        self._log = log
        self._created_ns = 0
        self._cluster = cluster
        self._deployment = deployment
        self._closed = msgspec.structs.replace(deployment, max_concurrent_requests=0)
        self._capacity = CapacityWatch(log, self._capacity_changed)
        self._has_capacity = asyncio.Event()
        self._subjects = subjects
        self._name = name
        self._snapshots = snapshots
        self._readers = readers
        self._snapshot_every = recovery.snapshot_every
        self._sealer = sealer
        if sealer is not None:
            sealer.attach(self._view_for_seals)
        self._epoch_seq = 0
        self._writer = DecisionWriter(log, subjects, cluster)
        self._folded = 0
        self._last: StoredRecord | None = None
        self._since_snapshot = 0
        self._snapshot_due = asyncio.Event()
        self._led = False
        self._heartbeat_now = asyncio.Event()
        self._caught_up = False
        self._claimed_seq = 0
        shortest_s = min(recovery.worker_silent_s, recovery.leader_silent_s)
        self._heartbeat_s = min(HEARTBEAT_S, shortest_s / _HEARTBEATS_IN_SILENCE)
        self._echoes = Echoes(gap_s=shortest_s / 2)
        self._check_liveness = asyncio.Event()
        self._workers = WorkerLiveness(self._echoes, recovery.worker_silent_s, recovery.worker_hung_s)
        self._leader = LeaderLiveness(self._echoes, recovery.leader_silent_s, answer_s=2 * self._heartbeat_s)
        self._timers = Timers()
        self._check_limits = asyncio.Event()
        self._alone = alone
        self._ended = ended

    @property
    def leading(self) -> bool:
        """True if this conductor opened the last epoch it has read."""
        return self._cluster.leader == self._name

    async def run(self) -> None:
        """Fold the log, and decide while leading, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_heartbeats(), name="receive heartbeats")
                tasks.create_task(self._send_heartbeats(), name="send heartbeats")
                tasks.create_task(self._follow(), name="follow")
                tasks.create_task(self._watch_liveness(), name="watch liveness")
                tasks.create_task(self._watch_deadlines(), name="watch deadlines")
                tasks.create_task(self._capacity.run(), name="watch capacity")
                tasks.create_task(self._admit_again(), name="admit again")
                if self._readers is not None:
                    tasks.create_task(self._readers.run(lambda: self._led), name="watch readers")
                if self._snapshots is not None:
                    tasks.create_task(self._keep_snapshots(self._snapshots), name="snapshots")
                if self._sealer is not None:
                    tasks.create_task(self._sealer.run(), name="seals")
        except asyncio.CancelledError:
            await self._announce_leaving()
            raise

    async def _announce_leaving(self) -> None:
        """Announce the end of the leadership, if it led, seal the log and write a snapshot."""
        await self._send_heartbeat(state="leaving", led=self._led)
        if self._sealer is not None:
            await self._sealer.finish()
        if self._snapshots is not None and self._led:
            await self._write_snapshot(self._snapshots)

    # ---- the log -----------------------------------------------------------------------------------
    async def _follow(self) -> None:
        began_s, state = time.monotonic(), await self._log.state()
        self._created_ns, known_seq = state.created_ns, self._cluster.seq
        start_seq = max(known_seq + 1, state.first_seq)
        subjects = self._subjects.for_conductor()
        async with aclosing(self._log.history(subjects, start_seq, state.last_seq)) as records:
            async for record in records:
                await self._fold(record, is_new=False)
        _LOGGER.log(
            logging.INFO if state.last_seq else logging.DEBUG,
            "read %d events%s in %.2f s, %d requests are open",
            state.last_seq + 1 - start_seq,
            f" after the {known_seq} of a snapshot" if known_seq else "",
            time.monotonic() - began_s,
            len(self._cluster.open),
        )
        if self._alone or await self._is_first(state):
            self._leader.set_absent("there is no other conductor")
        self._caught_up = True
        self._check_liveness.set()
        async with aclosing(self._log.read(subjects, max(start_seq, state.last_seq + 1))) as records:
            async for record in records:
                led, leader = self._led, self._cluster.leader
                await self._fold(record, is_new=True)
                if self._led and not led:
                    self._heartbeat_now.set()
                    _LOGGER.info("leading in epoch %d", self._cluster.fence.epoch)
                elif led and not self._led:
                    _LOGGER.warning("deposed by %s: following", self._cluster.leader)
                if leader != self._cluster.leader:
                    self._leader.expect(time.monotonic())

    async def _is_first(self, state: LogState) -> bool:
        """Tell whether no conductor has run on this log before."""
        return state.first_seq <= 1 and await self._log.last(self._subjects.epoch) is None

    async def _fold(self, record: StoredRecord, *, is_new: bool) -> None:
        """Fold one record; while leading, publish the resulting decisions."""
        read_ns = time.time_ns()
        faults.reach("conductor.record.read")
        if (request_id := self._cluster.may_have_forgotten(record)) is not None:
            await self._recall(request_id, record)
        folded = self._cluster.fold(record)
        self._folded += 1
        self._last = record
        self._timers.read(record.seq, record.time_ns, time.monotonic())
        self._check_limits.set()
        if folded.note and is_new:
            extra = quoting(folded.quotation) if folded.quotation else None
            _LOGGER.log(logging.INFO if self.leading else logging.DEBUG, folded.note, extra=extra)
        if folded.divergence:
            _LOGGER.error("record %d: %s", record.seq, folded.divergence.message)
        led, self._led = self._led, self.leading
        if self._led:
            if not led:
                faults.reach("conductor.claim.read")
                self._epoch_seq = record.seq
                if self._sealer is not None:
                    self._sealer.lead()
                self._workers.start_term()
                self._timers.start_term()
            elif self._sealer is not None and folded.confirmed and self._ends_request(record):
                self._sealer.request_ended()
            decisions = folded.decisions if led else self._cluster.outstanding()
            decisions = (*decisions, *self._cluster.schedule(self._allowed))
            await self._writer.decide(decisions, record.seq, read_ns)
        self._count_for_snapshot()
        if self._folded % _RECORDS_AT_ONCE == 0:
            await asyncio.sleep(0)

    async def _recall(self, request_id: str, record: StoredRecord) -> None:
        """Look in the log for an earlier submission of a request that the cluster may have forgotten."""
        subject, seq = self._subjects.request(request_id), 0
        while (earlier := await self._log.first_after(subject, seq)) and earlier.seq < record.seq:
            if self._cluster.recall(request_id, earlier):
                return
            seq = earlier.seq

    # ---- seals -------------------------------------------------------------------------------------
    def _ends_request(self, record: StoredRecord) -> bool:
        """Tell whether a decision that was confirmed by the log ends a request."""
        return record.subject.startswith(self._subjects.walk(""))

    def _view_for_seals(self) -> View:
        """The state that seals depend on. A request whose end is decided but not recorded is still open."""
        cluster = self._cluster
        ending = (r.id for r in islice(reversed(cluster.ended.values()), _ENDING_NOW) if r.expected)
        return View(
            leads=self._led,
            epoch=cluster.fence.epoch,
            epoch_seq=self._epoch_seq,
            seq=cluster.seq,
            open=frozenset((*cluster.open, *ending)),
            has_capacity=not self._capacity.reason,
        )

    # ---- the log's capacity ------------------------------------------------------------------------
    @property
    def _allowed(self) -> Deployment:
        """The deployment, without admissions while the log has no capacity. Admitted requests continue."""
        return self._closed if self._capacity.reason else self._deployment

    def _capacity_changed(self) -> None:
        if not self._capacity.reason:
            self._has_capacity.set()

    async def _admit_again(self) -> None:
        """Admit waiting requests once the log has capacity: no record would trigger it."""
        while True:
            await self._has_capacity.wait()
            self._has_capacity.clear()
            if self._led and self._last is not None:
                decisions = self._cluster.schedule(self._allowed)
                await self._writer.decide(decisions, self._last.seq, time.time_ns())

    # ---- heartbeats --------------------------------------------------------------------------------
    async def _send_heartbeats(self) -> None:
        while True:
            if self.leading:
                await self._send_heartbeat(state="leading")
            else:
                await self._send_heartbeat(state="following" if self._caught_up else "starting")
            with contextlib.suppress(TimeoutError):  # processes that wait for a leader learn of it at once
                async with asyncio.timeout(self._heartbeat_s):
                    await self._heartbeat_now.wait()
            self._heartbeat_now.clear()

    async def _send_heartbeat(self, **state: Any) -> None:
        heartbeat = {
            **state,
            "epoch": self._cluster.fence.epoch,
            "seq": self._cluster.seq,
            "open": len(self._cluster.open),
            "waiting": len(self._cluster.waiting),
            "pid": os.getpid(),
            "meters": ConductorMeters(
                log=self._log.stats(),
                folded=self._folded,
                decisions=self._writer.count,
                ended_readers=self._readers.ended if self._readers is not None else 0,
            ),
        }
        await self._log.send_heartbeat(
            self._subjects.heartbeat("conductor", self._name), msgspec.msgpack.encode(heartbeat)
        )

    async def _receive_heartbeats(self) -> None:
        async with aclosing(self._log.listen(self._subjects.heartbeats())) as heartbeats:
            async for subject, data in heartbeats:
                match subject.split("."):
                    case [_, _, "conductor", name] if name == self._name:
                        self._receive_echo()
                    case [_, _, "conductor", _]:
                        self._receive_conductor(_decoded(data))
                    case [_, _, "worker", rank] if rank.isdecimal():
                        self._workers.receive(int(rank), _decoded(data), time.monotonic())
                    case _:
                        pass

    def _receive_echo(self) -> None:
        now_s, stats = time.monotonic(), self._log.stats()
        self._echoes.receive(now_s, unacked=stats.unacked, acked=stats.publish_ack_s.count)
        if self._caught_up:
            ranks = self._cluster.world.ranks.items()
            incarnations = {rank: one.incarnation for rank, one in ranks if one.incarnation is not None}
            self._workers.set_incarnations(incarnations, now_s, self._cluster.seq)
        if self.leading:
            self._leader.expect(now_s)
        self._check_liveness.set()

    def _receive_conductor(self, heartbeat: dict[str, Any]) -> None:
        self._leader.receive(heartbeat, self._cluster.fence.epoch, time.monotonic())
        if self.leading and heartbeat.get("state") == "starting":
            self._heartbeat_now.set()
        self._check_liveness.set()

    # ---- leadership and lost workers ------------------------------------------------------------------
    async def _watch_liveness(self) -> None:
        """After each heartbeat, claim the leadership if there is no leader, or declare lost workers."""
        while True:
            await self._check_liveness.wait()
            self._check_liveness.clear()
            if self._led:
                await self._declare_lost()
                continue
            has_read_claim = self._cluster.seq >= self._claimed_seq
            if self._caught_up and has_read_claim and (why := self._leader.absence()):
                await self._claim(why)

    async def _claim(self, why: str) -> None:
        """Open the next epoch, unless another conductor does so first."""
        _LOGGER.info("%s: claiming the next epoch", why)
        try:
            async with asyncio.timeout(epochs.CLAIM_S):
                self._claimed_seq = await epochs.claim(
                    self._log, self._subjects, self._name, self._deployment.core_digest, ended=self._ended
                )
            self._ended = ()
        except WrongLastSequenceError:
            _LOGGER.info("another conductor opened an epoch first: following")
        except (TimeoutError, CapacityError) as error:  # if it was stored nevertheless, it will be read
            _LOGGER.warning("the log did not store the claim: %s", error)
        self._leader.expect(time.monotonic())

    async def _declare_lost(self) -> None:
        """Declare lost incarnations, unless the log is unavailable, which can be why workers are silent."""
        if not self._workers.lost():
            return
        if not await self._log_answers():
            self._echoes.gap()
            return
        for loss in self._workers.lost() if self._led else ():
            _LOGGER.warning("the worker of rank %d is lost: %s", loss.rank, loss.reason)
            self._workers.declare(loss)
            await self._writer.record_loss(loss)

    async def _log_answers(self) -> bool:
        try:
            async with asyncio.timeout(_PROBE_S):
                await self._log.state()
        except (TimeoutError, LogUnavailableError):
            return False
        return True

    # ---- time limits ---------------------------------------------------------------------------------
    async def _watch_deadlines(self) -> None:
        """Record passed time limits. Checked when one is due, and after a record or an acknowledgement."""
        loop = asyncio.get_running_loop()
        while True:
            took_s, next_s = 0.0, None
            if self._led:
                began_s, limits = time.monotonic(), self._cluster.deadlines()
                due = self._timers.due(limits, began_s)
                took_s = time.monotonic() - began_s
                for deadline in due:
                    self._timers.mark_sent(deadline)
                    await self._writer.record_deadline(deadline, partial(self._deadline_stored, deadline))
                next_s = self._timers.next_s(limits, time.monotonic())
            at_s = None if next_s is None else loop.time() + next_s
            await asyncio.sleep(max(_DEADLINE_CHECK_S, _DEADLINE_CHECK_FACTOR * took_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(at_s):
                    await self._check_limits.wait()
            self._check_limits.clear()

    def _deadline_stored(self, deadline: Deadline, seq: int) -> None:
        self._timers.stored(deadline, seq)
        self._check_limits.set()

    # ---- snapshots -----------------------------------------------------------------------------------
    def _count_for_snapshot(self) -> None:
        self._since_snapshot += 1
        if self._led and self._snapshot_every and self._since_snapshot >= self._snapshot_every:
            self._snapshot_due.set()

    async def _keep_snapshots(self, snapshots: Snapshots) -> None:
        while True:
            await self._snapshot_due.wait()
            await self._write_snapshot(snapshots)
            self._snapshot_due.clear()

    async def _write_snapshot(self, snapshots: Snapshots) -> None:
        if self._last is None:
            return  # nothing changed
        self._since_snapshot = 0
        await snapshots.write(self._cluster, self._last, self._created_ns)


def _decoded(heartbeat: bytes) -> dict[str, Any]:
    """The content of a heartbeat; empty if it is malformed."""
    try:
        return msgspec.msgpack.decode(heartbeat, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
