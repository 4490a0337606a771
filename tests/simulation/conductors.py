"""Simulated conductors: a leader, followers, and deposed leaders that do not know it yet.

Real code: the core (`conductor.core`) with its snapshots, the liveness of workers by heartbeat
(`conductor.liveness`), and the time limits (`conductor.timers`). Simulated: reading, publishing, and opening
epochs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from conductor.core import snapshot
from conductor.core.cluster import Cluster
from conductor.core.react import Deadline
from conductor.core.request import Decision
from conductor.liveness import Echoes, LeaderLiveness, WorkerLiveness
from conductor.timers import Timers
from shared.events import DeadlinePassed, EpochOpened, Event, WorkerLost
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER, Address
from tests.conductor.script import SUBJECTS, subject_of
from tests.simulation.log import SimLog
from tests.simulation.process import BEAT_MS, Process

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation

SILENT_S: Final = 1.5
"""A worker, or a leader, that is not heard for so long is gone."""
HUNG_S: Final = 3.0
"""So is a worker that has work and gets no further for so long."""
P_WRITES_DOWN: Final = 0.01


def is_for_conductors(address: Address) -> bool:
    """True if a conductor reads records on this subject; of outputs, only its own fences."""
    if address.kind == "output":
        return address.writer == CONDUCTOR_WRITER
    return address.kind not in {"edge", ""}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of a cluster, with the log's generation and the position it was taken at."""

    made: int
    last: StoredRecord
    data: bytes

    def is_of(self, log: SimLog) -> bool:
        """True if the log still contains everything that the snapshot was made from."""
        seq = self.last.seq
        return self.made == log.made and seq <= log.last_seq and log.records[seq - 1] == self.last


