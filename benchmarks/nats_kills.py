"""Repeated kill -9 of the NATS server under load, and a count of lost events.

    python -m benchmarks kills                          100 rounds
    python -m benchmarks.nats_kills --rounds 1000 --seed 7

One writer posts as fast as a window of 256 allows, another publishes events that each expect the previous one
as the last, and a reader reads everything. A round ends with a kill, shortly after events are acked again. At
the end the whole log is read again and compared with every ack.
"""

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.report import Figure
from shared.log.nats.jetstream import JetStreamLog, connect, provision
from shared.log.nats.private_server import NatsServer
from shared.log.port import StoredRecord
from shared.subjects import Subjects

ROUNDS: Final = 100
_SUBJECTS: Final = Subjects("kills")
_POSTED: Final = _SUBJECTS.walk("posted")
_IN_TURN: Final = _SUBJECTS.walk("in-turn")
_LAST: Final = _SUBJECTS.walk("last")
_WINDOW: Final = 256
_PADDING: Final = b"x" * 300
_KILL_WITHIN_S: Final = 0.2
_ALIVE: Final = 300
"""Acks after which the server counts as recovered."""


@dataclass(slots=True)
class Outcome:
    """The result of all rounds.

    Attributes:
        lost: events that were acked but are not in the log at the acked position.
        unstored: events that were posted but are nowhere in the log.
        doubled: second copies of a posted event; readers ignore them.
        in_turn_doubled: second copies of an event that expected its predecessor.
        misread: positions where the concurrent reader read something other than the log has.
        longest_gap_s: longest time between two acks.
    """

    rounds: int
    acked: int = 0
    stored: int = 0
    lost: int = 0
    unstored: int = 0
    doubled: int = 0
    in_turn_doubled: int = 0
    misread: int = 0
    longest_gap_s: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.unstored or self.in_turn_doubled or self.misread)


@dataclass(slots=True)
class _Load:
    """Two writers and a reader, with records of what they saw."""

    posted: set[bytes] = field(default_factory=set)
    acked: dict[int, bytes] = field(default_factory=dict)
    read: list[StoredRecord] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    longest_gap_s: float = 0.0
    _last_ack_s: float = field(default_factory=time.monotonic)
    _window: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_WINDOW))
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def post(self, log: JetStreamLog) -> None:
        number = 0
        while not self.enough.is_set():
            await self._window.acquire()
            data = b"p%d %s" % (number, _PADDING)
            self.posted.add(data)
            log.post(_POSTED, data, partial(self._stored, data))
            number += 1
        await log.drain()

    async def publish_in_turn(self, log: JetStreamLog) -> None:
        number = seq = 0
        while not self.enough.is_set():
            data = b"t%d" % number
            seq = await log.publish(_IN_TURN, data, expected_last_seq=seq)
            self._count(data, seq)
            number += 1

    async def read_all(self, log: JetStreamLog) -> None:
        async with contextlib.aclosing(log.read([_SUBJECTS.walk("*")], 1)) as records:
            async for record in records:
                if record.subject == _LAST:
                    return
                self.read.append(record)

    async def recovered(self) -> None:
        """Wait until a number of further events are acked."""
        wanted = len(self.acked) + _ALIVE
        while len(self.acked) < wanted:
            self._news.clear()
            await self._news.wait()

    def _stored(self, data: bytes, seq: int) -> None:
        self._window.release()
        self._count(data, seq)

    def _count(self, data: bytes, seq: int) -> None:
        now_s = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_ack_s)
        self._last_ack_s = now_s
        self.acked[seq] = data
        self._news.set()


async def run(folder: Path, rounds: int, seed: int) -> Outcome:
    """Kill the server once per round."""
    moments = random.Random(seed)
    server = NatsServer(folder)
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1)  # the process ends with the thread that started it
    try:
        await loop.run_in_executor(thread, server.start)
        await provision(server.url, server.credentials, _SUBJECTS)
        logs = [
            await connect(server.url, credentials=server.credentials, subjects=_SUBJECTS, name=name)
            for name in ("posts", "in turn", "reads")
        ]
        load = _Load()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(load.read_all(logs[2]))
            writing = [
                tasks.create_task(load.post(logs[0])),
                tasks.create_task(load.publish_in_turn(logs[1])),
            ]
            for _ in range(rounds):
                await load.recovered()
                await asyncio.sleep(moments.uniform(0, _KILL_WITHIN_S))
                await loop.run_in_executor(thread, server.kill)
                await loop.run_in_executor(thread, server.start)
            await load.recovered()
            load.enough.set()
            await asyncio.wait(writing)
            await logs[0].publish(_LAST, b"")
            await reading
        outcome = _compared(rounds, load, [record async for record in logs[2].history([_SUBJECTS.walk("*")])])
        for log in logs:
            await log.close()
        return outcome
    finally:
        server.kill()
        thread.shutdown()


def _compared(rounds: int, load: _Load, history: list[StoredRecord]) -> Outcome:
    held = {record.seq: record.data for record in history if record.subject != _LAST}
    posted = Counter(record.data for record in history if record.subject == _POSTED)
    in_turn = Counter(record.data for record in history if record.subject == _IN_TURN)
    before_last = history[: len(load.read)]
    return Outcome(
        rounds=rounds,
        acked=len(load.acked),
        stored=len(held),
        lost=sum(held.get(seq) != data for seq, data in load.acked.items()),
        unstored=len(load.posted - posted.keys()),
        doubled=posted.total() - len(posted),
        in_turn_doubled=in_turn.total() - len(in_turn),
        misread=sum(one != other for one, other in zip(load.read, before_last, strict=True)),
        longest_gap_s=load.longest_gap_s,
    )


def measure(rounds: int = ROUNDS, seed: int = 1) -> list[Figure]:
    """Run the benchmark and return its figures."""
    with (
        tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        outcome = runner.run(run(Path(folder), rounds, seed))
    return [
        Figure("kill -9 of the NATS server under load", outcome.rounds, ""),
        Figure("events acked", outcome.acked, "", f"{outcome.stored} are stored"),
        Figure("acked and lost", outcome.lost, ""),
        Figure("posted and never stored", outcome.unstored, ""),
        Figure("read with another content than stored", outcome.misread, ""),
        Figure("stored twice", outcome.doubled, "", "posted events; readers ignore second copies"),
        Figure("stored twice, of events with an expected predecessor", outcome.in_turn_doubled, ""),
        Figure("longest time between two acks", outcome.longest_gap_s, "s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nats_kills", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args()
    for figure in measure(told.rounds, told.seed):
        print(figure.line())


if __name__ == "__main__":
    main()
