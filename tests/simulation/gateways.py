"""Simulated gateways: they submit requests for clients and relay each chunk once.

Real code: the fold that makes an answer from records (`gateway.requests.relay.OutputFold`). Simulated: the
dispatcher that passes records to answers; the buffer, which drops the answer of a slow client so that it is
read from the log again later; and the submissions, each stored only if its id is new.

A resuming client sends its position: the number of its chunks and their digest. Positions are equal at all
gateways, because they come from the log. If the log now holds other chunks, the client gets an error.
"""

import hashlib
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from gateway.requests.relay import AnswerItem, Failed, OutputFold
from shared.epoch_fence import EpochFence
from shared.events import (
    AnyEvent,
    Failure,
    OutputChunk,
    RequestCancel,
    RequestSubmitted,
    encode,
    submission_digest,
)
from shared.log.port import StoredRecord
from shared.subjects import Address
from shared.transcript import chunk_bytes
from tests.conductor.script import SUBJECTS
from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.clients import Client
    from tests.simulation.simulator import Simulation

BUFFER: Final = 3
"""So many chunks wait for a client; the rest waits in the log."""
NOT_NOW: Final = Failure(code="log_unavailable", message="the log does not answer", status=503)
CONFLICT: Final = Failure(code="request_id_conflict", message="the id is taken", status=409)
GONE: Final = Failure(code="request_not_found", message="the log holds no such request", status=404)
OTHERWISE: Final = Failure(code="output_changed", message="the log has not what you have", status=410)


@dataclass(frozen=True, slots=True)
class Position:
    """The number of chunks that a client has, and their digest."""

    chunks: int = 0
    digest: bytes = b""

    def behind(self, chunk: OutputChunk) -> "Position":
        """The position after the next chunk."""
        seen = chunk_bytes(chunk) + chunk.track.encode()
        return Position(self.chunks + 1, hashlib.blake2b(self.digest + seen, digest_size=8).digest())


START: Final = Position()
Told: TypeAlias = tuple[AnswerItem, Position, int]
"""A piece of an answer, the position behind it, and the log's generation that it is of."""


@dataclass(slots=True, eq=False)
class Answer:
    """One client's answer at one gateway.

    Attributes:
        after: the client's position when it connected; earlier chunks are not sent again.
        position: the position of the fold.
        rest: the position to read the log from, and the epoch in force there; None while it is live.
        buffered: the chunks that wait for the client.
    """

    client: "Client"
    gateway: "Gateway"
    request_id: str
    after: Position
    position: Position = START
    fold: OutputFold = field(default_factory=OutputFold)
    rest: tuple[int, EpochFence] | None = None
    buffered: deque[Told] = field(default_factory=deque)
    is_submitting: bool = False
    is_over: bool = False

    def begin_again(self, submission_seq: int) -> None:
        """Read the whole request from the log: the live records may have started in the middle."""
        self.fold, self.position = OutputFold(submission_seq=submission_seq), START
        self.buffered.clear()
        self.rest, self.is_over = (1, EpochFence()), False

    def take(self, seq: int, address: Address, event: AnyEvent) -> None:
        """Fold one valid record."""
        self.put(self.fold.fold(seq, address, event))

    def put(self, items: list[AnswerItem]) -> None:
        for item in items:
            if not isinstance(item, OutputChunk):
                if self.position.chunks < self.after.chunks:
                    item = Failed(OTHERWISE)  # it ends before what the client has  # noqa: PLW2901
                self._tell(item)
                continue
            self.position = self.position.behind(item)
            if self.position.chunks == self.after.chunks and self.position != self.after:
                self._tell(Failed(OTHERWISE))
            elif self.position.chunks > self.after.chunks:
                self._tell(item)

    def fail(self, failure: Failure) -> None:
        """End the answer for a reason that is not on the log."""
        self._tell(Failed(failure))

    def _tell(self, item: AnswerItem) -> None:
        if not self.is_over:
            self.buffered.append((item, self.position, self.gateway.line.generation))
            self.is_over = not isinstance(item, OutputChunk)


