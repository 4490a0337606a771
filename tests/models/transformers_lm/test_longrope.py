"""Rotary factors are chosen for each token as transformers chooses them for a text alone."""

from typing import Any

import pytest
import torch

from models.checkpoints.files import context_length, read_config
from models.decoder_lm.nodes import load
from models.transformers_lm.architecture import body_of
from models.transformers_lm.longrope import LongFactors, rotary_change_of
from tests.tiny import MODELS, tiny_checkpoint
from tests.tiny.phi import CHANGE
from tests.workers.kv_engine.recorder import SameLaunches

LONG = MODELS["phi3_longrope"].config


def rotary() -> Any:
    """Transformers' module of a fresh model, as it was before the node replaced its forward."""
    module = body_of(load(tiny_checkpoint("phi3_longrope")).model).rotary_emb
    del module.forward
    return module


def angles(module: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = module(torch.zeros(1, 1), position_ids=positions[None])
    return cos[0], sin[0]


def test_tokens_of_long_and_short_texts_have_the_angles_of_their_texts_alone() -> None:
    """The largest short position, and the first long ones, are beside one another."""
    short, long = torch.arange(CHANGE), torch.arange(CHANGE + 1)
    expected = [
        torch.cat(pair) for pair in zip(*(angles(rotary(), text) for text in (short, long)), strict=True)
    ]
    module = rotary()
    chosen = LongFactors(module, CHANGE)

    with chosen.of(torch.tensor([0] * CHANGE + [1] * (CHANGE + 1), dtype=torch.int32)):
        found = angles(module, torch.cat((short, long)))

    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(found[0][:CHANGE], found[0][CHANGE : 2 * CHANGE])


def test_the_choice_can_be_recorded() -> None:
    """Nothing in it makes the host wait for the device, and it writes to the same memory each time."""
    module, positions = rotary(), torch.tensor([7, 9])
    chosen, tokens = LongFactors(module, CHANGE), torch.tensor([0, 1], dtype=torch.int32)
    found: list[torch.Tensor] = []
    hidden, given = torch.zeros(1, 1), positions[None]

    def compute() -> None:
        with chosen.of(tokens):
            found[:] = module(hidden, position_ids=given)

    replay = SameLaunches().capture(compute)
    before = found[0].clone()
    tokens.fill_(0)
    replay()

    assert torch.equal(found[0][0, 0], before[0, 0])
    assert not torch.equal(found[0][0, 1], before[0, 1])


def test_without_a_choice_transformers_chooses_for_the_batch() -> None:
    module, positions = rotary(), torch.tensor([0, 5, CHANGE])
    expected = angles(module, positions)
    chosen = LongFactors(module, CHANGE)

    with chosen.of(None):
        found = angles(module, positions)

    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("architecture", "length"),
    [("Phi3ForCausalLM", 512), ("PhimoeForCausalLM", 512), ("LlamaForCausalLM", CHANGE), (None, CHANGE)],
)
def test_only_where_generate_computes_keys_again_the_whole_context_is_served(
    architecture: str | None, length: int
) -> None:
    assert context_length({**LONG, "architectures": [architecture]}) == length


def test_the_text_model_among_media_is_limited_to_short_factors() -> None:
    text = {**LONG, "architectures": ["Phi3ForCausalLM"]}

    assert context_length({"architectures": ["LlavaForConditionalGeneration"], "text_config": text}) == CHANGE


def test_the_change_is_read_from_the_config() -> None:
    config = load(tiny_checkpoint("phi3_longrope")).model.config
    plain = load(tiny_checkpoint("phi3")).model.config

    assert rotary_change_of("Phi3ForCausalLM", config) == CHANGE
    assert rotary_change_of("LlamaForCausalLM", config) is None
    assert rotary_change_of("Phi3ForCausalLM", plain) is None
    assert context_length(read_config(tiny_checkpoint("phi3_longrope"))) == 512
