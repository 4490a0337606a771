"""A deterministic simulator of the log and everybody on it.

One seed is one history. Real are: the conductor's core, the worker's inbox, the fences, the transcript,
the replayer. Simulated are the log and the processes: what a process posts may be lost and sent again
behind later events, stored twice because an ack got lost, or delayed; readers are slow at random; any
process may crash between any two steps and come back without memory; a conductor or worker may be taken
for dead while it still runs (a zombie), and go on when it pleases.

Here one rank runs one node; `tests.simulation.many_ranks` has a model on several.

Faults stop after `Plan.faulty_steps`; then everything that is down comes back, the world runs until
nothing more happens, and `tests.simulation.invariants` looks at what is left.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from conductor.core.cluster import Cluster
from conductor.core.schedule import Deployment
from shared.events import (
    AnyEvent,
    EpochOpened,
    Event,
    Inputs,
    NodeReady,
    OutputChunk,
    OutputFence,
    Params,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    WalkCompleted,
    WalkStop,
    WalkStopped,
    WorkerJoined,
    WorkerLeaving,
    decode,
    encode,
)
from shared.fence import EpochFence
from shared.ids import Rank
from shared.log.port import StoredRecord
from shared.models import registry
from shared.models.base import ModelGraph
from shared.subjects import CONDUCTOR_WRITER
from shared.transcript import Transcript
from tests.conductor.script import LIMITS, SUBJECTS, completion, deployment, subject_of
from workers.inbox import Inbox, Joined, Start, StepKey, Stop, Superseded
from workers.lives import Lives

ANSWER_TOKENS = 6


def token(request_id: str, index: int) -> int:
    """What the model would say: a function of request and position alone, as with a recorded seed."""
    return sum(request_id.encode()) * 31 + index * 7


def text_of(request_id: str, count: int = ANSWER_TOKENS) -> str:
    return "".join(f"<{token(request_id, index)}>" for index in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What may happen in one history."""

    requests: int = 5
    places: int = 3
    faulty_steps: int = 400
    p_lost: float = 0.08
    p_ack_lost: float = 0.08
    p_crash: float = 0.02
    p_zombie: float = 0.5
    p_cancel: float = 0.15
    p_again: float = 0.3
    p_leave: float = 0.0
    p_gone: float = 0.0
    layout: str = "one"
    max_attempts: int = 1000
    settle_steps: int = 200_000

    @staticmethod
    def of(seed: int) -> "Plan":
        """A plan for a seed: quiet and wild ones, busy and idle ones."""
        chance = random.Random(f"plan {seed}")
        return Plan(
            requests=chance.randint(1, 6),
            places=chance.randint(1, 6),
            faulty_steps=chance.choice([100, 300, 600]),
            p_lost=chance.choice([0.0, 0.05, 0.3]),
            p_ack_lost=chance.choice([0.0, 0.05, 0.3]),
            p_crash=chance.choice([0.0, 0.01, 0.04]),
            p_zombie=chance.choice([0.0, 0.5, 1.0]),
            p_cancel=chance.choice([0.0, 0.2, 0.8]),
            max_attempts=chance.choice([2, 1000, 1000, 1000]),
        )


@dataclass(slots=True)
class Entry:
    """One event in an outbox. `sent`: it was on its way once, and is to be sent again."""

    subject: str
    data: bytes
    stored: Callable[[], None] | None = None
    sent: bool = False


class Process:
    """Anybody on the log: a cursor that reads, an outbox that posts."""

    def __init__(self, sim: "Simulation", name: str, start: int) -> None:
        self.sim, self.name, self.cursor = sim, name, start
        self.outbox: list[Entry] = []
        self.alive = True
        self.zombie = False

    def post(self, subject: str, event: Event, stored: Callable[[], None] | None = None) -> None:
        self.outbox.append(Entry(subject, encode(event), stored))

    def transmit(self) -> None:
        """Put one event on its way: the next fresh one, or one whose ack never came."""
        chance = self.sim.random
        fresh = next((entry for entry in self.outbox if not entry.sent), None)
        again = [entry for entry in self.outbox if entry.sent]
        entry = chance.choice(again) if again and (fresh is None or chance.random() < 0.5) else fresh
        if entry is None:
            return
        entry.sent = True
        if self.sim.faulty and chance.random() < self.sim.plan.p_lost:
            return
        self.sim.store(entry.subject, entry.data)
        if self.sim.faulty and chance.random() < self.sim.plan.p_ack_lost:
            return
        self.outbox.remove(entry)
        if entry.stored:
            entry.stored()

    def read(self) -> None:
        record = self.sim.records[self.cursor]
        self.cursor += 1
        if self.wants(record):
            self.take(record)

    @property
    def behind(self) -> bool:
        return self.cursor < len(self.sim.records)

    def wants(self, record: StoredRecord) -> bool:
        return True

    def take(self, record: StoredRecord) -> None:
        raise NotImplementedError

    def work(self) -> bool:
        """Do a piece of own work; whether there was any."""
        return False


