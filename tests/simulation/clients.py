"""Simulated clients: they submit, read, lose their connection and return; some use the log directly.

Each client records every chunk that it receives, so a gap, an overlap or a contradiction is found as soon as
it
is read.
"""

from typing import TYPE_CHECKING, Final

import msgspec

from gateway.requests.relay import Answered, AnswerItem
from shared.epoch_fence import EpochFence
from shared.events import (
    Failure,
    OutputChunk,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
)
from shared.log.port import StoredRecord
from shared.request_output import RequestOutput
from shared.subjects import Address
from tests.conductor.script import SUBJECTS
from tests.simulation.gateways import START, Answer, Gateway, Position, plainly
from tests.simulation.line import Entry, Line
from tests.simulation.process import Process
from tests.simulation.questions import Question
from tests.simulation.reading import Reader

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation

AGAIN: Final = frozenset({"log_unavailable"})
"""Errors after which a client asks again."""


class Reading:
    """What one client received of one request; `generation` is the log's generation at its end."""

    def __init__(self) -> None:
        self.generation: int | None = None
        self.text: dict[str, str] = {}
        self.chunks = 0
        self.end: str | None = None

    def take(self, chunk: OutputChunk) -> None:
        known = self.text.get(chunk.track, "")
        if chunk.data is None:
            assert chunk.text_offset == len(known), (
                f"a hole or an overlap in track {chunk.track!r}: {chunk.text!r} at {chunk.text_offset}, "
                f"behind {known!r}"
            )
        self.text[chunk.track] = known + (chunk.text if chunk.data is None else chunk.data.decode())
        self.chunks += 1

    def close(self, end: str, generation: int) -> None:
        """End the reading."""
        self.end, self.generation = end, generation

    @property
    def is_over(self) -> bool:
        return self.end is not None


class Client:
    """An HTTP client that wants one answer; `reading` is what it received.

    Attributes:
        position: the position that it sends when it resumes.
        may_ask_ms: the earliest time of its next attempt.
        left: it does not want the answer any more.
        old: by generation of the log, what it received before it restarted from the beginning.
    """

    def __init__(self, sim: "Simulation", question: Question) -> None:
        self.sim, self.question = sim, question
        self.reading = Reading()
        self.position: Position = START
        self.gateway: Gateway | None = None
        self.answer: Answer | None = None
        self.may_ask_ms = 0
        self.is_stalled = False
        self.has_left = False
        self.was_told_to_forget = False
        self.old: list[Reading] = []

    def __repr__(self) -> str:
        return f"client of {self.request_id}"

    @property
    def request_id(self) -> str:
        return self.question.request_id

    def submission(self, event_id: str, origin: str) -> RequestSubmitted:
        return msgspec.structs.replace(self.question.submission(event_id, origin), is_first=True)

    @property
    def wants_more(self) -> bool:
        return not self.has_left and not self.reading.is_over and not self.was_told_to_forget

    def act(self) -> bool:
        """Do one thing; return False if there is nothing to do."""
        if not self.wants_more:
            return False
        if self.answer is None:
            return self._ask()
        assert self.gateway is not None
        answer = self.answer
        if self.is_stalled or self.gateway.is_frozen or answer.is_submitting or not answer.buffered:
            return False
        self._read(*answer.buffered.popleft())
        return True

    def _ask(self) -> bool:
        gateways = [gateway for gateway in self.sim.gateways if gateway.is_alive and not gateway.is_frozen]
        if not gateways or self.sim.now_ms < self.may_ask_ms:
            return False
        self.gateway = self.sim.random.choice(gateways)
        if self.position.chunks:
            self.sim.saw("a client comes back for the rest")
        self.answer = self.gateway.ask(self, self.position)
        return True

    def _read(self, item: AnswerItem, position: Position, generation: int) -> None:
        if isinstance(item, OutputChunk):
            assert position.chunks == self.position.chunks + 1, f"{self}: {position} after {self.position}"
            self.reading.take(item)
            self.position = position
            return
        assert self.answer is not None
        if isinstance(item, Answered):
            self._hang_up()
            self.reading.close("finished", generation)
            return
        self._fail(item.failure, generation)

    def _fail(self, failure: Failure, generation: int) -> None:
        self._hang_up()
        if failure.code in AGAIN:
            self.ask_later()
        elif failure.code in {"request_not_found", "output_changed"}:
            self.was_told_to_forget = True
            self.sim.saw(f"a client is told: {failure.code}")
        else:
            self.reading.close(failure.code, generation)

    def ask_later(self) -> None:
        """Retry after a while."""
        pause_ms = self.sim.random.randint(1, 300)
        self.may_ask_ms = self.sim.now_ms + pause_ms
        self.sim.later(pause_ms, lambda: None)

    def lose_line(self) -> None:
        """Break the connection; buffered data is lost with it."""
        if self.answer is not None:
            self._hang_up()
            self.ask_later()

    def _hang_up(self) -> None:
        if self.gateway is not None and self.answer is not None:
            self.gateway.close(self.answer)
        self.gateway = self.answer = None

    def leave(self) -> None:
        """Give the request up; its gateway cancels it."""
        gateway = self.gateway
        self.has_left = True
        self._hang_up()
        if gateway is not None and gateway.is_alive:
            gateway.cancel(self.request_id, "the client disconnected")

    def ask_again(self) -> None:
        """Read the whole answer again from its beginning."""
        self.old.append(self.reading)
        self._hang_up()
        self.reading, self.position = Reading(), START


class Service(Process):
    """A service that publishes a request to the log and reads the answer there."""

    def __init__(self, sim: "Simulation", question: Question) -> None:
        super().__init__(sim, f"service of {question.request_id}", 0)
        self.question = question
        self.begin()

    def begin(self) -> None:
        """Start without having read anything."""
        self.reading = Reading()
        self.output = RequestOutput()
        self.fence = EpochFence()
        self.seq: int | None = None
        self.is_posted = False
        self.rejections: list[RequestRejected] = []

    @property
    def request_id(self) -> str:
        return self.question.request_id

    def wants(self, address: Address) -> bool:
        is_ours = address.request_id == self.question.request_id
        return address.name == "epoch" or (is_ours and address.kind in {"request", "walk", "output"})

    def work(self) -> bool:
        if self.is_posted:
            return False
        self.is_posted = True
        event = self.question.submission(f"{self.request_id}.asked", "nats")
        as_json = self.sim.random.random() < 0.5
        self.line.outbox.append(Entry(SUBJECTS.request(self.request_id), plainly(event, as_json=as_json)))
        return True

    def take(self, record: StoredRecord) -> None:
        event = self.sim.log.events[record.seq - 1]
        if event is None or not self.fence.admits(event) or self.reading.is_over:
            return
        address = SUBJECTS.parse(record.subject)
        assert address is not None
        for chunk in self.output.fold(address, event):
            self.reading.take(chunk)
        match event:
            case RequestSubmitted() if self.seq is None and event.id == f"{self.request_id}.asked":
                self.seq = record.seq
            case RequestFinished():
                assert event.output == self.output.transcript.totals
                self.reading.close("finished", self.line.generation)
            case RequestFailed():
                self.reading.close(event.failure.code, self.line.generation)
            case RequestCancelled():
                self.reading.close("request_cancelled", self.line.generation)
            case RequestRejected() if event.submission_seq == self.seq:
                self.reading.close(event.failure.code, self.line.generation)
            case _:
                pass

    def regressed(self) -> None:
        """Restart, as a new process would: read the rest of the answer again."""
        self.line = Line(self.sim.log, self.sim.random, Reader(self.sim.log, self.wants, 0))
        self.begin()
