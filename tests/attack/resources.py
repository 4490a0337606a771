"""Resources: clients that are slow, silent or oversized, beside one that behaves.

The well-behaved client has to be answered, the gateway's memory has to stay bounded, and all processes have
to live. Every attack is undone by closing its connections.
"""

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from tests.attack import target
from tests.attack.promises import Verdict
from tests.attack.target import MODEL, chat
from tests.e2e.deploy import Running

_CONNECTIONS: Final = 300
_ANSWERS: Final = 5
_SLOW_S: Final = 5.0
"""A well-behaved client that waits longer than this for an answer is not served."""
_GROWTH_MB: Final = 300
"""The most that the gateway may grow during one attack: some large bodies are in memory at a time."""
_MB: Final = 1 << 20
_LARGEST: Final = 32 * _MB
"""The largest body that a gateway accepts by default."""


async def attack(out: Path) -> list[Verdict]:
    """Hold resources in every way, and ask meanwhile."""
    served = Verdict("a client is served beside slow, silent and oversized ones")
    bounded = Verdict("the gateway's memory stays bounded")
    refused = Verdict("oversized and malformed requests are refused, not executed and not fatal")
    with target.served(out / "deployment") as running:
        before = sorted(_pids(running))
        for name, hold in _HOLDING.items():
            start_mb = _memory_mb(running)
            async with hold(running):
                await _asks(running, name, served)
                grown_mb = _memory_mb(running) - start_mb
            bounded.tried()
            bounded.note += f"{name}: {grown_mb:+.0f} MB; "
            if grown_mb > _GROWTH_MB:
                bounded.broken(name, f"expected at most {_GROWTH_MB} MB more, found {grown_mb:.0f} MB")
        for name, body in _bodies():
            await _refused(running, name, body, refused)
        await _ids(running, served)
        refused.expect("the processes of before", sorted(_pids(running)), before)
    return [served, bounded, refused]


def _pids(running: Running) -> list[int]:
    return [pid for pid in running.all_pids() if pid != running.launcher.pid]


def _memory_mb(running: Running) -> float:
    status = Path(f"/proc/{running.pids.gateway[0]}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


async def _asks(running: Running, name: str, served: Verdict) -> None:
    """Ask some times while the attack is held."""
    for _ in range(_ANSWERS):
        with served.survives(name):
            began_s = time.monotonic()
            async with target.client(running) as http:
                answer = await http.post("/v1/chat/completions", json=chat("hi", max_tokens=2), timeout=30.0)
            assert answer.status_code == 200, f"{answer.status_code} {answer.text:.200}"
            took_s = time.monotonic() - began_s
            assert took_s < _SLOW_S, f"it took {took_s:.1f} s"


# ---- clients that hold something ------------------------------------------------------------------------


@asynccontextmanager
async def _held(running: Running, said: bytes, count: int, drip: bytes = b"") -> AsyncIterator[None]:
    """Open connections, say something on each, and then one byte of `drip` at a time."""
    parts = urlsplit(running.url)
    writers = []
    for _ in range(count):
        with suppress(OSError):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 16)
            writer.write(said)
            writers.append(writer)

    async def dripping() -> None:
        for byte in itertools.cycle(drip):
            for writer in writers:
                with suppress(OSError):
                    writer.write(bytes([byte]))
            await asyncio.sleep(0.1)

    drips = asyncio.create_task(dripping())
    try:
        yield
    finally:
        drips.cancel()
        for writer in writers:
            writer.transport.abort()


def _head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def _silent(running: Running) -> Any:
    return _held(running, b"", _CONNECTIONS)


def _slow_heads(running: Running) -> Any:
    return _held(running, b"POST /generate HTTP/1.1\r\nX-Slow: ", _CONNECTIONS, drip=b"a")


def _slow_bodies(running: Running) -> Any:
    return _held(running, _head("/generate", 1_000_000) + b'{"text": "', _CONNECTIONS, drip=b"a")


