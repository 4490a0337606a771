"""The state of a scheduler in a checkpoint: the attributes that its steps have changed.

Multistep schedulers keep outputs of the steps before, all of them an index. The attributes that
`set_timesteps` has made are equal in every run with the same arguments; they are not stored.
"""

from collections.abc import Mapping
from typing import Any

import torch

from models.diffusion_pipelines.packing import build, flatten

Snapshot = Mapping[str, Any]


def snapshot(scheduler: Any) -> Snapshot:
    """The attributes of a scheduler, such as they are now; lists are copied, tensors are not."""
    return {
        name: list(value) if isinstance(value, list) else value for name, value in vars(scheduler).items()
    }


def changes_since(
    before: Snapshot, scheduler: Any, prefix: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The attributes that differ: their structure by name, and their tensors.

    Args:
        before: the attributes as they were.
        scheduler: now.
        prefix: of the tensors' names.

    Raises:
        TypeError: one of them is something else than tensors, lists of them and plain values.
    """
    tensors: dict[str, torch.Tensor] = {}
    changed = {
        name: flatten(value, f"{prefix}.{name}", tensors)
        for name, value in vars(scheduler).items()
        if name not in before or not _is_same(before[name], value)
    }
    return changed, tensors


def _is_same(before: Any, value: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(before, torch.Tensor):
        return before is value
    if isinstance(value, list) and isinstance(before, list):
        return len(before) == len(value) and all(map(_is_same, before, value))
    return before is value or bool(before == value)


def restore(scheduler: Any, structure: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Set the attributes of `changes_since`.

    Raises:
        KeyError: a tensor of the structure is missing.
    """
    for name, one in structure.items():
        setattr(scheduler, name, build(one, tensors))
