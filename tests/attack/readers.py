"""Greedy readers: a thousand consumers with the keys of readers and clients, while our processes need one.

JetStream counts the consumers of a stream; a process that dies needs a new one to come back. Whatever readers
and clients open, and whichever process is killed meanwhile, the service has to answer again.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from shared.log.nats.credentials import Credentials
from tests.attack import bus, target
from tests.attack.bus import Bus
from tests.attack.promises import Verdict
from tests.attack.target import Told, generate
from tests.e2e.deploy import Running

READERS: Final = 1000
BACK_S: Final = 60.0
"""Time limit of the first answer after a kill, with loading of torch on a busy machine."""
_STREAM: Final = "DS_LOG"
_AT_ONCE: Final = 50
_LASTS_NS: Final = 290_000_000_000
"""The time that a consumer stays without its reader: just below the server's limit."""


async def attack(out: Path) -> list[Verdict]:
    """Open consumers with each key, kill each role, and ask."""
    back = Verdict("a killed process comes back while readers hold every consumer they can get")
    honest = Verdict("an honest reader and client can still read an answer over NATS")
    visible = Verdict("the number of consumers and its limit are visible to operators")
    with target.served(out / "deployment") as running:
        keys = {"reader": running.reader, "client": running.client}
        for role, credentials in keys.items():
            async with bus.connected(running.nats_url, role, credentials) as greedy:
                opened = await _open(greedy, READERS)
                back.note += f"{role} opened {opened} of {READERS}; "
                for victim in ("conductor", "worker", "gateway"):
                    await _killed(running, victim, f"{opened} consumers of {role}", back)
                await _visible(running, visible, f"{opened} consumers of {role}")
                await _honest(running, {name: one for name, one in keys.items() if name != role}, honest)
        for inbox in ("_INBOX.greedy", "_INBOX.nobody"):
            async with bus.connected(running.nats_url, "client", running.client) as greedy:
                opened = await _open(greedy, READERS, inbox=inbox)
                back.note += f"client opened {opened} on {inbox}; "
                await _killed(running, "worker", f"{opened} consumers on {inbox}", back)
                await _honest(running, {"reader": running.reader}, honest)
        async with bus.connected(running.nats_url, "client", running.client) as churning:
            await _while_churning(running, churning, back)
    return [back, honest, visible]


async def _open(greedy: Bus, count: int, first: int = 0, inbox: str = "") -> int:
    """Open ephemeral push consumers; return the number of those that the server created.

    `inbox` is where they deliver to, if not to an inbox of the key's own; nobody listens at `_INBOX.nobody`.
    """
    created = 0

    async def one(number: int) -> None:
        nonlocal created
        deliver = f"{inbox}.{number}" if inbox else greedy.new_inbox()
        if inbox != "_INBOX.nobody":
            await greedy.subscribe(deliver)
        name = f"greedy{greedy.role}{inbox.replace('.', '')}{number}"
        answer = await _consumer(greedy, name, deliver)
        created += "error" not in answer

    for start in range(first, first + count, _AT_ONCE):
        async with asyncio.TaskGroup() as tasks:
            for number in range(start, min(start + _AT_ONCE, first + count)):
                tasks.create_task(one(number))
    return created


async def _consumer(greedy: Bus, name: str, deliver: str, **config: Any) -> Mapping[str, Any]:
    """Create a consumer as a client of NATS does; return the server's answer."""
    wanted = {
        "name": name,
        "deliver_subject": deliver,
        "ack_policy": "none",
        "deliver_policy": "new",
        "mem_storage": True,
        "inactive_threshold": _LASTS_NS,
        **config,
    }
    request = json.dumps({"stream_name": _STREAM, "config": wanted}).encode()
    answer = await greedy.request(f"$JS.API.CONSUMER.CREATE.{_STREAM}.{name}", request, timeout=30)
    found: Mapping[str, Any] = json.loads(answer.data)
    return found


async def _killed(running: Running, role: str, attack: str, back: Verdict) -> None:
    """Kill a role, and ask until it is answered."""
    pids = running.pids
    pid = {"conductor": pids.conductor, "worker": list(pids.worker.values()), "gateway": pids.gateway}[role][
        0
    ]
    os.kill(pid, signal.SIGKILL)
    began_s = time.monotonic()
    back.tried()
    error = await _answered(running, began_s + BACK_S)
    if error:
        back.broken(f"{attack}, the {role} killed", f"no answer within {BACK_S:g} s: {error}")
    back.note += f"{role} back in {time.monotonic() - began_s:.1f} s; "


async def _answered(running: Running, deadline: float) -> str:
    """Ask until there is an answer; return the last error otherwise."""
    error = ""
    while time.monotonic() < deadline:
        try:
            async with asyncio.timeout_at(deadline), target.client(running) as http:
                told = await generate(http, Told.new("after"), "hello", max_tokens=4)
            if told.answer[2] in {"length", "stop"}:
                return ""
            error = str(told.answer[2])
        except (httpx.HTTPError, OSError, TimeoutError) as caught:
            error = repr(caught)
        await asyncio.sleep(0.2)
    return error or "it took too long"


async def _visible(running: Running, verdict: Verdict, attack: str) -> None:
    async with target.client(running) as http:
        metrics = (await http.get("/metrics")).text
    lines = [line for line in metrics.splitlines() if "max_readers" in line and not line.startswith("#")]
    verdict.expect(f"{attack}: /metrics has the limit of readers", bool(lines), expected=True)


async def _honest(running: Running, others: Mapping[str, Credentials], verdict: Verdict) -> None:
    """Another key opens one consumer and closes it again."""
    for role, credentials in others.items():
        with verdict.survives(f"{role} reads while another key is greedy"):
            async with bus.connected(running.nats_url, role, credentials) as one:
                deliver = one.new_inbox()
                await one.subscribe(deliver)
                name = f"honest{time.monotonic_ns()}"
                answer = await _consumer(one, name, deliver, inactive_threshold=5_000_000_000)
                assert "error" not in answer, answer["error"]


async def _while_churning(running: Running, churning: Bus, back: Verdict) -> None:
    """Consumers are opened without pause, so that every place that gets free is taken at once."""

    async def churn() -> None:
        number = 0
        while True:
            await _open(churning, _AT_ONCE, first=number)
            number += _AT_ONCE

    churner = asyncio.create_task(churn())
    try:
        await _killed(running, "conductor", "consumers opened without pause", back)
    finally:
        churner.cancel()
