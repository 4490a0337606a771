"""Latents, rollouts and plans of the nodes, against recordings of the published code."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from models.base import Item
from models.programs import Mask, Pass
from models.vjepa2_ac import predictor
from models.vjepa2_ac.rollout import Rollout
from tests.models.vjepa2_ac import cases, served
from tests.models.vjepa2_ac.served import PUBLISHED, is_close
from workers.data_plane.arrays import to_array, to_tensor
from workers.data_plane.port import Array
from workers.kv_engine.outputs import Output, ProgramOutput, ProgramReport
from workers.kv_engine.programs.spec import ProgramSpec


def encoded() -> torch.Tensor:
    item = Item(inputs={"pixels": torch.from_numpy(cases.clip())}, args={"each": False, "digests": ["clip"]})
    found: torch.Tensor = served.load("video_encoder").run([item])[0].outputs["encoder_hidden"]
    return found


@torch.inference_mode()
def predicted(of: torch.Tensor, *, extrinsics: bool = False) -> torch.Tensor:
    item = Item(inputs={"encoder_hidden": torch.from_numpy(PUBLISHED["clip"]), "controls": of}, args={})
    found: torch.Tensor = (
        served.load("predictor", extrinsics=extrinsics).run([item])[0].outputs["predicted_hidden"]
    )
    return found


def test_a_clip_has_the_published_latents() -> None:
    assert is_close(encoded(), PUBLISHED["clip"])


def test_frames_that_were_chosen_otherwise_are_not_taken_from_the_cache() -> None:
    """Of nine chosen frames eight are encoded: as many as of eight, of the same file."""
    node, clip = served.load("video_encoder"), torch.from_numpy(cases.clip())
    items = [
        Item(inputs={"pixels": pixels}, args={"each": False, "digests": ["clip"], "num_frames": frames})
        for pixels, frames in ((clip, 9), (clip.flip(0), 8))
    ]

    first, second = (node.run([item])[0].outputs["encoder_hidden"] for item in items)

    assert not torch.allclose(first, second, atol=1e-3)


@pytest.mark.parametrize(("extrinsics", "name"), [(False, "predicted"), (True, "seeing")])
def test_all_frames_at_once_are_predicted_as_by_the_published_forward(extrinsics: bool, name: str) -> None:
    found = predicted(served.controls(extrinsics=extrinsics)[None, :4], extrinsics=extrinsics)

    assert is_close(found, PUBLISHED[name])


def test_recordings_depend_on_all_inputs() -> None:
    """Negative control: actions, states and cameras matter, and so does what was encoded."""
    clean = served.controls(extrinsics=True)
    for first, last in ((0, 7), (7, 14), (14, 20)):
        changed = clean.clone()
        changed[:, first:last] = 0
        assert not is_close(predicted(changed[None, :4], extrinsics=True), PUBLISHED["seeing"])
    assert not is_close(PUBLISHED["seeing"], PUBLISHED["predicted"])


def test_a_rollout_over_the_pool_is_the_published_one() -> None:
    by = served.engine()

    found = served.rolled(by, {"a": (served.frames()[:1], served.controls())}, cases.HORIZON)["a"]

    assert is_close(found.flatten(0, 1)[None], PUBLISHED["rollout"])
    assert by.stats().kv_used == 0, "the last frame ends the run"


def test_rollouts_at_once_are_those_of_each_alone() -> None:
    by, of = served.engine(), served.controls()
    trajectories = {
        name: (served.frames()[at : at + 1], sign * of)
        for name, at, sign in (("a", 0, 1), ("b", 3, 1), ("c", 0, -1))
    }

    found = served.rolled(by, trajectories, 4)

    for name, one in trajectories.items():
        alone = served.rolled(served.engine(), {name: one}, 4)[name]
        torch.testing.assert_close(found[name], alone, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found["a"], found["c"], atol=1e-2)


class Unmasked(Rollout):
    def passes(self) -> Any:
        return [replace(one, mask=Mask.CAUSAL) for one in super().passes()]


class Misplaced(Rollout):
    def passes(self) -> Any:
        [one] = super().passes()
        assert isinstance(one.positions, torch.Tensor)
        return [replace(one, positions=one.positions * torch.tensor([[0], [1], [1]]))]


class Forgetful(Rollout):
    def passes(self) -> list[Pass]:
        return [replace(one, commits=False) for one in super().passes()]


@pytest.mark.parametrize("wrong", [Unmasked, Misplaced, Forgetful])
def test_another_mask_position_or_memory_is_another_rollout(wrong: type[Rollout]) -> None:
    """Negative controls of the comparison with the published rollout."""
    node = served.load(served.NODE)
    node.programs["rollout"] = lambda _, inputs, args, *, seed: wrong(
        node.network, inputs["frame"], inputs["controls"], horizon=args["horizon"]
    )

    found = served.rolled(
        served.engine(node), {"a": (served.frames()[:1], served.controls())}, cases.HORIZON
    )["a"]

    assert not is_close(found.flatten(0, 1)[None], PUBLISHED["rollout"])


def plan_args(name: str) -> dict[str, Any]:
    """The arguments of the program for a recorded plan."""
    options = cases.PLANS[name]
    asked = {key: value for key, value in options["mpc_args"].items() if key != "rollout"}
    horizon = options["mpc_args"]["rollout"]
    return {**asked, "horizon": horizon, "close_gripper": options["close_gripper"]}


def planned(
    args: dict[str, Any],
    *,
    goal: int = cases.GOAL_FRAME,
    pose: Any = cases.POSE,
    state: Mapping[str, Array] | None = None,
    **settings: int,
) -> list[Output]:
    """The outputs of an engine that plans."""
    inputs = {
        "frame": to_array(served.frames()[[0, goal]]),
        "controls": to_array(torch.from_numpy(np.float32(pose))[None]),
    }
    by = served.engine(**settings)
    by.add_program(
        ProgramSpec(
            key="p",
            node=served.NODE,
            program="mpc",
            inputs=inputs,
            args=args,
            seed=cases.SEED,
            state=state or {},
        )
    )
    return served.steps(by)


@pytest.mark.parametrize("name", cases.PLANS)
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 12}, {"max_sequences": 3}])
def test_a_plan_is_the_published_one_however_many_samples_fit(name: str, settings: dict[str, Any]) -> None:
    args = plan_args(name)

    *reports, output = planned(args, **settings)

    assert isinstance(output, ProgramOutput)
    assert is_close(to_tensor(output.values["actions"], torch.device("cpu")), PUBLISHED[name])
    assert all(isinstance(one, ProgramReport) for one in reports)
    progress = [dict(one.progress) for one in reports if isinstance(one, ProgramReport)]
    assert [one["step"] for one in progress] == [1, 2]
    assert progress[-1]["cost"] > 0
    assert output.counts == {"forwards": 3 * args["samples"] * args["horizon"]}


@pytest.mark.parametrize(("goal", "pose"), [(2, 1), (cases.GOAL_FRAME, -3)])
def test_a_plan_depends_on_goal_and_pose(goal: int, pose: int) -> None:
    """Negative control: no part of what a plan is made of is ignored."""
    args = plan_args("closing")

    expected = least_cost(planned(args))

    assert abs(least_cost(planned(args, goal=goal, pose=pose * cases.POSE)) / expected - 1) > 1e-4


def test_an_interrupted_plan_goes_on_after_its_last_round() -> None:
    args = plan_args("closing")
    *reports, whole = planned(args)
    last = reports[-1]
    assert isinstance(last, ProgramReport)
    assert isinstance(whole, ProgramOutput)

    [output] = planned(args, state=last.state)

    assert isinstance(output, ProgramOutput)
    assert output.values["actions"].data.tobytes() == whole.values["actions"].data.tobytes()
    assert output.counts == {"forwards": args["samples"] * args["horizon"]}, "one of three rounds"


def least_cost(outputs: list[Output]) -> float:
    """The least cost of the first step of a plan."""
    assert isinstance(outputs[0], ProgramReport)
    return float(outputs[0].progress["cost"])


@torch.inference_mode()
def test_candidates_have_the_costs_of_their_latents() -> None:
    latents = torch.from_numpy(PUBLISHED["clip"])
    several = torch.stack([served.controls()[:4], -served.controls()[:4], served.controls()[1:5]])
    item = Item(inputs={"encoder_hidden": latents, "controls": several}, args={})
    found = served.load("ac_predictor_mpc").run([item])[0].outputs["predicted_hidden"]
    goal = found[1:2] + 0.01
    scored = (
        served.load("mpc_scorer")
        .run([Item(inputs={"predicted_hidden": found, "goal_hidden": goal}, args={})])[0]
        .outputs
    )

    assert is_close(found[:1], PUBLISHED["predicted"])
    expected = np.abs(found.numpy() - goal.numpy()).mean(axis=(1, 2))
    np.testing.assert_allclose(scored["costs"].numpy(), expected, rtol=1e-4)
    assert (scored["best_index"].dtype, scored["best_index"].shape, int(scored["best_index"])) == (
        torch.int64,
        torch.Size([]),
        1,
    )
    assert scored["predicted_hidden"] is found


def test_nodes_of_one_process_share_the_predictor() -> None:
    one, other = served.load("predictor"), served.load(served.NODE)

    assert one._network is other.network


def test_angles_beyond_the_thirds_are_zero() -> None:
    cosines, sines = predictor.angles_of(torch.ones(3, 1), 64, torch.float32)

    assert cosines.shape == (1, 64)
    assert (cosines[0, 60:] == 1).all()
    assert (sines[0, 60:] == 0).all()
    assert (sines[0, :60] != 0).all()
