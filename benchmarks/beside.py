"""A decode with a vocoder beside it on the same rank: how much slower is it?

A language model of 50 million weights and a stack of convolutions as vocoders have them, both random, each
in its engine's own thread as a worker has them. The vocoder never pauses, which no real one does: two of its
firings are always under way. In turns: the decode alone, beside a vocoder of the same priority, and beside
one that gives way, as ours does (`workers.engine.cpu_threads`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from statistics import median
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import RATIO, Figure, spread
from shared.models.base import Item, KVLayout, StatelessResult
from shared.models.transformers_lm.node import DecoderLM
from workers.arrays import to_array
from workers.engine.kv_engine import KVEngine
from workers.engine.sequence import SequenceSpec
from workers.engine.thread import EngineThread
from workers.stateless.nodes import StatelessNodes
from workers.stateless.thread import StatelessThread

ROUNDS: Final = 8
SECONDS: Final = 1.2
ROWS: Final = 2
_LAYERS: Final = 12
_POSITIONS: Final = 1024


class _Vocoder:
    """Latents (768, 16) to 8192 samples."""

    max_batch = 8

    def __init__(self) -> None:
        layers: list[torch.nn.Module] = []
        width = 768
        for stride in (8, 8, 4, 2):
            layers += [torch.nn.ConvTranspose1d(width, width // 2, 2 * stride, stride, stride // 2)]
            width //= 2
            for dilation in (1, 3, 9):
                convolution = torch.nn.Conv1d(
                    width, width, 7, padding=3 * dilation, dilation=dilation, groups=width
                )
                layers += [torch.nn.GELU(), convolution, torch.nn.Conv1d(width, width, 1)]
        self._layers = torch.nn.Sequential(*layers, torch.nn.Conv1d(width, 1, 7, padding=3)).eval()

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        sounds = self._layers(torch.stack([item.inputs["latents"] for item in items]))
        return [StatelessResult(outputs={"audio": sound}) for sound in sounds]


def _engine() -> KVEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=16_000,
        max_position_embeddings=_POSITIONS,
    )
    node = DecoderLM(
        LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False),
        name="llm",
        layout=KVLayout(layers=_LAYERS, kv_heads=4, head_dim=64),
        max_positions=_POSITIONS,
        weights_digest="",
    )
    return KVEngine(node, num_blocks=256, block_size=16, max_step_tokens=64, max_rows=2 * ROWS)


class _Bench:
    """Both engines, and what they have done so far."""

    def __init__(self) -> None:
        self.tokens = 0
        self.firings = 0
        self._keys = (str(number) for number in count())
        self.engine = EngineThread(_engine, self._on_outputs, self._on_error, on_cancelled=lambda *_: None)

    def _on_outputs(self, outputs: Sequence[Any]) -> None:
        self.tokens += len(outputs)

    def _on_error(self, keys: Sequence[str], error: Exception) -> None:
        raise error

    @asynccontextmanager
    async def decoding(self) -> AsyncIterator[None]:
        keys = [next(self._keys) for _ in range(ROWS)]
        for key in keys:
            self.engine.submit(SequenceSpec(key=key, prompt_ids=[1, 2, 3], max_tokens=1000))
        yield
        for key in keys:
            self.engine.cancel(key)

    async def fire_for_ever(self, thread: StatelessThread) -> None:
        latents = to_array(torch.randn(768, 16))
        while True:
            await thread.fire("vocoder", {"latents": latents}, {}, seed=0)
            self.firings += 1

    async def rates(self, beside: StatelessThread | None) -> tuple[float, float]:
        """Tokens and firings a second."""
        async with asyncio.TaskGroup() as tasks:
            fires = [tasks.create_task(self.fire_for_ever(beside)) for _ in range(2)] if beside else []
            await asyncio.sleep(SECONDS / 4)
            tokens, firings, begun_s = self.tokens, self.firings, time.perf_counter()
            await asyncio.sleep(SECONDS)
            took_s = time.perf_counter() - begun_s
            found = (self.tokens - tokens) / took_s, (self.firings - firings) / took_s
            for fire in fires:
                fire.cancel()
        return found


async def _measure() -> list[Figure]:
    def vocoder(*, beside_kv: bool) -> StatelessThread:
        return StatelessThread(
            lambda: StatelessNodes({"vocoder": _Vocoder()}, torch.device("cpu"), beside_kv=beside_kv)
        )

    bench = _Bench()
    ways: dict[str, StatelessThread | None] = {
        "alone": None,
        "beside one that gives way": vocoder(beside_kv=True),
        "beside one of its priority": vocoder(beside_kv=False),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    threads: list[EngineThread | StatelessThread] = [
        bench.engine,
        *(thread for thread in ways.values() if thread),
    ]
    for thread in threads:
        await thread.start()
    for _ in range(ROUNDS):
        async with bench.decoding():
            for way, beside in ways.items():
                found[way].append(await bench.rates(beside))
    for thread in threads:
        await thread.close()

    figures: list[Figure] = []
    for way, rates in found.items():
        ratios = [mine[0] / alone[0] for mine, alone in zip(rates, found["alone"], strict=True)]
        firings = f"{median(fired for _, fired in rates):.1f} firings/s"
        figures += [spread(f"a decode {way}, to one alone", ratios, RATIO, firings)] if ways[way] else []
        figures += [spread(f"a decode {way}", [tokens for tokens, _ in rates], "tok/s")]
    return figures


def measure() -> list[Figure]:
    """How fast the decode is, and how fast beside each vocoder."""
    return asyncio.run(_measure())
