"""`python -m benchmarks images`: both ways in process draw the same image."""

from functools import cache

import torch
from transformers import Qwen2Config

from benchmarks.drawing import Drawing, Picture
from benchmarks.images import difference, passes_of
from benchmarks.random_bagel import SHAPES
from benchmarks.turns import Parts, together
from models.bagel.llm import BagelForConditionalGeneration
from tests.tiny.bagel import bagel_checkpoint

CPU = torch.device("cpu")
SMALL = Picture(side=64, timesteps=5)


@cache
def drawing() -> Drawing:
    return Drawing(bagel_checkpoint(), CPU)


def test_the_bare_loop_and_the_engine_draw_the_same_image_in_as_many_passes() -> None:
    by_engine, bare = drawing().by_engine(SMALL, 1), drawing().bare(SMALL, 1)
    assert by_engine.passes == bare.passes > SMALL.timesteps - 1
    assert bare.pixels.shape == (64, 64, 3)
    assert bare.pixels.std() > 1
    assert difference(drawing(), SMALL).value <= 1
    assert abs(bare.pixels.astype(int) - drawing().bare(SMALL.plain, 1).pixels).max() > 1
    assert abs(bare.pixels.astype(int) - drawing().bare(SMALL, 2).pixels).max() > 1


def test_of_fifty_steps_ninety_passes_are_computed_with_guidance() -> None:
    [figure] = passes_of(drawing())
    assert figure.value == 90
    assert figure.note == "of 147 with all three branches in each step; 49 without guidance"


def test_the_published_shape_is_that_of_the_published_model() -> None:
    config = Qwen2Config(**SHAPES["published"].llm_config)
    config.latent_width, config.latent_side = 64, 64
    with torch.device("meta"):
        model = BagelForConditionalGeneration(config)
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    of_texts = sum(size for name, size in sizes.items() if "_moe_gen" not in name)
    assert round(of_texts / 1e9, 1) == 7.6
    assert round(sum(sizes.values()) / 1e9, 1) == 14.2


def test_clients_ask_together_and_parts_are_shares_of_a_whole() -> None:
    rate, seconds = together(3, lambda client: [float(client), 1.0])
    assert sorted(seconds) == [0.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    assert rate > 0

    parts = Parts(CPU)
    with parts.timed("whole"), parts.timed("part"):
        pass
    assert 0 <= parts.share("part", "whole") <= 1
