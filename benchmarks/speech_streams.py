"""Streams of speech as listeners hear them: first sound, pauses, real-time factor; by their number.

Requests go to `/v1/audio/speech` and are streamed. A listener starts to play with the first chunk; whenever
the next one is not there in time, the sound stops (an underrun). The real-time factor is the time for a
second of sound of one stream: below 1, it is faster than it plays.

Of Orpheus, the same speeches are made in this process, too, in turns with the served ones: the engine in one
thread, and SNAC in another, without gateway, log and conductor. The ratio is the cost of serving.

    python -m benchmarks speech_streams                           # a tiny Orpheus, 1, 8 and 32 listeners
    python -m benchmarks.speech_streams --shape 0.6b              # one of that size, random weights
    python -m benchmarks.speech_streams --shape qwen3_tts_1.7b --rate 10 --goal-ms 50    # on a GPU
    python -m benchmarks.speech_streams --checkpoint ./Qwen3-TTS-12Hz-1.7B-CustomVoice --rate 10 --goal-ms 50

With `--rate`, requests come so many times a second whatever became of the earlier ones, and 95 of 100 must
have their first sound within `--goal-ms`.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import msgspec
import torch

from benchmarks.machine import described, new_loop
from benchmarks.orpheus_3b import write_orpheus_3b
from benchmarks.playback import Chunk, percentile, played
from benchmarks.random_qwen3_tts import write_qwen3_tts_1b7
from benchmarks.report import RATIO, Figure, show, spread
from configs.checks import resolve
from models import registry
from models.base import ChunkOf, Item
from models.orpheus.frames import END_AUDIO, FIRST_AUDIO, STRIDE_TOKENS, WINDOW_TOKENS
from shared.walks.chunks import SlidingWindow
from tests.e2e.deploy import serve
from tests.tiny.orpheus import tiny_orpheus
from workers import settings
from workers.kv_engine.outputs import TokenOutput
from workers.kv_engine.sequence_spec import Sampling, SequenceSpec
from workers.loading.engines import make_kv_engines

LISTENERS: Final = (1, 8, 32)
ROUNDS: Final = 3
TOKENS: Final = 7 * 24
SAMPLE_RATE: Final = 24_000
DRAWS: Final[dict[str, Any]] = {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3}
"""As the published code of Orpheus draws."""
NO_GPU: Final = 2
"""The exit status where a goal for GPUs is asked for without one."""
_QWEN3_TTS: Final = "qwen3_tts_1.7b"
_SHAPE_0B6: Final = {
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
}


@dataclass(slots=True)
class Stream:
    """One speech as it came.

    Attributes:
        end_s: seconds from the request to its end.
    """

    chunks: list[Chunk] = field(default_factory=list)
    end_s: float = 0.0

    @property
    def sound_s(self) -> float:
        return sum(chunk.plays_s for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Round:
    """Speeches that were made together."""

    streams: list[Stream]
    took_s: float

    @property
    def sound_per_s(self) -> float:
        """Seconds of sound per second, of all streams."""
        return sum(stream.sound_s for stream in self.streams) / self.took_s


Way = Callable[[int], Round]
"""Makes so many speeches at once."""


def measure() -> list[Figure]:
    return compare(tiny_orpheus(), LISTENERS, TOKENS)


def compare(checkpoint: Path, listeners: Sequence[int], tokens: int) -> list[Figure]:
    """Make speeches of Orpheus served and in this process, in turns."""
    figures: list[Figure] = []
    with _served(checkpoint, "orpheus_colocated", tokens) as served:
        ways: dict[str, Way] = {"served": served, "engine alone": InProcess(checkpoint, tokens)}
        for way in ways.values():
            way(1)  # warms up
        for count in listeners:
            rounds: dict[str, list[Round]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, way in ways.items():
                    rounds[name].append(way(count))
            figures += _heard(f"{count} at once", rounds["served"])
            ratios = [
                mine.sound_per_s / theirs.sound_per_s
                for mine, theirs in zip(rounds["served"], rounds["engine alone"], strict=True)
            ]
            figures.append(spread(f"sound/s: served / engine alone, {count} at once", ratios, RATIO))
    return figures


def heard(checkpoint: Path, listeners: Sequence[int], tokens: int) -> list[Figure]:
    """Make speeches of any speech model, served."""
    figures: list[Figure] = []
    with _served(checkpoint, str(checkpoint), tokens) as served:
        served(1)  # warms up
        for count in listeners:
            figures += _heard(f"{count} at once", [served(count) for _ in range(ROUNDS)])
    return figures


def _heard(label: str, rounds: Sequence[Round]) -> Iterator[Figure]:
    streams = [stream for one in rounds for stream in one.streams]
    playbacks = [played(stream.chunks) for stream in streams]
    firsts = [1e3 * one.first_s for one in playbacks]
    factors = [stream.end_s / stream.sound_s for stream in streams]
    stopped = sum(one.underruns > 0 for one in playbacks)
    yield spread(f"{label}: real-time factor of a stream", factors, "s/s", f"of {len(streams)}")
    yield Figure(f"{label}: first sound", median(firsts), "ms", f"p95 {percentile(firsts, 0.95):,.0f} ms")
    yield Figure(
        f"{label}: underruns per stream",
        sum(one.underruns for one in playbacks) / len(streams),
        "",
        f"in {stopped} of {len(streams)}, {sum(one.silent_s for one in playbacks):.2f} s in total",
    )
    yield spread(f"{label}: sound", [one.sound_per_s for one in rounds], "s/s")


# ---- served ------------------------------------------------------------------------------------------


@contextmanager
def _served(checkpoint: Path, model: str, tokens: int) -> Iterator[Way]:
    """Serve a model, a bundled configuration over `checkpoint` or that folder itself."""
    with ExitStack() as stack:
        loop = stack.enter_context(new_loop())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dalsegno-bench-")))
        args = () if model == str(checkpoint) else ("--set", f"checkpoint={checkpoint}")
        url = stack.enter_context(serve(folder, *args, model=model)).url
        yield lambda count: loop.run(_together(url, count, tokens))


async def _together(url: str, count: int, tokens: int) -> Round:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(_listen(http, number, tokens)) for number in range(count)]
        return Round([task.result() for task in asked], time.perf_counter() - begun_s)


async def _listen(http: httpx.AsyncClient, number: int, tokens: int) -> Stream:
    body = {
        "model": (await http.get("/v1/models")).json()["data"][0]["id"],
        "input": f"The sign is there, number {number}.",
        "response_format": "pcm",
        "stream_format": "sse",
        **DRAWS,
        "seed": number,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    found, begun_s = Stream(), time.perf_counter()
    async with http.stream("POST", "/v1/audio/speech", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"speech {number} was refused: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            event: dict[str, Any] = msgspec.json.decode(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(f"speech {number} failed: {event}")
            if "audio" in event:
                plays_s = len(b64decode(event["audio"])) / 2 / SAMPLE_RATE
                found.chunks.append(Chunk(time.perf_counter() - begun_s, plays_s))
    found.end_s = time.perf_counter() - begun_s
    return found


# ---- a goal under a rate of requests ----------------------------------------------------------------


def at_a_rate(checkpoint: Path, rate: float, seconds: float, tokens: int, goal_ms: float) -> list[Figure]:
    """Ask `rate` times a second, whatever became of earlier requests."""
    with ExitStack() as stack:
        loop = stack.enter_context(new_loop())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dalsegno-bench-")))
        url = stack.enter_context(serve(folder, model=str(checkpoint))).url
        loop.run(_together(url, 1, tokens))  # warms up
        streams = loop.run(_arriving(url, rate, seconds, tokens))
    found = Round(streams, seconds)
    firsts = [1e3 * played(stream.chunks).first_s for stream in streams]
    p95 = percentile(firsts, 0.95)
    verdict = f"goal {goal_ms:g} ms {'reached' if p95 <= goal_ms else 'missed'}"
    label = f"{rate:g} requests/s"
    return [Figure(f"{label}: first sound, p95", p95, "ms", verdict), *_heard(label, [found])]


async def _arriving(url: str, rate: float, seconds: float, tokens: int) -> list[Stream]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        async with asyncio.TaskGroup() as tasks:
            asked: list[asyncio.Task[Stream]] = []
            begun_s = time.perf_counter()
            for number in range(round(rate * seconds)):
                await asyncio.sleep(max(0.0, begun_s + number / rate - time.perf_counter()))
                asked.append(tasks.create_task(_listen(http, number, tokens)))
        return [task.result() for task in asked]


# ---- the engine alone -------------------------------------------------------------------------------


class InProcess:
    """Orpheus in this process: the engine in this thread, SNAC in another."""

    def __init__(self, checkpoint: Path, tokens: int) -> None:
        config = resolve(str(checkpoint))
        self._snac: Any = registry.module("orpheus", "nodes").load(checkpoint, "snac_decoder")
        [self._engine] = make_kv_engines(
            config, settings.parse(config.model_kwargs), 0, lambda *_: None
        ).values()
        self._tokens = tokens
        self._windows = SlidingWindow(WINDOW_TOKENS, STRIDE_TOKENS)
        self._made = 0

    def __call__(self, count: int) -> Round:
        begun_s = time.perf_counter()
        streams: dict[str, Stream] = {}
        said: dict[str, list[int]] = {}
        for number in range(count):
            key = f"{self._made}-{number}"
            streams[key], said[key] = Stream(), []
            self._engine.add(self._spec(key, number))
        self._made += 1
        sounds: list[Future[None]] = []
        with ThreadPoolExecutor(1) as vocoder:
            while self._engine.has_work:
                for output in self._engine.step():
                    assert isinstance(output, TokenOutput)
                    told = said[output.key]
                    if not FIRST_AUDIO <= output.token_id < END_AUDIO:
                        continue
                    told.append(output.token_id)
                    number = self._windows.whole(len(told)) - 1
                    if number >= 0 and len(told) == self._windows.span(number)[1]:
                        window = told[slice(*self._windows.span(number))]
                        stream = streams[output.key]
                        sounds.append(vocoder.submit(self._decode, stream, window, number, begun_s))
        for sound in sounds:
            sound.result()
        for key, stream in streams.items():
            if not stream.chunks:
                sys.exit(f"a speech of {self._tokens} tokens has {len(said[key])} of sound, and needs 28")
            stream.end_s = stream.chunks[-1].at_s
        return Round([*streams.values()], time.perf_counter() - begun_s)

    def _spec(self, key: str, number: int) -> SequenceSpec:
        prompt = [1 + (number + place) % 200 for place in range(24)]  # about as long as the served ones
        sampling = Sampling(**DRAWS, seed=number)
        return SequenceSpec(key=key, prompt_ids=prompt, max_tokens=self._tokens, sampling=sampling)

    def _decode(self, stream: Stream, tokens: list[int], number: int, begun_s: float) -> None:
        item = Item(
            inputs={"token": torch.tensor(tokens)}, args={}, chunk=ChunkOf(number=number, fresh=7, last=False)
        )
        [result] = self._snac.run([item])
        if isinstance(result, Exception):
            raise result
        samples = result.outputs["audio"]
        stream.chunks.append(Chunk(time.perf_counter() - begun_s, len(samples) / SAMPLE_RATE))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speech_streams",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=("tiny", "0.6b", _QWEN3_TTS), default="tiny")
    parser.add_argument("--checkpoint", type=Path, help="a speech model to serve, in place of a shape")
    parser.add_argument("--listeners", type=int, nargs="+", default=list(LISTENERS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="the length of a speech")
    parser.add_argument("--rate", type=float, help="requests per second, in place of listeners")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they come")
    parser.add_argument("--goal-ms", type=float, default=50.0, help="of the first sound, p95")
    told = parser.parse_args()
    if told.shape == _QWEN3_TTS and not torch.cuda.is_available():
        print(f"{_QWEN3_TTS}: expected a GPU, found none: nothing was measured", file=sys.stderr)
        sys.exit(NO_GPU)
    print(described())
    with tempfile.TemporaryDirectory(prefix="dalsegno-speech-") as folder:
        checkpoint = told.checkpoint or _written(told.shape, Path(folder))
        if told.rate is not None:
            found = at_a_rate(checkpoint, told.rate, told.seconds, told.tokens, told.goal_ms)
        elif json.loads((checkpoint / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]:
            found = compare(checkpoint, told.listeners, told.tokens)
        else:
            found = heard(checkpoint, told.listeners, told.tokens)
        show({str(told.checkpoint or told.shape): found})


def _written(shape: str, folder: Path) -> Path:
    if shape == "tiny":
        return tiny_orpheus()
    if shape == "0.6b":
        return write_orpheus_3b(folder, **_SHAPE_0B6)
    return write_qwen3_tts_1b7(folder)


if __name__ == "__main__":
    main()