def _never_reading(running: Running) -> Any:
    body = json.dumps({"text": "hi", "model_kwargs": {"max_tokens": 400, "ignore_eos": True}}).encode()
    return _held(running, (_head("/generate", len(body)) + body) * 3, 40)


def _large_uploads(running: Running) -> Any:
    return _held(running, _head("/v1/chat/completions", 32 * _MB) + b'{"a": "' + b"x" * 30 * _MB, 6)


def _endless_chunks(running: Running) -> Any:
    head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    return _held(running, head + b"1\r\n \r\n" * 1000, 100, drip=b"1\r\n \r\n")


def _pipelined(running: Running) -> Any:
    return _held(running, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 2000, 20)


_HOLDING: Final[Mapping[str, Callable[[Running], Any]]] = {
    "silent connections": _silent,
    "heads by the byte": _slow_heads,
    "bodies by the byte": _slow_bodies,
    "clients that never read": _never_reading,
    "uploads of 30 MB": _large_uploads,
    "endless chunks": _endless_chunks,
    "pipelined requests": _pipelined,
}


# ---- bodies and ids --------------------------------------------------------------------------------------


def _bodies() -> Iterator[tuple[str, bytes]]:
    deep = 200_000
    yield "deep lists", b"[" * deep + b"]" * deep
    yield "deep maps", b'{"a":' * deep + b"1" + b"}" * deep
    yield "a deep message", b'{"model":"attacked","messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
    yield "a long number", b'{"max_tokens":' + b"9" * 1_000_000 + b"}"
    yield "a huge exponent", b'{"temperature":1e999999999}'
    yield "many keys", json.dumps({str(n): n for n in range(200_000)}).encode()
    yield "equal keys", b"{" + b",".join([b'"model":"attacked"'] * 200_000) + b"}"
    yield "lone surrogates", b'{"model":"attacked","messages":[{"role":"user","content":"\\ud800"}]}'
    yield "no UTF-8", b'{"model":"attacked","messages":[{"role":"user","content":"\xff\xfe"}]}'
    many = [{"role": "user", "content": "x"}] * 100_000
    yield "many messages", json.dumps({"model": MODEL, "messages": many}).encode()
    stops = {"model": MODEL, "messages": many[:1], "stop": ["x" * 9] * 50_000, "max_tokens": 2}
    yield "many stop strings", json.dumps(stops).encode()
    bias = {"model": MODEL, "messages": many[:1], "logit_bias": {str(n): 1 for n in range(100_000)}}
    yield "a large logit bias", json.dumps(bias).encode()
    yield "many choices", json.dumps({"model": MODEL, "messages": many[:1], "n": 1_000_000}).encode()
    yield "a body above the limit", b'{"a":"' + b"x" * 40 * _MB + b'"}'


async def _refused(running: Running, name: str, body: bytes, refused: Verdict) -> None:
    async with target.client(running) as http:
        refused.tried()
        try:
            headers = {"content-type": "application/json"}
            answer = await http.post("/v1/chat/completions", content=body, headers=headers)
        except (httpx.WriteError, httpx.ReadError):
            assert len(body) > _LARGEST, name
            return  # the server closed the connection before it was sent
        except httpx.HTTPError as error:
            refused.broken(name, repr(error))
            return
        if not 400 <= answer.status_code < 500:
            refused.broken(name, f"expected a refusal, found {answer.status_code} {answer.text:.200}")


async def _ids(running: Running, served: Verdict) -> None:
    """Statuses, cancels and cancels over NATS of requests that do not exist."""
    async with target.client(running) as http:
        for _ in range(20):
            ids = [secrets.token_hex(8) for _ in range(50)]
            async with asyncio.TaskGroup() as tasks:
                for one in ids:
                    tasks.create_task(http.get(f"/v1/requests/{one}"))
                    tasks.create_task(http.delete(f"/v1/requests/{one}"))
    await _asks(running, "statuses and cancels of unknown ids", served)
