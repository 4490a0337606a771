"""The script that made the checkpoint still makes it: the same tokenizer, the same first losses."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from configs.demo_vision import train
from configs.demo_vision.lessons import Turn
from configs.demo_vision.pictures import Scene

CHECKPOINT = Path(train.__file__).parent / "checkpoint"


def config(name: str) -> Any:
    return json.loads((CHECKPOINT / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.mark.slow
def test_the_tokenizer_is_trained_again_to_the_letter(tokenizer: Tokenizer) -> None:
    again, shipped = json.loads(train.build_tokenizer().to_str()), json.loads(tokenizer.to_str())

    assert again["model"] == shipped["model"]
    assert again["added_tokens"] == shipped["added_tokens"]


@pytest.mark.slow
def test_the_first_steps_lose_what_the_record_says(tokenizer: Tokenizer) -> None:
    """Approximately: another processor rounds otherwise. The third loss has seen the optimiser twice."""
    recorded = config("training.json")
    model = train.build_model(tokenizer)
    classifier = train.SceneClassifier(model.model.vision_tower, 64)

    losses = list(islice(train.train(classifier, train.scene_losses(), recorded["tower_steps"]), 3))

    assert losses == pytest.approx(recorded["first_tower_losses"], abs=5e-3)


def test_the_record_is_of_this_script() -> None:
    recorded = config("training.json")

    found = (recorded["seed"], recorded["tower_steps"], recorded["steps"])
    assert found == (train.SEED, train.TOWER_STEPS, train.STEPS)
    assert recorded["last_loss"] < 0.05


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 3_000_000


def test_only_answers_are_learnt(tokenizer: Tokenizer) -> None:
    scene = Scene("red", "star", "white")
    lesson = [Turn("What colour is it?", "Red.", (scene,)), Turn("Which shape?", "A star.")]

    ids, labels = train.encode(tokenizer, lesson)

    learnt = [label for label in labels if label != train.IGNORED]
    assert tokenizer.decode(learnt, skip_special_tokens=False) == "Red.<|im_end|>A star.<|im_end|>"
    image_id = tokenizer.get_vocab()[train.IMAGE]
    assert ids.count(image_id) == train.IMAGE_TOKENS


def test_a_batch_is_padded_on_the_right_and_padding_is_not_learnt(tokenizer: Tokenizer) -> None:
    batch = next(train.batches(tokenizer))

    learnt = batch.labels != train.IGNORED
    assert learnt.any(dim=1).all()
    assert torch.equal(batch.labels[learnt], batch.ids[learnt])
    image_id = tokenizer.get_vocab()[train.IMAGE]
    images = int(batch.ids.eq(image_id).sum()) / train.IMAGE_TOKENS
    assert batch.pixels.shape == (images, 3, train.SIDE, train.SIDE)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [train.learning_rate(step, train.STEPS) for step in range(train.STEPS)]

    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) in {train.WARM_UP - 1, train.WARM_UP}
    assert rates[-1] < 1e-3
