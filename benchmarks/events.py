"""Events per request, and events of the conductor per token (expected: none).

Counted in the log of a real deployment: short answers, and one of 200 tokens. Between the order to decode and
its report there must be only the worker's chunks.
"""

import tempfile
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Final

from benchmarks.client import Connection
from benchmarks.machine import new_loop
from benchmarks.report import Figure
from shared.events import AnyEvent, NodeReady, OutputChunk, WalkCompleted, decode
from shared.log.nats.jetstream import connect
from shared.subjects import CONDUCTOR_WRITER, Subjects
from tests.e2e.deploy import Running, serve

SHORT: Final = 20
SHORT_TOKENS: Final = 32
LONG_TOKENS: Final = 200


def measure() -> list[Figure]:
    with (
        tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as folder,
        serve(Path(folder)) as running,
        new_loop() as loop,
    ):
        return loop.run(_count(running))


async def _count(running: Running) -> list[Figure]:
    ids = [f"short-{number}" for number in range(SHORT)]
    async with Connection(running.url) as connection:
        for request_id in ids:
            await connection.ask(_question(request_id, SHORT_TOKENS))
        await connection.ask(_question("long", LONG_TOKENS))
    log = await connect(
        running.nats_url,
        credentials=running.reader,
        subjects=Subjects(running.prefix),
        name="bench",
    )
    found: dict[str, list[tuple[AnyEvent, int]]] = {}
    async with aclosing(log.history(Subjects(running.prefix).logged())) as records:
        async for record in records:
            address = Subjects(running.prefix).parse(record.subject)
            if address is not None and address.request_id is not None:
                event = decode(record.data, address.kind)
                found.setdefault(address.request_id, []).append((event, len(record.data)))
    await log.close()

    short = [found[request_id] for request_id in ids]
    events = sum(map(len, short)) / SHORT
    size = sum(data for history in short for _, data in history) / SHORT
    long = [event for event, _ in found["long"]]
    kinds = Counter(type(event).__name__ for event in long)
    return [
        Figure(f"events of an answer of {SHORT_TOKENS} tokens", events, "", f"{size / 1024:.1f} KiB"),
        Figure(
            f"events of an answer of {LONG_TOKENS} tokens",
            len(long),
            "",
            ", ".join(f"{kind} {count}" for kind, count in kinds.items()),
        ),
        Figure("of those: chunks", kinds["OutputChunk"], "", _chunk_sizes(long)),
        Figure("conductor's events from first to last token", _interruptions(long), "", "expected: 0"),
    ]


def _question(request_id: str, tokens: int) -> dict[str, object]:
    return {
        "request_id": request_id,
        "model": "demo",
        "messages": [{"role": "user", "content": "What does len do?"}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }


def _chunk_sizes(events: list[AnyEvent]) -> str:
    sizes = [len(event.token_ids) for event in events if isinstance(event, OutputChunk)]
    return f"tokens in each: {', '.join(map(str, sizes))}"


def _interruptions(events: list[AnyEvent]) -> int:
    """Count the conductor's events between the order of the answer and its completion."""
    begin = next(at for at, event in enumerate(events) if isinstance(event, NodeReady) and event.index == 1)
    end = next(at for at, event in enumerate(events) if isinstance(event, WalkCompleted) and event.index == 1)
    return sum(event.writer == CONDUCTOR_WRITER for event in events[begin + 1 : end])
