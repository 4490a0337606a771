"""Beats that a busy loop does not stop, on a real connection and on a pretended one."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from shared.log.nats import heartbeat_connection, jetstream
from shared.log.nats.private_server import NatsServer
from shared.log.port import LogUnavailableError
from shared.subjects import Subjects
from workers.membership.heartbeat import Pulse

EVERY_S = 0.02


@dataclass(slots=True)
class Line:
    """Where beats go; `heard` is read from the main thread."""

    heard: list[dict[str, Any]] = field(default_factory=list)
    threads: set[threading.Thread] = field(default_factory=set)
    is_closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    async def beat(self, subject: str, data: bytes) -> None:
        with self.changed:
            self.heard.append(msgspec.msgpack.decode(data, type=dict[str, Any]))
            self.threads.add(threading.current_thread())
            self.changed.notify_all()

    async def close(self) -> None:
        self.is_closed = True

    def wait_for(self, count: int) -> None:
        """Block this thread until so many more were heard."""
        with self.changed:
            behind = len(self.heard) + count
            assert self.changed.wait_for(lambda: len(self.heard) >= behind, timeout=20)

    async def hears(self, count: int = 1) -> None:
        """The same, while the loop turns."""
        await asyncio.to_thread(self.wait_for, count)


def signs() -> Mapping[str, Any]:
    return {"state": "ready", "thread": threading.current_thread().name}


@asynccontextmanager
async def beating(line: Line, **kwargs: Any) -> AsyncIterator["asyncio.Task[None]"]:
    async def open_line() -> Line:
        return line

    pulse = Pulse("ds.beat.worker.0", kwargs.pop("open_line", open_line), every_s=EVERY_S)
    task = asyncio.create_task(pulse.run(kwargs.pop("signs", signs)))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_the_vital_signs_are_read_on_the_main_loop_and_told_from_the_thread() -> None:
    line = Line()
    async with beating(line):
        await line.hears(2)
    assert line.heard[0] == {"state": "ready", "thread": "MainThread", "loop_age_s": 0}
    assert [thread.name for thread in line.threads] == ["beats"]


async def test_a_loop_that_does_not_turn_is_told_of_by_its_last_signs_and_their_age() -> None:
    line = Line()
    async with beating(line):
        await line.hears()
        before = len(line.heard)
        blocked_s = time.monotonic()
        line.wait_for(5)  # this blocks the main loop
        blocked_s = time.monotonic() - blocked_s
        told = line.heard[before:]
        await line.hears(2)

    assert {beat["state"] for beat in told} == {"ready"}
    ages = [beat["loop_age_s"] for beat in told]
    assert ages[-1] > ages[-2] > 0
    assert ages[-1] <= blocked_s + EVERY_S
    assert line.heard[-1]["loop_age_s"] == 0


async def test_who_stood_still_altogether_does_not_blame_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    line, slept = Line(), asyncio.sleep

    async def oversleep(delay: float) -> None:
        if threading.current_thread().name == "beats":
            threading.Event().wait(10 * EVERY_S)  # as a process that is stopped, and goes on
        await slept(delay)

    async with beating(line):
        await line.hears()
        monkeypatch.setattr("workers.membership.heartbeat.asyncio.sleep", oversleep)
        before = len(line.heard)
        line.wait_for(4)
        told = line.heard[before:]
    assert all(beat["loop_age_s"] < 5 * EVERY_S for beat in told)


async def test_no_beat_outlives_the_work() -> None:
    line = Line()
    async with beating(line):
        await line.hears()
    count = len(line.heard)
    [thread] = line.threads
    thread.join(20)
    assert not thread.is_alive()
    assert line.is_closed
    assert len(line.heard) == count


async def test_signs_that_cannot_be_read_end_the_process_that_would_look_dead_else() -> None:
    def broken() -> Mapping[str, Any]:
        raise ZeroDivisionError

    async with beating(Line(), signs=broken) as task:
        await asyncio.wait([task])
        with pytest.raises(ExceptionGroup) as raised:
            task.result()
    assert raised.group_contains(ZeroDivisionError)


async def test_a_connection_that_does_not_come_is_tried_for_again() -> None:
    line, tries = Line(), 0

    async def open_line() -> Line:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise LogUnavailableError("not yet")
        return line

    async with beating(line, open_line=open_line):
        await line.hears()
    assert tries == 3


async def test_they_go_over_a_connection_of_their_own_while_the_main_loop_is_blocked(
    nats_server: NatsServer, subjects: Subjects
) -> None:
    url, credentials = nats_server.url, nats_server.credentials
    await jetstream.provision(url, credentials, subjects)
    subject = subjects.beat("worker", "0")
    pulse = Pulse(
        subject,
        lambda: heartbeat_connection.open_line(url, credentials=credentials, name="beats", timeout_s=20),
        every_s=EVERY_S,
    )
    heard: list[float] = []
    enough, blocked = threading.Event(), threading.Event()

    async def listen() -> None:
        log = await jetstream.connect(url, credentials=credentials, subjects=subjects, name="listener")
        async with aclosing(log.listen(subject)) as found:
            async for _, data in found:
                if blocked.is_set():
                    heard.append(msgspec.msgpack.decode(data)["loop_age_s"])
                listening.set()
                if len(heard) == 5:
                    break
        await log.close()
        enough.set()

    listening = threading.Event()
    elsewhere = threading.Thread(target=lambda: asyncio.run(listen()))
    task = asyncio.create_task(pulse.run(signs))
    elsewhere.start()
    await asyncio.to_thread(listening.wait, 20)
    blocked.set()
    assert enough.wait(20)  # the main loop stands still here
    task.cancel()
    await asyncio.wait([task])
    elsewhere.join(20)
    assert heard[-1] > heard[1] >= 0
