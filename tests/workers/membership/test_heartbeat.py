"""Heartbeats continue while the main loop is blocked; over a fake connection and over a real one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from shared.log.nats import heartbeat_connection, jetstream
from shared.log.nats.private_server import NatsServer
from shared.log.port import LogUnavailableError
from shared.subjects import Subjects
from workers.membership.heartbeat import Heartbeat

EVERY_S = 0.02


class Clock:
    """A clock that only `advance` moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(slots=True)
class FakeConnection:
    """A connection that keeps the heartbeats; `received` is read from the main thread."""

    received: list[dict[str, Any]] = field(default_factory=list)
    threads: set[threading.Thread] = field(default_factory=set)
    is_closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    async def send_heartbeat(self, subject: str, data: bytes) -> None:
        with self.changed:
            self.received.append(msgspec.msgpack.decode(data, type=dict[str, Any]))
            self.threads.add(threading.current_thread())
            self.changed.notify_all()

    async def close(self) -> None:
        self.is_closed = True

    def wait_for(self, count: int) -> None:
        """Block this thread until `count` more heartbeats were received."""
        with self.changed:
            expected = len(self.received) + count
            assert self.changed.wait_for(lambda: len(self.received) >= expected, timeout=20)

    async def receives(self, count: int = 1) -> None:
        """Wait for `count` more heartbeats; the event loop is not blocked meanwhile."""
        await asyncio.to_thread(self.wait_for, count)

    async def receives_one(self, is_expected: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a heartbeat that is as expected, from the latest one on."""

        def wait() -> None:
            with self.changed:
                first = len(self.received) - 1
                assert self.changed.wait_for(lambda: any(map(is_expected, self.received[first:])), timeout=20)

        await asyncio.to_thread(wait)


def vital_signs() -> Mapping[str, Any]:
    return {"state": "ready", "thread": threading.current_thread().name}


@asynccontextmanager
async def beating(connection: FakeConnection, **kwargs: Any) -> AsyncIterator["asyncio.Task[None]"]:
    async def open_connection() -> FakeConnection:
        return connection

    signs = kwargs.pop("signs", vital_signs)
    kwargs.setdefault("open_connection", open_connection)
    kwargs.setdefault("every_s", EVERY_S)
    task = asyncio.create_task(Heartbeat("ds.beat.worker.0", **kwargs).run(signs))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_the_vital_signs_are_read_on_the_main_loop_and_sent_from_the_thread() -> None:
    connection = FakeConnection()
    async with beating(connection):
        await connection.receives(2)
    assert connection.received[0] == {"state": "ready", "thread": "MainThread", "loop_age_s": 0}
    assert [thread.name for thread in connection.threads] == ["heartbeat"]


def sleep_by(clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each sleep of the heartbeat thread take `seconds` on the clock, and next to no real time."""
    real_sleep = asyncio.sleep

    async def sleep(delay: float) -> None:
        if threading.current_thread().name == "heartbeat":
            clock.advance(seconds)
            delay = 0.001
        await real_sleep(delay)

    monkeypatch.setattr("workers.membership.heartbeat.asyncio.sleep", sleep)


@pytest.mark.slow
async def test_a_blocked_loop_is_reported_by_its_latest_signs_and_their_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection, clock = FakeConnection(), Clock()
    sleep_by(clock, monkeypatch, EVERY_S)
    async with beating(connection, clock=clock, signs=lambda: {"state": "ready", "read_s": clock.now}):
        await connection.receives()
        before = len(connection.received)
        connection.wait_for(5)  # this blocks the main loop
        sent, now_s = connection.received[before:], clock.now
        await connection.receives_one(lambda beat: beat["loop_age_s"] == 0)

    assert {beat["state"] for beat in sent} == {"ready"}
    ages = [beat["loop_age_s"] for beat in sent]
    assert ages[-1] > ages[-2] > 0
    assert ages[-1] <= round(now_s - sent[-1]["read_s"], 3), "the loop had answered before it was blocked"


@pytest.mark.slow
async def test_a_process_that_stood_still_as_a_whole_does_not_blame_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection, clock = FakeConnection(), Clock()
    async with beating(connection, clock=clock):
        await connection.receives()
        sleep_by(clock, monkeypatch, 10 * EVERY_S)  # as in a process that is stopped and continued
        before = len(connection.received)
        connection.wait_for(4)  # this blocks the main loop
        sent = connection.received[before:]
    assert [beat["loop_age_s"] for beat in sent[:4]] == [0, 0, 0, 0]


async def test_no_heartbeat_is_sent_after_the_end() -> None:
    connection = FakeConnection()
    async with beating(connection):
        await connection.receives()
    count = len(connection.received)
    [thread] = connection.threads
    thread.join(20)
    assert not thread.is_alive()
    assert connection.is_closed
    assert len(connection.received) == count


async def test_vital_signs_that_cannot_be_read_end_the_process() -> None:
    def broken() -> Mapping[str, Any]:
        raise ZeroDivisionError

    async with beating(FakeConnection(), signs=broken) as task:
        await asyncio.wait([task])
        with pytest.raises(ExceptionGroup) as raised:
            task.result()
    assert raised.group_contains(ZeroDivisionError)


async def test_a_connection_that_cannot_be_opened_is_tried_again() -> None:
    connection, tries = FakeConnection(), 0

    async def open_connection() -> FakeConnection:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise LogUnavailableError("not yet")
        return connection

    async with beating(connection, open_connection=open_connection):
        await connection.receives()
    assert tries == 3


async def test_heartbeats_have_a_connection_of_their_own_while_the_main_loop_is_blocked(
    nats_server: NatsServer, subjects: Subjects
) -> None:
    url, credentials = nats_server.url, nats_server.credentials
    await jetstream.provision(url, credentials, subjects)
    subject = subjects.heartbeat("worker", "0")
    heartbeat = Heartbeat(
        subject,
        lambda: heartbeat_connection.open_heartbeat_connection(
            url, credentials=credentials, name="heartbeat", timeout_s=20
        ),
        every_s=EVERY_S,
    )
    received: list[float] = []
    enough, blocked = threading.Event(), threading.Event()

    async def listen() -> None:
        log = await jetstream.connect(url, credentials=credentials, subjects=subjects, name="listener")
        async with aclosing(log.listen(subject)) as found:
            async for _, data in found:
                if blocked.is_set():
                    received.append(msgspec.msgpack.decode(data)["loop_age_s"])
                listening.set()
                if len(received) == 5:
                    break
        await log.close()
        enough.set()

    listening = threading.Event()
    other_thread = threading.Thread(target=lambda: asyncio.run(listen()))
    task = asyncio.create_task(heartbeat.run(vital_signs))
    other_thread.start()
    await asyncio.to_thread(listening.wait, 20)
    blocked.set()
    assert enough.wait(20)  # this blocks the main loop
    task.cancel()
    await asyncio.wait([task])
    other_thread.join(20)
    assert received[-1] > received[1] >= 0
