import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import msgspec
import pytest

from gateway.requests.relay import BUFFER_BYTES, Answered, AnswerItem, Failed, OutputFold, RecordRouter, Relay
from shared.epoch_fence import EpochFence
from shared.events import (
    EpochOpened,
    Event,
    Failure,
    OutputChunk,
    OutputFence,
    OutputTotals,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    Usage,
    encode,
)
from shared.log.memory import MemoryLog, MemoryStore
from shared.subjects import CONDUCTOR_WRITER, Address, Subjects
from shared.transcript import Transcript
from tests.admissions import admitted

SUBJECTS = Subjects()
BUSY = Failure(code="overloaded", message="later", status=503)


def chunk(index: int, text: str, attempt: int = 1) -> OutputChunk:
    return OutputChunk(id=f"{attempt}.{index}", writer="w0", attempt=attempt, index=index, text=text)


def fence(attempt: int, epoch: int = 1) -> OutputFence:
    return OutputFence(writer=CONDUCTOR_WRITER, epoch=epoch, attempt=attempt, reason="lost", history=b"")


def totals_of(chunks: Sequence[OutputChunk]) -> OutputTotals:
    transcript = Transcript()
    for one in chunks:
        transcript.fold(one)
    return transcript.totals


def finished(output: OutputTotals, epoch: int = 1) -> RequestFinished:
    return RequestFinished(
        writer=CONDUCTOR_WRITER,
        epoch=epoch,
        usage=Usage(prompt_tokens=2, completion_tokens=3),
        finish_reasons=["length"],
        output=output,
        history=b"",
    )


def opened(epoch: int) -> EpochOpened:
    return EpochOpened(writer=CONDUCTOR_WRITER, epoch=epoch, conductor="c", core="x")


def rejected(submission_seq: int) -> RequestRejected:
    return RequestRejected(writer=CONDUCTOR_WRITER, epoch=1, failure=BUSY, submission_seq=submission_seq)


def folded(fold: OutputFold, events: Sequence[Event], first_seq: int = 10) -> list[AnswerItem]:
    """Admit the request to rank 0, and fold the events, each on its writer's subject."""
    return [
        item
        for seq, event in enumerate([admitted("r1"), *events], first_seq - 1)
        for item in fold.fold(seq, Address(kind="output", writer=event.writer), event)  # type: ignore[arg-type]
    ]


def texts(items: Sequence[AnswerItem]) -> str:
    return "".join(item.text for item in items if isinstance(item, OutputChunk))


class TestOutputFold:
    def test_chunks_come_in_order_and_each_once(self) -> None:
        chunks = [chunk(0, "a"), chunk(1, "b"), chunk(2, "c")]
        shuffled = [chunks[0], chunks[2], chunks[0], chunks[1], chunks[2]]

        items = folded(OutputFold(), [*shuffled, finished(totals_of(chunks))])

        assert texts(items) == "abc"
        assert items[-1] == Answered(
            usage=Usage(prompt_tokens=2, completion_tokens=3), finish_reason="length"
        )

    def test_a_chunk_of_an_older_attempt_behind_a_fence_is_void(self) -> None:
        valid = [chunk(0, "a"), chunk(1, "B", attempt=2)]
        late = [chunk(1, "b"), chunk(2, "c")]

        items = folded(OutputFold(), [valid[0], fence(2), *late, valid[1], finished(totals_of(valid))])

        assert texts(items) == "aB"
        assert isinstance(items[-1], Answered)

    def test_an_output_that_does_not_add_up_is_an_error(self) -> None:
        items = folded(OutputFold(), [chunk(0, "a"), finished(totals_of([chunk(0, "a"), chunk(1, "b")]))])

        assert isinstance(items[-1], Failed)
        assert (items[-1].failure.code, items[-1].failure.status) == ("output_mismatch", 500)

    def test_an_early_chunk_whose_gap_never_closes_is_an_error(self) -> None:
        chunks = [chunk(0, "a"), chunk(1, "b"), chunk(2, "c")]

        items = folded(OutputFold(), [chunks[0], chunks[2], finished(totals_of(chunks))])

        assert texts(items) == "a"
        assert isinstance(items[-1], Failed)

    def test_nothing_follows_the_end(self) -> None:
        failed = RequestFailed(writer=CONDUCTOR_WRITER, epoch=1, failure=BUSY, history=b"")

        assert folded(OutputFold(), [failed, chunk(0, "a"), finished(totals_of([]))]) == [Failed(BUSY)]

    def test_a_rejection_of_somebody_elses_submission_is_not_ours(self) -> None:
        fold = OutputFold(submission_seq=5)

        assert folded(fold, [rejected(6)]) == []
        assert folded(fold, [rejected(5)]) == [Failed(BUSY)]

    def test_a_rejection_that_is_read_before_the_ack_counts_once_the_ack_came(self) -> None:
        fold = OutputFold()

        assert folded(fold, [rejected(8), rejected(9)]) == []
        assert fold.submitted_at(9) == [Failed(BUSY)]
        assert fold.ended

    def test_the_rejection_of_another_submission_does_not_count_after_the_ack_either(self) -> None:
        fold = OutputFold()
        folded(fold, [rejected(8)])

        assert fold.submitted_at(9) == []
        assert not fold.ended

    def test_what_is_stored_before_the_submission_is_not_its_answer(self) -> None:
        fold = OutputFold(submission_seq=20)

        assert folded(fold, [chunk(0, "old")], first_seq=19) == []

    def test_a_cancelled_request_ends_with_410(self) -> None:
        cancelled = RequestCancelled(writer=CONDUCTOR_WRITER, epoch=1, reason="an operator", history=b"")

        [item] = folded(OutputFold(), [cancelled])

        assert isinstance(item, Failed)
        assert (item.failure.code, item.failure.status) == ("request_cancelled", 410)