class SimConductor(Process):
    def __init__(self, sim: "Simulation", name: str) -> None:
        super().__init__(sim, name, 0)
        self.cluster = Cluster(sim.graph_of, SUBJECTS)
        self.led = False
        self.claimed = False
        self.number = 0

    def wants(self, record: StoredRecord) -> bool:
        address = SUBJECTS.parse(record.subject)
        return address is not None and (address.kind != "output" or address.writer == CONDUCTOR_WRITER)

    def work(self) -> bool:
        """Claim an epoch: at the start, and when another leads whom nobody else keeps alive."""
        leader = self.sim.conductor(self.cluster.leader)
        follows = self.zombie or (leader is not None and leader is not self and leader.alive)
        if self.claimed and (self.cluster.leader == self.name or follows or self.behind):
            return False
        epoch = 1 + max((e.epoch or 0 for e in self.sim.events(EpochOpened)), default=0)
        event = EpochOpened(
            id=f"epoch.{epoch}.{self.name}",
            writer=CONDUCTOR_WRITER,
            epoch=epoch,
            conductor=self.name,
            core="k",
        )
        self.sim.store(SUBJECTS.epoch, encode(event))
        self.claimed = True
        return True

    def take(self, record: StoredRecord) -> None:
        folded = self.cluster.fold(record)
        leading = self.cluster.leader == self.name
        if leading and not self.led:
            self.publish(self.cluster.outstanding())
        elif leading:
            self.publish(folded.decisions)
        self.led = leading
        if leading:
            self.publish(self.cluster.schedule(self.sim.deployment))

    def publish(self, decisions: object) -> None:
        for decision in decisions:  # type: ignore[attr-defined]
            self.number += 1
            stamped = msgspec.structs.replace(
                decision, writer=CONDUCTOR_WRITER, number=self.number, epoch=self.cluster.fence.epoch
            )
            request = self.cluster.request(str(decision.request_id))
            origin = request.submission.origin if request else "nats"
            self.post(subject_of(decision, origin), stamped)


@dataclass(slots=True)
class Job:
    """One order a worker is at. `said` is None until the fence of its attempt was read."""

    order: NodeReady
    transcript: Transcript = field(default_factory=Transcript)
    said: int | None = None
    unacked: int = 0


class RankProcess(Process):
    """Any life of a rank: it has joined, and has an inbox."""

    def __init__(self, sim: "Simulation", name: str, rank: int = 0) -> None:
        super().__init__(sim, name, len(sim.records))
        self.rank = rank
        lives = Lives()
        for record, event in zip(sim.records, sim.decoded, strict=True):
            match event:
                case WorkerJoined():
                    lives.joined(event, record.seq)
                case WorkerLeaving():
                    lives.over(event)
                case _:
                    pass
        epoch = max((event.epoch or 0 for event in sim.events(EpochOpened)), default=0)
        self.inbox = Inbox(SUBJECTS, Rank(rank), name, lives=lives, epoch=epoch)
        joined = WorkerJoined(
            id=name, writer=f"w{rank}", rank=rank, model="demo", nodes=["llm"], device="cpu", kv_tokens=128
        )
        self.post(SUBJECTS.worker(rank), joined)

    @property
    def busy(self) -> bool:
        """Whether it has orders it has neither carried out nor dropped."""
        raise NotImplementedError

    def report_stop(self, order: WalkStop) -> None:
        event = WalkStopped(
            id=f"{order.request_id}.stopped.{order.attempt}.{order.index}.{self.rank}",
            writer=f"w{self.rank}",
            request_id=order.request_id,
            attempt=order.attempt,
            incarnation=order.incarnation,
            index=order.index,
            rank=self.rank,
            steps_after=0,
        )
        self.post(SUBJECTS.done(self.rank, str(order.request_id)), event)


