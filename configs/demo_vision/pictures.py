"""Pictures of one coloured shape on a plain background, drawn from a source of chance.

The same chance draws the same picture. Only `random.Random.random` is used, whose results Python guarantees.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from PIL import Image, ImageDraw

T = TypeVar("T")
Colour: TypeAlias = tuple[int, int, int]
Point: TypeAlias = tuple[float, float]

COLOURS: Final[Mapping[str, Colour]] = {
    "red": (220, 30, 30),
    "orange": (250, 140, 10),
    "yellow": (245, 225, 40),
    "green": (30, 150, 50),
    "blue": (30, 70, 220),
    "purple": (130, 40, 160),
    "black": (10, 10, 10),
    "white": (248, 248, 248),
}
OVERSAMPLED: Final = 3
"""Pictures are drawn larger by this factor and reduced, so that edges are smooth."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of a picture: a colour and a shape, and the colour of the background."""

    colour: str
    shape: str
    background: str

    def __str__(self) -> str:
        shape, background = _with_article(self.colour), _with_article(self.background)
        return f"{shape.capitalize()} {self.shape} on {background} background"


def _with_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def choose(chance: random.Random, items: Sequence[T]) -> T:
    """One of the items, each as likely as the others."""
    return items[int(chance.random() * len(items))]


def random_scene(chance: random.Random) -> Scene:
    """A scene whose shape and background differ in colour."""
    colour = choose(chance, list(COLOURS))
    others = [name for name in COLOURS if name != colour]
    return Scene(colour, choose(chance, list(SHAPES)), choose(chance, others))


def draw(scene: Scene, chance: random.Random) -> Image.Image:
    """Draw a scene: the place, the size, the angle, the shades and the size of the picture vary."""
    width, height = (48 + int(chance.random() * 65) for _ in range(2))
    canvas = Image.new("RGB", (width * OVERSAMPLED, height * OVERSAMPLED), _shade(scene.background, chance))
    shorter = min(canvas.size)
    radius = shorter * (0.3 + 0.18 * chance.random())
    x, y = (radius + (side - 2 * radius) * chance.random() for side in canvas.size)
    angle = (chance.random() - 0.5) * 0.5
    outline = [
        (
            x + radius * (px * math.cos(angle) - py * math.sin(angle)),
            y + radius * (px * math.sin(angle) + py * math.cos(angle)),
        )
        for px, py in SHAPES[scene.shape]()
    ]
    ImageDraw.Draw(canvas).polygon(outline, fill=_shade(scene.colour, chance))
    return canvas.resize((width, height), Image.Resampling.BOX)


def _shade(name: str, chance: random.Random) -> Colour:
    """A shade of a colour."""
    red, green, blue = (
        min(255, max(0, round(level + (chance.random() - 0.5) * 36))) for level in COLOURS[name]
    )
    return red, green, blue


# ---- outlines in a circle of radius 1 ------------------------------------------------------------------
def _corners(count: int, radii: Sequence[float], turn: float = 0.0) -> list[Point]:
    """The corners of a polygon, from the top, at the radii in turn."""
    angles = [2 * math.pi * number / count + turn for number in range(count)]
    return [
        (radii[number % len(radii)] * math.sin(angle), -radii[number % len(radii)] * math.cos(angle))
        for number, angle in enumerate(angles)
    ]


def _circle() -> list[Point]:
    return _corners(48, [0.95])


def _square() -> list[Point]:
    return _corners(4, [1.0], turn=math.pi / 4)


def _triangle() -> list[Point]:
    return _corners(3, [1.0])


def _star() -> list[Point]:
    return _corners(10, [1.0, 0.42])


def _cross() -> list[Point]:
    arm, end = 0.28, 0.95
    right = [(arm, -end), (arm, -arm), (end, -arm), (end, arm), (arm, arm), (arm, end)]
    return [*right, *((-px, -py) for px, py in right)]


def _heart() -> list[Point]:
    turns = [2 * math.pi * number / 48 for number in range(48)]
    return [
        (
            math.sin(turn) ** 3,
            -(13 * math.cos(turn) - 5 * math.cos(2 * turn) - 2 * math.cos(3 * turn) - math.cos(4 * turn))
            / 16.5
            - 0.08,
        )
        for turn in turns
    ]


SHAPES: Final[Mapping[str, Callable[[], list[Point]]]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "heart": _heart,
}
