"""A round: clients stream, one fault happens at one point, and everything received is checked.

order ──> clients ──> the role reaches its point ──> the fault ──> recovery ──> ends ──> checker
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from nats.errors import Error as NatsError

from tests.chaos.checker import Expected, Finding, Stream, check, check_open, parts_of
from tests.chaos.clients import ask
from tests.chaos.deployment import Deployment
from tests.chaos.questions import LASTING, STOPPED, Question, stopping_at
from tests.chaos.rawlog import Record
from tests.chaos.seen import Seen

Disturbance: TypeAlias = Callable[[], Coroutine[Any, Any, bool]]
"""What goes wrong; whether it did. Its first step is done before anybody asks."""
DISTURBED_S: Final = 90.0
"""How long a disturbance may go on when all clients are served: a worker may have to start for it."""
_LEFTOVERS_S: Final = 20.0
"""How long rows, tensors and open requests may be held when all requests have ended."""
_ENDS_S: Final = 30.0
"""How long requests whose clients left may take to end."""
_WRONG_ENDS: Final = frozenset({70, 78})
"""Statuses by which a role says that it found a bug, or will never run."""

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """The same requests, sent without a fault.

    Attributes:
        questions: the requests to send; one has its own stop string.
        expected: by question, the result.
    """

    questions: Sequence[Question]
    expected: Mapping[str, Expected]


@dataclass(slots=True)
class Outcome:
    """The outcome of a round.

    Attributes:
        reached: the point was reached, so the round proves something.
        stall_s: the longest silence of a client; `undisturbed_s`, the same without a fault.
        clients: the number of clients; `resumed`, how often they resumed.
        attempts: the number of attempt fences.
        parts: the outcomes of several rounds, if it combines them.
    """

    name: str
    parts: "Sequence[Outcome]" = ()
    reached: bool = True
    findings: list[Finding] = field(default_factory=list)
    stall_s: float = 0.0
    undisturbed_s: float = 0.0
    clients: int = 0
    resumed: int = 0
    attempts: int = 0
    took_s: float = 0.0
    note: str = ""
    records: list[Record] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        return self.reached and not self.findings

    @property
    def rounds(self) -> int:
        return len(self.parts) or 1

    @property
    def rounds_survived(self) -> int:
        return sum(one.survived for one in self.parts or [self])

    @property
    def longer_s(self) -> float:
        """How much longer a client waited than in an undisturbed run."""
        return max(0.0, self.stall_s - self.undisturbed_s)

    @property
    def lost(self) -> int:
        """The requests without an answer."""
        kinds = {"lost", "no-end", "not-on-the-log", "end-missing"}
        return len({finding.request_id for finding in self.findings if finding.kind in kinds})

    @property
    def tokens_twice(self) -> int:
        return sum(finding.tokens for finding in self.findings if finding.kind == "twice")

    @property
    def tokens_missing(self) -> int:
        return sum(finding.tokens for finding in self.findings if finding.kind == "missing")


class Rounds:
    """Rounds on one deployment, one after the other."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._epochs: list[Record] = []  # of before the round
        self._read = 0
        self._acks = 0
        self._asked_before: set[str] = set()
        self._undisturbed_s = 0.0

    async def undisturbed(self, questions: Sequence[Question] = LASTING) -> Undisturbed:
        """Send the requests without a fault.

        Raises:
            AssertionError: something went wrong.
        """
        first = await self.round("undisturbed", questions)
        asked = [
            stopping_at(seen.text_of(0)) if seen.question is STOPPED else seen.question for seen in first.seen
        ]
        again = await self.round("undisturbed", asked)
        assert not first.findings + again.findings, [str(one) for one in first.findings + again.findings]
        stream = Stream(again.records)
        self._undisturbed_s = again.stall_s
        return Undisturbed(
            questions=asked,
            expected={seen.question.name: Expected.of(seen, stream) for seen in again.seen},
        )

    async def round(
        self,
        name: str,
        questions: Sequence[Question],
        *,
        expected: Mapping[str, Expected] | None = None,
        disturb: Disturbance | None = None,
        patience_s: float = DISTURBED_S,
    ) -> Outcome:
        """Send the requests, apply the fault, wait for all ends, check.

        Once all clients are served, a disturbance is given up after `patience_s`.
        """
        began_s = time.monotonic()
        start_seq = await self._caught_up() + 1
        outcome = Outcome(name=name, clients=len(questions), undisturbed_s=self._undisturbed_s)
        outcome.seen, outcome.reached = await self._asked(name, questions, disturb, patience_s)
        outcome.records = await self._until_all_ended(start_seq)
        records = [*self._epochs, *outcome.records]
        outcome.findings = check(records, outcome.seen, expected, earlier=self._asked_before)
        self._asked_before.update(part for seen in outcome.seen for part in parts_of(seen))
        outcome.findings += self.deployment.ledger.check(outcome.records, start_seq, self._acks)
        outcome.findings += self._died_since(began_s)
        outcome.findings += [
            Finding(kind="left-over", request_id="", message=held)
            for held in await self.deployment.leftovers(_LEFTOVERS_S)
        ]
        outcome.stall_s = max(seen.longest_stall_s for seen in outcome.seen)
        outcome.resumed = sum(seen.resumed for seen in outcome.seen)
        outcome.attempts = sum(one.attempts for one in Stream(outcome.records).requests.values())
        outcome.took_s = time.monotonic() - began_s
        return outcome

    async def ask(self, name: str, questions: Sequence[Question], disturb: Disturbance) -> list[Seen]:
        """Send the requests and apply the fault; return what the clients received, unchecked."""
        return (await self._asked(name, questions, disturb, DISTURBED_S))[0]

    async def _asked(
        self, name: str, questions: Sequence[Question], disturb: Disturbance | None, patience_s: float
    ) -> tuple[list[Seen], bool]:
        """Return what the clients received, and True if the fault happened."""
        number, doors = next(_numbers), self.deployment.doors
        async with asyncio.TaskGroup() as tasks:
            disturbing = tasks.create_task(disturb()) if disturb is not None else None
            asking = [
                tasks.create_task(
                    ask(doors, question, f"{name}-{number}-{question.name}-{place}", first=place)
                )
                for place, question in enumerate(questions)
            ]
            seen = [await one for one in asking]
            return seen, disturbing is None or await _in_time(disturbing, patience_s)

    async def _until_all_ended(self, start_seq: int) -> list[Record]:
        """The round's records, once every request in them has ended, or on a timeout."""
        deadline = time.monotonic() + _ENDS_S
        while True:
            with contextlib.suppress(NatsError, TimeoutError):
                self._acks = len(self.deployment.ledger.acked)
                records = await self.deployment.log.records(start_seq)
                if not check_open([*self._epochs, *records]) or time.monotonic() > deadline:
                    return records
            assert time.monotonic() < deadline + _ENDS_S, "the stream cannot be read"
            await asyncio.sleep(0.1)

    async def _caught_up(self) -> int:
        """The current end of the log; the epochs up to there are known."""
        while True:
            with contextlib.suppress(NatsError, TimeoutError):
                records = await self.deployment.log.records(self._read + 1)
                self._epochs += [one for one in records if one.subject.endswith(".conductor.epoch")]
                self._read = records[-1].seq if records else self._read
                return self._read
            await asyncio.sleep(0.1)

    def _died_since(self, since_s: float) -> list[Finding]:
        """The processes that have exited because of a bug."""
        return [
            Finding(kind="died", request_id="", message=f"{one.role} ended with status {one.status}")
            for one in self.deployment.exits()
            if one.at_s > since_s and one.status in _WRONG_ENDS
        ]


async def _in_time(disturbing: "asyncio.Task[bool]", patience_s: float) -> bool:
    """Wait for a disturbance; return False if it does not happen in time."""
    await asyncio.wait({disturbing}, timeout=patience_s)
    if not disturbing.done():
        disturbing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disturbing
        return False
    return disturbing.result()