class SimWorker(RankProcess):
    """The one rank of a model that runs on one."""

    def __init__(self, sim: "Simulation", name: str, rank: int = 0) -> None:
        super().__init__(sim, name, rank)
        self.jobs: dict[StepKey, Job] = {}

    @property
    def busy(self) -> bool:
        return bool(self.jobs)

    def wants(self, record: StoredRecord) -> bool:
        address = SUBJECTS.parse(record.subject)
        return address is not None and address.kind in {"ready", "worker", "conductor"}

    def take(self, record: StoredRecord) -> None:
        match self.inbox.fold(record):
            case Start(key, order):
                self.sim.started[key, self.rank] += 1
                for old in [k for k in self.jobs if k.request_id == key.request_id]:
                    del self.jobs[old]
                self.jobs[key] = Job(order)
            case Stop(key, order):
                if self.jobs.pop(key, None):
                    self.report_stop(order)
            case Superseded():
                self.alive = False
            case Joined() | None:
                pass
            case other:
                raise AssertionError(other)

    def work(self) -> bool:
        ready = [key for key, job in self.jobs.items() if not job.unacked or job.said != ANSWER_TOKENS]
        if not ready:
            return False
        key = self.sim.random.choice(sorted(ready))
        job = self.jobs[key]
        if job.order.index == 0:
            self.finish(key, job)
        elif job.said is None:
            return self.resume(job)
        elif job.said < ANSWER_TOKENS:
            self.say(job)
        elif job.unacked == 0:
            self.finish(key, job)
        return True

    def resume(self, job: Job) -> bool:
        """Fold what is valid of the output up to the fence of this attempt; whether that is there yet."""
        order = job.order
        if order.attempt > 1:
            transcript, said = Transcript(), 0
            for event in self.sim.outputs(str(order.request_id)):
                said += sum(len(chunk.token_ids) for chunk in transcript.fold(event))
                if isinstance(event, OutputFence) and event.attempt == order.attempt:
                    break
            else:
                return False
            job.transcript, job.said = transcript, said
        else:
            job.said = 0
        return True

    def say(self, job: Job) -> None:
        order, said = job.order, job.said
        assert said is not None
        request_id = str(order.request_id)
        count = min(self.sim.random.randint(1, 3), ANSWER_TOKENS - said)
        chunk = OutputChunk(
            id=f"{request_id}.chunk.{order.attempt}.{job.transcript.next_index}.{order.incarnation}",
            writer="w0",
            request_id=request_id,
            attempt=order.attempt,
            incarnation=order.incarnation,
            index=job.transcript.next_index,
            text="".join(f"<{token(request_id, said + i)}>" for i in range(count)),
            text_offset=len(text_of(request_id, said)),
            token_ids=[token(request_id, said + i) for i in range(count)],
            token_offset=said,
        )
        assert job.transcript.fold(chunk) == [chunk]
        job.said = said + count
        job.unacked += 1

        def stored() -> None:
            job.unacked -= 1

        self.post(SUBJECTS.output(order.origin, request_id, "w0"), chunk, stored)

    def finish(self, key: StepKey, job: Job) -> None:
        done: WalkCompleted = completion(job.order)
        if job.order.index:
            done = msgspec.structs.replace(done, output=job.transcript.totals)
        self.post(SUBJECTS.done(0, str(job.order.request_id)), done)
        del self.jobs[key]


