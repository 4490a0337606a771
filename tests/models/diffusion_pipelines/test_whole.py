"""Pipelines of classes without rules of their own: one node, from prompt to pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.diffusion_pipelines import nodes
from models.diffusion_pipelines.whole import WholePipeline
from models.stepped import Call
from tests.models.diffusion_pipelines.served import (
    NO_PROGRESS,
    Ask,
    by_diffusers,
    difference,
    drive,
    item_of,
    loaded,
)
from tests.tiny.diffusion import tiny_pipeline

NAME, CHECKED = "stable_diffusion", "stable_diffusion_checked"


def whole(folder: Path, **kwargs: Any) -> WholePipeline:
    node = nodes.load(folder, "pipeline", device="cpu", dtype="auto", progress=NO_PROGRESS, kwargs=kwargs)
    assert isinstance(node, WholePipeline)
    return node


@torch.inference_mode()
def test_an_unknown_class_gives_the_pictures_of_its_own_call() -> None:
    node = loaded(NAME, "pipeline")
    asks = [Ask("a red cat", 1), Ask("other words", 2)]
    driven = drive(node, [node.start(item_of(NAME, ask), {}) for ask in asks])
    frames = [result.outputs["frames"].numpy() for result in driven.results]
    for shown, ask in zip(frames, asks, strict=True):
        assert difference(shown, by_diffusers(NAME, ask)) <= 1
    assert difference(*frames) > 1
    assert driven.results[0].facts == {
        "frames": 1, "height": 32, "width": 32, "safety_checker": "none", "flagged": False, "sound_rate": 0,
    }  # fmt: skip
    assert [one.progress for one in driven.reports[0]] == [{"step": k, "steps": 3} for k in (1, 2, 3)]


@torch.inference_mode()
def test_a_cancelled_run_ends_at_its_step() -> None:
    node = loaded(NAME, "pipeline")
    run = node.start(item_of(NAME, Ask()), {})
    assert isinstance(run.begin(), Call)
    call = run._greenlet
    run.close()
    assert call.dead
    driven = drive(node, [node.start(item_of(NAME, Ask()), {})])
    assert difference(driven.results[0].outputs["frames"].numpy(), by_diffusers(NAME, Ask())) <= 1


def test_a_class_in_parts_runs_whole_too() -> None:
    node = loaded("wan21", "pipeline")
    with torch.inference_mode():
        driven = drive(node, [node.start(item_of("wan21", Ask()), {})])
    assert difference(driven.results[0].outputs["frames"].numpy(), by_diffusers("wan21", Ask())) <= 1


@torch.inference_mode()
def test_a_safety_checker_stays_on_and_its_verdict_is_a_fact() -> None:
    node = whole(tiny_pipeline(CHECKED))
    checker = node.pipeline.safety_checker
    verdicts = []
    for threshold in (-10.0, 10.0):
        checker.concept_embeds_weights.fill_(threshold)
        checker.special_care_embeds_weights.fill_(10.0)
        (result,) = drive(node, [node.start(item_of(CHECKED, Ask()), {})]).results
        assert result.facts["safety_checker"] == "on"
        verdicts.append((result.facts["flagged"], int(np.asarray(result.outputs["frames"]).max())))
    assert verdicts[0] == (True, 0)
    assert verdicts[1][0] is False
    assert verdicts[1][1] > 0


@torch.inference_mode()
def test_a_safety_checker_that_is_configured_off_is_reported() -> None:
    node = whole(tiny_pipeline(CHECKED), safety_checker=False)
    (result,) = drive(node, [node.start(item_of(CHECKED, Ask()), {})]).results
    assert node.pipeline.safety_checker is None
    assert result.facts["safety_checker"] == "off"


def test_it_has_no_checkpoints() -> None:
    with pytest.raises(ValueError, match="no checkpoints"):
        loaded(NAME, "pipeline").start(item_of(NAME, Ask()), {"x": torch.zeros(1)})
