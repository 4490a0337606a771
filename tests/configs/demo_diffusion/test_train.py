"""The script that made the checkpoint still makes it, and masks blocks as they are masked while served."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from configs.demo_diffusion import train

CHECKPOINT = Path(train.__file__).parent / "checkpoint"


def config(name: str) -> Any:
    return json.loads((CHECKPOINT / name).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_first_steps_lose_what_the_record_says() -> None:
    """Approximately: another processor rounds otherwise."""
    recorded = config("training.json")
    tokenizer, model = train.load_start()

    losses = list(islice(train.train(model, train.batches(tokenizer), recorded["steps"]), 2))

    assert losses == pytest.approx(recorded["first_losses"][:2], abs=2e-2)


def test_the_record_is_of_this_script() -> None:
    recorded = config("training.json")

    assert (recorded["seed"], recorded["steps"]) == (train.SEED, train.STEPS)
    assert recorded["last_loss"] < 0.2


def test_the_checkpoint_takes_less_than_two_megabytes() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 2_000_000


def test_blocks_before_a_lesson_are_finished_and_those_behind_it_are_masks() -> None:
    tokenizer, _ = train.load_start()
    mask = tokenizer.token_to_id(train.MASK)
    batch = next(train.batches(tokenizer))

    for ids, labels, length in zip(batch.ids, batch.labels, batch.lengths.tolist(), strict=True):
        learnt = (labels != -100).nonzero()[:, 0]
        assert bool((ids[learnt] == mask).all()), "what is learnt is masked"
        assert int(learnt.max()) - int(learnt.min()) < train.BLOCK, "one block is learnt"
        masked = (ids == mask).nonzero()[:, 0]
        behind = masked[masked >= learnt.min() + train.BLOCK]
        assert torch.equal(behind, torch.arange(length - len(behind), length)), "whole blocks at the end"


def test_the_shipped_tokenizer_has_the_mask() -> None:
    shipped = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))

    assert shipped.token_to_id(train.MASK) == config("config.json")["vocab_size"] - 1
    assert config("tokenizer_config.json")["mask_token"] == train.MASK
