"""Checkpoints of a run: all that the steps so far have changed, and a run that goes on from it.

A checkpoint holds the latents after a step, the attributes of the scheduler and of its copies that the steps
have changed, and the outputs that the step cache keeps. To resume, the pipeline's `__call__` runs again:
calls of the steps before are answered with zeros, which costs nothing and lets schedulers and generators
advance as they did; then the state is set.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

import torch

from models.diffusion_pipelines.packing import json_tensor, json_value
from models.diffusion_pipelines.scheduler_copies import CopiesState, SchedulerCopies
from models.diffusion_pipelines.scheduler_state import Snapshot, changes_since, restore, snapshot
from models.diffusion_pipelines.step_cache import StepCache

LATENTS: Final = "latents"
CHECKPOINT_STEPS: Final = 5
"""The steps between two checkpoints."""
_HEAD: Final = "run"
_LARGE_BYTES: Final = 1 << 20
_LARGE_INTERVAL_S: Final = 5.0
"""Checkpoints of a video are stored at most this often."""

Tensors = Mapping[str, torch.Tensor]


class Checkpoints:
    """The checkpoints that one run makes.

    Args:
        scheduler: the run's.
        cache: the run's.
        resumed: the checkpoint that the run goes on from, if any.

    Attributes:
        shapes: of the modules' outputs, by module.
    """

    def __init__(self, scheduler: Any, cache: StepCache, resumed: "Resumed | None") -> None:
        self.shapes: dict[str, Any] = dict(resumed.shapes) if resumed else {}
        self._scheduler, self._cache = scheduler, cache
        self._copies = SchedulerCopies(scheduler, resumed.copies if resumed else None)
        self._fresh: Snapshot = {}
        self._stored_s = time.monotonic()

    def begin(self) -> None:
        """Remember the scheduler as it is before the first step."""
        self._fresh = snapshot(self._scheduler)

    def after(self, step: int, steps: int, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        """The checkpoint after `step` of so many steps; empty if none is due."""
        if step % CHECKPOINT_STEPS or step >= steps:
            return {}
        state = self._state(step, latents)
        now_s = time.monotonic()
        is_large = sum(one.nbytes for one in state.values()) > _LARGE_BYTES
        if is_large and now_s - self._stored_s < _LARGE_INTERVAL_S:
            return {}
        self._stored_s = now_s
        return state

    def _state(self, step: int, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        changed, tensors = changes_since(self._fresh, self._scheduler, "scheduler")
        copied, of_copies = self._copies.state()
        cached, of_cache = self._cache.state()
        head = {
            "step": step,
            "shapes": self.shapes,
            "scheduler": changed,
            "copies": copied,
            "cache": cached,
        }
        return {
            _HEAD: json_tensor(head),
            LATENTS: latents.detach().clone(),
            **tensors,
            **of_copies,
            **of_cache,
        }


class Resumed:
    """A checkpoint that a run goes on from.

    Raises:
        ValueError: it is no checkpoint of a run.
    """

    def __init__(self, state: Tensors, device: torch.device) -> None:
        self._device = device
        try:
            head = json_value(state[_HEAD])
            self.step: int = head["step"]
            self.shapes: dict[str, Any] = head["shapes"]
            self.copies = CopiesState(head["copies"], state, self.step)
            self._scheduler, self._cache = head["scheduler"], head["cache"]
            self._tensors = {LATENTS: state[LATENTS], **state}
        except KeyError as error:
            raise ValueError(f"the checkpoint lacks {error}") from error

    def answer(self, module: str) -> Any:
        """Zeros in the shape of the module's output."""
        return _zeros(self.shapes[module], self._device)

    def set(self, scheduler: Any, cache: StepCache) -> torch.Tensor:
        """Set the state of the scheduler and of the cache; return the latents."""
        tensors = {name: one.to(self._device).clone() for name, one in self._tensors.items()}
        restore(scheduler, self._scheduler, tensors)
        cache.restore(self._cache, tensors)
        return tensors[LATENTS]


def shape_of(output: Any) -> Any:
    """The shape of a module's output, as plain JSON."""
    if isinstance(output, torch.Tensor):
        return {"shape": list(output.shape), "dtype": str(output.dtype).removeprefix("torch.")}
    if isinstance(output, list | tuple):
        return [isinstance(output, tuple), [shape_of(one) for one in output]]
    return None


def _zeros(shape: Any, device: torch.device) -> Any:
    if shape is None:
        return None
    if isinstance(shape, dict):
        return torch.zeros(shape["shape"], dtype=getattr(torch, shape["dtype"]), device=device)
    parts = [_zeros(one, device) for one in shape[1]]
    return tuple(parts) if shape[0] else parts
