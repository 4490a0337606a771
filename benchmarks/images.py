"""Images of BAGEL with random weights: images per second, served and in process, with guidance and without.

In turns, the same image:

- by a bare loop in process: the same driver and nodes, keys and values in plain tensors;
- by the engine in process;
- by `dalsegno serve`, with 1, 4 and 8 clients;
- by `dalsegno serve bagel_cfg_parallel`, a branch of guidance on each of three ranks.

On a GPU it is the published size, one way after the other (`benchmarks.images_gpu`).

    python -m benchmarks images                                # small on a CPU, published on a GPU
    python -m benchmarks.images --shape published --minutes 9  # 30 GB in the folder for temporary files
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import torch

from benchmarks import images_gpu
from benchmarks.drawing import Drawing, Picture
from benchmarks.image_ways import Rates, Way, deployed, in_process, in_turns, served
from benchmarks.machine import described
from benchmarks.random_bagel import SHAPES, write_random_bagel
from benchmarks.report import RATIO, Figure, show, spread
from benchmarks.session import MINUTES

ROUNDS: Final = 3
CLIENTS: Final = (1, 4, 8)
SPREAD_CLIENTS: Final = (1, 4)
SMALL: Final = Picture(side=192, timesteps=13)
COUNTED: Final = Picture(side=16, timesteps=50)
"""The image whose passes are counted: the number does not depend on the size."""
ALL_BRANCHES: Final = 147
"""The passes of an image in 50 steps if all three branches are computed in each."""


def compare(
    checkpoint: Path,
    picture: Picture = SMALL,
    *,
    clients: Sequence[int] = CLIENTS,
    spread_clients: Sequence[int] = SPREAD_CLIENTS,
    rounds: int = ROUNDS,
) -> list[Figure]:
    """The figures of one checkpoint, all ways in turns."""
    drawing = Drawing(checkpoint, torch.device("cpu"))
    with deployed(checkpoint, "bagel_single_gpu") as one, deployed(checkpoint, "bagel_cfg_parallel") as three:
        ways: dict[str, Way[Picture]] = {
            "bare loop": in_process(drawing.bare),
            "engine": in_process(drawing.by_engine),
        }
        ways |= {f"served to {count}": served(one, count) for count in clients}
        of_ranks: dict[str, Way[Picture]] = {
            f"three ranks, served to {count}": served(three, count) for count in spread_clients
        }
        for way in (*ways.values(), *of_ranks.values()):
            way(picture.short, 0)  # warms up
        drawing.parts.seconds.clear()
        guided = in_turns(ways | of_ranks, picture, rounds)
        unguided = in_turns(ways, picture.plain, rounds)
    share = drawing.parts.share("autoencoder", "image")
    return [
        *_figures("guided", guided),
        *_figures("unguided", unguided),
        *passes_of(drawing),
        difference(drawing, picture),
        Figure("share of the autoencoder in an image", share, "", "in process, guided and unguided"),
    ]


def passes_of(drawing: Drawing) -> list[Figure]:
    """The passes of an image in 50 steps, with guidance and without."""
    guided, plain = (drawing.bare(one, 0).passes for one in (COUNTED, COUNTED.plain))
    note = f"of {ALL_BRANCHES} with all three branches in each step; {plain} without guidance"
    return [Figure("passes of a guided image, 50 steps", guided, "", note)]


def difference(drawing: Drawing, picture: Picture) -> Figure:
    """The difference of the images by the bare loop and by the engine."""
    one, other = (draw(picture, 1).pixels.astype(int) for draw in (drawing.bare, drawing.by_engine))
    largest = abs(one - other).max()
    return Figure("largest difference of a pixel, bare loop and engine", float(largest), "", "of 255 levels")


def _figures(what: str, rates: Mapping[str, Rates]) -> list[Figure]:
    bare = rates["bare loop"]
    pairs = [(name, rates[name], "bare loop", bare) for name in rates if name != "bare loop"]
    for name, one in rates.items():
        if name.startswith("three ranks, "):
            rank = name.removeprefix("three ranks, ")
            pairs = [pair for pair in pairs if pair[0] != name]
            pairs.append((name, one, "one rank", rates[rank]))
    return [
        *(spread(f"{what}: {name} / {other}", one.over(two), RATIO) for name, one, other, two in pairs),
        *(
            spread(f"{what}: {name}, images", one.per_s, "/s", f"{1e3 * median(one.seconds):,.0f} ms each")
            for name, one in rates.items()
        ),
    ]


def measure() -> list[Figure]:
    """The figures of the small shape; on a GPU, those of the published one."""
    if torch.cuda.is_available():
        return images_gpu.one_by_one("published")
    with tempfile.TemporaryDirectory(prefix="dalsegno-bagel-") as folder:
        return compare(write_random_bagel(Path(folder), "small"))


def main() -> None:
    """Measure one shape, and print the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.images", description=__doc__.splitlines()[0])
    default = "published" if torch.cuda.is_available() else "small"
    parser.add_argument("--shape", choices=sorted(SHAPES), default=default)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the published shape")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the small shape")
    told = parser.parse_args()
    print(described(), flush=True)
    if told.shape == "published":
        images_gpu.one_by_one(told.shape, minutes=told.minutes)
        return
    with tempfile.TemporaryDirectory(prefix="dalsegno-bagel-") as folder:
        show({"images": compare(write_random_bagel(Path(folder), told.shape), rounds=told.rounds)})


if __name__ == "__main__":
    main()
