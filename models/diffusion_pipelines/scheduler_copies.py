"""Copies of a scheduler that a pipeline makes for itself: one for sound, one for actions.

A pipeline that denoises several latents copies its scheduler for each of the others. Those latents are local
to its `__call__`, and `callback_on_step_end` does not show them. So a copy keeps what its last step has
returned; in a run that is resumed, it returns the latents of the checkpoint instead, once.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from models.diffusion_pipelines.scheduler_state import changes_since, restore, snapshot

_HOOK: Final = "__deepcopy__"
"""`copy.deepcopy` asks the object for this method."""


@dataclass(frozen=True, slots=True, eq=False)
class CopiesState:
    """The copies in a checkpoint.

    Attributes:
        structures: of each copy, of `SchedulerCopies.state`.
        tensors: of the checkpoint, by name.
        step: the step that it was taken after.
    """

    structures: Sequence[Any]
    tensors: Mapping[str, torch.Tensor]
    step: int


class SchedulerCopies:
    """The copies of one run's scheduler, in the order of their making.

    Args:
        scheduler: the run's own.
        resumed: the state that they are to go on from.
    """

    def __init__(self, scheduler: Any, resumed: CopiesState | None = None) -> None:
        self._scheduler, self._resumed = scheduler, resumed
        self._copies: list[_Copy] = []
        scheduler.__dict__[_HOOK] = self._copied

    def state(self) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """The structures of all copies, and their tensors by name."""
        structures, tensors = [], dict[str, torch.Tensor]()
        for one in self._copies:
            structure, own = one.state()
            structures.append(structure)
            tensors |= own
        return structures, tensors

    def _copied(self, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self._scheduler))
        attributes = {name: value for name, value in vars(self._scheduler).items() if name != _HOOK}
        twin.__dict__.update(copy.deepcopy(attributes, memo))
        self._copies.append(_Copy(twin, len(self._copies), self._resumed))
        return twin


class _Copy:
    """One copy, whose `step` is replaced."""

    def __init__(self, scheduler: Any, number: int, resumed: CopiesState | None) -> None:
        self._scheduler, self._number, self._resumed = scheduler, number, resumed
        self._name = f"copies.{number}"
        self._own_step = scheduler.step
        self._steps = 0
        self._latents: torch.Tensor | None = None
        scheduler.__dict__["step"] = self._take
        self._fresh = snapshot(scheduler)

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        structure, tensors = changes_since(self._fresh, self._scheduler, self._name)
        if self._latents is not None:
            tensors[self._latents_name] = self._latents.clone()
        return structure, tensors

    @property
    def _latents_name(self) -> str:
        return f"{self._name}.latents"

    def _take(self, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self._own_step(output, *args, **kwargs)
        self._steps += 1
        if self._resumed is not None and self._resumed.step == self._steps:
            result = (self._restored(self._resumed, output.device), *result[1:])
        self._latents = result[0]
        return result

    def _restored(self, state: CopiesState, device: torch.device) -> torch.Tensor:
        """Set the scheduler's state; return the latents."""
        own = {
            name: one.to(device).clone()
            for name, one in state.tensors.items()
            if name.startswith(f"{self._name}.")
        }
        restore(self._scheduler, state.structures[self._number], own)
        return own[self._latents_name]
