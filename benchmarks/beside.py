"""Slowdown of a decode by a vocoder that runs concurrently on the same rank.

The model has 50 million weights, the vocoder is a stack of convolutions; both are random, and each runs in
its engine's thread as in a worker. Two calls of the vocoder are always in progress; a real vocoder pauses.
Measured in turns: the decode alone, with a vocoder of the same priority, and with one of lower priority as in
a worker: a thread on a CPU (`workers.machine.cpu_threads`), a stream on a GPU
(`workers.kv_engine.gpu.cuda_streams`).

    python -m benchmarks beside                  # on the CPU
    python -m benchmarks.beside --device cuda --keep beside.jsonl    # goes on where it was stopped
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from statistics import median
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu import NO_GPU
from benchmarks.kept import KeptFigures, add_option
from benchmarks.machine import described
from benchmarks.report import RATIO, Figure, show, spread
from models.base import Item, KVLayout, StatelessResult
from models.transformers_lm.node import DecoderLM
from workers.data_plane.arrays import to_array
from workers.kv_engine.attention.kernels import default_kernel
from workers.kv_engine.config import KVEngineConfig
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.gpu.cuda_graphs import CudaCapture
from workers.kv_engine.gpu.cuda_streams import StreamPriority, use_gpu_stream
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.thread import EngineThread
from workers.stateless_engine.nodes import StatelessNodes
from workers.stateless_engine.thread import StatelessThread

ROUNDS: Final = 8
SECONDS: Final = 1.2
ROWS: Final = 2
_LAYERS: Final = 12
_POSITIONS: Final = 1024
_ANSWER: Final = 1000


class _Vocoder:
    """Latents (768, 16) to 8192 samples."""

    max_batch = 8

    def __init__(self, device: torch.device) -> None:
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
        whole = torch.nn.Sequential(*layers, torch.nn.Conv1d(width, 1, 7, padding=3))
        self._layers = whole.eval().to(device)

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        sounds = self._layers(torch.stack([item.inputs["latents"] for item in items]))
        return [StatelessResult(outputs={"audio": sound}) for sound in sounds]


def _engine(device: torch.device) -> KVEngine:
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
    on_gpu = device.type == "cuda"
    model: Any = LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)
    node = DecoderLM(
        model.to(device, torch.bfloat16 if on_gpu else torch.float32),
        name="llm",
        layout=KVLayout(layers=_LAYERS, kv_heads=4, head_dim=64),
        max_positions=_POSITIONS,
        weights_digest="",
    )
    use_gpu_stream(device, StreamPriority.HIGH)
    return KVEngine(
        node,
        KVEngineConfig(num_blocks=256, block_size=16, max_step_tokens=64, max_sequences=2 * ROWS),
        capture=CudaCapture(device) if on_gpu and default_kernel(device.type) is not None else None,
    )


def _nodes(device: torch.device, *, is_low_priority: bool) -> StatelessNodes:
    vocoder = _Vocoder(device)
    use_gpu_stream(device, StreamPriority.LOW if is_low_priority else StreamPriority.HIGH)
    return StatelessNodes({"vocoder": vocoder}, device, with_kv_node=is_low_priority)


class _Bench:
    """Both engines, with counters of their work."""

    def __init__(self, device: torch.device) -> None:
        self.tokens = 0
        self.firings = 0
        self._keys = (str(number) for number in count())
        self._decoding: set[str] = set()
        self.engine = EngineThread(
            lambda: _engine(device), self._on_outputs, self._on_error, on_cancelled=lambda *_: None
        )

    def _on_outputs(self, outputs: Sequence[Any]) -> None:
        self.tokens += len(outputs)
        for output in outputs:
            if output.finish is not None and output.key in self._decoding:
                self._decoding.remove(output.key)
                self._decode()  # a GPU finishes an answer in less than a round

    def _on_error(self, keys: Sequence[str], error: Exception) -> None:
        raise error

    def _decode(self) -> None:
        key = next(self._keys)
        self._decoding.add(key)
        self.engine.submit(SequenceSpec(key=key, prompt_ids=[1, 2, 3], max_tokens=_ANSWER))

    @asynccontextmanager
    async def decoding(self) -> AsyncIterator[None]:
        for _ in range(ROWS):
            self._decode()
        yield
        keys, self._decoding = self._decoding, set()
        for key in keys:
            self.engine.cancel(key)

    async def fire_for_ever(self, thread: StatelessThread) -> None:
        latents = to_array(torch.randn(768, 16))
        while True:
            await thread.fire("vocoder", {"latents": latents}, {}, seed=0)
            self.firings += 1

    async def rates(self, vocoder: StatelessThread | None) -> tuple[float, float]:
        """Measure tokens and vocoder calls per second."""
        async with asyncio.TaskGroup() as tasks:
            fires = [tasks.create_task(self.fire_for_ever(vocoder)) for _ in range(2)] if vocoder else []
            await asyncio.sleep(SECONDS / 4)
            tokens, firings, begun_s = self.tokens, self.firings, time.perf_counter()
            await asyncio.sleep(SECONDS)
            took_s = time.perf_counter() - begun_s
            found = (self.tokens - tokens) / took_s, (self.firings - firings) / took_s
            for fire in fires:
                fire.cancel()
        return found


_ALONE: Final = "alone"
_VARIANTS: Final = (_ALONE, "with a vocoder of lower priority", "with a vocoder of the same priority")


async def _measure(device: torch.device, kept: KeptFigures) -> list[Figure]:
    bench = _Bench(device)
    low, same = (StatelessThread(partial(_nodes, device, is_low_priority=lower)) for lower in (True, False))
    vocoders = dict(zip(_VARIANTS, (None, low, same), strict=True))
    threads: list[EngineThread | StatelessThread] = [bench.engine, low, same]
    missing = [number for number in range(ROUNDS) if _named(number, _VARIANTS[-1], "calls/s") not in kept]
    for thread in threads if missing else ():
        await thread.start()
    for number in missing:
        async with bench.decoding():
            rates = {variant: await bench.rates(vocoder) for variant, vocoder in vocoders.items()}
        for variant, (tokens, firings) in rates.items():
            for value, unit in ((tokens, "tok/s"), (firings, "calls/s")):
                kept.keep(Figure(_named(number, variant, unit), value, unit))
        said = ", ".join(f"{tokens:,.0f} {variant}" for variant, (tokens, _) in rates.items())
        print(f"round {number + 1} of {ROUNDS}, tokens/s: {said}", flush=True)
    for thread in threads if missing else ():
        await thread.close()
    return _summary(kept)


def _named(number: int, variant: str, unit: str) -> str:
    return f"round {number + 1}: decode {variant}, {unit}"


def _summary(kept: KeptFigures) -> list[Figure]:
    """The figures of all rounds."""

    def of_rounds(variant: str, unit: str) -> list[float]:
        return [kept[_named(number, variant, unit)].value for number in range(ROUNDS)]

    figures: list[Figure] = []
    alone = of_rounds(_ALONE, "tok/s")
    for variant in _VARIANTS:
        tokens = of_rounds(variant, "tok/s")
        if variant != _ALONE:
            ratios = [mine / own for mine, own in zip(tokens, alone, strict=True)]
            firings = f"{median(of_rounds(variant, 'calls/s')):.1f} vocoder calls/s"
            figures.append(spread(f"decode {variant} / alone", ratios, RATIO, firings))
        figures.append(spread(f"decode {variant}", tokens, "tok/s"))
    return figures


def measure(device: str = "cpu", kept: KeptFigures | None = None) -> list[Figure]:
    """Measure the decode alone and with each vocoder, but for the rounds that are kept; print each round."""
    return asyncio.run(_measure(torch.device(device), kept or KeptFigures()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_option(parser)
    asked = parser.parse_args()
    device: str = asked.device
    if device == "cuda" and not torch.cuda.is_available():
        print("expected a GPU and torch with CUDA, found none: nothing was measured", file=sys.stderr)
        sys.exit(NO_GPU)
    print(described())
    show({"beside": measure(device, KeptFigures(asked.keep))})


if __name__ == "__main__":
    main()
