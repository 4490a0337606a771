"""Weights in groups of 32 in safetensors, as conversions of other formats write them (`models.gguf`).

    q.weight_numbers    U8 (outputs, inputs), or of four bits (outputs, inputs / 2): the first in the low bits
    q.weight_fifths     U8 (outputs, inputs / 8): the fifth bits of numbers of five, the first in the lowest
    q.weight_scales     F32 (outputs, groups)
    q.weight_minimums   F32 (outputs, groups); absent if weights are `scale * (number - zero)`
    q.weight_values     I8 (16), that numbers of four bits choose from; mostly absent

`models.grouped_weights` says what they stand for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import TensorInfo
from models.grouped_weights import GROUP, GroupedWeight

METHOD: Final = "groups"
NUMBERS: Final = "weight_numbers"
_SCALES: Final = "weight_scales"
_FIFTHS: Final = "weight_fifths"
_MINIMUMS: Final = "weight_minimums"
_VALUES: Final = "weight_values"
_COUNT: Final = 16
_PLACES: Final = torch.arange(8, dtype=torch.uint8)
CONFIG: Final[Mapping[str, Any]] = {"quant_method": METHOD}
"""The `quantization_config` of a checkpoint that has any."""


@dataclass(frozen=True, slots=True)
class GroupedParts:
    """The tensors of one weight, by their names in the files.

    Attributes:
        shape: (outputs, inputs).
    """

    numbers: str
    scales: str
    minimums: str | None
    values: str | None
    fifths: str | None
    bits: int
    shape: tuple[int, int]

    @property
    def names(self) -> list[str]:
        tables = (self.scales, self.minimums, self.values, self.fifths)
        return [self.numbers, *(name for name in tables if name is not None)]

    def is_grouped(self, _: Callable[[str], torch.Tensor]) -> bool:
        return True

    def grouped(self, read: Callable[[str], torch.Tensor]) -> GroupedWeight:
        """Return the weight as it is stored."""
        numbers = read(self.numbers)
        if self.bits < 8:
            numbers = torch.stack([numbers & 15, numbers >> 4], 2).flatten(1)
        if self.fifths is not None:
            numbers += (read(self.fifths)[:, :, None] >> _PLACES & 1).flatten(1) << 4
        minimums = read(self.minimums) if self.minimums is not None else None
        values = tuple(read(self.values).tolist()) if self.values is not None else None
        return GroupedWeight(self.bits, numbers, read(self.scales), minimums, values)

    def floats(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the weight, float32 of `shape`."""
        return self.grouped(read).floats()


def tensors_of(name: str, weight: GroupedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of the weight of that name (`q.weight`), whose inputs are whole groups."""
    module, numbers = name.rpartition(".")[0], weight.numbers
    fifths = None
    if weight.bits == 5:
        fifths = (numbers.view(len(numbers), -1, 8) >> 4 << _PLACES).sum(2, dtype=torch.uint8)
    if weight.bits < 8:
        numbers = numbers[:, 0::2] & 15 | numbers[:, 1::2] << 4
    values = torch.tensor(weight.values, dtype=torch.int8) if weight.values is not None else None
    tensors = {NUMBERS: numbers, _SCALES: weight.scales, _MINIMUMS: weight.minimums}
    tensors |= {_VALUES: values, _FIFTHS: fifths}
    return {f"{module}.{end}": part.contiguous() for end, part in tensors.items() if part is not None}


def grouped_parts(name: str, tensors: Mapping[str, TensorInfo], checkpoint: Path) -> GroupedParts:
    """Return the tensors of the weight whose numbers have this name.

    Raises:
        CheckpointError: one of them is missing, or has the wrong type or shape.
    """
    module, numbers = name.rpartition(".")[0], tensors[name]
    ends = (_SCALES, _MINIMUMS, _VALUES, _FIFTHS)
    scales, minimums, values, fifths = (f"{module}.{end}" for end in ends)
    found = tensors.get(scales)
    tables = [tensors[part] for part in (scales, minimums) if part in tensors]
    if (
        (numbers.dtype, len(numbers.shape)) != ("U8", 2)
        or found is None
        or any((table.dtype, len(table.shape)) != ("F32", 2) for table in tables)
    ):
        raise CheckpointError(
            f"{checkpoint}: {name} is {numbers.dtype}{list(numbers.shape)}, expected a matrix of U8, and "
            f"ones of F32 in {scales} and {minimums}, if there is any; convert the file again"
        )
    outputs, groups = found.shape
    bits = 4 if numbers.shape[1] * 2 == groups * GROUP else 8
    expected = (outputs, groups * GROUP * bits // 8)
    if tuple(numbers.shape) != expected or (minimums in tensors and tensors[minimums].shape != found.shape):
        raise CheckpointError(
            f"{checkpoint}: {name} is {list(numbers.shape)} with scales of {list(found.shape)}, expected "
            f"{list(expected)}; convert the file again"
        )
    table = tensors.get(values)
    if table is not None and ((table.dtype, table.shape) != ("I8", (_COUNT,)) or bits != 4):
        raise CheckpointError(
            f"{checkpoint}: {values} is {table.dtype}{list(table.shape)} for numbers of {bits} bits, "
            f"expected I8[{_COUNT}] for numbers of 4; convert the file again"
        )
    of_fifths = tensors.get(fifths)
    wanted = (outputs, groups * GROUP // 8)
    if of_fifths is not None and ((of_fifths.dtype, of_fifths.shape) != ("U8", wanted) or bits != 4):
        raise CheckpointError(
            f"{checkpoint}: {fifths} is {of_fifths.dtype}{list(of_fifths.shape)} beside numbers of {bits} "
            f"bits, expected U8{list(wanted)} beside numbers of 4; convert the file again"
        )
    return GroupedParts(
        name,
        scales,
        minimums if minimums in tensors else None,
        values if table is not None else None,
        fifths if of_fifths is not None else None,
        bits + (of_fifths is not None),
        (outputs, groups * GROUP),
    )
