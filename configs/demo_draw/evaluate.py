"""Measurement of the demo that draws, with diffusers' own `ZImagePipeline` and its default arguments.

    python -m configs.demo_draw.evaluate configs/demo_draw/checkpoint

A picture counts if it is nearer to the wanted scene than to others: its *colour* to those that differ in the
colour of the shape, its *shape* to those that differ in the shape, and its *background* likewise.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from diffusers import ZImagePipeline

from configs.demo_draw.scenes import SIDE, SIZES, Scene, draw, usual_background
from configs.demo_vision.pictures import COLOURS, SHAPES

STEPS: Final = 20
Pixels = npt.NDArray[np.float32]


def pixels_of(picture: Any) -> Pixels:
    """A pillow image as numbers, (SIDE, SIDE, 3)."""
    return np.asarray(picture.convert("RGB").resize((SIDE, SIDE)), dtype=np.float32)


def error(pixels: Pixels, scene: Scene) -> float:
    """The mean squared difference to the scene as it should be drawn."""
    return float(((pixels - pixels_of(draw(scene))) ** 2).mean())


def right(pixels: Pixels, wanted: Scene) -> dict[str, bool]:
    """The attributes of the scene that a picture shows."""
    found: dict[str, bool] = {}
    values = {"colour": list(COLOURS), "shape": list(SHAPES), "background": list(COLOURS)}
    for attribute, known in values.items():
        scenes = [
            Scene(**{**_fields(wanted), attribute: one})
            for one in known
            if attribute == "shape" or one != _other_colour(wanted, attribute)
        ]
        found[attribute] = min(scenes, key=lambda scene: error(pixels, scene)) == wanted
    return found


def _fields(scene: Scene) -> dict[str, str]:
    return {
        "colour": scene.colour, "shape": scene.shape, "background": scene.background, "size": scene.size,
    }  # fmt: skip


def _other_colour(scene: Scene, attribute: str) -> str:
    return scene.background if attribute == "colour" else scene.colour


def prompts() -> list[tuple[str, Scene]]:
    """All shapes in all colours; and each with a background and a size, in turn."""
    found = []
    for number, (colour, shape) in enumerate((c, s) for c in COLOURS for s in SHAPES):
        plain = Scene(colour, shape, usual_background(colour))
        found.append((plain.name, plain))
        behind = [name for name in COLOURS if name != colour][number % (len(COLOURS) - 1)]
        size = list(SIZES)[number % len(SIZES)]
        other = Scene(colour, shape, behind, size)
        article = "an" if behind[0] in "aeiou" else "a"
        found.append((f"{other.name} on {article} {behind} background", other))
    return found


def main() -> None:
    """Print the shares of right pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--grid", type=Path, help="write all pictures in one, for people")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind: Any = ZImagePipeline
    pipeline = kind.from_pretrained(options.folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    counts: Counter[str] = Counter()
    asked, shown = prompts(), []
    for seed, (prompt, scene) in enumerate(asked):
        generator = torch.Generator().manual_seed(seed)
        [picture] = pipeline(
            prompt, width=SIDE, height=SIDE, num_inference_steps=STEPS, generator=generator
        ).images
        shown.append(np.asarray(picture))
        counts.update(name for name, is_right in right(pixels_of(picture), scene).items() if is_right)
    for name in ("colour", "shape", "background"):
        sys.stdout.write(f"{name}: {counts[name] / len(asked):.1%} of {len(asked)}\n")
    if options.grid:
        _write_grid(shown, options.grid)


def _write_grid(pictures: list[npt.NDArray[Any]], path: Path) -> None:
    from PIL import Image  # noqa: PLC0415 - only for people

    columns = 12
    rows = [
        np.concatenate(pictures[start : start + columns], 1) for start in range(0, len(pictures), columns)
    ]
    Image.fromarray(np.concatenate([row for row in rows if row.shape == rows[0].shape])).save(path)


if __name__ == "__main__":
    main()
