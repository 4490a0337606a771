"""Cost of distributing a speech model over ranks: the same requests, to three placements in turns.

    one rank       LLM and SNAC in one process
    two ranks      LLM | SNAC
    three ranks    prefill | decode | SNAC: keys and values move too

All three are deployments of `dalsegno serve` and run at the same time; requests go to one of them at a time.
The checkpoint is a tiny one in the published layout, whose steps take one or two milliseconds: the worst case
for the added time. `--shape 3b` makes one of the published size with random weights, for a GPU.

    python -m benchmarks speech                       # with the others, the tiny one
    python -m benchmarks.speech --shape 3b --ranks 1 --clients 1 16 --keep speech.jsonl

With `--keep` a number of clients whose figures are in the file is not measured again, and none begins after
nine minutes. Keep each shape in a file of its own.
"""

import argparse
import asyncio
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import msgspec

from benchmarks.kept import KeptFigures, add_option
from benchmarks.machine import described, new_loop
from benchmarks.orpheus_3b import write_orpheus_3b
from benchmarks.report import RATIO, Figure, spread
from benchmarks.session import MINUTES
from tests.e2e.deploy import Running, serve
from tests.tiny.orpheus import tiny_orpheus

ROUNDS: Final = 5
CLIENTS: Final = (1, 4)
SPEECHES: Final = 8
"""Requests in a round."""
MAX_TOKENS: Final = 7 * 24
LAYOUTS: Final[Mapping[int, tuple[str, str]]] = {
    1: ("one rank", "orpheus_colocated"),
    2: ("two ranks", "orpheus_two_ranks"),
    3: ("three ranks", "orpheus_three_ranks"),
}
"""By the number of ranks: the label and the configuration."""
SAMPLE_RATE: Final = 24_000


@dataclass(frozen=True, slots=True)
class _Speech:
    """One answer; `first_s` is the time from the request to the first audio."""

    first_s: float
    tokens: int
    audio_s: float
    digest: str


@dataclass(frozen=True, slots=True)
class _Round:
    speeches: list[_Speech]
    took_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(speech.tokens for speech in self.speeches) / self.took_s

    @property
    def audio_s_per_s(self) -> float:
        return sum(speech.audio_s for speech in self.speeches) / self.took_s

    @property
    def first_ms(self) -> float:
        return 1e3 * median(speech.first_s for speech in self.speeches)


def measure() -> list[Figure]:
    return compare(tiny_orpheus(), list(LAYOUTS), CLIENTS)


def compare(checkpoint: Path, ranks: Sequence[int], clients: Sequence[int]) -> list[Figure]:
    """Send the same requests to each placement in turns."""
    return [figure for figures in _compared(checkpoint, ranks, clients) for figure in figures]


def _compared(
    checkpoint: Path, ranks: Sequence[int], clients: Sequence[int]
) -> Generator[list[Figure], None, None]:
    """Yield the figures of each number of clients when they are measured."""
    with ExitStack() as stack:
        loop = stack.enter_context(new_loop())
        running: dict[int, Running] = {}
        for count in ranks:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dalsegno-bench-")))
            args = ("--set", f"checkpoint={checkpoint}")
            running[count] = stack.enter_context(serve(folder, *args, model=LAYOUTS[count][1]))
        for at_a_time in clients:
            rounds: dict[int, list[_Round]] = {count: [] for count in ranks}
            for _ in range(ROUNDS + 1):  # the first warms up
                for count in ranks:
                    rounds[count].append(loop.run(_round(running[count].url, LAYOUTS[count][1], at_a_time)))
            yield _figures(at_a_time, {count: found[1:] for count, found in rounds.items()})


async def _round(url: str, model: str, clients: int) -> _Round:
    numbers = iter(range(max(SPEECHES, clients)))
    speeches: list[_Speech] = []

    async def client(http: httpx.AsyncClient) -> None:
        speeches.extend([await _ask(http, model, number) for number in numbers])

    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(client(http))
        return _Round(speeches, time.perf_counter() - begun_s)


