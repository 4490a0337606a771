"""Each known class, served in three nodes, against diffusers' own call with the same generator."""

import pytest
import torch

from models.base import Item
from tests.models.diffusion_pipelines.served import (
    Ask,
    by_diffusers,
    difference,
    drive,
    loaded,
    oracle,
    served,
    started,
)
from tests.tiny.diffusion import BUILDERS, CALLS

KNOWN = [name for name in BUILDERS if not name.startswith(("stable_diffusion", "cosmos3_"))]
ALONE = {"cosmos3"}
ROUNDED = 0.02
"""The part of the values that may be rounded to the other side in a forward over several requests."""

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("name", KNOWN)
def test_a_pipeline_in_parts_gives_the_frames_of_its_own_call(name: str) -> None:
    first, second = Ask("a red cat", 1), Ask("entirely other words, and more of them", 2)
    frames, driven = served(name, [first, second, Ask("a red cat", 2)])
    for shown, ask in zip(frames, (first, second), strict=False):
        exact = by_diffusers(name, ask)
        assert difference(shown, exact) <= 1
        assert (shown != exact).mean() < ROUNDED
    assert driven.widest == (1 if name in ALONE else 3)
    assert difference(frames[2], frames[0]) > 1, "the seed changes nothing"
    assert difference(frames[2], frames[1]) > 0, "the prompt changes nothing"


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@torch.inference_mode()
def test_the_sound_of_a_film_is_that_of_its_own_call() -> None:
    name, ask = "cosmos3_sound", Ask("a red cat", 1)
    driven = drive(loaded(name, "denoiser"), [started(name, ask)])
    (made,) = loaded(name, "vae_decoder").run([Item(inputs=driven.results[0].outputs, args={})])
    exact = oracle(name)(
        prompt=ask.prompt, negative_prompt="", **CALLS[name], output_type="np",
        generator=torch.Generator().manual_seed(ask.seed),
    )  # fmt: skip
    assert made.facts["sound_rate"] == 200
    assert made.outputs["sound"].shape == exact.sound.shape
    assert exact.sound.std() > 0
    assert (made.outputs["sound"] - exact.sound).abs().max() < 1e-4


def test_both_experts_of_wan22_are_asked() -> None:
    _, driven = served("wan22_a14b", [Ask()])
    assert driven.modules == {"transformer", "transformer_2"}


@pytest.mark.parametrize(("name", "pictures"), [("flux2_klein", 1), ("flux2_klein", 2), ("cosmos3", 1)])
def test_an_input_image_is_taken_by_classes_that_can_do_without(name: str, pictures: int) -> None:
    asks = [Ask(call={"num_inference_steps": 2}, pictures=count) for count in (pictures, 0)]
    (frames, without), _ = served(name, asks)
    assert difference(frames, by_diffusers(name, asks[0])) <= 1
    assert difference(frames, without) > 1