class Gateway(Process):
    """One incarnation of a gateway; `name` is its origin on the log."""

    def __init__(self, sim: "Simulation", name: str) -> None:
        super().__init__(sim, name, sim.log.last_seq)
        self.fence = sim.log.opened()
        self.answers: defaultdict[str, list[Answer]] = defaultdict(list)
        self.number = 0

    def wants(self, address: Address) -> bool:
        if address.kind == "output":
            return address.origin == self.name
        return address.kind in {"walk", "conductor"}

    # ---- clients -----------------------------------------------------------------------------------
    def ask(self, client: "Client", after: Position) -> Answer:
        """Submit a client's request, or attach to it."""
        answer = Answer(client, self, client.request_id, after)
        if not self.is_reachable or self.line.is_full or self.sim.log.is_full:
            answer.fail(NOT_NOW)
            return answer
        self.answers[client.request_id].append(answer)
        if after.chunks and not self.sim.log.last(SUBJECTS.request(client.request_id)):
            self.sim.saw("a client is told that its request is gone")
            answer.fail(GONE)
            return answer
        self._submit(answer)
        return answer

    def _submit(self, answer: Answer) -> None:
        self.number += 1
        event = answer.client.submission(f"{self.name}.{self.number}", self.name)
        answer.is_submitting = True

        def stored(seq: int) -> None:
            answer.is_submitting = False
            answer.put(answer.fold.submitted_at(seq))

        def refused() -> None:
            answer.is_submitting = False
            self._attach(answer, event)

        self.line.publish(SUBJECTS.request(answer.request_id), event, 0, stored, refused)

    def _attach(self, answer: Answer, event: RequestSubmitted) -> None:
        """The id exists: if it is the same request, read its answer from the beginning."""
        log = self.sim.log
        for seq in log.by_subject[SUBJECTS.request(answer.request_id)]:
            original = log.events[seq - 1]
            if isinstance(original, RequestSubmitted):
                if submission_digest(original) != submission_digest(event):
                    answer.fail(CONFLICT)
                    return
                self.sim.saw("a client is attached to its request")
                self.line.highest = max(self.line.highest, seq)
                answer.begin_again(seq)
                return
        answer.fail(CONFLICT)

    def close(self, answer: Answer) -> None:
        """The client has disconnected."""
        if answer in self.answers.get(answer.request_id, []):
            self.answers[answer.request_id].remove(answer)
            if not self.answers[answer.request_id]:
                del self.answers[answer.request_id]

    def cancel(self, request_id: str, reason: str) -> None:
        """Publish a cancel."""
        self.number += 1
        event = RequestCancel(
            id=f"{self.name}.{self.number}", writer=self.name, request_id=request_id, reason=reason
        )
        self.post(SUBJECTS.control(request_id), event)

    # ---- the hub -----------------------------------------------------------------------------------
    def take(self, record: StoredRecord) -> None:
        event = self.sim.log.events[record.seq - 1]
        if event is None or not self.fence.admits(event) or event.request_id is None:
            return
        for answer in self.answers.get(event.request_id, ()):
            if answer.rest is not None or answer.is_over:
                continue
            if len(answer.buffered) >= BUFFER:
                answer.rest = (record.seq, EpochFence(self.fence.epoch))
                self.sim.saw("an answer is let go of, for its client is slow")
            else:
                answer.take(record.seq, self.sim.log.addresses[record.seq - 1], event)

    def work(self) -> bool:
        """Read the log for a client that was dropped or came later."""
        if not self.is_reachable:
            return False
        waiting = [
            answer
            for answers in self.answers.values()
            for answer in answers
            if answer.rest is not None and not answer.is_over and len(answer.buffered) < BUFFER
        ]
        chance = self.sim.random
        return any(map(self._read_on, chance.sample(waiting, len(waiting))))

    def _read_on(self, answer: Answer) -> bool:
        """Read the next record of the request, if there is one."""
        assert answer.rest is not None
        (seq, fence), log = answer.rest, self.sim.log
        while seq <= log.last_seq:
            address, event = log.addresses[seq - 1], log.events[seq - 1]
            seq += 1
            is_asked_for = address.kind in {"walk", "output"} and address.request_id == answer.request_id
            if not is_asked_for and address.name != "epoch":
                continue
            self.line.highest = max(self.line.highest, seq - 1)
            if event is not None and fence.admits(event) and is_asked_for:
                answer.take(seq - 1, address, event)
                answer.rest = (seq, fence)
                return True
        return False

    def end(self, why: str) -> None:
        super().end(why)
        for answers in list(self.answers.values()):
            for answer in list(answers):
                answer.client.lose_line()


def plainly(event: RequestSubmitted, *, as_json: bool) -> bytes:
    """The submission as a foreign service writes it: JSON without a tag."""
    if not as_json:
        return encode(event)
    told = msgspec.to_builtins(event)
    del told["type"]
    return msgspec.json.encode(told)
