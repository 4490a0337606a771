"""Pictures of one coloured shape and their captions, drawn from a source of chance.

Colours and shapes are those of the demo that sees (`configs.demo_vision.pictures`). The same chance draws the
same picture.
"""

import random
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageDraw

from configs.demo_vision.pictures import COLOURS, SHAPES, choose

SIDE: Final = 64
"""Of a picture, in pixels."""
SIZES: Final = {"small": 0.22, "": 0.34, "large": 0.46}
"""Words for the radius of a shape, and the radius as a share of the side."""
_OVERSAMPLED: Final = 4
_JITTER: Final = 0.02


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of a picture; `size` is a word of `SIZES`."""

    colour: str
    shape: str
    background: str
    size: str = ""

    @property
    def name(self) -> str:
        """The shape in words: `a small red circle`."""
        words = [word for word in (self.size, self.colour, self.shape) if word]
        return f"{_article(words[0])} {' '.join(words)}"


def usual_background(colour: str) -> str:
    """The background of a caption that names none."""
    return "black" if colour == "white" else "white"


def random_scene(chance: random.Random) -> Scene:
    """A scene whose shape and background differ in colour; half of them have the usual background."""
    colour = choose(chance, list(COLOURS))
    others = [name for name in COLOURS if name != colour]
    background = usual_background(colour) if chance.random() < 0.5 else choose(chance, others)
    size = choose(chance, list(SIZES)) if chance.random() < 0.5 else ""
    return Scene(colour, choose(chance, list(SHAPES)), background, size)


def caption(scene: Scene, chance: random.Random) -> str:
    """The scene in words. A usual background is mentioned now and then."""
    name = scene.name
    if scene.background != usual_background(scene.colour) or chance.random() < 0.3:
        behind = f"{_article(scene.background)} {scene.background} background"
        name = f"{name} on {behind}" if chance.random() < 0.7 else f"{name}, {scene.background} background"
    return choose(chance, (name, name, name.capitalize(), f"{name.capitalize()}.", f"Draw {name}."))


def draw(scene: Scene, chance: random.Random | None = None) -> Image.Image:
    """Draw a scene, in the middle; with `chance` its place and size vary a little."""

    def off() -> float:
        return (chance.random() - 0.5) * 2 * _JITTER if chance is not None else 0.0

    side = SIDE * _OVERSAMPLED
    radius, x, y = (SIZES[scene.size] + off()) * side, (0.5 + off()) * side, (0.5 + off()) * side
    canvas = Image.new("RGB", (side, side), COLOURS[scene.background])
    outline = [(x + radius * px, y + radius * py) for px, py in SHAPES[scene.shape]()]
    ImageDraw.Draw(canvas).polygon(outline, fill=COLOURS[scene.colour])
    return canvas.resize((SIDE, SIDE), Image.Resampling.BOX)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
