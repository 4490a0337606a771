"""Pi0 against `sample_actions` of transformers' own class, in both layouts of its checkpoints."""

from functools import cache
from typing import Any

import pytest
import torch

import models.pi0.nodes as pi0
from models.base import Item
from models.programs import Mask
from tests.models.robot_policy import naive
from tests.tiny import pi

IDS = [2, 9, 77, 8, 130, 131]
ROWS = 4
"""Rows of an image."""


@cache
def case() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "pixels": random(2, 3, pi.IMAGE_SIZE, pi.IMAGE_SIZE),
        "state": random(pi.STATE_DIM),
        "noise": random(pi.HORIZON, pi.ACTION_DIM),
    }


@cache
def oracle() -> Any:
    return pi.pi0_model()


@torch.inference_mode()
def expected(**changed: torch.Tensor) -> torch.Tensor:
    given = case() | changed
    image = oracle().config.vlm_config.image_token_id
    ids = torch.tensor([[image] * ROWS * len(given["pixels"]) + IDS])
    actions: torch.Tensor = oracle().sample_actions(
        state=given["state"][None],
        input_ids=ids,
        pixel_values=given["pixels"][None],
        pixel_attention_mask=torch.ones(1, len(given["pixels"]), dtype=torch.bool),
        attention_mask=torch.ones_like(ids),
        noise=given["noise"][None],
    )[0]
    return actions


@cache
def nodes(layout: str) -> Any:
    return naive.load(pi0, pi.tiny_pi0() if layout == "transformers" else pi.lerobot_pi0())


def found(layout: str = "transformers", *, run: Any = None, **changed: torch.Tensor) -> torch.Tensor:
    encoder, node = nodes(layout)
    given = case() | changed
    return naive.run(node, naive.driver(encoder, node, ids=IDS, **given), **(run or {}))


@pytest.mark.parametrize("layout", ["transformers", "lerobot"])
def test_the_actions_are_those_of_transformers(layout: str) -> None:
    torch.testing.assert_close(found(layout), expected(), rtol=0, atol=2e-5)


def test_a_camera_that_is_missing_is_no_part_of_the_prefix() -> None:
    one = case()["pixels"][:1]
    torch.testing.assert_close(found(pixels=one), expected(pixels=one), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["pixels", "state", "noise"])
def test_every_input_matters(name: str) -> None:
    changed: dict[str, Any] = {name: -case()[name]}
    assert (expected(**changed) - expected()).abs().max() > 0.01
    torch.testing.assert_close(found(**changed), expected(**changed), rtol=0, atol=2e-5)


@pytest.mark.parametrize("wrong", [{"mask": Mask.CAUSAL}, {"shift": 1}], ids=["mask", "positions"])
def test_another_mask_or_other_positions_would_be_seen(wrong: dict[str, Any]) -> None:
    assert (found(run=wrong) - expected()).abs().max() > 0.002


def test_several_requests_encode_their_images_as_alone() -> None:
    encoder, _ = nodes("transformers")
    pixels = case()["pixels"]
    items = [Item(inputs={"pixels": some}, args={}) for some in (pixels, pixels[1:], pixels[:1])]
    together = [one.outputs["rows"] for one in encoder.run(items)]
    alone = [encoder.run([item])[0].outputs["rows"] for item in items]
    assert [len(one) for one in together] == [2 * ROWS, ROWS, ROWS]
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
