"""Floods of guides and of large inputs with one key, and plain requests with another.

Every flood is measured in turns: alone, beside as many plain requests of the other key (the control: what any
load of that size costs on this machine), and beside the flood. A flood may cost its neighbours twice what the
control costs them, and not more.
"""

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx

from tests.attack import target
from tests.attack.promises import Verdict
from tests.attack.target import chat
from tests.e2e.deploy import Running

FACTOR: Final = 2.0
"""The allowed ratio of a neighbour's p99 beside a flood to its p99 without one."""
NOISE_S: Final = 0.5
"""The allowance for a busy machine, which adds it to a p99 of few requests by itself."""
_ROUNDS: Final = 3
_PLAIN: Final = 12
"""Plain requests in each window."""
_FLOODERS: Final = 8
_LARGE: Final = 4
_WINDOW_S: Final = 15.0
"""The longest time of a window; a request that is not answered by then counts with its time so far."""
_PRIMES: Final = (999983, 999979, 999961, 999959, 999953, 999931, 999917, 999907, 999883, 999863)
Body: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Flood:
    """One kind of flood.

    Attributes:
        bodies: the requests, without end.
        at_once: how many are sent at a time; `pause_s`, how long a sender waits between two of them.
        statuses: how often each status was answered.
    """

    name: str
    bodies: Iterator[Body]
    at_once: int = _FLOODERS
    pause_s: float = 0.0
    statuses: dict[int, int] = field(default_factory=dict)


def _guided(schema: Any) -> Body:
    guide = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    return chat("hi", max_tokens=8, response_format=guide)


def bad_schemas() -> Iterator[Body]:
    """Schemas that take seconds to compile, or that cannot be satisfied; each of them another one."""
    for number in itertools.count():
        prime = _PRIMES[number % len(_PRIMES)]
        properties = {
            f"p{number}-{place}": {"multipleOf": prime - place, "type": "integer"} for place in range(4)
        }
        yield _guided({"type": "object", "properties": properties, "required": sorted(properties)})
        pattern = f"^(a|b|{number}){{1,400}}(x+x+)+y$"
        yield _guided({"type": "string", "pattern": pattern, "minLength": 300, "maxLength": 4000})
        choice = [{"const": f"{number}-{place}" * 20} for place in range(200)]
        yield _guided({"allOf": [{"anyOf": choice}, {"oneOf": choice}]})
        yield chat("hi", max_tokens=8, guide={"regex": f"({number}|(a{{1,200}}){{1,200}})+"})


def unique_schemas() -> Iterator[Body]:
    """Small valid schemas, each of them another one."""
    for number in itertools.count():
        properties = {f"name{number}": {"type": "string"}, "age": {"type": "integer"}}
        yield _guided({"type": "object", "properties": properties, "required": sorted(properties)})


def large_inputs() -> Iterator[Body]:
    """Inputs of some megabytes, of characters that a tokenizer has no merges for."""
    for number in itertools.count():
        yield chat(f"{number}" + "\U0001f9d9" * 750_000, max_tokens=1)


def repeated_bad() -> Iterator[Body]:
    """One bad schema, again and again: its refusal has to be remembered."""
    properties = {
        f"p{place}": {"multipleOf": prime, "type": "integer"} for place, prime in enumerate(_PRIMES)
    }
    while True:
        yield _guided({"type": "object", "properties": properties})


def plain() -> Iterator[Body]:
    for number in itertools.count():
        yield chat(f"hi {number}", max_tokens=8)


def floods() -> list[Flood]:
    return [
        Flood("bad schemas", bad_schemas()),
        Flood("one bad schema repeated", repeated_bad()),
        Flood("unique valid schemas", unique_schemas()),
        Flood("inputs of 3 MB", large_inputs(), at_once=_LARGE, pause_s=1.0),
    ]


async def attack(out: Path) -> list[Verdict]:
    """Measure a plain request alone, beside the control and beside each flood, in turns."""
    verdicts = []
    with target.served(out / "deployment", keys=("victim", "flooder")) as running:
        await _window(running, 3)  # warm
        for flood in floods():
            verdict = Verdict(
                f"a plain request's p99 stays within {FACTOR:g}x beside {flood.name} of another key"
            )
            await _measured(running, flood, verdict)
            verdicts.append(verdict)
    return verdicts


async def _measured(running: Running, flood: Flood, verdict: Verdict) -> None:
    alone_s: list[float] = []
    control_s: list[float] = []
    flooded_s: list[float] = []
    for _ in range(_ROUNDS):
        alone_s += await _window(running, _PLAIN)
        async with _flooded(running, Flood("control", plain(), flood.at_once, flood.pause_s)):
            control_s += await _window(running, _PLAIN)
        async with _flooded(running, flood):
            flooded_s += await _window(running, _PLAIN)
        await _drained(running)
        if p(99, flooded_s) >= _WINDOW_S - 1:
            break  # clear enough
    verdict.tried(sum(flood.statuses.values()))
    allowed_s = FACTOR * max(p(99, alone_s), p(99, control_s)) + NOISE_S
    told = [f"{name} {p(50, s):.2f}/{p(99, s):.2f}" for name, s in
            (("alone", alone_s), ("control", control_s), ("flooded", flooded_s))]  # fmt: skip
    verdict.note = f"p50/p99 in s: {', '.join(told)}; flood: {flood.statuses}"
    if p(99, flooded_s) > allowed_s:
        verdict.broken(f"{flood.at_once} at a time", f"expected at most {allowed_s:.2f} s, {verdict.note}")


def p(percent: float, values: list[float]) -> float:
    """The percentile by nearest rank."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


async def _window(running: Running, count: int) -> list[float]:
    """Return the seconds that plain requests of the victim take, one after the other."""
    took_s: list[float] = []
    until_s = time.monotonic() + _WINDOW_S
    async with target.client(running, "victim") as http:
        while len(took_s) < count and time.monotonic() < until_s:
            began_s = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + until_s - began_s):
                    body = chat(f"hello {len(took_s)}", max_tokens=8)
                    answer = await http.post("/v1/chat/completions", json=body)
                    assert answer.status_code == 200, answer.text
            took_s.append(time.monotonic() - began_s)
    return took_s


@asynccontextmanager
async def _flooded(running: Running, flood: Flood) -> AsyncIterator[None]:
    """Flood for the time of the block."""
    ready = asyncio.Event()
    tasks = [asyncio.create_task(_flooder(running, flood, ready)) for _ in range(flood.at_once)]
    await ready.wait()
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _flooder(running: Running, flood: Flood, ready: asyncio.Event) -> None:
    async with target.client(running, "flooder") as http:
        while True:
            body = json.dumps(next(flood.bodies), ensure_ascii=False).encode()
            ready.set()
            status = 0
            with suppress(httpx.HTTPError):
                answer = await http.post(
                    "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
                )
                status = answer.status_code
            flood.statuses[status] = flood.statuses.get(status, 0) + 1
            await asyncio.sleep(flood.pause_s)


async def _drained(running: Running) -> None:
    """Wait until a plain request is quick again, so that a flood does not reach into the next window."""
    until_s = time.monotonic() + _WINDOW_S
    while time.monotonic() < until_s and max(await _window(running, 2)) > 1.0:
        pass
