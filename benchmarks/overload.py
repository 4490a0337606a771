"""Responses under overload (expected: answers, 429 and 503 only), memory, and recovery.

256 clients send requests concurrently and repeatedly to a gateway that admits `PLACES` at a time. Half of
them wait as long as `Retry-After` says, the others retry at once; every eighth disconnects in the middle of
its stream. Measured: the statuses, the memory of every role, and, when all clients are gone, the time until
the server is ready, runs nothing, and answers as before.
"""

import asyncio
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.client import Connection, Response
from benchmarks.machine import new_loop, resident_bytes
from benchmarks.report import RATIO, Figure
from tests.e2e.deploy import Running, serve

CLIENTS: Final = 256
PLACES: Final = 64
SECONDS: Final = 30.0
SAMPLE_S: Final = 1.0
RECOVERY_S: Final = 5.0
_IMPATIENT_S: Final = 0.05
_FINE: Final = frozenset({200, 429, 503})
_QUESTION: Final = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What does sorted do?"}],
    "max_tokens": 64,
    "temperature": 0.0,
}


@dataclass(slots=True)
class _Crowd:
    """The responses to the clients, and the memory of the roles during the load."""

    statuses: Counter[int] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    left: int = 0
    weights: dict[str, list[int]] = field(default_factory=dict)


def measure() -> list[Figure]:
    places = ("--set", f"gateway.max_in_flight={PLACES}")
    with (
        tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder,
        serve(Path(folder), *places) as running,
        new_loop() as loop,
    ):
        expected = loop.run(_ask(running, stream=False)).text
        loop.run(_rush(running, seconds=5.0))  # fill pools and caches
        crowd = loop.run(_rush(running, seconds=SECONDS))
        recovery_s = loop.run(_recovered(running, expected))
    return _figures(crowd, expected, recovery_s)


async def _rush(running: Running, *, seconds: float) -> _Crowd:
    crowd = _Crowd()
    end_s = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_watch_memory(running, crowd, end_s))
        for number in range(CLIENTS):
            tasks.create_task(_client(running, crowd, number, end_s))
    return crowd


async def _client(running: Running, crowd: _Crowd, number: int, end_s: float) -> None:
    dice = random.Random(number)
    while time.monotonic() < end_s:
        try:
            if number % 8 == 0:
                await _leave_early(running)
                crowd.left += 1
                continue
            response = await _ask(running, stream=dice.random() < 0.5)
        except (OSError, EOFError, ValueError, RuntimeError) as error:
            crowd.broken[f"{type(error).__name__}: {error}"[:80]] += 1
            continue
        crowd.statuses[response.status] += 1
        if response.status == 200:
            crowd.texts[response.text] += 1
        else:
            patient = number % 2 == 0
            await asyncio.sleep(float(response.headers.get("retry-after", 1)) if patient else _IMPATIENT_S)


async def _ask(running: Running, *, stream: bool) -> Response:
    async with Connection(running.url) as connection:
        return await connection.post("/v1/chat/completions", _QUESTION | {"stream": stream})


async def _leave_early(running: Running) -> None:
    async with Connection(running.url) as connection:
        await connection.send("/v1/chat/completions", _QUESTION | {"stream": True, "ignore_eos": True})
        await connection.head()


async def _watch_memory(running: Running, crowd: _Crowd, end_s: float) -> None:
    while time.monotonic() < end_s:
        pids = running.pids
        roles = {"gateway": pids.gateway[0], "conductor": pids.conductor[0], "worker": pids.worker["0"]}
        if pids.nats is not None:
            roles["NATS"] = pids.nats
        for name, pid in roles.items():
            crowd.weights.setdefault(name, []).append(resident_bytes(pid))
        await asyncio.sleep(SAMPLE_S)


async def _recovered(running: Running, expected: str) -> float:
    """Return the seconds until the deployment is ready, runs nothing, and answers as before."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < 10 * RECOVERY_S:
        health = await _health(running)
        if health["status"] == "healthy" and not health["gateway"]["running"]:
            answer = await _ask(running, stream=False)
            if answer.status == 200 and answer.text == expected:
                return time.monotonic() - begun_s
        await asyncio.sleep(0.02)
    raise RuntimeError(f"expected the deployment to recover within {10 * RECOVERY_S:g} s; it did not")


async def _health(running: Running) -> dict[str, Any]:
    async with Connection(running.url) as connection:
        response = await connection.get("/health")
    return msgspec.json.decode(response.body, type=dict[str, Any])


def _figures(crowd: _Crowd, expected: str, recovery_s: float) -> list[Figure]:
    total = crowd.statuses.total()
    others = {status: count for status, count in crowd.statuses.items() if status not in _FINE}
    listed = ", ".join(f"{status}: {count:,}" for status, count in sorted(crowd.statuses.items()))
    wrong = crowd.texts.total() - crowd.texts[expected]
    figures = [
        Figure(
            f"responses to {CLIENTS} clients in {SECONDS:g} s",
            total,
            "",
            f"{listed}; {crowd.left:,} disconnected early",
        ),
        Figure("statuses other than 200, 429, 503", sum(others.values()), "", str(others or "")),
        Figure("connections that broke", crowd.broken.total(), "", str(dict(crowd.broken) or "")),
        Figure("answers that differ from one without load", wrong, "", f"of {crowd.texts.total():,}"),
        Figure("answers", crowd.statuses[200] / SECONDS, "/s"),
        Figure("time to recover", recovery_s, "s", f"target: at most {RECOVERY_S:g}"),
    ]
    for name, weights in crowd.weights.items():
        third = max(1, len(weights) // 3)
        first, last = (sum(part) / len(part) for part in (weights[:third], weights[-third:]))
        note = f"{first / 1e6:.0f} MB in the first third, {last / 1e6:.0f} MB in the last"
        figures.append(
            Figure(f"overload: memory of the {name}, last / first third", last / first, RATIO, note)
        )
    return figures