async def _ask(http: httpx.AsyncClient, model: str, number: int) -> _Speech:
    body = {
        "model": model,
        "input": f"The sign is there, number {number}.",
        "response_format": "pcm",
        "stream_format": "sse",
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "seed": number,  # for the vocoder's noise
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    begun_s, first_s, nbytes, tokens = time.perf_counter(), 0.0, 0, 0
    digest = blake2b(digest_size=8)
    async with http.stream("POST", "/v1/audio/speech", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            event: dict[str, Any] = msgspec.json.decode(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(f"speech {number} failed: {event}")
            if event["type"] == "speech.audio.done":
                tokens = event["usage"]["output_tokens"]
                continue
            first_s = first_s or time.perf_counter() - begun_s
            pcm = b64decode(event["audio"])
            nbytes += len(pcm)
            digest.update(pcm)
    return _Speech(first_s, tokens, nbytes / 2 / SAMPLE_RATE, f"{number}:{digest.hexdigest()}")


def _figures(clients: int, rounds: dict[int, list[_Round]]) -> list[Figure]:
    figures: list[Figure] = []
    [first, *others] = rounds
    for count, found in rounds.items():
        label = f"{LAYOUTS[count][0]}, {clients} at a time"
        figures += [
            spread(f"{label}: tokens", [one.tokens_per_s for one in found], "/s"),
            spread(f"{label}: audio", [one.audio_s_per_s for one in found], "s/s"),
            spread(f"{label}: first audio", [one.first_ms for one in found], "ms"),
        ]
    for count in others:
        pairs = list(zip(rounds[count], rounds[first], strict=True))
        ratios = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
        what = f"{LAYOUTS[count][0]} / {LAYOUTS[first][0]}, {clients} at a time"
        figures.append(spread(f"tokens/s: {what}", ratios, RATIO))
        firsts = [one.first_ms / other.first_ms for one, other in pairs]
        figures.append(spread(f"first audio: {what}", firsts, RATIO))
    differing = _differing(found for found in rounds.values())
    asked = len(next(iter(rounds.values()))[0].speeches)
    figures.append(Figure(_named(clients), differing, "", f"of {asked}"))
    return figures


def _differing(layouts: Iterable[list[_Round]]) -> int:
    """Count the requests whose audio is not bit-identical in all rounds of all placements."""
    heard: dict[str, set[str]] = {}
    for rounds in layouts:
        for one in rounds:
            for speech in one.speeches:
                number, _, digest = speech.digest.partition(":")
                heard.setdefault(number, set()).add(digest)
    return sum(len(digests) > 1 for digests in heard.values())


def _resume(
    make: Callable[[Path], Path], ranks: Sequence[int], clients: Sequence[int], file: Path | None
) -> None:
    """Print the figures of each number of clients as they come; those in the file are not measured again."""
    begun_s, kept = time.monotonic(), KeptFigures(file)
    missing = [count for count in clients if not all(name in kept for name in _names(ranks, count))]
    with tempfile.TemporaryDirectory(prefix="dalsegno-orpheus-") as folder:
        made = make(Path(folder)) if missing else Path(folder)
        # Closing it ends the servers, which begin with the first figure.
        with closing(_compared(made, ranks, missing)) as found:
            for count in clients:
                if count not in missing:
                    print(f"  {count} at a time: measured before, see {file}")
                    continue
                if file is not None and time.monotonic() - begun_s > 60 * MINUTES:
                    print(f"  {count} at a time: not measured, the time is up; run it again")
                    continue
                for figure in next(found):
                    print(kept.keep(figure).line(), flush=True)


def _names(ranks: Sequence[int], clients: int) -> list[str]:
    """Names of figures that are there only if a number of clients was measured with these ranks."""
    first, *others = (LAYOUTS[count][0] for count in ranks)
    ratios = [f"first audio: {other} / {first}, {clients} at a time" for other in others]
    return [f"{first}, {clients} at a time: first audio", *ratios, _named(clients)]


def _named(clients: int) -> str:
    """The name of the last figure of a number of clients."""
    return f"{clients} at a time: answers that differ between placements"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speech", description=__doc__)
    parser.add_argument("--shape", choices=("tiny", "3b"), default="tiny")
    parser.add_argument("--ranks", type=int, nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    add_option(parser)
    told = parser.parse_args()
    print(described())
    make = write_orpheus_3b if told.shape == "3b" else lambda _: tiny_orpheus()
    _resume(make, told.ranks, told.clients, told.keep)


if __name__ == "__main__":
    main()
