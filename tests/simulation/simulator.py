"""Deterministic simulator of the log and all processes that use it.

One seed is one history. Real code: the conductor's core with its snapshots, the worker's inbox, its output
recovery and its tensor scopes, the fences, the transcript, the gateway's fold, the replayer. Simulated: the
log
(`log`), time, and the processes around that core: `conductors`, `workers`, `gateways`, `clients`. Possible
accidents are in `accidents`; their frequency in one history is in its `plan`.

    plan(seed) ──> accidents and small steps, in an order drawn from the seed ──> no more accidents
               ──> dead processes are restarted, until nothing more happens ──> `invariants`

Each step does one thing: an event is sent, a record is read, a token is generated, a clock is read. Time
advances by a few milliseconds per step, and jumps when all processes are idle.
"""

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from shared.events import (
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    WalkStop,
)
from shared.log.port import StoredRecord
from shared.tensors import Handle
from tests.conductor.script import LIMITS
from tests.simulation.accidents import ACCIDENTS
from tests.simulation.clients import Client, Service
from tests.simulation.conductors import Conductor, Snapshot
from tests.simulation.gateways import Gateway
from tests.simulation.log import SimLog
from tests.simulation.models import LAYOUTS
from tests.simulation.plan import Plan
from tests.simulation.process import BEAT_MS, Process, drawn
from tests.simulation.questions import asked
from tests.simulation.workers import Worker
from workers.orders.inbox import StepKey

QUIET_BEATS: Final = 12
"""So many beats in a row that lead to nothing are the end: more than anybody has to be silent to be lost."""
WALK_LIMITS_S: Final = {"prefill": 0.3, "decode": 0.5}
ENDS: Final = (RequestFinished, RequestFailed, RequestCancelled)
_FAR_AWAY: Final = 1_000_000


class RestlessError(AssertionError):
    """The simulation does not come to rest."""


@dataclass(frozen=True, slots=True)
class Happening:
    """An event outside of the log: its step, the log's generation and position, and a description."""

    step: int
    generation: int
    seq: int
    what: str


