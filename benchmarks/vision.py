"""A vision-language model compared with transformers' `generate`; its caches; its cost for other requests.

The model is a LLaVA of random weights: images of 224 x 224 pixels give 196 tokens each. Measured in turns:

- requests a second and the time to the first text, for new images (no cache helps), known images behind a new
  text (the encoder cache helps), and known images at the start of the prompt (the prefix cache helps, too);
- the same requests by transformers' `generate`, one after another, as its users call it;
- bytes of the log, and memory of the conductor, per request with an image of 10 MB;
- the time between tokens of text answers, alone and beside a stream of requests with new images.
"""

import asyncio
import base64
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import msgspec
import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import LlavaForConditionalGeneration, SiglipImageProcessorPil

from benchmarks.client import Connection, Reply
from benchmarks.machine import new_loop, resident_bytes
from benchmarks.report import RATIO, Figure, spread
from configs.demo_vision import train
from configs.demo_vision.train import IMAGE, TURN_END, TURN_START
from shared.log.nats.jetstream import connect
from shared.subjects import Subjects
from tests.e2e.deploy import Running, serve

ROUNDS: Final = 3
REQUESTS: Final = 12
CLIENTS: Final = 4
ANSWER: Final = 16
LARGE: Final = 4
"""Requests with an image of 10 MB."""
SIDE: Final = 224
_numbers: Final = count()


@dataclass(frozen=True, slots=True)
class _Question:
    """A chat with one image: the content parts, and the PNG."""

    before: str
    png: bytes
    after: str

    def body(self, model: str) -> dict[str, Any]:
        url = "data:image/png;base64," + base64.b64encode(self.png).decode()
        parts = [
            *([{"type": "text", "text": self.before}] if self.before else []),
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": self.after},
        ]
        return _asked(model, [{"role": "user", "content": parts}])


