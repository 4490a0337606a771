"""Cost of gateway, log and conductor: requests served by a deployment, and answered by the engine in process.

Both sides use the same checkpoint, requests and limits, and take turns: one round served, one in process.
Each client sends its next request when it has the last answer. With the demo and a small Qwen3 of random
weights a step takes one or two milliseconds, so this is the worst case: the added time is the same for a
model that is a hundred times slower.

On the served side five processes (client, gateway, conductor, worker, NATS) share the machine's cores; in
process there is one thread.
"""

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.client import Connection, Reply
from benchmarks.in_process import InProcess
from benchmarks.machine import cpu_s, new_loop
from benchmarks.report import RATIO, Figure, spread
from configs.checks import resolve
from dalsegno.serve.data_dir import Pids
from tests.e2e.deploy import Running, serve
from tests.tiny import tiny_checkpoint

ROUNDS: Final = 7
QUESTIONS: Final = {1: 12, 8: 48, 32: 128}
"""Requests in a round, by the number of clients."""
MAX_TOKENS: Final = 64
BUILTINS: Final = (
    *("len", "sorted", "abs", "all", "any", "ascii", "bin", "callable", "chr", "compile", "delattr", "dir"),
    *("divmod", "eval", "exec", "format", "getattr", "globals", "hasattr", "hash", "hex", "id", "input"),
    *("isinstance", "issubclass", "iter", "locals", "max", "min", "next", "oct", "open", "ord", "pow"),
)


@dataclass(slots=True)
class _Round:
    """One round of one side."""

    replies: list[Reply]
    took_s: float
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return sum(reply.tokens for reply in self.replies) / self.took_s

    @property
    def first_ms(self) -> float:
        return 1e3 * median(reply.first_s for reply in self.replies)

    @property
    def end_ms(self) -> float:
        return 1e3 * median(reply.end_s for reply in self.replies)


def measure() -> list[Figure]:
    demo = _compare("demo", "demo")
    return demo + _compare("random Qwen3", str(tiny_checkpoint("qwen3")))


def _compare(label: str, model: str) -> list[Figure]:
    engine = InProcess(resolve(model))
    gc.collect()
    gc.freeze()  # otherwise the collector's passes over torch's many objects would count
    figures: list[Figure] = []
    with (
        tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder,
        serve(Path(folder), model=model) as running,
        new_loop() as loop,
    ):
        for clients, count in QUESTIONS.items():
            questions = [_question(resolve(model).name, number) for number in range(count)]
            served: list[_Round] = []
            called: list[_Round] = []
            for _ in range(ROUNDS + 1):
                served.append(loop.run(_served(running, questions, clients)))
                called.append(_called(engine, questions, clients))
            figures += _figures(label, clients, served[1:], called[1:])  # the first round is the warm-up
    return figures


def _question(model: str, number: int) -> dict[str, Any]:
    builtin = BUILTINS[number % len(BUILTINS)]
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"What does {builtin} do? ({number})"}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
    }


async def _served(running: Running, questions: Sequence[dict[str, Any]], clients: int) -> _Round:
    replies: dict[int, Reply] = {}
    left = iter(enumerate(questions))
    connections = [Connection(running.url) for _ in range(clients)]

    async def client(connection: Connection) -> None:
        for number, question in left:
            replies[number] = await connection.ask(question)

    for connection in connections:
        await connection.__aenter__()
    before, begun_s = _usage(running.pids), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for connection in connections:
            tasks.create_task(client(connection))
    took_s, after = time.perf_counter() - begun_s, _usage(running.pids)
    for connection in connections:
        await connection.__aexit__(None, None, None)
    used = {name: after[name] - before[name] for name in after}
    return _Round([replies[number] for number in range(len(questions))], took_s, used)


def _called(engine: InProcess, questions: list[dict[str, Any]], clients: int) -> _Round:
    cpu, begun_s = time.process_time(), time.perf_counter()
    replies = engine.answer(questions, clients)
    took_s = time.perf_counter() - begun_s
    return _Round(replies, took_s, {"in process": time.process_time() - cpu})


def _usage(pids: Pids) -> dict[str, float]:
    assert pids.nats is not None
    roles = {"gateway": pids.gateway[0], "conductor": pids.conductor[0], "worker": pids.worker["0"]}
    used = {name: cpu_s(pid) for name, pid in roles.items()}
    return used | {"NATS": cpu_s(pids.nats), "client": cpu_s(os.getpid())}


def _figures(model: str, clients: int, served: list[_Round], called: list[_Round]) -> list[Figure]:
    label = f"{model}, {clients} at a time"
    pairs = list(zip(served, called, strict=True))
    asked = len(served[0].replies)
    rates = [median(one.tokens_per_s for one in side) for side in (served, called)]
    ratios = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
    what = f"tokens/s: {rates[0]:,.0f} served, {rates[1]:,.0f} in process"
    figures = [
        spread(f"{label}: served / in process", ratios, RATIO, what),
        spread(f"{label}: requests", [asked / one.took_s for one in served], "/s"),
    ]
    if clients == 1:
        figures += [
            _added(f"{label}: added to the first text", [(s.first_ms, c.first_ms) for s, c in pairs]),
            _added(f"{label}: added to the end", [(s.end_ms, c.end_ms) for s, c in pairs]),
        ]
    spent = {name: 1e3 * median(one.cpu_s[name] for one in served) / asked for name in served[0].cpu_s}
    alone = 1e3 * median(one.cpu_s["in process"] for one in called) / asked
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in spent.items())
    differing = sum(a.text != b.text for a, b in zip(served[0].replies, called[0].replies, strict=True))
    return [
        *figures,
        Figure(f"{label}: CPU per request", sum(spent.values()), "ms", f"{parts}; in process {alone:.1f}"),
        Figure(f"{label}: answers that differ", differing, "", f"of {asked}"),
    ]


def _added(name: str, pairs: list[tuple[float, float]]) -> Figure:
    alone = median(called for _, called in pairs)
    return spread(name, [served - called for served, called in pairs], "ms", f"{alone:.2f} in process")
