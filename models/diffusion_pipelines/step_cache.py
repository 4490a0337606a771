"""Outputs of a denoiser used again in the next step, where its input has hardly changed.

A step's calls differ little from those of the step before, in the middle of a long schedule. An output is
used again while the input differs from that of the last computed call by less than a threshold, relative to
its mean. The first and the last step are always computed. The error is measured: the next computed output
against the one that was used until then.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from models.diffusion_pipelines.packing import build, flatten

Place = tuple[str, int]
"""A call in its step: the module, and how many calls came before."""


@dataclass(slots=True, eq=False)
class _Slot:
    """The last computed call of one place in a step, such as the one with the negative prompt."""

    input: torch.Tensor
    output: Any
    used_again: int = 0


class StepCache:
    """The cache of one run.

    Args:
        threshold: the relative change below which an output is used again; 0: never.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.reused = 0
        self.error = 0.0
        self._slots: dict[Place, _Slot] = {}

    def lookup(self, place: Place, rows: Any, *, must_compute: bool) -> Any:
        """Return the output to use again; None: compute the call.

        Args:
            place: of the call.
            rows: the input that changes from step to step: a tensor, or a list of them.
            must_compute: it is of the first or the last step.
        """
        slot = self._slots.get(place)
        if not self.threshold or must_compute or slot is None:
            return None
        found = _flat(rows)
        if found.shape != slot.input.shape or _difference(found, slot.input) >= self.threshold:
            return None
        slot.used_again += 1
        self.reused += 1
        return slot.output

    def keep(self, place: Place, rows: Any, output: Any) -> None:
        """Keep the output of a computed call, and measure the one that it replaces."""
        if not self.threshold:
            return
        slot = self._slots.get(place)
        if slot is not None and slot.used_again:
            self.error = max(self.error, _difference(_flat(output), _flat(slot.output)))
        self._slots[place] = _Slot(_flat(rows), output)

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The cache as plain values and tensors by name, for a checkpoint."""
        tensors: dict[str, torch.Tensor] = {}
        slots = [
            [
                *place,
                slot.used_again,
                flatten(slot.input, f"cache.{number}.input", tensors),
                flatten(slot.output, f"cache.{number}.output", tensors),
            ]
            for number, (place, slot) in enumerate(self._slots.items())
        ]
        return {"reused": self.reused, "error": self.error, "slots": slots}, tensors

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Set what `state` has given."""
        self.reused, self.error = state["reused"], state["error"]
        self._slots = {
            (module, call): _Slot(build(rows, tensors), build(output, tensors), used_again)
            for module, call, used_again, rows, output in state["slots"]
        }


def _flat(value: Any) -> torch.Tensor:
    """The numbers of a tensor, or of nested lists of them, in one row."""
    if isinstance(value, torch.Tensor):
        return value.reshape(-1).float()
    return torch.cat([_flat(one) for one in value if one is not None])


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The mean absolute difference, relative to the mean absolute value of the first."""
    scale = float(one.abs().mean())
    return float((one - other).abs().mean()) / scale if scale else 0.0
