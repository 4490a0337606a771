"""The lessons of the demo that draws."""

import random

import numpy as np

from configs.demo_draw.scenes import SIDE, SIZES, Scene, caption, draw, random_scene, usual_background
from configs.demo_vision.pictures import COLOURS


def test_the_same_chance_draws_the_same() -> None:
    def lesson(seed: int) -> tuple[str, bytes]:
        chance = random.Random(seed)
        scene = random_scene(chance)
        return caption(scene, chance), draw(scene, chance).tobytes()

    assert lesson(3) == lesson(3)
    assert lesson(3) != lesson(4)


def test_a_picture_has_the_colours_of_its_scene() -> None:
    cells = np.asarray(draw(Scene("red", "circle", "blue")))
    assert cells.shape == (SIDE, SIDE, 3)
    assert tuple(cells[SIDE // 2, SIDE // 2]) == COLOURS["red"]
    assert tuple(cells[0, 0]) == COLOURS["blue"]


def test_a_large_shape_covers_more_than_a_small_one() -> None:
    def covered(size: str) -> float:
        cells = np.asarray(draw(Scene("black", "square", "white", size)))
        return float((cells < 128).mean())

    assert covered("small") < covered("") < covered("large")
    assert set(SIZES) == {"small", "", "large"}


def test_captions_say_all_that_is_not_usual() -> None:
    chance = random.Random(5)
    for _ in range(200):
        scene = random_scene(chance)
        text = caption(scene, chance).lower()
        assert scene.colour in text
        assert scene.shape in text
        assert scene.size in text
        if scene.background != usual_background(scene.colour):
            assert scene.background in text
