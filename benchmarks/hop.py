"""Cost of one decision: from `walk.completed` to the next `node.ready`, through the log both ways.

The conductor and the log are real. The worker is a stub in this process that reports every order as done at
once, so only the hop remains. A request has two steps (`prepare`, then `prefill` and `decode`), an admission
and an end: seven events, of which the conductor writes four and reads all. The timed hop is the one between
the two steps.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Final

from benchmarks import histories
from benchmarks.machine import cpu_s, new_loop
from benchmarks.report import Figure
from configs.checks import resolve
from shared.events import NodeReady, RequestFinished, decode, encode
from shared.log.nats.jetstream import JetStreamLog, connect, provision
from shared.log.nats.private_server import NatsServer
from shared.subjects import Subjects

SUBJECTS: Final = Subjects()
REQUESTS: Final = {1: 1_000, 16: 4_000, 256: 8_000}
HOPS_PER_REQUEST: Final = 2


def measure() -> list[Figure]:
    figures: list[Figure] = []
    with private_log() as server, running_conductor(server) as conductor, new_loop() as loop:
        for in_flight, requests in REQUESTS.items():
            figures += loop.run(_run(server, conductor.pid, in_flight, requests))
    return figures


@contextmanager
def private_log() -> Iterator[NatsServer]:
    """Run a NATS server with its own stream on disk."""
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder, new_loop() as loop:
        server = NatsServer(Path(folder))
        server.start()
        try:
            loop.run(provision(server.url, server.credentials, SUBJECTS))
            yield server
        finally:
            server.stop()


@contextmanager
def running_conductor(server: NatsServer) -> Iterator[subprocess.Popen[bytes]]:
    """Run a conductor of the demo on that log."""
    command = (sys.executable, "-m", "dalsegno", "conductor", "--nats", server.url, "--config", "demo")
    env = os.environ | {"DALSEGNO_NATS_TOKEN": server.token}
    # The stub sends no heartbeats, so it must not be declared lost in the middle.
    never_lost = ("--set", "recovery.worker_silent_s=600")
    process = subprocess.Popen((*command, *never_lost, "--log-level", "warning"), env=env)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def _run(server: NatsServer, conductor: int, in_flight: int, requests: int) -> list[Figure]:
    log = await connect(server.url, credentials=server.credentials, subjects=SUBJECTS, name="bench")
    try:
        worker = _StubWorker(log, prefix=f"bench-{in_flight}")
        await worker.run(in_flight, min(requests // 4, 500))  # warm up, and wait until the conductor leads
        worker = _StubWorker(log, prefix=f"timed-{in_flight}")
        cpu, own, begun_s = cpu_s(conductor), time.process_time(), time.perf_counter()
        await worker.run(in_flight, requests)
        took_s, own = time.perf_counter() - begun_s, time.process_time() - own
        cpu = cpu_s(conductor) - cpu
    finally:
        await log.close()
    hops = requests * HOPS_PER_REQUEST
    cuts = quantiles(worker.hops_s, n=100)
    label = f"{in_flight} in flight"
    return [
        Figure(f"{label}: hop p50", cuts[49] * 1e6, "us", f"p99 {cuts[98] * 1e6:,.0f}"),
        Figure(f"{label}: hops", hops / took_s, "/s", f"stub worker {own / hops * 1e6:.0f} us CPU per hop"),
        Figure(
            f"{label}: conductor CPU per hop",
            cpu / hops * 1e6,
            "us",
            f"{cpu / requests * 1e6:.0f} per request, admission and end included",
        ),
    ]


class _StubWorker:
    """Submits requests and reports each order as done."""

    def __init__(self, log: JetStreamLog, prefix: str) -> None:
        self.hops_s: list[float] = []
        self._log = log
        self._prefix = prefix
        self._submitted = 0
        self._reported = 0
        self._reported_at_s: dict[str, float] = {}
        self._model = resolve("demo").name

    async def run(self, in_flight: int, requests: int) -> None:
        """Answer `requests` requests, `in_flight` at a time."""
        start_seq = (await self._log.state()).last_seq + 1
        joined = histories.joined(histories.RANK, self._model, incarnation=self._prefix)
        await self._log.publish(SUBJECTS.worker(histories.RANK), encode(joined))
        for _ in range(in_flight):
            self._submit()
        finished = 0
        reading = [SUBJECTS.ready(histories.RANK, "*"), SUBJECTS.walk("*")]
        async with aclosing(self._log.read(reading, start_seq)) as records:
            async for record in records:
                match decode(record.data):
                    case NodeReady() as order:
                        self._report(order)
                    case RequestFinished():
                        finished += 1
                        if self._submitted < requests:
                            self._submit()
                        elif finished == requests:
                            return
                    case _:
                        pass

    def _submit(self) -> None:
        request_id = f"{self._prefix}-{self._submitted:06}"
        self._submitted += 1
        submission = histories.submission(request_id, self._model)
        self._log.post(SUBJECTS.request(request_id), encode(submission))

    def _report(self, order: NodeReady) -> None:
        request_id = str(order.request_id)
        if order.index == 1:
            self.hops_s.append(time.perf_counter() - self._reported_at_s.pop(request_id))
        self._reported += 1
        done = encode(histories.completed(order, self._reported))
        if order.index == 0:
            self._reported_at_s[request_id] = time.perf_counter()
        self._log.post(SUBJECTS.done(order.rank, request_id), done)
