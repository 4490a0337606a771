"""Weights that are left in the files, because the CPU kernels multiply them as they are stored.

The model has placeholders for them, which take no memory. Whatever computes with floats fills them first.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from models.grouped_weights import GroupedWeight
from models.transformers_lm.expert_layers import ExpertMatrix, matrix_named, name_in_files

Readers = Mapping[str, Callable[[], GroupedWeight]]
"""By the name of a linear layer or of an expert's matrix, what reads its weight as it is stored."""


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """A tensor of zeros with the interface of a file's slice. All its numbers are one in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.zeros((), dtype=self.dtype).expand(self.shape)[index]


def with_placeholders(slices: Mapping[str, Any], left: Iterable[str], dtype: torch.dtype) -> dict[str, Any]:
    """Return a checkpoint's tensors with placeholders for the weights of the modules `left`.

    The matrices of a layer's experts become the two tensors that transformers has for them.
    """
    kept = dict(slices)
    gates: dict[str, list[list[int]]] = {}
    downs: dict[str, list[list[int]]] = {}
    for name in left:
        shape = kept.pop(f"{name}.weight").get_shape()
        if found := name_in_files(name):
            merged = downs if found.part == "down" else gates
            merged.setdefault(f"{found.layer}.mlp.experts", []).append(shape)
        else:
            kept[f"{name}.weight"] = _Placeholder(tuple(shape), dtype)
    for experts, shapes in gates.items():
        outputs, inputs = shapes[0]
        kept[f"{experts}.gate_up_proj"] = _Placeholder((len(shapes) // 2, 2 * outputs, inputs), dtype)
    for experts, shapes in downs.items():
        kept[f"{experts}.down_proj"] = _Placeholder((len(shapes), *shapes[0]), dtype)
    return kept


def fill(model: Any, readers: Readers) -> None:
    """Replace placeholders by the floats of what is stored."""
    for name, read in readers.items():
        matrix = matrix_named(model, name)
        if isinstance(matrix, ExpertMatrix):
            for parameter in (matrix.experts.gate_up_proj, matrix.experts.down_proj):
                if not any(parameter.stride()):
                    parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
            matrix.weight.copy_(read().floats())
        else:
            matrix.weight.data = read().floats().to(matrix.weight.dtype)
