"""A log in memory of everything that can be in one, in any order: a reader of it must not depend on sense."""

import random
from typing import Any

from shared.events import (
    EpochOpened,
    Event,
    Failure,
    Inputs,
    Limits,
    NodeReady,
    OutputChunk,
    OutputFence,
    OutputTotals,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestSubmitted,
    Usage,
    encode,
)
from shared.events.decisions import Pins
from shared.log.memory import MemoryLog, MemoryStore
from shared.subjects import CONDUCTOR_WRITER
from tests.conductor.script import SUBJECTS

IDS = ("r0", "r1", "r2", "r3", "a/b", "no token!")
LIVES: tuple[dict[str, int], ...] = ({}, {"w0": 7}, {"w1": 8}, {"w0": 7, "w1": 8})


class OddLog:
    """Records at random, by a seed. `store` is the log."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._time_ns = 1_000_000_000_000
        self.store = MemoryStore(SUBJECTS, clock=self._clock)
        self._kinds = [
            self._submit, self._submit, self._junk, self._epoch, self._admit, self._admit, self._resume,
            self._fence, self._order, self._order, self._chunk, self._chunk, self._chunk, self._end,
            self._reject, self._stray,
        ]  # fmt: skip

    @property
    def log(self) -> MemoryLog:
        return MemoryLog(self.store)

    def grow(self, records: int) -> None:
        for _ in range(records):
            self.random.choice(self._kinds)()

    def _clock(self) -> int:
        self._time_ns += self.random.randrange(1, 1_000_000)
        return self._time_ns

    def _id(self) -> str:
        # Later requests have other ids, too, so that whole requests expire.
        return self.random.choice((*IDS, f"n{len(self.store.records) // 20}"))

    def _say(self, subject: str, event: Event) -> None:
        self.store.append(subject, encode(event))

    def _decided(self, request_id: str) -> dict[str, Any]:
        epoch = self.random.choice((None, 1, 2, 3, 4))
        return {"writer": CONDUCTOR_WRITER, "epoch": epoch, "request_id": request_id}

    # ---- events --------------------------------------------------------------------------------------
    def _submit(self) -> None:
        request_id = self._id()
        event = RequestSubmitted(
            model=self.random.choice(("demo", "other")),
            tenant=self.random.choice((None, "alice")),
            inputs=Inputs(text="a prompt"),
            request_id=request_id,
        )
        self._say(SUBJECTS.request(request_id), event)

    def _junk(self) -> None:
        kind = self.random.choice((SUBJECTS.request, SUBJECTS.walk, SUBJECTS.control))
        self.store.append(kind(self._id()), b"junk")

    def _epoch(self) -> None:
        if self.random.random() < 0.3:
            number = self.random.randrange(1, 5)
            opened = EpochOpened(id="e", writer=CONDUCTOR_WRITER, epoch=number, conductor="c", core="k")
            self._say(SUBJECTS.epoch, opened)

    def _admit(self) -> None:
        request_id = self._id()
        event = RequestAdmitted(
            **self._decided(request_id),
            id=f"admitted {len(self.store.records)}",
            family="decoder_lm",
            seed=1,
            placement={"llm": 0},
            lives=self.random.choice(LIVES),
            limits=Limits(max_seq_len=1, kv_tokens=1, default_max_tokens=1),
            pins=Pins(graph="", plan="", config="", core="", submission=""),
            reason="",
        )
        self._say(SUBJECTS.walk(request_id), event)

    def _resume(self) -> None:
        request_id = self._id()
        event = RequestResumed(
            **self._decided(request_id),
            id=f"resumed {len(self.store.records)}",
            attempt=self.random.randrange(1, 4),
            placement={"llm": 1},
            lives=self.random.choice(LIVES),
            reason="",
        )
        self._say(SUBJECTS.walk(request_id), event)

    def _fence(self) -> None:
        request_id = self._id()
        event = OutputFence(
            **self._decided(request_id),
            attempt=self.random.randrange(1, 4),
            reason="",
            history=b"",
            lives=self.random.choice(LIVES),
        )
        self._say(SUBJECTS.output("nats", request_id, CONDUCTOR_WRITER), event)

    def _order(self) -> None:
        request_id, rank = self._id(), self.random.randrange(3)
        event = NodeReady(
            **self._decided(request_id),
            rank=rank,
            attempt=self.random.randrange(1, 4),
            model="demo",
            walks=[],
            placement={},
            origin="nats",
            seed=1,
            reason="",
            history=b"",
        )
        self._say(SUBJECTS.ready(rank, request_id), event)

    def _chunk(self) -> None:
        request_id, writer = self._id(), self.random.choice(("w0", "w1"))
        event = OutputChunk(
            writer=writer,
            request_id=request_id,
            incarnation=self.random.choice((7, 8)),
            attempt=self.random.randrange(4),
            index=self.random.randrange(3),
            advisory=self.random.random() < 0.1,
            metadata={"echo": True} if self.random.random() < 0.3 else {},
            track=self.random.choice(("", "", "sound")),
        )
        self._say(SUBJECTS.output("nats", request_id, writer), event)

    def _end(self) -> None:
        request_id = self._id()
        said = self._decided(request_id)
        events = (
            RequestFinished(
                **said,
                usage=Usage(prompt_tokens=3),
                finish_reasons=["stop"],
                output=OutputTotals(),
                history=b"",
            ),
            RequestFailed(**said, failure=Failure(code="step_failed", message=""), history=b""),
            RequestCancelled(**said, reason="", history=b""),
        )
        self._say(SUBJECTS.walk(request_id), self.random.choice(events))

    def _reject(self) -> None:
        request_id = self._id()
        positions = [
            record.seq for record in self.store.records if record.subject == SUBJECTS.request(request_id)
        ]
        event = RequestRejected(
            **self._decided(request_id),
            failure=Failure(code="queue_full", message=""),
            submission_seq=self.random.choice(positions or [1]),
        )
        self._say(SUBJECTS.walk(request_id), event)

    def _stray(self) -> None:
        self.store.append("other.request.r0", b"")
        self.store.append("ds.unknown.r0", b"")
