"""Pictures and lessons: the same chance gives the same; every answer is about the pictures of its lesson."""

import random

import pytest

from configs.demo_vision.lessons import GREETING, NO_PICTURE, QUESTIONS, random_lesson
from configs.demo_vision.pictures import COLOURS, SHAPES, Scene, draw, random_scene


def test_the_same_chance_draws_the_same_picture() -> None:
    scene = Scene("red", "star", "white")

    assert draw(scene, random.Random(1)).tobytes() == draw(scene, random.Random(1)).tobytes()
    assert draw(scene, random.Random(1)).tobytes() != draw(scene, random.Random(2)).tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_covers_a_part_of_the_picture_in_its_colour(shape: str) -> None:
    picture = draw(Scene("black", shape, "white"), random.Random(3)).convert("L")

    dark = sum(level < 80 for level in picture.tobytes()) / (picture.width * picture.height)
    assert 0.03 < dark < 0.75


def test_the_background_has_another_colour() -> None:
    chance = random.Random(5)
    scenes = [random_scene(chance) for _ in range(300)]

    assert all(scene.colour != scene.background for scene in scenes)
    assert {scene.colour for scene in scenes} == {scene.background for scene in scenes} == set(COLOURS)
    assert {scene.shape for scene in scenes} == set(SHAPES)


def test_a_scene_is_described_in_english() -> None:
    assert str(Scene("red", "star", "orange")) == "A red star on an orange background"
    assert str(Scene("orange", "heart", "blue")) == "An orange heart on a blue background"


def test_lessons_are_about_their_pictures() -> None:
    chance = random.Random(7)
    for _ in range(400):
        first, *later = random_lesson(chance)
        if not first.scenes:
            assert (first.answer in {GREETING, NO_PICTURE}, later) == (True, [])
            continue
        words = " ".join(str(scene).lower() for scene in first.scenes)
        for turn in (first, *later):
            named = set(turn.answer.lower().strip(".").replace(",", "").split())
            assert named & {*COLOURS, *SHAPES} <= set(words.split())
        assert not any(turn.scenes for turn in later)


def test_each_kind_of_question_has_several_forms() -> None:
    assert all(len(set(forms)) >= 5 for forms in QUESTIONS.values())
