"""Speed of replaying a log: the core alone, and `dalsegno replay --all` from the log on disk.

    fold      a conductor's start: all events but the outputs, folded to its state
    replay    the core's replay: all events; each decision is repeated and compared, each output digested
    command   `dalsegno replay --all` in its own process, reading from a local NATS server
    start     a conductor started on that log: time until it decides about a request at the end of the log

Rates are events per second of CPU time, as on an idle machine. The command's start (imports, connecting) is
reported separately; replaying one request takes about that long.
"""

import gc
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from statistics import median
from typing import Final

from benchmarks import histories
from benchmarks.hop import SUBJECTS, private_log, running_conductor
from benchmarks.machine import new_loop
from benchmarks.report import RATIO, Figure, spread
from conductor.core.cluster import Cluster
from conductor.core.replay import Replayer
from conductor.deployment import deployment_of
from configs.checks import resolve
from dalsegno.replay.verdicts import pins
from dalsegno.roles.gc_tuning import collected_seldom
from models import registry
from shared.events import encode
from shared.log.nats.jetstream import connect
from shared.log.nats.private_server import NatsServer
from shared.log.port import StoredRecord

REQUESTS: Final = 10_000
ROUNDS: Final = 5
TARGET_PER_S: Final = 100_000


def measure() -> list[Figure]:
    records = histories.make(REQUESTS, deployment_of(resolve("demo"), max_event_bytes=1 << 20), SUBJECTS)
    output = f"{SUBJECTS.prefix}.output."
    decisive = [record for record in records if not record.subject.startswith(output)]
    what = f"{REQUESTS:,} requests, {len(records):,} events"
    fold = _rates(len(decisive), lambda: _fold(decisive))
    replay = _rates(len(records), lambda: _replay(records))
    return [
        spread("replay, core: events/s / target", [rate / TARGET_PER_S for rate in replay], RATIO),
        *_command(records),
        spread("core: fold, per s of CPU", fold, "/s", f"{len(decisive):,} events"),
        spread("core: replay, per s of CPU", replay, "/s", what),
    ]


def _rates(events: int, work: Callable[[], None]) -> list[float]:
    rates = []
    for _ in range(ROUNDS):
        gc.collect()
        gc.freeze()
        with collected_seldom():
            begun_s = time.process_time()
            work()
            rates.append(events / (time.process_time() - begun_s))
    return rates


def _fold(records: Sequence[StoredRecord]) -> None:
    cluster = Cluster(registry.graph, SUBJECTS)
    for record in records:
        cluster.fold(record)
    assert not cluster.open


def _replay(records: Sequence[StoredRecord]) -> None:
    verdicts = Replayer(registry.graph, SUBJECTS, pins=pins).run(records)
    assert len(verdicts) == REQUESTS
    assert all(verdict.matches for verdict in verdicts.values())


# ---- from the log on disk ----------------------------------------------------------------------------


def _command(records: Sequence[StoredRecord]) -> list[Figure]:
    with private_log() as server:
        with new_loop() as loop:
            loop.run(_store(server, records))
        walls, cpus, starts = [], [], []
        for _ in range(ROUNDS):
            start_wall, start_cpu = _run(server, "request-000000")
            wall, cpu = _run(server, "--all")
            walls.append(len(records) / (wall - start_wall))
            cpus.append(len(records) / (cpu - start_cpu))
            starts.append(start_wall)
        with new_loop() as loop:
            decides = [loop.run(_start(server, f"waiting-{number}")) for number in range(ROUNDS)]
    return [
        Figure("replay, command: events/s of CPU / target", median(cpus) / TARGET_PER_S, RATIO),
        spread("command: replay --all, per s of CPU", cpus, "/s"),
        spread("command: replay --all, per s of wall", walls, "/s", "reading and deciding in one process"),
        spread("command: replay of one request", starts, "s", "mostly start-up"),
        spread("conductor: from its start on that log to a decision", decides, "s", "imports included"),
    ]


async def _start(server: NatsServer, request_id: str) -> float:
    """Start a conductor on a log with a request that it refuses; return the seconds until it does."""
    log = await connect(server.url, credentials=server.credentials, subjects=SUBJECTS, name="bench")
    refused = encode(histories.submission(request_id, "no such model"))
    seq = await log.publish(SUBJECTS.request(request_id), refused)
    begun_s = time.perf_counter()
    with running_conductor(server):
        async with aclosing(log.read([SUBJECTS.walk(request_id)], seq)) as records:
            await anext(records)
        took_s = time.perf_counter() - begun_s
    await log.close()
    return took_s


async def _store(server: NatsServer, records: Sequence[StoredRecord]) -> None:
    log = await connect(server.url, credentials=server.credentials, subjects=SUBJECTS, name="bench")
    for number, record in enumerate(records):
        log.post(record.subject, record.data)
        if number % 1024 == 0:
            await log.drain()
    await log.drain()
    await log.close()


def _run(server: NatsServer, *args: str) -> tuple[float, float]:
    """Run the command; return its wall and CPU time."""
    command = (sys.executable, "-m", "dalsegno", "replay", "--nats", server.url, *args)
    env = os.environ | {"DALSEGNO_NATS_TOKEN": server.token}
    before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    took_s, after = time.perf_counter() - begun_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(
            f"dalsegno replay ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr}"
        )
    return took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