class Scene:
    """A router on a log in memory; the test passes records to it."""

    def __init__(self) -> None:
        self.server = MemoryStore(SUBJECTS)
        self.router = RecordRouter(MemoryLog(self.server), SUBJECTS, EpochFence())

    def store(self, subject: str, event: Event) -> None:
        self.router.route(self.server.append(subject, encode(event)))

    def output(self, request_id: str, event: Event) -> None:
        self.store(SUBJECTS.output("g", request_id, event.writer), event)

    def walk(self, request_id: str, event: Event) -> None:
        self.store(SUBJECTS.walk(request_id), event)


async def read(relay: Relay) -> list[AnswerItem]:
    async with aclosing(relay.items()) as items:
        return [item async for item in items]


class TestHub:
    async def test_each_record_goes_to_its_own_request(self) -> None:
        scene = Scene()
        one, two = scene.router.open("one"), scene.router.open("two")
        for request_id, text in (("one", "1"), ("two", "2"), ("three", "3")):
            scene.walk(request_id, admitted(request_id))
            scene.output(request_id, chunk(0, text))
            scene.walk(request_id, finished(totals_of([chunk(0, text)])))

        assert texts(await read(one)) == "1"
        assert texts(await read(two)) == "2"
        assert len(scene.router) == 0

    async def test_a_deposed_conductor_ends_nothing(self) -> None:
        scene = Scene()
        relay = scene.router.open("one")
        scene.walk("one", admitted("one"))
        scene.store(SUBJECTS.epoch, opened(2))
        scene.walk("one", finished(totals_of([]), epoch=1))
        scene.output("one", fence(9, epoch=1))
        scene.output("one", chunk(0, "a"))
        scene.walk("one", finished(totals_of([chunk(0, "a")]), epoch=2))

        items = await read(relay)

        assert texts(items) == "a"
        assert isinstance(items[-1], Answered)

    async def test_bytes_that_are_no_event_are_passed_over(self) -> None:
        scene = Scene()
        relay = scene.router.open("one")
        scene.router.route(scene.server.append(SUBJECTS.walk("one"), b"\xff nonsense"))
        scene.walk("one", finished(totals_of([])))

        assert isinstance((await read(relay))[-1], Answered)

    async def test_a_slow_client_gets_everything_once_and_holds_a_bounded_buffer(self) -> None:
        scene = Scene()
        relay = scene.router.open("one")
        scene.walk("one", admitted("one"))
        chunks = [chunk(index, f"<{index}>" + "x" * 5000) for index in range(100)]
        for one in chunks:
            scene.output("one", one)

            assert relay.buffered_bytes < BUFFER_BYTES + 25_000
        scene.walk("one", finished(totals_of(chunks)))

        assert relay.is_behind
        assert len(scene.router) == 0
        items = await read(relay)
        assert [item.index for item in items if isinstance(item, OutputChunk)] == list(range(100))
        assert isinstance(items[-1], Answered)

    async def test_a_relay_that_fell_behind_follows_live_and_stays_fenced(self) -> None:
        scene = Scene()
        relay = scene.router.open("one")
        scene.walk("one", admitted("one"))
        scene.store(SUBJECTS.epoch, opened(3))
        chunks = [chunk(index, "y" * 70_000) for index in range(3)]
        for one in chunks:
            scene.output("one", one)
        assert relay.is_behind
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(relay))
            await asyncio.sleep(0)
            scene.walk("one", finished(totals_of([]), epoch=2))
            scene.store(SUBJECTS.epoch, opened(4))
            scene.walk("one", finished(totals_of([]), epoch=3))
            scene.walk("one", finished(totals_of(chunks), epoch=4))

        assert isinstance(reading.result()[-1], Answered)

    async def test_losing_the_log_ends_every_answer(self) -> None:
        scene = Scene()
        relay = scene.router.open("one")
        scene.walk("one", admitted("one"))
        scene.output("one", chunk(0, "a"))
        scene.router.fail_all(BUSY)

        items = await read(relay)

        assert texts(items) == "a"
        assert items[-1] == Failed(BUSY)


class TestForgedChunks:
    async def test_they_reach_no_client_and_are_told_to_the_operator_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        scene = Scene()
        relay = scene.router.open("one")
        scene.output("one", chunk(0, "early"))
        scene.walk("one", admitted("one", {"w0": 10}))
        genuine = msgspec.structs.replace(chunk(0, "a"), incarnation=10)
        forged = msgspec.structs.replace(genuine, id="forged", writer="w7", text="FORGED")
        for event in (forged, genuine, forged, msgspec.structs.replace(genuine, incarnation=9)):
            scene.output("one", event)
        scene.walk("one", finished(totals_of([genuine])))

        items = await read(relay)

        assert texts(items) == "a"
        assert isinstance(items[-1], Answered)
        assert [one.getMessage().partition("delivered: ")[2].partition(";")[0] for one in caplog.records] == [
            "w0: the request is not admitted",
            "w7: a writer without an order",
            "w0: written by incarnation 9",
        ]

    async def test_an_incarnation_that_is_over_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        scene = Scene()
        relay = scene.router.open("one")
        scene.walk("one", admitted("one", {"w0": 10}))
        scene.output("one", msgspec.structs.replace(chunk(0, "zombie"), incarnation=9))
        scene.walk("one", finished(totals_of([])))

        assert texts(await read(relay)) == ""
        [warning] = caplog.records
        assert "request one: a chunk at record 2 is void" in warning.getMessage()
        assert "written by incarnation 9; incarnation 10 has the order" in warning.getMessage()
