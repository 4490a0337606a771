"""The options of a request. Their names and defaults are M*'s, and those of CEM the published ones."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

MOST_FRAMES: Final = 64
"""The longest rollout."""

Numbers = list[list[float | list[float]]]
"""Rows of numbers, or a list of such rows for several candidates."""


class VJepa2AcOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The predictions that are wanted of a clip.

    Attributes:
        num_frames: frames taken evenly, at most all of the video. Default: the checkpoint's clip length.
        skip_predictor: answer with the latents of the encoder.
        actions: of each step, 7 numbers: the change of place, rotation and gripper. With `mpc`, of each of
            several candidates.
        states: the pose of the gripper in each step, 7 numbers; as many as there are actions.
        extrinsics: the pose of the camera in each step, 6 numbers, for a checkpoint that takes it.
        rollout_horizon: predict so many frames, one after the other, from the first frame. 0 and 1: predict
            behind all frames of the clip at once. With `cem`: the actions to plan, 2 by default.
        stream_rollout: send each frame of a rollout when it is computed.
        mpc: score the candidates by the distance of what they lead to from the goal.
        goal_hidden: the latents of the goal: of `mpc` as many as of the clip, of `cem` those of a frame.
        goal_hidden_fill: a goal whose latents are all this number.
        cem: plan the actions that lead from the first frame and one state to the goal: `goal_hidden`, or a
            second file.
        samples: sequences of actions to try in a step of `cem`.
        topk: the best of them, of which it learns.
        cem_steps: steps of `cem`.
        momentum_mean: the share of the former mean in the new one.
        momentum_std: the share of the former deviation in the new one.
        momentum_mean_gripper: the same of the gripper.
        momentum_std_gripper: the same of the gripper.
        maxnorm: the most that an action moves along an axis, in metres.
        close_gripper: the number of the action from which on the gripper closes.
    """

    num_frames: Annotated[int, Meta(ge=1, le=1024)] | None = None
    skip_predictor: bool = False
    actions: Annotated[Numbers, Meta(min_length=1)] | None = None
    states: Annotated[Numbers, Meta(min_length=1)] | None = None
    extrinsics: Annotated[Numbers, Meta(min_length=1)] | None = None
    rollout_horizon: Annotated[int, Meta(ge=0, le=MOST_FRAMES)] = 0
    stream_rollout: bool = False
    mpc: bool = False
    goal_hidden: Annotated[Numbers, Meta(min_length=1)] | None = None
    goal_hidden_fill: float | None = None
    cem: bool = False
    samples: Annotated[int, Meta(ge=2, le=10_000)] = 400
    topk: Annotated[int, Meta(ge=2, le=10_000)] = 10
    cem_steps: Annotated[int, Meta(ge=1, le=1000)] = 10
    momentum_mean: Annotated[float, Meta(ge=0, le=1)] = 0.15
    momentum_std: Annotated[float, Meta(ge=0, le=1)] = 0.15
    momentum_mean_gripper: Annotated[float, Meta(ge=0, le=1)] = 0.15
    momentum_std_gripper: Annotated[float, Meta(ge=0, le=1)] = 0.15
    maxnorm: Annotated[float, Meta(gt=0, le=10)] = 0.05
    close_gripper: Annotated[int, Meta(ge=0)] | None = None

    @property
    def walk(self) -> str:
        """The walk of the request; the order of the cases is M*'s."""
        if self.skip_predictor:
            return "encode"
        if self.cem:
            return "plan_to_file" if self.goal_hidden is None and self.goal_hidden_fill is None else "plan"
        if self.mpc:
            return "score"
        if self.rollout_horizon > 1:
            return "rollout_streamed" if self.stream_rollout else "rollout"
        return "predict"

    @property
    def horizon(self) -> int:
        """The steps of a rollout or of a plan."""
        return self.rollout_horizon or 2

    @property
    def is_of_frames(self) -> bool:
        """True if frames are encoded one by one, and not as a clip."""
        return self.walk.startswith(("plan", "rollout"))
