"""Simulated workers: the incarnations of one rank, the orders it reads, and the tensors it holds.

Real code: the inbox (which orders are for this incarnation, each once) and the scopes (which tensor is freed
when). `jobs` executes the orders. One process may have several incarnations: one that was declared lost joins
again. One that was superseded ends.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from shared.events import (
    EdgeEvent,
    StreamSent,
    WalkStop,
    WalkStopped,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from shared.ids import Rank
from shared.log.port import StoredRecord
from shared.subjects import Address, worker_writer
from tests.conductor.script import SUBJECTS
from tests.simulation.jobs import Items, Job, scope_of
from tests.simulation.process import Process, drawn
from tests.simulation.reading import Reader
from workers.data_plane.scopes import Scopes
from workers.membership.peers import PeerIncarnations
from workers.orders.inbox import (
    Inbox,
    IncarnationBegun,
    IncarnationLost,
    IncarnationSuperseded,
    RequestEnded,
    StartOrder,
    StepKey,
    StopOrder,
)
from workers.orders.out_of_order_buffer import ReceivedEdge

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation


class Worker(Process):
    """One process of one rank."""

    def __init__(self, sim: "Simulation", name: str, rank: int) -> None:
        self.rank = rank
        self.checkpoint = sim.checkpoint
        self.lives = 0
        self.steps = 0
        super().__init__(sim, name, sim.log.last_seq)
        self.live()

    def live(self) -> None:
        """Join with the state of a new process."""
        log = self.sim.log
        self.lives += 1
        self.is_leaving = False
        self.has_said_goodbye = False
        if self.lives > 1:
            self.line.reader = Reader(log, self.wants, log.last_seq)
            self.line.highest = max(self.line.highest, log.last_seq)
            self.line.outbox.clear()
        self.jobs: dict[StepKey, Job] = {}
        self.tensors: Scopes[str] = Scopes()
        self.attempts: dict[str, int] = {}
        self.items: defaultdict[tuple[str, int, str], Items] = defaultdict(Items)
        self.lost_tensors: set[str] = set()
        self.life = f"{self.name}.{self.lives}"
        self.inbox = Inbox(
            SUBJECTS, Rank(self.rank), self.life, peers=self._lives(), epoch=log.opened().epoch
        )
        nodes = list(self.sim.model.graph_of(self.sim.model.family).nodes)
        self.post(
            SUBJECTS.worker(self.rank),
            WorkerJoined(
                id=self.life,
                writer=worker_writer(self.rank),
                rank=self.rank,
                model="demo",
                nodes=nodes,
                device="cpu",
                kv_tokens=128,
                node_weights=dict.fromkeys(nodes, f"{self.checkpoint:064x}"),
            ),
        )

    def _lives(self) -> PeerIncarnations:
        lives = PeerIncarnations()
        for seq, event in self.sim.log.valid():
            match event:
                case WorkerJoined():
                    lives.joined(event, seq)
                case WorkerLeaving() | WorkerLost():
                    lives.ended(event)
                case _:
                    pass
        return lives

    @property
    def incarnation(self) -> int | None:
        return self.inbox.incarnation

    def make(self, key: str, scope: str) -> None:
        """Put a tensor into a scope."""
        self.tensors.add(key, scope)
        self.sim.saw("a tensor is made")

    def has(self, key: str) -> bool:
        """True if it holds a tensor."""
        return key in self.tensors._scope_of

    @property
    def tensor_names(self) -> list[str]:
        return sorted(self.tensors._scope_of)

    @property
    def scopes(self) -> int:
        """The number of scopes that hold tensors."""
        return self.tensors.count

    def signs(self) -> dict[str, Any]:
        age_s = (self.sim.now_ms - self.hung_ms) / 1000 if self.hung_ms is not None else 0.0
        state = "draining" if self.is_leaving else "loading" if self.incarnation is None else "ready"
        running = {"steps": self.steps, "running": len(self.jobs), "loop_age_s": age_s}
        return {"state": state, "rank": self.rank, "incarnation": self.incarnation, **running}

    # ---- the log -----------------------------------------------------------------------------------
    def wants(self, address: Address) -> bool:
        if address.kind == "ready":
            return address.rank == self.rank
        if address.kind == "edge":
            return address.to_rank == self.rank
        return address.kind in {"walk", "worker", "conductor"}

    def take(self, record: StoredRecord) -> None:
        match self.inbox.fold(record):
            case StartOrder() as start:
                if not self.is_leaving:
                    self._start(start, record.seq)
            case StopOrder(key, order):
                if self.drop(key):
                    self._report_stop(order)
            case ReceivedEdge(event, rank):
                self.hear(event, rank)
            case RequestEnded(request_id):
                self._forget(request_id)
            case IncarnationSuperseded():
                self.end("is superseded")
            case IncarnationLost():
                self.sim.saw("a life that was given up joins again")
                self.live()
            case IncarnationBegun() | _:
                pass

    def _start(self, start: StartOrder, seq: int) -> None:
        assert not start.refused, start.refused
        key = start.key
        self.sim.started[self.sim.log.generation, key, self.rank, self.incarnation or 0] += 1
        for other in [k for k in self.jobs if k.request_id == key.request_id and k.attempt < key.attempt]:
            self.drop(other)
        before = self.attempts.get(key.request_id)
        if before is not None and before < key.attempt:
            self.tensors.end(f"{key.request_id}/{before}")
            for stream in [s for s in self.items if s[0] == key.request_id and s[1] < key.attempt]:
                del self.items[stream]
        self.attempts[key.request_id] = key.attempt
        self.jobs[key] = Job(self, key, start.order, seq)
        for edge in start.edges:
            self.hear(edge.event, edge.rank)

    def drop(self, key: StepKey) -> bool:
        """Drop an order; return True if it was running."""
        self.tensors.end(scope_of(key))
        return self.jobs.pop(key, None) is not None

    def _forget(self, request_id: str) -> None:
        """Release everything of a request that has ended."""
        for key in [k for k in self.jobs if k.request_id == request_id]:
            self.drop(key)
        for stream in [s for s in self.items if s[0] == request_id]:
            del self.items[stream]
        if self.attempts.pop(request_id, None) is not None:
            self.tensors.end(request_id)

    def hear(self, event: EdgeEvent, rank: int) -> None:
        """Receive an event of another rank."""
        request_id = str(event.request_id)
        if isinstance(event, StreamSent):
            self.items[request_id, event.attempt, event.stream].take(event)
        elif (job := self.jobs.get(StepKey(request_id, event.attempt, event.index))) is not None:
            job.hear(event, rank)

    # ---- leaving -----------------------------------------------------------------------------------
    def leave(self) -> None:
        """Take no more orders, finish running ones if there is time, and leave."""
        self.is_leaving = True
        self.sim.later(self.sim.random.randint(1, 200), self._say_goodbye)

    def _say_goodbye(self) -> None:
        if not self.is_alive or not self.is_leaving or self.has_said_goodbye:
            return
        self.has_said_goodbye = True
        for key in list(self.jobs):
            self.drop(key)
        if self.incarnation is None:
            self.end("leaves before it had joined")
            return
        leaving = WorkerLeaving(
            id=f"{self.name}.{self.lives}.leaving",
            writer=worker_writer(self.rank),
            rank=self.rank,
            incarnation=self.incarnation,
        )
        self.post(SUBJECTS.worker(self.rank), leaving, lambda _: self.end("has left"))

    # ---- a part of an order ------------------------------------------------------------------------
    def work(self) -> bool:
        if self.has_said_goodbye or self.line.is_full:
            return False
        keys = sorted(self.jobs)
        while keys:
            key = drawn(keys, self.sim.random)
            if self.jobs[key].step():
                self.steps += 1
                return True
        return False

    def be_killed_by(self, request_id: str) -> None:
        """The process is killed by a request."""
        self.sim.killed[self.life] = (request_id, self.sim.log.last_seq)
        self.end(f"is killed by {request_id}")

    def _report_stop(self, order: WalkStop) -> None:
        event = WalkStopped(
            id=f"{order.request_id}.stopped.{order.attempt}.{order.index}.{self.rank}",
            writer=worker_writer(self.rank),
            request_id=order.request_id,
            attempt=order.attempt,
            incarnation=order.incarnation,
            index=order.index,
            rank=self.rank,
            steps_after=0,
        )
        self.post(SUBJECTS.done(self.rank, str(order.request_id)), event)
