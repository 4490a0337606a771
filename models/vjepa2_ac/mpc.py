"""The program `mpc`: the actions that lead to a goal, by the cross-entropy method (CEM).

    repeat `cem_steps` times:
        draw `samples` sequences of actions from a normal distribution
        roll each of them out, from the present frame and pose
        keep the `topk` whose last frames are nearest to the goal, and move the distribution towards them

Draws, costs and updates are those of the published code (`notebooks/utils/mpc_utils.py` of
facebookresearch/vjepa2). The rotation of the gripper is not planned: its actions are 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch

from models.programs import Going, Mask, Pass
from models.vjepa2_ac.poses import moved
from models.vjepa2_ac.predictor import AcPredictor, normalized, positions_of

_MOST_TOKENS: Final = 16_384
"""The most tokens of the KV cache that the samples take that are rolled out at once."""
_GRIPPER: Final = 0.75
"""The most that the gripper moves in an action."""
_STILL: Final = 0.25
"""Planned movements of the gripper below it are none."""


class MpcRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the program; see `models.vjepa2_ac.options.VJepa2AcOptions`.

    Attributes:
        horizon: the actions of a sequence.
    """

    horizon: int
    samples: int
    topk: int
    cem_steps: int
    momentum_mean: float
    momentum_std: float
    momentum_mean_gripper: float
    momentum_std_gripper: float
    maxnorm: float
    close_gripper: int | None = None

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> "MpcRequest":
        """Read the arguments of a walk, which has others as well."""
        return msgspec.convert(args, cls)


