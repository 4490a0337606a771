"""Images of BAGEL in the published size: 1024 x 1024 pixels in 50 steps, one way after the other.

Each figure is printed as soon as it is there; a way that fails is named, and none begins after the time is
up. The most important ones come first: the engine in process, then the bare loop, then served.
`benchmarks.images` calls it. Not run on a GPU yet.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import torch

from benchmarks.drawing import Drawing, Drawn, Picture
from benchmarks.image_ways import deployed, served
from benchmarks.random_bagel import write_random_bagel
from benchmarks.report import Figure, spread
from benchmarks.session import MINUTES, Session

PUBLISHED: Final = Picture(side=1024, timesteps=50)
OTHERS: Final = "published on an H200: M* 18.0 s, vLLM-Omni 20.6 s; goal below 11 s"
CLIENTS: Final = (1, 4)
_TERAFLOPS: Final = 60.3
"""Floating-point operations of a pass over the 4,096 latents of an image, in 10 ** 12."""


def one_by_one(shape: str, picture: Picture = PUBLISHED, *, minutes: float = MINUTES) -> list[Figure]:
    """Measure all ways to draw with random weights of a shape; return what could be measured."""
    session = Session(minutes)
    with tempfile.TemporaryDirectory(prefix="dalsegno-bagel-") as name:
        folder = Path(name)
        session.measure("the checkpoint", partial(_written, folder, shape))
        session.measure("in process", partial(_in_process, session, folder, picture))
        torch.cuda.empty_cache()  # the nodes in process are gone
        configs = ["bagel_single_gpu"]
        if torch.cuda.device_count() != 1:  # a rank on each GPU, or on the CPU
            configs.append("bagel_cfg_parallel")
        for config in configs:
            session.measure(f"served, {config}", partial(_served, folder, config, picture))
    return session.figures


def _written(folder: Path, shape: str) -> Iterator[Figure]:
    begun_s = time.perf_counter()
    write_random_bagel(folder, shape)
    yield Figure("random weights written", time.perf_counter() - begun_s, "s")


def _in_process(session: Session, folder: Path, picture: Picture) -> Iterator[Figure]:
    begun_s = time.perf_counter()
    drawing = Drawing(folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    yield Figure("loaded", time.perf_counter() - begun_s, "s")
    for name, draw in (("engine", drawing.by_engine), ("bare loop", drawing.bare)):
        for what, one in (("guided", picture), ("unguided", picture.plain)):
            session.measure(f"{name}, {what}", partial(_images, f"{name}, {what}", drawing, draw, one))


def _images(
    name: str, drawing: Drawing, draw: Callable[[Picture, int], Drawn], picture: Picture
) -> Iterator[Figure]:
    """Draw twice, after a warm-up."""
    begun_s = time.perf_counter()
    draw(picture.short, 0)
    yield Figure(f"{name}: warmed up", time.perf_counter() - begun_s, "s")
    seconds, parts = list[float](), drawing.parts
    for seed in (1, 2):
        parts.seconds.clear()
        passes = draw(picture, seed).passes
        seconds += parts.seconds["image"]
        yield Figure(f"{name}: image {seed}", seconds[-1], "s", OTHERS if picture == PUBLISHED else "")
    flow_s = parts.seconds["flow"][-1]
    rate = f"{_TERAFLOPS * passes / flow_s:,.0f} TFLOP/s" if picture.side == PUBLISHED.side else ""
    yield Figure(f"{name}: passes of the flow", passes, "", rate)
    yield Figure(f"{name}: share of the autoencoder", parts.share("autoencoder", "image"), "")


def _served(folder: Path, config: str, picture: Picture) -> Iterator[Figure]:
    with deployed(folder, config) as url:
        yield Figure(f"{config}: warmed up", sum(served(url, 1)(picture.short, 0)[1]), "s")
        for clients in CLIENTS:
            rate, seconds = served(url, clients)(picture, 1)
            note = OTHERS if clients == 1 and picture == PUBLISHED else ""
            yield spread(f"{config}, {clients} clients: an image", seconds, "s", note)
            yield Figure(f"{config}, {clients} clients: images", rate, "/s")
