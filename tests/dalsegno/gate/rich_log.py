"""A log of one deployment with everything that scheduling depends on, made by the real core in a moment.

Three replicas with KV caches of different sizes, tenants, priorities, time limits, prompts that share
prefixes, refusals of every kind, workers that die, leave and come back, poison pills, and conductors that
take over. The seed decides what happens when.
"""

import contextlib
import random
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from conductor.core.lifecycle import Phase
from conductor.core.replicas import Memory, Policy
from conductor.core.schedule import Deployment
from configs.placement import PlacedGroup
from shared.events import (
    DeadlinePassed,
    Failure,
    Inputs,
    MalformedEventError,
    NodeReady,
    Params,
    RequestSubmitted,
    decode,
    encode,
)
from shared.ids import Rank
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER
from tests.conductor import script
from tests.conductor.script import SUBJECTS, Script

RANKS: Final = (0, 1, 2)
KV_TOKENS: Final = {0: 128, 1: 96, 2: 64}
_PIECE: Final = 256
"""Bytes of a prompt that the choice of a rank by its prefix cache takes together."""
_PREFIXES: Final = [name * _PIECE for name in "pqr"]
_WEIGHTS: Final = {"prepare": "1" * 32, "llm": "2" * 32}


@dataclass(frozen=True, slots=True)
class RichLog:
    """The records, and the deployment that decided them."""

    records: list[StoredRecord]
    deployment: Deployment


class _Clocked(Script):
    """A script whose clock can jump."""

    jumped_ns = 0

    def store(self, subject: str, data: bytes) -> int:
        seq = super().store(subject, data)
        last = self.records[-1]
        self.records[-1] = msgspec.structs.replace(last, time_ns=last.time_ns + self.jumped_ns)
        return seq