class Simulation:
    """One history: call `run`, then examine `log`, `clients`, the processes, and the `story`.

    Attributes:
        seen: how often each thing happened.
        started: how often an order was started, by the log's generation, step, rank and incarnation.
        killed: by incarnation (the id of its join), the request that killed its process, and the log
            position.
        lost_tensors: by request, the number of tensors lost without a cause.
    """

    def __init__(
        self, seed: int, plan: Plan | None = None, records: list[StoredRecord] | None = None
    ) -> None:
        self.seed, self.plan = seed, plan or Plan.of(seed)
        self.layout = LAYOUTS[self.plan.layout]
        self.model, self.ranks = self.layout.model, self.layout.ranks
        self.random = random.Random(seed)
        self.is_faulty = True
        self.now_ns = _FAR_AWAY * 1_000_000
        self.log = SimLog(self.clock_ns)
        self.steps = 0
        self.story: list[Happening] = []
        self.checkpoint = 0  # the one that processes load which start now
        self.seen: Counter[str] = Counter()
        self.started: Counter[tuple[int, StepKey, int, int]] = Counter()
        self.killed: dict[str, tuple[str, int]] = {}
        self.lost_tensors: Counter[str] = Counter()
        self.strangers = 0
        self.snapshot: Snapshot | None = None
        self._next_beat_ns = self.now_ns
        self._quiet_beats = 0
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._made = 0
        self.deployment = self.layout.deployment(
            limits=msgspec.structs.replace(
                LIMITS,
                max_attempts=self.plan.max_attempts,
                walk_timeouts_s=WALK_LIMITS_S if self.plan.limited else {},
            ),
            max_concurrent_requests=self.plan.places,
            max_waiting=self.plan.waiting,
            replicas=self.plan.replicas,
            max_per_replica=self.plan.per_replica,
        )
        self.questions = {one.request_id: one for one in asked(seed, self.plan)}
        self.poisons = {one.request_id: one.poison for one in self.questions.values() if one.poison}
        self.clients: list[Client] = []
        self.services: list[Service] = []
        self.conductors: list[Conductor] = []
        self.gateways: list[Gateway] = []
        self.workers: list[Worker] = []
        for record in records or []:
            self._remember(record)
        for number, question in enumerate(self.questions.values()):
            if number < self.plan.services:
                self.services.append(Service(self, question))
            else:
                self.clients.append(Client(self, question))
        for _ in range(self.plan.gateways):
            self.gateways.append(Gateway(self, self.name("g")))
        for _ in range(self.plan.conductors):
            self.conductors.append(Conductor(self, self.name("c")))
        for rank in self.ranks:
            self.spawn_worker(rank)

    def _remember(self, record: StoredRecord) -> None:
        """Start with a record of another history."""
        self.now_ns = max(self.now_ns, record.time_ns)
        self.log.append(record.subject, record.data)

    # ---- what is asked -----------------------------------------------------------------------------
    def kind_of(self, request_id: str) -> str:
        """The kind of a request."""
        return self.questions[request_id].kind

    def expected(self, request_id: str) -> list[dict[str, str]]:
        """The output that the client should receive, by track: of each checkpoint there was."""
        kind = self.kind_of(request_id)
        return [self.model.expected(request_id, kind, one) for one in range(self.checkpoint + 1)]

    # ---- who there is ------------------------------------------------------------------------------
    def name(self, kind: str) -> str:
        """A new, unique name."""
        self._made += 1
        return f"{kind}{self._made}x{self.log.last_seq}"

    @property
    def processes(self) -> list[Process]:
        return [*self.gateways, *self.services, *self.conductors, *self.workers]

    @property
    def leader(self) -> Conductor:
        """The conductor that leads, and knows it."""
        return next(one for one in self.conductors if one.is_alive and one.is_leading)

    def present(self, rank: int) -> Worker | None:
        """The live process of a rank; of several, the newest."""
        alive = [worker for worker in self.workers if worker.rank == rank and worker.is_alive]
        return alive[-1] if alive else None

    def living(self, rank: int, incarnation: int) -> Worker | None:
        """The process of an incarnation."""
        found = (w for w in self.workers if w.rank == rank and w.is_alive and w.incarnation == incarnation)
        return next(found, None)

    def spawn_worker(self, rank: int) -> None:
        self.workers.append(Worker(self, self.name(f"w{rank}-"), rank))

    def replace(self, process: Process) -> None:
        """Restart a process after a while, as a supervisor does."""
        pause_ms = self.random.choice([1, 50, 400, 2500])
        match process:
            case Worker():
                self.workers = [one for one in self.workers if one.is_alive]
                self.later(pause_ms, lambda: self._staff(process.rank))
            case Conductor():
                self.conductors = [one for one in self.conductors if one.is_alive]
                self.later(pause_ms, lambda: self.conductors.append(Conductor(self, self.name("c"))))
            case Gateway():
                self.gateways = [one for one in self.gateways if one.is_alive]
                self.later(pause_ms, lambda: self.gateways.append(Gateway(self, self.name("g"))))
            case _:
                raise AssertionError(process)

    def _staff(self, rank: int) -> None:
        if self.present(rank) is None:
            self.spawn_worker(rank)

    # ---- what is kept ------------------------------------------------------------------------------
    def holds(self, handle: Handle, key: StepKey, reader: Worker) -> bool:
        """True if a tensor's owner is alive and holds it. A live owner must not have freed it too early."""
        if handle.data is not None or handle.rank is None:
            return True
        owner = self.living(handle.rank, handle.incarnation or 0)
        if owner is None:
            return False
        if key.request_id in owner.lost_tensors:
            owner.lost_tensors.discard(key.request_id)
            self.lost_tensors[key.request_id] += 1
            self.saw("a tensor is gone for no reason")
            return False
        if owner.has(handle.key):
            return True
        knows = not (reader.line.is_stale or owner.line.is_stale or owner.has_said_goodbye)
        assert not knows or not self.is_current(key), (
            f"{key} needs {handle.key}, which {owner} let go of too early"
        )
        return False

    def is_current(self, key: StepKey) -> bool:
        """True if, by the log, a step may still have to be done."""
        for _, event in self.log.valid():
            is_of = event.request_id == key.request_id
            stops = isinstance(event, WalkStop) and event.attempt == key.attempt
            if is_of and (event.attempt > key.attempt or stops or isinstance(event, ENDS)):
                return False
        return True

    # ---- time --------------------------------------------------------------------------------------
    def clock_ns(self) -> int:
        return self.now_ns

    @property
    def now_s(self) -> float:
        return self.now_ns / 1_000_000_000

    @property
    def now_ms(self) -> int:
        return self.now_ns // 1_000_000

    def later(self, pause_ms: int, what: Callable[[], None]) -> None:
        """Call a function after a while."""
        self._made += 1
        heapq.heappush(self._timers, (self.now_ns + pause_ms * 1_000_000, self._made, what))

    def run(self) -> "Simulation":
        """Run with accidents, then without, until nothing more happens."""
        for _ in range(self.plan.busy_steps):
            self.step()
        self.is_faulty, self._quiet_beats = False, 0
        for _ in range(self.plan.rest_steps):
            if not self.step():
                return self
        raise RestlessError(f"it does not come to rest in {self.plan.rest_steps} steps")

    def step(self) -> bool:
        """Do one thing; return False if nothing can happen any more."""
        self.steps += 1
        self.now_ns += self.random.randrange(4_000_000)
        self._ring()
        if self.is_faulty:
            self._have_accidents()
        actors: list[Client | Process] = [*self.clients, *self.processes]
        while actors:
            actor = drawn(actors, self.random)
            if actor.act():
                self._quiet_beats = 0
                return True
        return self._wait()

    def _ring(self) -> None:
        while self._timers and self._timers[0][0] <= self.now_ns:
            heapq.heappop(self._timers)[2]()
            self._quiet_beats = 0
        while self._next_beat_ns <= self.now_ns:
            self._next_beat_ns += BEAT_MS * 1_000_000
            self._beat()

    def _wait(self) -> bool:
        """Advance to the next timer; return False if there is none."""
        self._quiet_beats += 1
        if not self._timers and self._quiet_beats > QUIET_BEATS:
            return False
        rings = [self._next_beat_ns, *(at_ns for at_ns, _, _ in self._timers[:1])]
        self.now_ns = max(self.now_ns, min(rings))
        return True

    def _beat(self) -> None:
        """Send the heartbeats of all processes; then let conductors evaluate them."""
        for process in self.processes:
            if process.is_reachable and not process.line.is_stale:
                process.line.reader.beat()
        p_lost = self.plan.p_lost * self.is_faulty
        heard = [conductor for conductor in self.conductors if conductor.is_reachable]
        for process in (*self.conductors, *self.workers):
            if process.is_reachable:
                for conductor in heard:
                    if self.random.random() >= p_lost:
                        conductor.hear(process, process.signs())
        for conductor in heard:
            conductor.look()

    def _have_accidents(self) -> None:
        for name, rate in self.plan.rates.items():
            if self.random.random() < rate and (what := ACCIDENTS[name](self)) is not None:
                self.saw(f"accident: {name}")
                if what:
                    self.tell(what)

    def go_back(self, keep: int, *, is_new: bool) -> None:
        """Truncate the log to its first records."""
        self.log.go_back(keep, is_new=is_new)

    @property
    def command(self) -> str:
        """The command that repeats this history."""
        changed = self.plan.difference(Plan.of(self.seed))
        changes = [f"--set '{name}={json.dumps(value)}'" for name, value in changed.items()]
        return " ".join(["python -m tests.simulation", f"--seed {self.seed}", *changes])

    # ---- what is told ------------------------------------------------------------------------------
    def saw(self, what: str) -> None:
        """Count something that happened."""
        self.seen[what] += 1

    def tell(self, what: str) -> None:
        """Record an event outside of the log."""
        self.story.append(Happening(self.steps, self.log.generation, self.log.last_seq, what))