class Clients(Process):
    """All clients and their gateway: submits, cancels, submits again, and reads what is released."""

    def __init__(self, sim: "Simulation", wanted: list[str], known: set[str]) -> None:
        super().__init__(sim, "g", 0)
        self.to_submit = [request_id for request_id in wanted if request_id not in known]
        self.submitted: list[str] = [request_id for request_id in wanted if request_id in known]
        self.fence = EpochFence()
        self.transcripts: dict[str, Transcript] = {}
        self.text: dict[str, dict[str, str]] = {}
        self.ends: dict[str, list[AnyEvent]] = {}

    def take(self, record: StoredRecord) -> None:
        address = SUBJECTS.parse(record.subject)
        assert address is not None
        event = decode(record.data, address.kind)
        if not self.fence.admits(event):
            return
        request_id = str(event.request_id)
        match event:
            case OutputChunk() | OutputFence() if request_id not in self.ends:
                valid = self.transcripts.setdefault(request_id, Transcript()).fold(event)
                tracks = self.text.setdefault(request_id, {})
                for chunk in valid:
                    text = tracks.get(chunk.track, "")
                    assert chunk.text_offset == len(text), "a hole or an overlap in what a client reads"
                    tracks[chunk.track] = text + chunk.text
            case RequestFinished() | RequestFailed() | RequestCancelled() | RequestRejected():
                known = self.ends.setdefault(request_id, [])
                if event.id not in {end.id for end in known}:
                    known.append(event)
            case _:
                pass

    def work(self) -> bool:
        chance, plan = self.sim.random, self.sim.plan
        if self.to_submit:
            self.submit(self.to_submit.pop(0))
            return True
        if self.sim.faulty and self.submitted and chance.random() < 0.05:
            request_id = chance.choice(self.submitted)
            if chance.random() < plan.p_again:
                self.submit(request_id)
            elif chance.random() < plan.p_cancel:
                event = RequestCancel(id=f"{request_id}.cancel", request_id=request_id, reason="left")
                self.post(SUBJECTS.control(request_id), event)
                self.sim.cancelled.add(request_id)
            return True
        return False

    def submit(self, request_id: str) -> None:
        event = RequestSubmitted(
            id=f"{request_id}.submitted",
            request_id=request_id,
            model="demo",
            inputs=Inputs(text=self.sim.asked(request_id)),
            params=Params(max_tokens=ANSWER_TOKENS),
        )
        self.post(SUBJECTS.request(request_id), event)
        self.submitted.append(request_id)


