"""Rollouts of V-JEPA 2-AC with random weights: keys and values kept, against all frames again in each step.

In process, in turns: the program over the pool of the engine; the same program over plain tensors, one
rollout after the other; and the published loop, a forward under a mask over all frames so far. Horizons 4, 15
and 30, one rollout and four at a time.

    python -m benchmarks rollouts                      # a small predictor, frames of 64 patches, on the CPU
    python -m benchmarks.rollouts --shape published    # the published one, 256 patches; for a GPU
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from benchmarks.machine import described
from benchmarks.report import RATIO, Figure, show, spread
from models.vjepa2_ac.node import RolloutNode
from models.vjepa2_ac.predictor import AcPredictor, normalized
from models.vjepa2_ac.settings import AcSettings
from tests.models.plain_cells import PlainCells
from tests.models.vjepa2_ac import served
from workers.kv_engine.attention.paged import ATTENTION
from workers.kv_engine.config import KVEngineConfig
from workers.kv_engine.engine import KVEngine
from workers.machine.cpu_threads import threads_for, use_cpu_threads

ROUNDS: Final = 3
HORIZONS: Final = (4, 15, 30)
AT_ONCE: Final = (1, 4)
SHAPES: Final = {
    "small": AcSettings(
        crop_size=128,
        hidden_size=96,
        pred_hidden_size=128,
        pred_num_hidden_layers=4,
        pred_num_attention_heads=2,
    ),
    "published": AcSettings(),
}


class _Loops:
    """Both ways to compute the same rollouts."""

    def __init__(self, settings: AcSettings) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        self.network: Final = AcPredictor(settings).to(device, dtype).requires_grad_(False)
        frames = torch.randn(max(AT_ONCE), 1, settings.patches, settings.hidden_size, device=device)
        self.frames: Final = normalized(frames)
        self.controls: Final = torch.randn(max(AT_ONCE), max(HORIZONS), 14, device=device)
        blocks = -(-max(HORIZONS) * settings.frame_tokens // 16) + 1
        config = KVEngineConfig(
            num_blocks=max(AT_ONCE) * blocks, block_size=16, max_step_tokens=4096, max_sequences=max(AT_ONCE)
        )
        node: Any = RolloutNode(self.network, served.NODE)
        self._node = node
        self._engine = KVEngine(node, config)

    def kept(self, horizon: int, at_once: int) -> torch.Tensor:
        """The last frames, by the program."""
        self._node.use_attention(ATTENTION)
        runs = {str(n): (self.frames[n], self.controls[n, :horizon]) for n in range(at_once)}
        found = served.rolled(self._engine, runs, horizon)
        return torch.stack([found[name][-1] for name in runs])

    @torch.inference_mode()
    def plain(self, horizon: int, at_once: int) -> torch.Tensor:
        """The last frames, by the program over plain tensors."""
        return torch.stack([self._plain(n, horizon) for n in range(at_once)])

    def _plain(self, number: int, horizon: int) -> torch.Tensor:
        inputs = {"frame": self.frames[number], "controls": self.controls[number, :horizon]}
        driver = self._node.programs["rollout"](self._node, inputs, {"horizon": horizon}, seed=0)
        cells = PlainCells(self._node)
        found = cells.run(driver)
        for _ in range(horizon - 1):
            driver.more(found)
            found = cells.run(driver)
        return found["frame"][-1]

    @torch.inference_mode()
    def again(self, horizon: int, at_once: int) -> torch.Tensor:
        """The last frames, by the published loop."""
        frames, controls = self.frames[:at_once], self.controls[:at_once]
        for step in range(1, horizon + 1):
            behind = self.network(frames, controls[:, :step])[:, -1:]
            frames = torch.cat([frames, normalized(behind)], dim=1)
        return frames[:, -1].cpu()


def measure(shape: str = "small") -> list[Figure]:
    """Milliseconds of rollouts, and how much longer the published loop takes."""
    use_cpu_threads(threads_for(10**9, os.cpu_count() or 1))
    loops, found = _Loops(SHAPES[shape]), []
    for horizon in HORIZONS:
        for at_once in AT_ONCE:
            ways: dict[str, Callable[[int, int], torch.Tensor]] = {
                "kept": loops.kept,
                "plain": loops.plain,
                "again": loops.again,
            }
            took: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS + 1):
                for name, way in ways.items():
                    begin = time.perf_counter()
                    way(horizon, at_once)
                    took[name].append(1000 * (time.perf_counter() - begin))
            kept, plain, again = (took[name][1:] for name in ways)  # the first round warms up
            what = f"horizon {horizon}, {at_once} at once"
            found += [
                spread(f"time, frames again / keys and values kept, {what}", _ratios(again, kept), RATIO),
                spread(f"time, plain tensors / engine, {what}", _ratios(plain, kept), RATIO),
                spread(f"rollout, {what}", kept, "ms"),
                spread(f"rollout over plain tensors, {what}", plain, "ms"),
                spread(f"rollout by the published loop, {what}", again, "ms"),
            ]
    return found


def _ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ones, others, strict=True)]


def main() -> None:
    """Measure one shape, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    shape = parser.parse_args().shape
    print(described())
    show({"rollouts": measure(shape)})


if __name__ == "__main__":
    main()
