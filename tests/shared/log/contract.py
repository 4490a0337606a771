"""The contract of the log, which runs against the log in memory and against a real nats-server.

A test class inherits `LogContract` and provides the fixture `deployment`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import pytest

from shared.errors import BugError
from shared.log.capacity import Capacity, capacity_of
from shared.log.port import (
    Log,
    LogFullError,
    LogRegressedError,
    LogUnavailableError,
    OutboxFullError,
    PayloadTooLargeError,
    StoredRecord,
    WrongLastSequenceError,
)
from shared.subjects import Subjects

_Item = TypeVar("_Item")


class Deployment(Protocol):
    """One log, and the faults that a test can cause."""

    subjects: Subjects

    async def open(self, on_change: Callable[[bool], None] | None = None) -> Log: ...
    async def stop(self) -> None: ...
    async def start(self) -> None: ...
    async def recreate(self) -> None: ...
    async def fill(self) -> None:
        """Fill the log until it refuses events."""
        ...

    async def set_max_messages(self) -> None: ...


class Watch:
    """An `on_change` callback whose calls a test can await."""

    def __init__(self) -> None:
        self.changes: list[bool] = []
        self._changed = asyncio.Event()

    def __call__(self, connected: bool) -> None:
        self.changes.append(connected)
        self._changed.set()

    async def until(self, *, connected: bool) -> None:
        while not self.changes or self.changes[-1] is not connected:
            self._changed.clear()
            await self._changed.wait()


async def take(items: AsyncGenerator[_Item, None], count: int) -> list[_Item]:
    """Return the next `count` items and consume no more."""
    return [await anext(items) for _ in range(count)]


async def collect(items: AsyncGenerator[_Item, None]) -> list[_Item]:
    return [item async for item in items]


def datas(records: list[StoredRecord]) -> list[bytes]:
    return [record.data for record in records]


class LogContract:
    """The contract's tests."""

    # ---- writing and reading ----------------------------------------------------------------------
    async def test_what_is_published_is_read_in_order_with_position_subject_and_time(
        self, deployment: Deployment
    ) -> None:
        log = await deployment.open()
        before_ns = time.time_ns()
        subjects = [deployment.subjects.request(f"r{n}") for n in range(3)]
        seqs = [await log.publish(subject, subject.encode()) for subject in subjects]
        async with aclosing(log.read(deployment.subjects.for_conductor(), 1)) as records:
            read = await take(records, 3)
        assert [record.seq for record in read] == seqs == [1, 2, 3]
        assert [record.subject for record in read] == subjects
        assert datas(read) == [subject.encode() for subject in subjects]
        times = [before_ns - 1_000_000, *(record.time_ns for record in read), time.time_ns() + 1_000_000]
        assert times == sorted(times)

    async def test_a_post_is_called_back_with_its_sequence_and_not_before_it_returns(
        self, deployment: Deployment
    ) -> None:
        log = await deployment.open()
        stored: list[int] = []
        for number in range(100):
            log.post(deployment.subjects.walk("r"), b"%d" % number, stored.append)
            assert stored == []
        await log.drain()
        assert stored == list(range(1, 101))
        records = await collect(log.history([deployment.subjects.walk("r")]))
        assert datas(records) == [b"%d" % number for number in range(100)]

    async def test_a_failing_callback_harms_nobody_else(self, deployment: Deployment) -> None:
        log = await deployment.open()
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        stored: list[int] = []

        def fail(_: int) -> None:
            raise RuntimeError("the publisher's own bug")

        log.post(deployment.subjects.walk("r"), b"1", fail)
        log.post(deployment.subjects.walk("r"), b"2", stored.append)
        await log.drain()
        assert stored == [2]
        assert [str(context["exception"]) for context in told] == ["the publisher's own bug"]

    async def test_a_reader_gets_what_was_there_and_then_what_comes(self, deployment: Deployment) -> None:
        log, other = await deployment.open(), await deployment.open()
        subject = deployment.subjects.walk("r")
        await log.publish(subject, b"1")
        await log.publish(subject, b"2")
        async with aclosing(other.read([subject], 2)) as records:
            assert datas(await take(records, 1)) == [b"2"]
            waiting = asyncio.ensure_future(anext(records))
            await asyncio.sleep(0)
            assert not waiting.done()
            await log.publish(subject, b"3")
            assert (await waiting).data == b"3"

    async def test_a_reader_may_start_right_behind_the_end(self, deployment: Deployment) -> None:
        log = await deployment.open()
        subject = deployment.subjects.walk("r")
        async with aclosing(log.read([subject], 1)) as records:
            waiting = asyncio.ensure_future(anext(records))
            await asyncio.sleep(0)
            await log.publish(subject, b"1")
            assert (await waiting).seq == 1
        async with aclosing(log.read([subject], 2)) as records:
            waiting = asyncio.ensure_future(anext(records))
            await asyncio.sleep(0)
            await log.publish(subject, b"2")
            assert (await waiting).seq == 2

    async def test_a_reader_gets_only_its_subjects(self, deployment: Deployment) -> None:
        log, subjects = await deployment.open(), deployment.subjects
        for name in ("a", "b"):
            await log.publish(subjects.ready(0, name), b"ready 0 " + name.encode())
            await log.publish(subjects.ready(1, name), b"ready 1 " + name.encode())
            await log.publish(subjects.worker(0), b"worker " + name.encode())
            await log.publish(subjects.output("nats", name, "w0"), b"output " + name.encode())
        async with aclosing(log.read(subjects.for_worker(0), 1)) as records:
            assert datas(await take(records, 4)) == [b"ready 0 a", b"worker a", b"ready 0 b", b"worker b"]
        async with aclosing(log.read([subjects.outputs_of("b")], 1)) as records:
            assert datas(await take(records, 1)) == [b"output b"]
        assert len(await collect(log.history(subjects.all_of("a")))) == 3

    async def test_two_readers_of_one_log_do_not_disturb_each_other(self, deployment: Deployment) -> None:
        log = await deployment.open()
        for number in range(10):
            log.post(deployment.subjects.walk("r"), b"%d" % number)
        await log.drain()
        async with (
            aclosing(log.read([deployment.subjects.walk("*")], 1)) as first,
            aclosing(log.read([deployment.subjects.walk("*")], 6)) as second,
        ):
            assert datas(await take(first, 2)) == [b"0", b"1"]
            assert datas(await take(second, 5)) == [b"5", b"6", b"7", b"8", b"9"]
            assert datas(await take(first, 8))[-1] == b"9"

    async def test_empty_data_is_an_event_like_any_other(self, deployment: Deployment) -> None:
        log = await deployment.open()
        await log.publish(deployment.subjects.worker(0), b"")
        assert datas(await collect(log.history([deployment.subjects.worker(0)]))) == [b""]

    # ---- history ----------------------------------------------------------------------------------
    async def test_the_history_of_an_empty_log_is_empty(self, deployment: Deployment) -> None:
        log = await deployment.open()
        assert await collect(log.history(deployment.subjects.for_conductor())) == []

    async def test_the_history_ends_though_nothing_matches(self, deployment: Deployment) -> None:
        log = await deployment.open()
        await log.publish(deployment.subjects.ready(1, "r"), b"1")
        assert await collect(log.history(deployment.subjects.for_worker(0))) == []

    async def test_the_history_ends_though_the_last_match_is_far_from_the_end(
        self, deployment: Deployment
    ) -> None:
        log, subjects = await deployment.open(), deployment.subjects
        await log.publish(subjects.worker(0), b"early")
        for number in range(500):
            log.post(subjects.ready(1, "r"), b"%d" % number)
        await log.drain()
        assert datas(await collect(log.history(subjects.for_worker(0)))) == [b"early"]

    async def test_the_history_has_bounds(self, deployment: Deployment) -> None:
        log, subject = await deployment.open(), deployment.subjects.walk("r")
        for number in range(1, 11):
            await log.publish(subject, b"%d" % number)
        assert [r.seq for r in await collect(log.history([subject], 3, 6))] == [3, 4, 5, 6]
        assert [r.seq for r in await collect(log.history([subject], 9))] == [9, 10]
        assert [r.seq for r in await collect(log.history([subject], 9, 99))] == [9, 10]
        assert await collect(log.history([subject], 7, 6)) == []
        assert await collect(log.history([subject], 11)) == []

    async def test_the_history_ends_before_a_match_beyond_its_bound(self, deployment: Deployment) -> None:
        log, subjects = await deployment.open(), deployment.subjects
        await log.publish(subjects.worker(0), b"1")
        await log.publish(subjects.walk("r"), b"2")
        await log.publish(subjects.worker(0), b"3")
        assert datas(await collect(log.history([subjects.worker(0)], 1, 2))) == [b"1"]

    async def test_the_history_does_not_wait_for_what_is_written_meanwhile(
        self, deployment: Deployment
    ) -> None:
        log, subject = await deployment.open(), deployment.subjects.walk("r")
        await log.publish(subject, b"1")
        await log.publish(subject, b"2")
        async with aclosing(log.history([subject])) as records:
            read = [await anext(records)]
            await log.publish(subject, b"3")
            read += await collect(records)
        assert datas(read) == [b"1", b"2"]

    # ---- conditions -------------------------------------------------------------------------------
    async def test_an_expectation_that_holds_lets_the_event_in(self, deployment: Deployment) -> None:
        log, subjects = await deployment.open(), deployment.subjects
        assert await log.publish(subjects.epoch, b"1", expected_last_seq=0) == 1
        await log.publish(subjects.walk("r"), b"between")
        assert await log.publish(subjects.epoch, b"2", expected_last_seq=1) == 3

    async def test_an_expectation_that_fails_stores_nothing(self, deployment: Deployment) -> None:
        log, subjects = await deployment.open(), deployment.subjects
        await log.publish(subjects.epoch, b"1", expected_last_seq=0)
        for expected in (0, 7):
            with pytest.raises(WrongLastSequenceError):
                await log.publish(subjects.epoch, b"2", expected_last_seq=expected)
        # Equal bytes make no difference: this event was not sent before.
        with pytest.raises(WrongLastSequenceError):
            await log.publish(subjects.epoch, b"1", expected_last_seq=0)
        assert (await log.state()).last_seq == 1

    async def test_of_many_with_the_same_expectation_one_wins(self, deployment: Deployment) -> None:
        logs = [await deployment.open() for _ in range(4)]
        outcomes = []

        async def attempt(number: int, log: Log) -> None:
            try:
                outcomes.append(
                    await log.publish(deployment.subjects.epoch, b"%d" % number, expected_last_seq=0)
                )
            except WrongLastSequenceError:
                outcomes.append(0)

        async with asyncio.TaskGroup() as group:
            for number, log in enumerate(logs):
                group.create_task(attempt(number, log))
        assert sorted(outcomes) == [0, 0, 0, 1]

    # ---- queries ----------------------------------------------------------------------------------
    async def test_last_is_the_newest_record_of_a_subject(self, deployment: Deployment) -> None:
        log, subjects = await deployment.open(), deployment.subjects
        assert await log.last(subjects.walk("r")) is None
        await log.publish(subjects.walk("r"), b"1")
        await log.publish(subjects.walk("r"), b"2\x00\xff")
        await log.publish(subjects.walk("other"), b"3")
        last = await log.last(subjects.walk("r"))
        assert last is not None
        assert last == (await collect(log.history([subjects.walk("r")])))[-1]
        assert (last.seq, last.data) == (2, b"2\x00\xff")

    async def test_the_state_tells_how_far_the_log_is_and_which_it_is(self, deployment: Deployment) -> None:
        log, other = await deployment.open(), await deployment.open()
        empty = await log.state()
        assert (empty.last_seq, empty.messages, empty.bytes) == (0, 0, 0)
        await log.publish(deployment.subjects.walk("r"), b"12345")
        state = await other.state()
        assert (state.first_seq, state.last_seq, state.messages) == (1, 1, 1)
        assert state.bytes > 5
        assert state.created_ns == empty.created_ns

    # ---- refusals ---------------------------------------------------------------------------------
    async def test_every_ack_is_timed(self, deployment: Deployment) -> None:
        log, subject = await deployment.open(), deployment.subjects.request("a")
        for number in range(3):
            await log.publish(subject, b"%d" % number)
        log.post(subject, b"3")
        waiting = log.stats().unacked
        await log.drain()

        stats = log.stats()
        assert (waiting, stats.unacked) == (1, 0)
        assert stats.publish_ack_s.count == 4
        assert 0 < stats.publish_ack_s.sum < 60

    async def test_the_time_to_an_ack_includes_the_logs_absence(self, deployment: Deployment) -> None:
        watch = Watch()
        log = await deployment.open(watch)
        await deployment.stop()
        await watch.until(connected=False)
        log.post(deployment.subjects.request("a"), b"1")
        begun_s = time.monotonic()
        await deployment.start()
        away_s = time.monotonic() - begun_s
        await log.drain()

        assert log.stats().publish_ack_s.sum >= away_s

    async def test_a_reader_that_has_not_taken_all_is_behind(self, deployment: Deployment) -> None:
        log, subjects = await deployment.open(), deployment.subjects
        for number in range(4):
            await log.publish(subjects.request("a"), b"%d" % number)
            await log.publish(subjects.walk("a"), b"another's")
        async with aclosing(log.read([subjects.request("*")], 1)) as records:
            behind = []
            for _ in range(4):
                await anext(records)
                behind.append(log.stats().behind)

        assert behind == [3, 2, 1, 0]
        assert log.stats().behind == 0

    async def test_an_event_too_large_is_refused_before_it_is_sent(self, deployment: Deployment) -> None:
        log, subject = await deployment.open(), deployment.subjects.walk("r")
        too_large = bytes(log.max_payload + 1)
        with pytest.raises(PayloadTooLargeError, match="limit is"):
            log.post(subject, too_large)
        with pytest.raises(PayloadTooLargeError):
            await log.publish(subject, too_large)
        assert await log.publish(subject, too_large[1:]) == 1

    async def test_a_subject_that_is_not_the_logs_is_our_own_mistake(self, deployment: Deployment) -> None:
        log, prefix = await deployment.open(), deployment.subjects.prefix
        for subject in (
            "elsewhere.walk.r",
            f"{prefix}.beat.worker.0",
            f"{prefix}.walk.a b",
            f"{prefix}.walk",
            f"{prefix}.walk.",
            f"{prefix}.walk.*",
            f"{prefix}.walk.a..b",
        ):
            with pytest.raises(BugError):
                log.post(subject, b"")
            with pytest.raises(BugError):
                await log.publish(subject, b"")

    async def test_reading_from_beyond_the_end_is_an_error(self, deployment: Deployment) -> None:
        log = await deployment.open()
        await log.publish(deployment.subjects.walk("r"), b"1")
        with pytest.raises(LogRegressedError, match="3"):
            await anext(log.read([deployment.subjects.walk("r")], 3))
        with pytest.raises(LogRegressedError, match="3"):
            await anext(log.history([deployment.subjects.walk("r")], 3))
        # The error is only that reader's.
        assert await log.publish(deployment.subjects.walk("r"), b"2") == 2

    async def test_a_closed_log_says_so_to_everybody(self, deployment: Deployment) -> None:
        log, subject = await deployment.open(), deployment.subjects.walk("r")
        reader = asyncio.ensure_future(anext(log.read([subject], 1)))
        listener = asyncio.ensure_future(anext(log.listen(deployment.subjects.heartbeats())))
        await asyncio.sleep(0)
        await log.close()
        assert not log.connected
        for waiting in (reader, listener):
            with pytest.raises(LogUnavailableError, match="closed"):
                await waiting
        with pytest.raises(LogUnavailableError, match="closed"):
            log.post(subject, b"")
        for question in (log.publish(subject, b""), log.last(subject), log.state()):
            with pytest.raises(LogUnavailableError, match="closed"):
                await _awaited(question)

    # ---- heartbeats -------------------------------------------------------------------------------
    async def test_beats_reach_who_listens_and_are_not_stored(self, deployment: Deployment) -> None:
        log, other = await deployment.open(), await deployment.open()
        subject = deployment.subjects.heartbeat("worker", "0")
        async with aclosing(other.listen(deployment.subjects.heartbeats())) as beats:
            heard = asyncio.ensure_future(anext(beats))
            while not heard.done():  # heartbeats before the subscription are lost
                await log.send_heartbeat(subject, b"step 1")
                await asyncio.sleep(0)
            assert heard.result() == (subject, b"step 1")
        assert (await log.state()).last_seq == 0

    # ---- faults -----------------------------------------------------------------------------------
    async def test_while_the_log_is_away_posts_are_kept_and_readers_wait(
        self, deployment: Deployment
    ) -> None:
        watch = Watch()
        log, subject = await deployment.open(watch), deployment.subjects.walk("r")
        await log.publish(subject, b"1")
        async with aclosing(log.read([subject], 1)) as records:
            read = await take(records, 1)
            await deployment.stop()
            await watch.until(connected=False)
            for number in range(2, 100):
                log.post(subject, b"%d" % number)
            waiting = asyncio.ensure_future(take(records, 98))
            await asyncio.sleep(0)
            assert not waiting.done()
            await deployment.start()
            await log.drain()
            read += await waiting
        assert datas(read) == [b"%d" % number for number in range(1, 100)]
        assert [record.seq for record in read] == list(range(1, 100))
        assert log.connected
        assert watch.changes == [False, True]

    async def test_a_failing_on_change_harms_nobody(self, deployment: Deployment) -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        failed = asyncio.Event()

        def fail(_: bool) -> None:
            failed.set()
            raise RuntimeError("the owner's own bug")

        log = await deployment.open(fail)
        await deployment.stop()
        await failed.wait()
        await deployment.start()
        assert await log.publish(deployment.subjects.walk("r"), b"1") == 1
        assert {str(context["exception"]) for context in told} == {"the owner's own bug"}

    async def test_a_publish_waits_for_a_log_that_is_away(self, deployment: Deployment) -> None:
        watch = Watch()
        log = await deployment.open(watch)
        await deployment.stop()
        await watch.until(connected=False)
        waiting = asyncio.ensure_future(
            log.publish(deployment.subjects.epoch, b"1", expected_last_seq=0),
        )
        await asyncio.sleep(0)
        await deployment.start()
        assert await waiting == 1

    async def test_a_cancelled_publish_is_not_sent_later(self, deployment: Deployment) -> None:
        watch = Watch()
        log = await deployment.open(watch)
        await deployment.stop()
        await watch.until(connected=False)
        waiting = asyncio.ensure_future(log.publish(deployment.subjects.walk("r"), b"given up"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await deployment.start()
        await log.publish(deployment.subjects.walk("r"), b"1")
        assert (await log.state()).last_seq == 1

    async def test_the_backlog_is_bounded(self, deployment: Deployment) -> None:
        watch = Watch()
        log = await deployment.open(watch)
        await deployment.stop()
        await watch.until(connected=False)

        def post_for_ever() -> None:
            while True:
                log.post(deployment.subjects.walk("r"), b"1")

        with pytest.raises(OutboxFullError, match="not acked"):
            post_for_ever()

    async def test_a_full_log_keeps_posts_waiting_until_there_is_room(self, deployment: Deployment) -> None:
        log = await deployment.open()
        await deployment.fill()
        before = (await log.state()).last_seq
        for number in range(50):
            log.post(deployment.subjects.walk("waits"), b"%d" % number)
        waiting = asyncio.ensure_future(log.drain())
        assert (await log.state()).last_seq == before
        assert not waiting.done()
        await deployment.set_max_messages()
        await waiting
        records = await collect(log.history([deployment.subjects.walk("waits")]))
        assert datas(records) == [b"%d" % number for number in range(50)]

    async def test_who_does_not_wait_for_room_is_told_at_once_that_there_is_none(
        self, deployment: Deployment
    ) -> None:
        log = await deployment.open()
        subject = deployment.subjects.request("new")
        await deployment.fill()
        assert capacity_of(await log.state(), refuses=log.is_full) is not Capacity.FREE
        for expected in (0, None):
            with pytest.raises(LogFullError, match="full"):
                await log.publish(subject, b"1", expected_last_seq=expected, waits_while_full=False)
        refused = [log.is_full]
        log.post(deployment.subjects.walk("waits"), b"under way")
        with pytest.raises(LogFullError, match="full"):  # nor after events that wait
            await log.publish(subject, b"1", expected_last_seq=0, waits_while_full=False)
        await deployment.set_max_messages()
        await log.drain()
        assert await log.publish(subject, b"1", expected_last_seq=0, waits_while_full=False) > 0
        assert [*refused, log.is_full] == [True, False]

    async def test_a_log_made_anew_is_noticed_by_readers_and_writers(self, deployment: Deployment) -> None:
        watch = Watch()
        log, subject = await deployment.open(watch), deployment.subjects.walk("r")
        for number in range(10):
            await log.publish(subject, b"%d" % number)
        async with aclosing(log.read([subject], 1)) as records:
            await take(records, 10)
            await deployment.stop()
            await watch.until(connected=False)
            log.post(subject, b"decided on what is gone")
            await deployment.recreate()
            with pytest.raises(LogRegressedError, match="recreated"):
                await anext(records)
        with pytest.raises(LogRegressedError, match="recreated"):
            log.post(subject, b"more")
        with pytest.raises(LogRegressedError, match="recreated"):
            await log.publish(subject, b"more")
        assert not log.connected
        assert watch.changes == [False]
        fresh = await deployment.open()
        assert await collect(fresh.history([subject])) == []


async def _awaited(question: Coroutine[Any, Any, object]) -> object:
    return await question