def _asked(model: str, messages: list[dict[str, Any]], tokens: int = ANSWER) -> dict[str, Any]:
    return {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def _png(number: int, side: int) -> bytes:
    """An image of noise, which PNG cannot compress: 3 * side * side bytes."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()


def make_checkpoint(folder: Path) -> None:
    """Write a LLaVA of random weights: 22 million parameters, in the layout of the hub."""
    tokenizer = train.build_tokenizer()
    model = train.build_model(
        tokenizer,
        side=SIDE,
        patch=16,
        text={"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 64,
              "num_attention_heads": 6, "num_key_value_heads": 2},
        vision={"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8},
    )  # fmt: skip
    train.save(model, tokenizer, folder, {})


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="dalsegno-bench-") as name:
        folder = Path(name)
        make_checkpoint(folder / "llava")
        with serve(folder, model=str(folder / "llava")) as running, new_loop() as loop:
            model = _model_of(running, loop)
            peer = _Transformers(folder / "llava")
            figures = _compared(running, loop, model, peer)
            figures += loop.run(_beside_images(running, model))
            figures += loop.run(_large_images(running, model))
    return figures


def _model_of(running: Running, loop: asyncio.Runner) -> str:
    async def ask() -> str:
        async with Connection(running.url) as connection:
            found = await connection.get("/v1/models")
        name: str = msgspec.json.decode(found.body)["data"][0]["id"]
        return name

    return loop.run(ask())


# ---- against transformers ------------------------------------------------------------------------------
class _Transformers:
    """The same checkpoint, called as transformers' users do: one request after another."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self._processor = SiglipImageProcessorPil.from_pretrained(checkpoint)
        self._image_tokens = (SIDE // 16) ** 2

    @torch.inference_mode()
    def answer(self, questions: Sequence[_Question]) -> list[Reply]:
        return [self._answer(question) for question in questions]

    def _answer(self, question: _Question) -> Reply:
        begun_s = time.perf_counter()
        ids, pixels = self._inputs(question)
        first_s: list[float] = []
        made = self._model.generate(
            input_ids=ids,
            pixel_values=pixels,
            max_new_tokens=ANSWER,
            min_new_tokens=ANSWER,
            do_sample=False,
            stopping_criteria=[_Watch(first_s, begun_s)],
        )
        text: str = self._tokenizer.decode(made[0, ids.shape[1] :].tolist())
        return Reply(first_s[0], time.perf_counter() - begun_s, texts=[text], tokens=ANSWER)

    def _inputs(self, question: _Question) -> tuple[torch.Tensor, torch.Tensor]:
        image = Image.open(io.BytesIO(question.png)).convert("RGB")
        pixels = self._processor(image, return_tensors="pt")["pixel_values"]
        text = (
            f"{TURN_START}user\n{question.before}{IMAGE * self._image_tokens}{question.after}{TURN_END}\n"
            f"{TURN_START}assistant\n"
        )
        return torch.tensor([self._tokenizer.encode(text, add_special_tokens=False).ids]), pixels


class _Watch:
    """A stopping criterion that notes the time of the first token, and never stops."""

    def __init__(self, first_s: list[float], begun_s: float) -> None:
        self._first_s = first_s
        self._begun_s = begun_s

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if not self._first_s:
            self._first_s.append(time.perf_counter() - self._begun_s)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _compared(running: Running, loop: asyncio.Runner, model: str, peer: _Transformers) -> list[Figure]:
    known = [_png(next(_numbers), SIDE) for _ in range(4)]
    kinds: dict[str, Callable[[int], _Question]] = {
        "new images": lambda n: _Question("", _png(next(_numbers), SIDE), f"What is it? ({n})"),
        "known images behind a new text": lambda n: _Question(
            f"Question {next(_numbers)}. ", known[n % 4], f"What is it? ({n})"
        ),
        "known images first": lambda n: _Question("", known[n % 4], f"What is it? ({next(_numbers)})"),
    }
    figures: list[Figure] = []
    first_ms: dict[str, float] = {}
    for kind, make in kinds.items():
        rates, firsts, theirs, theirs_first = [], [], [], []
        for _ in range(ROUNDS + 1):
            questions = [make(n) for n in range(REQUESTS)]
            replies, took_s = loop.run(_served(running, [q.body(model) for q in questions]))
            rates.append(REQUESTS / took_s)
            firsts.append(1e3 * median(reply.first_s for reply in replies))
            begun_s = time.perf_counter()
            called = peer.answer(questions)
            theirs.append(REQUESTS / (time.perf_counter() - begun_s))
            theirs_first.append(1e3 * median(reply.first_s for reply in called))
        first_ms[kind] = median(firsts[1:])  # the first round is the warm-up
        ratios = [ours / other for ours, other in zip(rates[1:], theirs[1:], strict=True)]
        figures += [
            spread(f"{kind}: requests/s, ours / transformers", ratios, RATIO),
            spread(f"{kind}: requests", rates[1:], "/s", f"transformers {median(theirs[1:]):.2f}"),
            spread(
                f"{kind}: first text, {CLIENTS} at a time",
                firsts[1:],
                "ms",
                f"transformers, one at a time, {median(theirs_first[1:]):.0f}",
            ),
        ]
    without, encoder, prefix = first_ms.values()
    return [
        Figure("first text: without a cache / with the encoder cache", without / encoder, RATIO),
        Figure("first text: without a cache / with encoder and prefix cache", without / prefix, RATIO),
        *figures,
    ]


async def _served(running: Running, bodies: Sequence[dict[str, Any]]) -> tuple[list[Reply], float]:
    replies: list[Reply] = []
    left = iter(bodies)

    async def client() -> None:
        async with Connection(running.url) as connection:
            replies.extend([await connection.ask(body) for body in left])

    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(client())
    return replies, time.perf_counter() - begun_s


# ---- text beside images --------------------------------------------------------------------------------
async def _beside_images(running: Running, model: str) -> list[Figure]:
    """The gaps between the chunks of text answers, alone and beside requests with new images."""
    alone = await _text_gaps_s(running, model)
    stop = asyncio.Event()
    images = asyncio.create_task(_ask_images(running, model, stop))
    beside = await _text_gaps_s(running, model)
    stop.set()
    asked = await images
    return [
        Figure("text beside images: p99 / p50 between chunks", _p99(beside) / median(beside), RATIO),
        Figure("text alone: p99 / p50 between chunks", _p99(alone) / median(alone), RATIO),
        Figure("text beside images: p50", 1e3 * median(beside), "ms", f"{asked} images meanwhile"),
        Figure("text beside images: p99", 1e3 * _p99(beside), "ms", f"alone {1e3 * _p99(alone):.1f}"),
    ]


async def _text_gaps_s(running: Running, model: str) -> list[float]:
    gaps: list[float] = []

    async def client(number: int) -> None:
        async with Connection(running.url) as connection:
            for turn in range(3):
                question = [{"role": "user", "content": f"Hello {number} {turn}"}]
                gaps.extend(await connection.gaps_s(_asked(model, question, tokens=400)))

    async with asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(client(number))
    return gaps


async def _ask_images(running: Running, model: str, stop: asyncio.Event) -> int:
    asked = 0
    async with Connection(running.url) as connection:
        while not stop.is_set():
            question = _Question("", _png(next(_numbers), SIDE), "What is it?")
            await connection.ask(question.body(model))
            asked += 1
    return asked


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


# ---- large images --------------------------------------------------------------------------------------
async def _large_images(running: Running, model: str) -> list[Figure]:
    """The growth of the log and of the conductor by requests with an image of 10 MB each."""
    subjects = Subjects(running.prefix)
    log = await connect(running.nats_url, credentials=running.reader, subjects=subjects, name="benchmark")
    bodies = [_Question("", _png(next(_numbers), 1826), "What is it?").body(model) for _ in range(LARGE + 1)]
    await _served(running, bodies[:1])
    bytes_before = (await log.state()).bytes
    memory_before = resident_bytes(running.pids.conductor[0])
    _, took_s = await _served(running, bodies[1:])
    grown = (await log.state()).bytes - bytes_before
    memory = resident_bytes(running.pids.conductor[0]) - memory_before
    await log.close()
    return [
        Figure("10 MB images: log per request", grown / LARGE / 1024, "KiB"),
        Figure("10 MB images: conductor's memory per request", memory / LARGE / 1024, "KiB"),
        Figure("10 MB images: time per request", took_s / LARGE, "s", f"{CLIENTS} at a time"),
    ]
