"""A robot policy, Pi0.5 with random weights: the latency of a chunk of actions, and chunks per second.

The same observations (three cameras of 224 x 224, a state, an instruction), in turns:

- by a bare loop in process: tower, prefix and ten steps one after another, keys and values in plain tensors;
- by `dalsegno serve` and openpi's client, with 1, 4 and 8 robots at a time.

The loop tells the shares of the tower and of the prefix in a chunk. On a GPU, with the published size:

    python -m benchmarks actions                               # a small one, on the CPU
    python -m benchmarks.actions --shape published             # 7 GB of weights; M* and openpi's shape
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from benchmarks.machine import described
from benchmarks.random_policy import SHAPES, write_policy
from benchmarks.report import RATIO, Figure, show, spread
from benchmarks.turns import Parts, together
from models.base import Item
from models.pi05.nodes import load
from models.robot_policy.flow import ActionFlow, PolicyNode, first_noise
from models.robot_policy.images import pixels_of
from models.robot_policy.prompts import state_prompt
from models.robot_policy.tower import CameraEncoder
from models.text.tokenizer import load_tokenizer
from tests.e2e.deploy import serve
from tests.gateway.policy.openpi_client import PolicyClient
from tests.models.robot_policy import naive
from workers.machine.cpu_threads import threads_for, use_cpu_threads

ROUNDS: Final = 3
CHUNKS: Final = 6
"""Chunks in a round, for each client."""
CLIENTS: Final = (1, 4, 8)
_STATE: Final = np.linspace(-1, 1, 8).astype(np.float32)
_CAMERAS: Final = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclass(slots=True)
class _Loop:
    """The bare loop, and the seconds that its parts take."""

    encoder: CameraEncoder
    node: PolicyNode
    ids: list[int]
    parts: Parts

    @classmethod
    def load(cls, checkpoint: Path) -> "_Loop":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        encoder, node = (
            load(checkpoint, name, device=device, progress=lambda *_: None, kwargs={})
            for name in ("vit_encoder", "LLM")
        )
        assert isinstance(encoder, CameraEncoder)
        assert isinstance(node, PolicyNode)
        use_cpu_threads(threads_for(node.parameters, os.cpu_count() or 1))  # as a worker
        tokenizer, _ = load_tokenizer(checkpoint)
        ids = tokenizer.encode(state_prompt("fold the shirt", _STATE)).ids
        return cls(encoder, node, ids, Parts(node.device))

    @torch.inference_mode()
    def chunk(self, seed: int) -> None:
        """Compute one chunk of actions."""
        device, settings = self.node.device, self.node.expert.settings
        with self.parts.timed("chunk"):
            images = [pixels_of(one, settings.image_size) for one in _images(seed)]
            with self.parts.timed("tower"):
                pixels = torch.from_numpy(np.stack(images)).to(device)
                [found] = self.encoder.run([Item(inputs={"pixels": pixels}, args={})])
                assert not isinstance(found, Exception)
            driver = ActionFlow(
                self.node,
                self.node.expert,
                rows=found.outputs["rows"],
                token_ids=torch.tensor(self.ids, device=device),
                state=torch.zeros(0, device=device),
                noise=first_noise(seed, settings.horizon, settings.action_dim).to(device),
                steps=settings.steps,
            )
            naive.run(self.node, driver, timed=self.parts.timed)


def _images(seed: int) -> list[Any]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (224, 224, 3), dtype=np.uint8) for _ in _CAMERAS]


def _observation(seed: int) -> dict[str, Any]:
    images = {f"image/{name}": one for name, one in zip(_CAMERAS, _images(seed), strict=True)}
    return {**images, "state": _STATE, "prompt": "fold the shirt"}


def compare(checkpoint: Path, clients: Sequence[int], rounds: int = ROUNDS) -> list[Figure]:
    """The figures of one checkpoint."""
    loop = _Loop.load(checkpoint)
    loop.chunk(0)
    loop.parts.seconds.clear()
    bare: list[float] = []
    served: dict[int, list[float]] = {count: [] for count in clients}
    latency: dict[int, list[float]] = {count: [] for count in clients}
    with tempfile.TemporaryDirectory(prefix="dalsegno-actions-") as folder:
        config = Path(folder) / "pi05.yaml"
        config.write_text(_configuration(checkpoint))
        with serve(Path(folder), model=str(config)) as running:
            _ask(running.url, 0, 1)
            for number in range(rounds):
                begun_s = time.perf_counter()
                for seed in range(CHUNKS):
                    loop.chunk(seed)
                bare.append(CHUNKS / (time.perf_counter() - begun_s))
                for count in clients:
                    rate, seconds = _served(running.url, count, number)
                    served[count].append(rate)
                    latency[count] += seconds
    return _figures(loop, bare, served, latency)


def _configuration(checkpoint: Path) -> str:
    nodes = "node_groups:\n  - {node_names: [vit_encoder], ranks: [0]}\n  - {node_names: [LLM], ranks: [0]}\n"
    return f"model: pi05\ncheckpoint: {checkpoint}\nmax_seq_len: 2048\n{nodes}"


def _served(url: str, clients: int, number: int) -> tuple[float, list[float]]:
    """Chunks per second of all clients together, and the seconds of each chunk."""
    return together(clients, lambda client: _ask(url, 1000 * number + 100 * client, CHUNKS))


def _ask(url: str, seed: int, chunks: int) -> list[float]:
    found = []
    with PolicyClient(url) as robot:
        for number in range(chunks):
            begun_s = time.perf_counter()
            robot.infer(_observation(seed + number))
            found.append(time.perf_counter() - begun_s)
    return found


def _figures(
    loop: _Loop, bare: list[float], served: dict[int, list[float]], latency: dict[int, list[float]]
) -> list[Figure]:
    parts = loop.parts
    shares = [
        Figure(f"share of the {name} in a chunk", parts.share(part, "chunk"), "", "bare loop")
        for name, part in (("tower", "tower"), ("prefix", "prefix"), ("flow", "actions"))
    ]
    ratios = [
        spread(
            f"served to {count}, over the bare loop",
            [one / other for one, other in zip(served[count], bare, strict=True)],
            RATIO,
        )
        for count in served
    ]
    bare_s = median(parts.seconds["chunk"])
    return [
        *ratios,
        *shares,
        Figure("bare loop: latency of a chunk", 1e3 * bare_s, "ms"),
        *(
            Figure("added by serving, to one robot", 1e3 * (median(latency[one]) - bare_s), "ms")
            for one in latency
            if one == 1
        ),
        spread("bare loop: chunks", bare, "/s"),
        *(Figure(f"{count} robots: latency p50", 1e3 * median(latency[count]), "ms") for count in latency),
        *(spread(f"{count} robots: chunks", served[count], "/s") for count in served),
    ]


def measure() -> list[Figure]:
    """The figures of the small shape."""
    with tempfile.TemporaryDirectory(prefix="dalsegno-policy-") as folder:
        return compare(write_policy(Path(folder), SHAPES["small"]), CLIENTS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.actions", description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    told = parser.parse_args()
    print(described())
    with tempfile.TemporaryDirectory(prefix="dalsegno-policy-") as folder:
        checkpoint = write_policy(Path(folder), SHAPES[told.shape])
        show({"actions": compare(checkpoint, told.clients, told.rounds)})


if __name__ == "__main__":
    main()