class Conductor(Process):
    """One incarnation of a conductor."""

    def __init__(self, sim: "Simulation", name: str) -> None:
        self.cluster = self._begin(sim)
        super().__init__(sim, name, self.cluster.seq)
        self.last: StoredRecord | None = None
        self.made = sim.log.made
        self.led = False
        self.number = 0
        self.claims = 0
        self.claimed_seq = 0
        self.is_claiming = False
        self.backlog_seq = sim.log.last_seq
        self.echoes = Echoes(gap_s=SILENT_S / 2)
        self.workers = WorkerLiveness(self.echoes, SILENT_S, HUNG_S)
        self.leader = LeaderLiveness(self.echoes, SILENT_S, answer_s=2 * BEAT_MS / 1000)
        self.timers = Timers()

    @staticmethod
    def _begin(sim: "Simulation") -> Cluster:
        """Start empty, or from a snapshot of this log."""
        if sim.snapshot is not None:
            if sim.snapshot.is_of(sim.log):
                sim.saw("a conductor begins with a snapshot")
                return snapshot.load(sim.snapshot.data, sim.model.graph_of, SUBJECTS)
            sim.saw("a snapshot of another log is passed over")
        return Cluster(sim.model.graph_of, SUBJECTS)

    @property
    def is_leading(self) -> bool:
        return self.cluster.leader == self.name

    @property
    def has_caught_up(self) -> bool:
        """True if it has read all records that existed at its start."""
        reader = self.line.reader
        return reader.taken >= self.backlog_seq or not reader.is_behind

    # ---- the log -----------------------------------------------------------------------------------
    def wants(self, address: Address) -> bool:
        return is_for_conductors(address)

    @property
    def may_read(self) -> bool:
        return not self.line.is_full

    def take(self, record: StoredRecord) -> None:
        self.last, leader = record, self.cluster.leader
        folded = self.cluster.fold(record)
        self.timers.read(record.seq, record.time_ns, self.sim.now_s)
        assert folded.divergence is None, f"{self} at record {record.seq}: {folded.divergence}"
        led, self.led = self.led, self.is_leading
        if self.led and not led:
            self.workers.start_term()
            self.timers.start_term()
        if self.led:
            self.publish(folded.decisions if led else self.cluster.outstanding())
            self.publish(self.cluster.schedule(self.sim.deployment))
        if leader != self.cluster.leader:
            self.leader.expect(self.sim.now_s)

    def publish(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            request = self.cluster.request(str(decision.request_id))
            origin = request.submission.origin if request else "nats"
            self.post(subject_of(decision, origin), self._stamped(decision))

    def _stamped(self, event: Event) -> Event:
        self.number += 1
        return msgspec.structs.replace(
            event, writer=CONDUCTOR_WRITER, number=self.number, epoch=self.cluster.fence.epoch
        )

    # ---- beats -------------------------------------------------------------------------------------
    def signs(self) -> dict[str, Any]:
        state = "leading" if self.is_leading else "following" if self.has_caught_up else "starting"
        return {"state": state, "epoch": self.cluster.fence.epoch}

    def hear(self, process: Process, signs: dict[str, Any]) -> None:
        """Receive a heartbeat: its own, another conductor's, or a worker's."""
        now_s = self.sim.now_s
        if process is self:
            self.echoes.receive(now_s, unacked=len(self.line.outbox), acked=self.line.acked)
            if self.has_caught_up:
                self.workers.set_incarnations(self._lives(), now_s, self.cluster.seq)
            if self.is_leading:
                self.leader.expect(now_s)
        elif isinstance(process, Conductor):
            self.leader.receive(signs, self.cluster.fence.epoch, now_s)
        else:
            self.workers.receive(signs["rank"], signs, now_s)

    def _lives(self) -> dict[int, int]:
        ranks = self.cluster.world.ranks.items()
        return {rank: one.incarnation for rank, one in ranks if one.incarnation is not None}

    # ---- the shell ---------------------------------------------------------------------------------
    def work(self) -> bool:
        """Take a snapshot now and then."""
        if not self.led or self.last is None or self.sim.random.random() > P_WRITES_DOWN:
            return False
        self.sim.snapshot = Snapshot(self.made, self.last, snapshot.dump(self.cluster))
        return True

    def look(self) -> None:
        """Claim leadership if there is no leader; declare lost workers and exceeded limits."""
        if not self.is_reachable or self.line.is_stale:
            return
        if self.led:
            for loss in self.workers.lost():
                self.workers.declare(loss)
                self.give_up(loss.rank, loss.reason, loss.read_seq)
            for limit in self.timers.due(self.cluster.deadlines(), self.sim.now_s):
                self.timers.mark_sent(limit)
                self.say_passed(limit)
        elif self.has_caught_up and self.cluster.seq >= self.claimed_seq and not self.is_claiming:
            is_first = not self.sim.log.last(SUBJECTS.epoch) and self.number == self.claims == 0
            if is_first or self.leader.absence() is not None:
                self._claim()

    def _claim(self) -> None:
        """Open the next epoch, unless another conductor does so first."""
        log = self.sim.log
        last = log.last(SUBJECTS.epoch)
        opened = log.events[last - 1] if last else None
        epoch = 1 + (opened.epoch or 0) if opened is not None else 1
        self.claims += 1
        self.is_claiming = True
        claim = EpochOpened(
            id=f"epoch.{epoch}.{self.name}.{self.claims}",
            writer=CONDUCTOR_WRITER,
            epoch=epoch,
            conductor=self.name,
            core="k",
        )

        def settled(seq: int = 0) -> None:
            self.is_claiming, self.claimed_seq = False, seq
            self.leader.expect(self.sim.now_s)

        self.line.publish(SUBJECTS.epoch, claim, last, settled, settled)

    def give_up(self, rank: int, reason: str, read_seq: int | None = None) -> bool:
        """Declare a rank's current incarnation lost, rightly or not."""
        life = self.cluster.world.incarnation(rank)
        if life is None:
            return False
        lives = self.sim.living(rank, life) is not None
        self.sim.saw("a worker is declared lost, wrongly" if lives else "a worker is declared lost, rightly")
        lost = WorkerLost(
            id=f"worker.{rank}.{life}.lost", rank=rank, incarnation=life, reason=reason, read_seq=read_seq
        )
        self.post(SUBJECTS.lost, self._stamped(lost))
        return True

    def say_passed(self, limit: Deadline) -> None:
        """Publish that a limit is exceeded."""
        whose = "request" if limit.step is None else str(limit.step)
        said = f"{self.cluster.fence.epoch}.{self.number + 1}"
        passed = DeadlinePassed(
            id=f"{limit.request_id}.deadline.{limit.attempt}.{whose}.{said}",
            request_id=limit.request_id,
            attempt=limit.attempt,
            deadline_ns=limit.at_ns,
            step=limit.step,
        )
        self.post(SUBJECTS.walk(limit.request_id), self._stamped(passed), partial(self.timers.stored, limit))