class _Driver:
    def __init__(self, seed: int, policy: Policy) -> None:
        self.random = random.Random(f"{seed} {policy}")
        self.script = _Clocked(
            serve=script.deployment(
                groups=(PlacedGroup(nodes=("prepare", "llm"), walks=None, ranks=tuple(map(Rank, RANKS))),),
                max_concurrent_requests=6,
                max_per_replica=3,
                max_waiting=5,
                shorten_above=0.5,
                replicas=policy,
                limits=msgspec.structs.replace(script.LIMITS, max_attempts=2),
            )
        )
        self.orders: dict[tuple[str, int, int], NodeReady] = {}
        self.submissions: dict[str, RequestSubmitted] = {}
        self.read = 0
        self.asked = 0
        self.lives = 0
        self.epochs = 0

    def run(self, steps: int) -> RichLog:
        self.lead()
        for rank in RANKS:
            self.join(rank)
        actions = [
            (self.submit, 40), (self.burst, 2), (self.answer, 70), (self.lose, 5), (self.join_all, 6),
            (self.leave, 1), (self.cancel, 3), (self.deadline, 6), (self.lead, 1), (self.fail, 2),
            (self.gap, 1), (self.refused, 5), (self.again, 3), (self.progress, 12),
        ]  # fmt: skip
        doers, weights = zip(*actions, strict=True)
        for _ in range(steps):
            self.random.choices(doers, weights)[0]()
        self.jump()
        for _ in range(12):
            self.again()
        self.join_all()
        for _ in range(40 * steps):
            if not self.script.cluster.open:
                break
            self.random.choice([self.answer, self.answer, self.join_all])()
        return RichLog(self.script.records, self.script.deployment)

    # ---- what happens ------------------------------------------------------------------------------
    def lead(self) -> None:
        """Another conductor takes over; what its predecessor remembered is gone."""
        self.epochs += 1
        self.script.cluster.memory = Memory()
        self.script._number = 0
        self.script.open_epoch(self.epochs, f"c{self.epochs}")

    def join(self, rank: int) -> None:
        self.lives += 1
        self.script.join(f"w{rank}-{self.lives}", rank, KV_TOKENS[rank], _WEIGHTS)

    def join_all(self) -> None:
        for rank in RANKS:
            if self.script.cluster.world.incarnation(rank) is None:
                self.join(rank)

    def submit(self, **fields: Any) -> None:
        self.asked += 1
        chance = self.random
        text = chance.choice(_PREFIXES) + str(chance.randrange(3)) * _PIECE
        usual: dict[str, Any] = {
            "inputs": Inputs(text=text),
            "params": Params(max_tokens=4, seed=chance.choice([None, 7])),
            "tenant": chance.choice([None, "a", "a", "b", "c"]),
            "priority": chance.choice([0, 0, 0, 1, -1]),
            "timeout_s": chance.choice([None, None, 0.05, 0.2, 1.0]),
        }
        self.script.submit(f"r{self.asked}", **usual | fields)

    def burst(self) -> None:
        """More than may run and wait."""
        for _ in range(9):
            self.submit()

    def gap(self) -> None:
        """The conductor is dead while requests come; its successor finds them all at once."""
        self.script.lead = False
        for _ in range(self.random.randint(1, 8)):
            self.submit()
        self.script.lead = True
        self.lead()

    def jump(self) -> None:
        """So much later that what has ended is forgotten, except for its digest."""
        self.script.jumped_ns += 20 * 60 * 1_000_000_000
        for _ in range(2):
            for _ in range(30):
                self.submit(timeout_s=None)
                for _ in range(3):
                    self.answer()

    def answer(self) -> None:
        if (ready := self._order()) is not None:
            self.script.complete(ready)

    def progress(self) -> None:
        """A suspect gets further than it was."""
        if (ready := self._order(is_suspect=True)) is not None:
            self.script.progress(ready)

    def fail(self) -> None:
        if (ready := self._order()) is not None:
            self.script.fail(ready, Failure(code="worker_failed", message="it failed"))

    def lose(self) -> None:
        """A worker dies; some of them take others along, and some die of a suspect."""
        suspects = [one for one in self.script.cluster.open.values() if one.suspicion.dead_incarnations]
        if suspects and self.random.random() < 0.7:
            for rank in self.random.choice(suspects).ranks:
                if self.script.cluster.world.incarnation(rank) is not None:
                    self.script.lose(rank)
            return
        # Of the orders behind this position, the worker had begun none: their requests are no suspects.
        read_seq = self.random.choice([None, len(self.script.records) - self.random.randrange(40)])
        for rank in self.random.sample(RANKS, self.random.choice([1, 1, 2])):
            if self.script.cluster.world.incarnation(rank) is not None:
                self.script.lose(rank, read_seq=read_seq)

    def leave(self) -> None:
        if self.script.cluster.world.incarnation(rank := self.random.choice(RANKS)) is not None:
            self.script.leave(rank)

    def cancel(self) -> None:
        if self.script.cluster.open:
            self.script.cancel(self.random.choice(list(self.script.cluster.open)))

    def deadline(self) -> None:
        """The conductor's shell says that a time limit has passed."""
        now_ns = self.script.cluster.now_ns
        due = [one for one in self.script.cluster.deadlines() if one.at_ns < now_ns]
        if not due:
            return
        limit = min(due, key=lambda one: (one.at_ns, one.request_id))
        self.script._number += 1
        event = DeadlinePassed(
            id=f"{limit.request_id}.deadline.{self.script._number}.{self.epochs}",
            writer=CONDUCTOR_WRITER,
            number=self.script._number,
            epoch=self.epochs,
            request_id=limit.request_id,
            attempt=limit.attempt,
            deadline_ns=limit.at_ns,
            step=limit.step,
        )
        self.script.say(SUBJECTS.walk(limit.request_id), event)

    def refused(self) -> None:
        """A request for another model, with an unknown option, or one that cannot be read."""
        match self.random.randrange(3):
            case 0:
                self.submit(model="another")
            case 1:
                self.submit(params=Params(max_tokens=4, options={"swirl": 1}))
            case _:
                self.asked += 1
                self.script.say(SUBJECTS.request(f"r{self.asked}"), b"\x93nonsense")

    def again(self) -> None:
        """An id is used again: for the same request, or for another one."""
        if self.asked:
            name = f"r{self.random.randint(1, self.asked)}"
            self._read()
            first = self.submissions.get(name)
            if self.random.random() < 0.5 and first is not None:
                self.script.say(SUBJECTS.request(name), encode(first))
            else:
                self.script.submit(name, inputs=Inputs(text=f"other {self.asked}"))

    def _order(self, *, is_suspect: bool = False) -> NodeReady | None:
        """A running order that its worker has not answered; of a suspect only, if there shall be one."""
        open_steps = [
            (request, step, rank)
            for request in self.script.cluster.open.values()
            if request.phase is Phase.RUNNING
            for step in request.running
            for rank in step.incarnations
            if rank in step.stored and rank not in step.parts and step.is_quarantined >= is_suspect
        ]
        if not open_steps:
            return None
        request, step, _ = self.random.choice(open_steps)
        self._read()
        return self.orders.get((request.id, request.attempt, step.index))

    def _read(self) -> None:
        """Note the new orders and submissions."""
        for record in self.script.records[self.read :]:
            if record.subject.startswith((SUBJECTS.request(""), f"{SUBJECTS.prefix}.ready.")):
                with contextlib.suppress(MalformedEventError):
                    event = decode(record.data)
                    if isinstance(event, NodeReady):
                        self.orders[str(event.request_id), event.attempt, event.index] = event
                    elif isinstance(event, RequestSubmitted):
                        self.submissions.setdefault(str(event.request_id), event)
        self.read = len(self.script.records)


def rich_log(seed: int, policy: Policy, steps: int = 300) -> RichLog:
    """The log of a seed."""
    return _Driver(seed, policy).run(steps)
