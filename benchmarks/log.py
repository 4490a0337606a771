"""Cost of the log, measured through the adapter that all roles use: `python -m benchmarks.log`.

    post       tracked publishes by one process: events per second until all are acked
    history    reading that log: records per second, raw and decoded as events
    idle hop   a record to another process and a record back, one at a time
    loaded hop the same with 16 and 256 in flight, and the CPU of one side per hop

The server and both processes share one machine, so throughputs are lower bounds. The adapter runs as in
production: file storage, every publish tracked to its ack, no publish awaited inline.
"""

import asyncio
import contextlib
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from shared.log.nats.credentials import Credentials
from shared.log.nats.jetstream import connect, provision
from shared.log.nats.private_server import NatsServer
from shared.log.port import Log
from shared.subjects import Subjects

_SUBJECTS = Subjects("bench")
_PAYLOAD_BYTES = 300
_EVENTS = 100_000
_HOPS = {1: 3_000, 16: 20_000, 256: 50_000}
_HOP_SUBJECT = _SUBJECTS.ready(0, "r")
_DONE_SUBJECT = _SUBJECTS.done(0, "r")


class _Fact(msgspec.Struct, frozen=True, tag="fact.v1"):
    """An event of usual size."""

    id: str
    writer: str
    number: int
    request_id: str
    text: str


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder:
        server = NatsServer(Path(folder))
        server.start()
        try:
            _run(provision(server.url, server.credentials, _SUBJECTS))
            _run(_writing_and_replaying(server.url, server.credentials))
            for in_flight, hops in _HOPS.items():
                _hop(server.url, server.credentials, in_flight, hops)
        finally:
            server.stop()


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(coroutine)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _row(what: str, rate: float, cpu_us: float, rest: str = "") -> None:
    print(f"{what:<28} {rate:>9,.0f}/s   {cpu_us:>6.1f} us CPU   {rest}", flush=True)


async def _writing_and_replaying(url: str, credentials: Credentials) -> None:
    log = await connect(url, credentials=credentials, subjects=_SUBJECTS, name="bench")
    encode = msgspec.msgpack.Encoder().encode
    padding = "x" * (_PAYLOAD_BYTES - 80)
    events = [encode(_Fact(f"id-{n:08}", "bench", n, "request-0001", padding)) for n in range(_EVENTS)]

    cpu, begin = _cpu_s(), time.perf_counter()
    window = asyncio.Semaphore(1024)
    for event in events:
        await window.acquire()
        log.post(_HOP_SUBJECT, event, lambda _: window.release())
    await log.drain()
    took = time.perf_counter() - begin
    _row("post, tracked, 1024 in flight", _EVENTS / took, (_cpu_s() - cpu) / _EVENTS * 1e6)

    for filters in ([_HOP_SUBJECT], _SUBJECTS.for_conductor()):
        cpu, begin = _cpu_s(), time.perf_counter()
        count = 0
        async for _ in log.history(filters):
            count += 1
        took = time.perf_counter() - begin
        assert count == _EVENTS
        _row(f"history, {len(filters)} filter(s)", count / took, (_cpu_s() - cpu) / count * 1e6)

    decode = msgspec.msgpack.Decoder(_Fact).decode
    cpu, begin = _cpu_s(), time.perf_counter()
    async for record in log.history([_HOP_SUBJECT]):
        decode(record.data)
    took = time.perf_counter() - begin
    _row("history, decoded", _EVENTS / took, (_cpu_s() - cpu) / _EVENTS * 1e6)
    await log.close()


def _hop(url: str, credentials: Credentials, in_flight: int, hops: int) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    worker = context.Process(target=_worker, args=(url, credentials, hops, ready), daemon=True)
    worker.start()
    ready.wait()
    _run(_conduct(url, credentials, in_flight, hops))
    worker.join()


def _worker(url: str, credentials: Credentials, hops: int, ready: Any) -> None:
    _run(_answer(url, credentials, hops, ready))


async def _answer(url: str, credentials: Credentials, hops: int, ready: Any) -> None:
    log = await connect(url, credentials=credentials, subjects=_SUBJECTS, name="bench-worker")
    start_seq = (await log.state()).last_seq + 1
    ready.set()
    async with contextlib.aclosing(log.read(_SUBJECTS.for_worker(0), start_seq)) as records:
        async for record in records:
            log.post(_DONE_SUBJECT, record.data)
            hops -= 1
            if not hops:
                break
    await log.drain()
    await log.close()


async def _conduct(url: str, credentials: Credentials, in_flight: int, hops: int) -> None:
    log = await connect(url, credentials=credentials, subjects=_SUBJECTS, name="bench-conductor")
    start_seq = (await log.state()).last_seq + 1
    latencies = []
    sent_at = {}
    cpu, begin = _cpu_s(), time.perf_counter()

    def send(number: int) -> None:
        sent_at[number] = time.perf_counter()
        log.post(_HOP_SUBJECT, number.to_bytes(4, "big") + bytes(_PAYLOAD_BYTES - 4))

    for number in range(in_flight):
        send(number)
    async with contextlib.aclosing(log.read([_DONE_SUBJECT], start_seq)) as records:
        async for record in records:
            latencies.append(time.perf_counter() - sent_at.pop(int.from_bytes(record.data[:4], "big")))
            if len(latencies) + len(sent_at) < hops:
                send(len(latencies) + len(sent_at))
            elif not sent_at:
                break
    took, spent = time.perf_counter() - begin, _cpu_s() - cpu
    await _finish(log)
    latencies.sort()
    p50, p99 = latencies[hops // 2], latencies[hops * 99 // 100]
    _row(
        f"hop, {in_flight} in flight",
        hops / took,
        spent / hops * 1e6,
        f"p50 {p50 * 1e6:,.0f} us  p99 {p99 * 1e6:,.0f} us",
    )


async def _finish(log: Log) -> None:
    await log.drain()
    await log.close()


if __name__ == "__main__":
    main()
