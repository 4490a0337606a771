"""Images of a diffusers pipeline with random weights: served, and by the bare pipeline in process.

In turns, the same image:

- by the pipeline's own call in this process;
- by `dalsegno serve`, with 1, 4 and 8 clients;
- by a server without batches of steps (`max_batch: 1`), with 4 and 8 clients.

And the memory of decoding one large image, in tiles and whole. On a GPU it is the time of a denoising step of
published sizes (`benchmarks.pipelines_gpu`).

    python -m benchmarks pipelines                # small on a CPU, published sizes on a GPU
    python -m benchmarks.pipelines --minutes 20   # the same, with its limits
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from diffusers import DiffusionPipeline

from benchmarks import pipelines_gpu
from benchmarks.drawing import PROMPT
from benchmarks.image_ways import Rates, Way, in_process, in_turns, running, served
from benchmarks.machine import described
from benchmarks.random_pipeline import SIDE, write_random_pipeline
from benchmarks.report import RATIO, Figure, show, spread
from benchmarks.session import MINUTES
from workers.machine.cpu_threads import stateless_threads, use_cpu_threads

ROUNDS: Final = 3
CLIENTS: Final = (1, 4, 8)
UNBATCHED_CLIENTS: Final = (4, 8)
STEPS: Final = 12
LARGE: Final = 2048
"""The side of the image whose decoding is measured."""
_UNBATCHED: Final = "without batches, "


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An image to be made: its side in pixels, and its steps."""

    side: int = SIDE
    steps: int = STEPS

    @property
    def options(self) -> dict[str, Any]:
        """Its parameters in a request."""
        return {"size": f"{self.side}x{self.side}", "num_inference_steps": self.steps}


SMALL: Final = Asked()


def compare(
    folder: Path,
    image: Asked = SMALL,
    *,
    clients: Sequence[int] = CLIENTS,
    unbatched: Sequence[int] = UNBATCHED_CLIENTS,
    rounds: int = ROUNDS,
) -> list[Figure]:
    """The figures of one folder, all ways in turns."""
    pipeline: Any = DiffusionPipeline
    bare = pipeline.from_pretrained(folder, torch_dtype=torch.float32)
    bare.set_progress_bar_config(disable=True)
    use_cpu_threads(stateless_threads(os.cpu_count() or 1, with_kv_node=False))  # as a worker
    with deployed(folder) as url, deployed(folder, max_batch=1) as single:
        ways: dict[str, Way[Asked]] = {"bare pipeline": in_process(partial(_draw, bare))}
        ways |= {f"served to {count}": served(url, count) for count in clients}
        ways |= {f"{_UNBATCHED}served to {count}": served(single, count) for count in unbatched}
        for way in (ways["bare pipeline"], served(url, 1), served(single, 1)):
            way(replace(image, steps=1), 0)  # warms up
        return [*_figures(in_turns(ways, image, rounds))]


def _figures(found: dict[str, Rates]) -> Iterator[Figure]:
    bare = found.pop("bare pipeline")
    for name, rates in found.items():
        yield spread(f"{name} / bare pipeline", rates.over(bare), RATIO)
    for name, rates in found.items():
        batched = name.removeprefix(_UNBATCHED)
        if batched != name and batched in found:
            yield spread(f"{batched}, with / without batches", found[batched].over(rates), RATIO)
    for name, rates in {"bare pipeline": bare, **found}.items():
        yield spread(f"{name}: images", rates.per_s, "/s", f"{1e3 * median(rates.seconds):,.0f} ms each")


def _draw(pipeline: Any, image: Asked, seed: int) -> None:
    """Draw an image by the pipeline's own call."""
    pipeline(
        PROMPT,
        width=image.side,
        height=image.side,
        num_inference_steps=image.steps,
        generator=torch.Generator().manual_seed(seed),
    )


def deployed(checkpoint: Path, **kwargs: Any) -> AbstractContextManager[str]:
    """Serve a folder, with these `model_kwargs`; give the address."""
    nodes = ["prepare", "text_encoder", "denoiser", "vae_decoder", "encode_output"]
    settings = {
        "model": "image_pipeline",
        "checkpoint": str(checkpoint),
        "max_seq_len": 4096,
        "model_kwargs": kwargs,
        "node_groups": [{"node_names": nodes, "ranks": [0]}],
    }
    return running(json.dumps(settings))  # JSON is YAML


_DECODE: Final = """
import ctypes
import sys
from pathlib import Path
import torch
from models.diffusion_pipelines.nodes import load

def kib(field):  # of /proc/self/status, proc(5)
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

torch.set_num_threads(1)
folder, side, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
node = load(folder, "vae_decoder", device="cpu", dtype="auto", kwargs={"vae_tiling": how == "tiled"})
latents = torch.randn(1, 16, side // 8, side // 8)
with torch.inference_mode():
    node._vae.decode(latents[:, :, :8, :8])  # torch's own code and caches are no part of the figure
    ctypes.CDLL(None).malloc_trim(0)  # what was freed must not serve the decoding
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: loading had one of its own
    before = kib("VmRSS")
    node._vae.decode(latents)
print("added", kib("VmHWM") - before)
"""


def memory(folder: Path, side: int = LARGE) -> list[Figure]:
    """The memory that the decoding of a large image adds to a process, whole and in tiles."""
    return [
        Figure(f"memory of decoding {side} x {side}, {how}", _added_kib(folder, side, how) / 1024, "MiB")
        for how in ("whole", "tiled")
    ]


def _added_kib(folder: Path, side: int, how: str) -> int:
    """What one way adds; in a process of its own, for the C library may keep what another way has freed."""
    command = [sys.executable, "-c", _DECODE, str(folder), str(side), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return next(int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("added "))


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The figures of the small shape; on a GPU, the steps of published ones."""
    if torch.cuda.is_available():
        return pipelines_gpu.one_by_one()
    with tempfile.TemporaryDirectory(prefix="dalsegno-pipeline-") as name:
        folder = write_random_pipeline(Path(name))
        return [*compare(folder, rounds=rounds), *memory(folder)]


def main() -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipelines", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="on a GPU: nothing begins later")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="on a CPU")
    options = parser.parse_args()
    print(described(), flush=True)
    if torch.cuda.is_available():  # prints each figure itself
        pipelines_gpu.one_by_one(minutes=options.minutes)
    else:
        show({"pipelines": measure(options.rounds)})


if __name__ == "__main__":
    main()
