"""The script that made the checkpoint still makes it: the same tokenizer, the same first losses."""

import json
from itertools import islice

import pytest
import torch
from tokenizers import Tokenizer

from configs.demo import train
from configs.demo.conversations import Conversation, Turn
from configs.demo.encoding import encode
from tests.configs.demo.test_checkpoint import CHECKPOINT, config


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

    losses = list(islice(train.train(train.build_model(), train.batches(tokenizer), recorded["steps"]), 3))

    assert losses == pytest.approx(recorded["first_losses"], abs=2e-3)
    assert losses[2] < losses[0]


def test_the_record_is_of_this_script() -> None:
    recorded = config("training.json")

    assert (recorded["seed"], recorded["steps"]) == (train.SEED, train.STEPS)
    assert recorded["last_loss"] < 0.02


def test_only_answers_are_learnt(tokenizer: Tokenizer) -> None:
    talk = Conversation(
        (Turn("What is len?", "It counts."), Turn("And abs?", "It drops the sign.")), "Be brief."
    )

    example = encode(tokenizer, talk)
    learnt = [token for token, answered in zip(example.ids, example.answered, strict=True) if answered]

    assert (
        tokenizer.decode(learnt, skip_special_tokens=False)
        == "It counts.<|im_end|>It drops the sign.<|im_end|>"
    )


def test_a_batch_is_padded_on_the_right_and_padding_is_not_learnt(tokenizer: Tokenizer) -> None:
    ids, labels = next(train.batches(tokenizer))

    assert ids.shape == labels.shape
    assert ids.numel() <= train.BATCH_TOKENS
    assert set(labels[ids == 0].tolist()) <= {train.IGNORED, 0}
    learnt = labels != train.IGNORED
    assert learnt.any(dim=1).all()
    assert torch.equal(labels[learnt], ids[learnt])


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [train.RATES.at(step, train.STEPS) for step in range(train.STEPS)]

    assert max(rates) == pytest.approx(train.RATES.peak)
    assert rates.index(max(rates)) in {train.RATES.warm_up - 1, train.RATES.warm_up}
    assert rates[-1] < 1e-3 * train.RATES.peak
