"""Runs of denoisers: together with others, resumed, cancelled, and with outputs used again."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from models.base import Item
from models.diffusion_pipelines.run_checkpoint import CHECKPOINT_STEPS
from models.stepped import Call
from shared.errors import ClientError
from tests.models.diffusion_pipelines.served import (
    Ask,
    by_diffusers,
    decoded,
    difference,
    drive,
    loaded,
    served,
    started,
)

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

STEPS = {"num_inference_steps": 7}


@torch.inference_mode()
def interrupted(name: str, ask: Ask) -> Mapping[str, torch.Tensor]:
    """The checkpoint of a run that is closed after it."""
    run, node = started(name, ask), loaded(name, "denoiser")
    reached = run.begin()
    while isinstance(reached, Call):
        if reached.report is not None and reached.report.state:
            run.close()
            return reached.report.state
        reached = run.take(node.compute([reached])[0])
    raise AssertionError("the run has given no checkpoint")


@pytest.mark.parametrize("name", ["z_image", "sdxl", "wan21", "wan22_a14b", "ltx_i2v", "cosmos3"])
def test_a_resumed_run_gives_the_frames_of_an_uninterrupted_one(name: str) -> None:
    ask = Ask("a red cat", 3, STEPS)
    state = interrupted(name, ask)
    (whole,), uninterrupted = served(name, [ask])
    with torch.inference_mode():
        driven = drive(loaded(name, "denoiser"), [started(name, ask, state)])
        assert difference(decoded(name, driven.results[0]), whole) == 0
    assert driven.forwards == uninterrupted.forwards * (7 - CHECKPOINT_STEPS) // 7
    assert driven.reports[0][0].progress == {"step": CHECKPOINT_STEPS, "steps": 7}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@torch.inference_mode()
def test_a_resumed_run_gives_the_sound_of_an_uninterrupted_one() -> None:
    name, ask = "cosmos3_sound", Ask("a red cat", 3, STEPS)
    node, state = loaded(name, "denoiser"), interrupted(name, ask)
    whole = drive(node, [started(name, ask)])
    driven = drive(node, [started(name, ask, state)])
    made, exact = (
        loaded(name, "vae_decoder").run([Item(inputs=one.results[0].outputs, args={})])[0].outputs
        for one in (driven, whole)
    )
    assert driven.reports[0][0].progress == {"step": CHECKPOINT_STEPS, "steps": 7}
    assert exact["sound"].std() > 0
    assert torch.equal(made["sound"], exact["sound"])
    assert torch.equal(made["frames"], exact["frames"])


@torch.inference_mode()
def test_a_resumed_run_uses_the_outputs_again_that_an_uninterrupted_one_does() -> None:
    ask = Ask(call={"num_inference_steps": 12}, further={"step_cache": 0.5})
    for name in ("wan21", "z_image"):
        node, state = loaded(name, "denoiser"), interrupted(name, ask)
        whole, driven = drive(node, [started(name, ask)]), drive(node, [started(name, ask, state)])
        assert driven.results[0].facts == whole.results[0].facts
        assert driven.results[0].facts["cached_calls"] > 0
        assert torch.equal(driven.results[0].outputs["latents"], whole.results[0].outputs["latents"])


def test_the_noise_of_an_ancestral_scheduler_goes_on_where_it_was() -> None:
    import diffusers  # noqa: PLC0415

    ancestral: Any = diffusers.EulerAncestralDiscreteScheduler
    node, ask = loaded("sdxl", "denoiser"), Ask("a red cat", 3, STEPS)
    before = node.pipeline.scheduler
    node.pipeline.__dict__["scheduler"] = ancestral.from_config(before.config)
    try:
        state = interrupted("sdxl", ask)
        (whole,), _ = served("sdxl", [ask])
        with torch.inference_mode():
            driven = drive(node, [started("sdxl", ask, state)])
            resumed = decoded("sdxl", driven.results[0])
    finally:
        node.pipeline.__dict__["scheduler"] = before
    assert difference(resumed, whole) == 0
    assert difference(whole, by_diffusers("sdxl", ask)) > 1


def test_a_damaged_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="checkpoint lacks"):
        started("z_image", Ask(), {"latents": torch.zeros(1)})


def test_requests_of_other_sizes_and_steps_share_no_forward_and_change_nothing() -> None:
    asks = [
        Ask("a red cat", 1, {"num_inference_steps": 4}),
        Ask("other words", 2, {"num_inference_steps": 2}),
        Ask("a third one", 3, {"height": 48, "width": 32}),
        Ask("a fourth one", 4, {"height": 32, "width": 48}),
    ]
    for name in ("z_image", "flux"):
        frames, driven = served(name, asks)
        assert driven.widest == 2
        for one, ask in zip(frames, asks, strict=True):
            assert difference(one, by_diffusers(name, ask)) <= 1


def test_a_request_without_guidance_joins_those_with_guidance() -> None:
    asks = [Ask("a red cat", 1), Ask("other words", 2, {"guidance_scale": 0.0})]
    frames, driven = served("z_image", asks)
    assert driven.widest == 2
    for one, ask in zip(frames, asks, strict=True):
        assert difference(one, by_diffusers("z_image", ask)) <= 1


def test_equal_seeds_give_equal_frames_whatever_else_runs() -> None:
    (alone,), _ = served("qwen_image", [Ask("a red cat", 5)])
    (first, _, again), _ = served("qwen_image", [Ask("a red cat", 5), Ask("x", 6), Ask("a red cat", 5)])
    assert difference(first, again) <= 1
    assert difference(first, alone) <= 1


@torch.inference_mode()
def test_a_cancelled_run_leaves_the_others_alone() -> None:
    node = loaded("wan21", "denoiser")
    cancelled, kept = started("wan21", Ask("a red cat", 1)), started("wan21", Ask("other words", 2))
    first = cancelled.begin()
    assert isinstance(first, Call)
    cancelled.take(node.compute([first])[0])
    cancelled.close()
    cancelled.close()
    assert torch.is_inference_mode_enabled()
    driven = drive(node, [kept])
    assert difference(decoded("wan21", driven.results[0]), by_diffusers("wan21", Ask("other words", 2))) <= 1


@torch.inference_mode()
def test_arguments_that_the_class_refuses_are_the_clients_error() -> None:
    with pytest.raises(ClientError, match="divisible"):
        started("z_image", Ask(call={"height": 30}))


def test_a_step_is_reported_after_each_step() -> None:
    _, driven = served("sd3", [Ask(call={"num_inference_steps": 4})])
    assert [one.progress for one in driven.reports[0]] == [{"step": k, "steps": 4} for k in (1, 2, 3)]


@pytest.mark.parametrize("name", ["z_image", "flux"])
def test_previews_come_as_often_as_asked_and_show_the_picture(name: str) -> None:
    _, driven = served(name, [Ask(call={"num_inference_steps": 6}, further={"partial_images": 2})])
    shown = [one.previews["image"] for one in driven.reports[0] if one.previews]
    assert [tuple(one.shape) for one in shown] == [(16, 16, 3)] * 2
    assert all(one.dtype == torch.uint8 and one.float().std() > 1 for one in shown)


def test_a_step_cache_saves_forwards_and_states_its_error() -> None:
    plain = Ask(call={"num_inference_steps": 12})
    cached = Ask(call={"num_inference_steps": 12}, further={"step_cache": 0.3})
    (exact,), all_steps = served("wan21", [plain])
    (near,), fewer = served("wan21", [cached])
    facts = fewer.results[0].facts
    assert facts["cached_calls"] == all_steps.forwards - fewer.forwards > 0
    assert 0 < facts["cache_error"] < 1
    assert difference(exact, near) > 0
    assert all_steps.results[0].facts == {"steps": 12}


def test_the_calls_of_a_guided_step_use_their_own_outputs_again() -> None:
    steps = {"num_inference_steps": 5, "guidance_scale": 5.0}
    _, driven = served("wan21", [Ask(call=steps, further={"step_cache": 0.5})])
    assert driven.forwards == 2 * 2, "with and without the prompt, in the first and the last step"
    assert driven.results[0].facts["cached_calls"] == 2 * 3


def test_a_step_cache_of_a_threshold_that_nothing_reaches_changes_nothing() -> None:
    (exact,), _ = served("z_image", [Ask()])
    (same,), driven = served("z_image", [Ask(further={"step_cache": 1e-9})])
    assert difference(exact, same) == 0
    assert driven.results[0].facts == {"steps": 3, "cached_calls": 0, "cache_error": 0.0}