class Beliefs:
    """The normal distribution of sequences of actions, (horizon, 4): place and gripper."""

    def __init__(self, request: MpcRequest) -> None:
        self._request = request
        self.mean = torch.zeros(request.horizon, 4)
        self.std = torch.tensor([*[request.maxnorm] * 3, 1.0]).repeat(request.horizon, 1)

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draw sequences of actions, (samples, horizon, 7), step by step as the published code does."""
        steps = [self._draw(step, generator) for step in range(self._request.horizon)]
        return torch.stack(steps, dim=1)

    def _draw(self, step: int, generator: torch.Generator) -> torch.Tensor:
        asked = self._request
        noise = torch.randn(asked.samples, 4, generator=generator)
        drawn = noise * self.std[step] + self.mean[step]
        found = torch.zeros(asked.samples, 7)
        found[:, :3] = drawn[:, :3].clamp(-asked.maxnorm, asked.maxnorm)
        found[:, 6] = drawn[:, 3].clamp(-_GRIPPER, _GRIPPER)
        if asked.close_gripper is not None and step >= asked.close_gripper:
            found[:, 6] = 1.0
        return found

    def learn(self, actions: torch.Tensor, costs: torch.Tensor) -> None:
        """Move towards the sequences with the least costs, (samples,)."""
        asked = self._request
        best = actions[costs.topk(asked.topk, largest=False).indices][..., [0, 1, 2, 6]]
        of_mean = torch.tensor([*[asked.momentum_mean] * 3, asked.momentum_mean_gripper])
        of_std = torch.tensor([*[asked.momentum_std] * 3, asked.momentum_std_gripper])
        self.mean = best.mean(dim=0) * (1 - of_mean) + self.mean * of_mean
        self.std = best.std(dim=0) * (1 - of_std) + self.std * of_std

    @property
    def actions(self) -> torch.Tensor:
        """The planned actions, (horizon, 7)."""
        found = torch.zeros(len(self.mean), 7)
        found[:, :3] = self.mean[:, :3]
        gripper = self.mean[:, 3]
        found[:, 6] = torch.where(gripper.abs() < _STILL, 0.0, gripper)
        return found


@dataclass(slots=True, eq=False)
class _Group:
    """Samples that are rolled out at once.

    Attributes:
        samples: their numbers.
        frames: the last frame of each, (n, patches, width).
        poses: the last pose of each, (n, 7).
    """

    samples: range
    frames: torch.Tensor
    poses: torch.Tensor
    step: int = 0


class Mpc:
    """One run of the program (`models.programs.Driver`).

    A context is reused by the samples of one group after the other, so the cells that it takes do not grow
    with the number of samples.

    Args:
        frame: the present frame, (patches, width), normalized as all frames.
        pose: the present pose, (7,).
        goal: the wanted frame.
    """

    def __init__(
        self,
        network: AcPredictor,
        request: MpcRequest,
        *,
        frame: torch.Tensor,
        pose: torch.Tensor,
        goal: torch.Tensor,
        seed: int,
    ) -> None:
        self._network = network
        self._request = request
        self._frame = frame.to(network.device)
        self._pose = pose.cpu()
        self._goal = goal.to(network.device)
        self._generator = torch.Generator().manual_seed(seed % 2**63)
        self._beliefs = Beliefs(request)
        self._cem_step = 0
        self._each = request.horizon * network.settings.frame_tokens
        self.max_contexts = max(1, min(request.samples, _MOST_TOKENS // self._each))
        self.counts: Final = {"forwards": 0}
        self._draw()

    @classmethod
    def start(
        cls, network: AcPredictor, inputs: Mapping[str, torch.Tensor], request: MpcRequest, *, seed: int
    ) -> "Mpc":
        """Start a run; without the input `goal_hidden`, the goal is the second encoded frame."""
        frames = inputs["frame"]
        goal = inputs.get("goal_hidden")
        return cls(
            network,
            request,
            frame=frames[0],
            pose=inputs["controls"].reshape(-1),
            goal=frames[1] if goal is None else goal.reshape(frames[0].shape),
            seed=seed,
        )

    @property
    def max_tokens(self) -> int:
        """Those of all sequences of frames that are rolled out at once."""
        return self.max_contexts * self._each

    def fit(self, contexts: int, tokens: int, spare: int) -> None:
        """Roll out fewer samples at once where the engine has less room (`models.programs.Driver`)."""
        at_once = min(self.max_contexts, contexts, (tokens + spare) // (self._each + spare))
        self.max_contexts = max(1, at_once)
        self._group = self._begin(0)

    def resume(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on after a round of the method: with its distribution, and the generator that drew so far."""
        self._beliefs.mean, self._beliefs.std = state["mean"].cpu(), state["std"].cpu()
        self._generator.set_state(state["generator"].cpu())
        self._cem_step = int(state["cem_step"])
        self._draw()

    def passes(self) -> Sequence[Pass]:
        """The next frame of each sample of the group; the last one is not kept."""
        group, settings = self._group, self._network.settings
        controls = torch.cat(
            [self._actions[group.samples.start : group.samples.stop, group.step], group.poses], 1
        )
        rows = self._network.rows(group.frames[:, None], controls[:, None])
        return [
            Pass(
                context=f"sample{place}",
                embeds=row,
                positions=positions_of(settings, group.step),
                mask=Mask.FULL,
                commits=group.step + 1 < self._request.horizon,
                after=group.step * settings.frame_tokens,
            )
            for place, row in enumerate(rows)
        ]

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | Going | None:
        """Take one frame of each sample; after the last frames of all samples, learn from them."""
        group = self._group
        self.counts["forwards"] += len(hidden)
        group.frames = normalized(self._network.latents(torch.stack([*hidden]))[:, 0])
        group.poses = moved(group.poses, self._acting(group))
        group.step += 1
        if group.step < self._request.horizon:
            return None
        self._costs.append((group.frames - self._goal).abs().flatten(1).mean(dim=-1).cpu())
        if group.samples.stop < self._request.samples:
            self._group = self._begin(group.samples.stop)
            return None
        return self._learn()

    def _learn(self) -> Mapping[str, torch.Tensor] | Going:
        costs = torch.cat(self._costs)
        self._beliefs.learn(self._actions, costs)
        self._cem_step += 1
        if self._cem_step == self._request.cem_steps:
            return {"actions": self._beliefs.actions}
        state = {
            "mean": self._beliefs.mean,
            "std": self._beliefs.std,
            "generator": self._generator.get_state(),
            "cem_step": torch.tensor(self._cem_step),
        }
        self._draw()
        steps = {"step": self._cem_step, "steps": self._request.cem_steps}
        return Going(progress={**steps, "cost": float(costs.min())}, state=state)

    def _draw(self) -> None:
        """Draw the samples of a round, and begin to roll them out."""
        self._actions = self._beliefs.draw(self._generator)
        self._costs: list[torch.Tensor] = []
        self._group = self._begin(0)

    def _acting(self, group: _Group) -> torch.Tensor:
        """The present actions of a group, (n, 7)."""
        return self._actions[group.samples.start : group.samples.stop, group.step]

    def _begin(self, first: int) -> _Group:
        samples = range(first, min(first + self.max_contexts, self._request.samples))
        return _Group(
            samples=samples,
            frames=self._frame.repeat(len(samples), 1, 1),
            poses=self._pose.repeat(len(samples), 1),
        )
