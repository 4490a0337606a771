"""Latency of one client's plain requests while another client's key floods the server.

A deployment with two API keys serves `victim`, who sends one short plain request after another, alone and
during each flood of `flooder`: guides that take for ever to compile, small valid guides that differ in every
request, ambiguous grammars whose masks are slow, and texts of several megabytes that do not fit the context.
`answers` is a flood of plain requests, for comparison: what sharing the engine costs without any guide.
"""

import asyncio
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from benchmarks.client import Connection
from benchmarks.machine import new_loop
from benchmarks.report import RATIO, Figure
from tests.e2e.deploy import serve

SECONDS: Final = 10.0
_KEYS: Final = {"victim": "v" * 32, "flooder": "f" * 32}
_QUESTION: Final = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What does sorted do?"}],
    "max_tokens": 8,
    "ignore_eos": True,
    "temperature": 0.0,
}
_EMOJI: Final = "\N{OWL}\N{ROCKET}" * 400_000
"""A text of 3.2 MB."""

Body = dict[str, Any]
_Flood = tuple[int, Callable[[int], Body]]


def _hostile(number: int) -> Body:
    factors = [{"type": "integer", "multipleOf": 99_991 + 2 * (3 * number + place)} for place in range(3)]
    return _guided({"type": "object", "properties": {"n": {"allOf": factors}}, "required": ["n"]})


def _valid(number: int) -> Body:
    properties = {f"name{number}": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}}
    return _guided({"type": "object", "properties": properties, "required": [*properties]})


def _slow(number: int) -> Body:
    rules = "\n".join(f'{name}: x x | x y | y x | y y | "a"' for name in "xy")
    return _QUESTION | {"max_tokens": 16, "guide": {"grammar": f'start: x "{number}"?\n{rules}'}}


def _large(number: int) -> Body:
    return _QUESTION | {"messages": [{"role": "user", "content": f"{number} {_EMOJI}"}]}


def _guided(schema: Body) -> Body:
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    return _QUESTION | {"response_format": form}


FLOODS: Final[dict[str, _Flood]] = {
    "answers": (24, lambda _: _QUESTION),
    "hostile guides": (10, _hostile),
    "valid guides": (24, _valid),
    "slow masks": (24, _slow),
    "large texts": (4, _large),
}
"""By name, the number of concurrent connections, and the request of a number."""


def measure() -> list[Figure]:
    keys = ",".join(f"{name}={secret}" for name, secret in _KEYS.items())
    environment = {"DALSEGNO_GATEWAY_API_KEYS": keys}
    with (
        tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder,
        serve(Path(folder), env=environment) as running,
        new_loop() as loop,
    ):
        loop.run(_victim(running.url, seconds=2.0))
        alone = loop.run(_victim(running.url, seconds=SECONDS))
        figures = [Figure("plain request alone, p99", _p99(alone), "s", _note(alone))]
        for name, flood in FLOODS.items():
            latencies, statuses = loop.run(_flooded(running.url, flood))
            figures += _figures(name, alone, latencies, statuses)
            loop.run(_victim(running.url, seconds=2.0))  # until the flood's last requests have ended
    return figures


async def _flooded(url: str, flood: _Flood) -> tuple[list[float], Counter[int]]:
    """The plain requests' latencies during a flood, and the statuses of the flood's responses."""
    connections, make = flood
    statuses, numbers = Counter[int](), itertools.count()
    async with asyncio.TaskGroup() as tasks:
        crowd = [tasks.create_task(_flooder(url, make, numbers, statuses)) for _ in range(connections)]
        await asyncio.sleep(0.5)
        latencies = await _victim(url, seconds=SECONDS)
        for task in crowd:
            task.cancel()
    return latencies, statuses


async def _flooder(
    url: str, make: Callable[[int], Body], numbers: Iterator[int], statuses: Counter[int]
) -> None:
    while True:
        with suppress(OSError, EOFError):
            async with Connection(url, key=_KEYS["flooder"]) as connection:
                response = await connection.post("/v1/chat/completions", make(next(numbers)))
                statuses[response.status] += 1


async def _victim(url: str, *, seconds: float) -> list[float]:
    """The latencies of plain requests, one after another."""
    latencies: list[float] = []
    end_s = time.perf_counter() + seconds
    async with Connection(url, key=_KEYS["victim"]) as connection:
        while time.perf_counter() < end_s:
            begun_s = time.perf_counter()
            response = await connection.post("/v1/chat/completions", _QUESTION)
            if response.status != 200:
                raise RuntimeError(f"expected 200, found {response.status}: {response.body.decode()}")
            latencies.append(time.perf_counter() - begun_s)
    return latencies


def _figures(name: str, alone: list[float], latencies: list[float], statuses: Counter[int]) -> list[Figure]:
    listed = ", ".join(f"{status}: {count:,}" for status, count in sorted(statuses.items()))
    return [
        Figure(f"floods: p99 with {name} / alone", _p99(latencies) / _p99(alone), RATIO, _note(latencies)),
        Figure(f"responses to {name}", statuses.total(), "", listed),
    ]


def _p99(latencies: list[float]) -> float:
    return sorted(latencies)[int(len(latencies) * 0.99)]


def _note(latencies: list[float]) -> str:
    ordered = sorted(latencies)
    p50_s, p99_s, max_s = ordered[len(ordered) // 2], _p99(latencies), ordered[-1]
    return f"p50 {p50_s * 1e3:.0f}, p99 {p99_s * 1e3:.0f}, max {max_s * 1e3:.0f} ms of {len(ordered):,}"