class Simulation:
    """One history: `run` it, then look at `records`, `clients` and the conductors."""

    flag: ClassVar[str] = ""
    ranks: ClassVar[tuple[int, ...]] = (0,)
    worker: ClassVar[type[RankProcess]] = SimWorker

    def __init__(
        self, seed: int, plan: Plan | None = None, records: list[StoredRecord] | None = None
    ) -> None:
        self.seed, self.plan = seed, plan or Plan.of(seed)
        self.random = random.Random(seed)
        self.faulty = True
        self.records: list[StoredRecord] = []
        self.decoded: list[AnyEvent] = []
        for record in records or []:
            self.store(record.subject, record.data)
        self.steps = 0
        self.generation = 0
        self.started: Counter[tuple[StepKey, int]] = Counter()
        self.cancelled: set[str] = set()
        self.released: dict[str, dict[str, str]] = {}
        self.story: list[str] = []
        limits = msgspec.structs.replace(LIMITS, max_attempts=self.plan.max_attempts)
        self.deployment = msgspec.structs.replace(
            self.serve(), limits=limits, max_concurrent_requests=self.plan.places
        )
        known = {str(event.request_id) for event in self.events(RequestSubmitted)}
        self.cancelled |= {str(event.request_id) for event in self.events(RequestCancel)}
        self.clients = Clients(self, [f"r{n}" for n in range(self.plan.requests)], known)
        self.conductors: list[SimConductor] = [SimConductor(self, self.name("c"))]
        self.workers: list[RankProcess] = []
        for rank in self.ranks:
            self.spawn(rank)

    # ---- the model ---------------------------------------------------------------------------------
    graph_of: Callable[[str], ModelGraph] = staticmethod(registry.graph)

    def serve(self) -> Deployment:
        """What is served, and where."""
        return deployment()

    def asked(self, request_id: str) -> str:
        """What a client writes."""
        return request_id

    def texts(self, request_id: str) -> dict[str, str]:
        """What it is to read, by track."""
        return {"": text_of(request_id)}

    # ---- the log -----------------------------------------------------------------------------------
    def store(self, subject: str, data: bytes) -> None:
        seq = len(self.records) + 1
        self.records.append(StoredRecord(seq, subject, data, time_ns=seq * 1000))
        self.decoded.append(decode(data))

    def events(self, kind: type[Event]) -> list[AnyEvent]:
        return [event for event in self.decoded if isinstance(event, kind)]

    def outputs(self, request_id: str) -> list[OutputChunk | OutputFence]:
        fence, found = EpochFence(), []
        for event in self.decoded:
            counts = fence.admits(event)
            if counts and isinstance(event, OutputChunk | OutputFence) and event.request_id == request_id:
                found.append(event)
        return found

    # ---- who there is ------------------------------------------------------------------------------
    def name(self, kind: str) -> str:
        self.generation += 1
        return f"{kind}{self.generation}.{len(self.records)}"

    def conductor(self, name: str) -> SimConductor | None:
        return next((c for c in self.conductors if c.name == name and not c.zombie), None)

    @property
    def processes(self) -> list[Process]:
        return [p for p in (self.clients, *self.conductors, *self.workers) if p.alive]

    # ---- time --------------------------------------------------------------------------------------
    def run(self) -> "Simulation":
        """Faults first, then none, until nothing more happens."""
        for _ in range(self.plan.faulty_steps):
            self.step()
        self.faulty = False
        for _ in range(self.plan.settle_steps):
            if not self.step() and not self.heal():
                return self
        raise AssertionError(f"seed {self.seed}: it never comes to rest")

    def step(self) -> bool:
        """One thing happens; whether anything could."""
        self.steps += 1
        if self.faulty and self.random.random() < self.plan.p_crash:
            self.crash()
            return True
        for process in self.random.sample(self.processes, len(self.processes)):
            actions: list[Callable[[], object]] = []
            if process.outbox:
                actions.append(process.transmit)
            if process.behind:
                actions.append(process.read)
            if actions and self.random.random() < 0.7:
                self.random.choice(actions)()
                return True
            if process.work():
                return True
            if actions:
                self.random.choice(actions)()
                return True
        return False

    def lose_gateway(self) -> None:
        """The gateway dies with all it had not sent; clients ask again, under the same ids, at a new one."""
        for request_id, tracks in self.clients.text.items():
            told = self.released.setdefault(request_id, {})
            for track, text in tracks.items():
                before = told.get(track, "")
                assert text.startswith(before) or before.startswith(text), (
                    "a second gateway told another story"
                )
                told[track] = max(text, before, key=len)
        stored = {str(event.request_id) for event in self.events(RequestSubmitted)}
        self.clients = Clients(self, [f"r{n}" for n in range(self.plan.requests)], stored)
        self.story.append(f"{self.steps}: gateway dies")

    def crash(self) -> None:
        """The gateway dies, or a conductor or rank does, or is only taken for dead; another takes over."""
        kind = self.random.choice(["conductor", "worker", "gateway"])
        if kind == "gateway":
            self.lose_gateway()
            return
        if kind == "worker":
            self.lose_rank(self.random.choice(self.ranks) if len(self.ranks) > 1 else self.ranks[0])
            return
        zombie = self.random.random() < self.plan.p_zombie
        self.replaced(self.conductors, zombie)
        self.conductors.append(SimConductor(self, self.name("c")))
        self.story.append(f"{self.steps}: conductor {'taken for dead' if zombie else 'dies'}")

    def lose_rank(self, rank: int) -> None:
        """A rank dies, or is only taken for dead, and another process takes its place at once."""
        zombie = self.random.random() < self.plan.p_zombie
        self.replaced([worker for worker in self.workers if worker.rank == rank], zombie)
        self.spawn(rank)
        self.story.append(f"{self.steps}: rank {rank} {'taken for dead' if zombie else 'dies'}")

    @staticmethod
    def replaced(group: Sequence[Process], zombie: bool) -> None:
        for process in group:
            if not process.zombie:
                process.zombie = True
                process.alive = process.alive and zombie

    def spawn(self, rank: int) -> None:
        """A process of its own for a rank."""
        self.workers.append(self.worker(self, self.name(f"w{rank}-"), rank))

    def present(self, rank: int) -> RankProcess | None:
        """The process that runs a rank now, if one does."""
        found = (w for w in self.workers if w.rank == rank and w.alive and not w.zombie)
        return next(found, None)

    def heal(self) -> bool:
        """The supervisor starts workers again that left of themselves; whether any had."""
        away = [rank for rank in self.ranks if self.present(rank) is None]
        for rank in away:
            self.spawn(rank)
        return bool(away)
