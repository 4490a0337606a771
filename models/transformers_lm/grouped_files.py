"""Weights in groups of 32 in safetensors, as conversions of other formats write them (`models.gguf`).

    q.weight_numbers    U8 (outputs, inputs), or of four bits (outputs, inputs / 2): the first in the low bits
    q.weight_high_bits  U8 (outputs, inputs / 8), the fifth bits of numbers of five; (outputs, inputs / 4),
                        the two high bits of numbers of six: the first in the lowest bits
    q.weight_scales     F32 (outputs, groups); of numbers of six bits, and of some of four,
                        (outputs, 2 * groups)
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
_HIGH_BITS: Final = "weight_high_bits"
_MINIMUMS: Final = "weight_minimums"
_VALUES: Final = "weight_values"
_COUNT: Final = 16
CONFIG: Final[Mapping[str, Any]] = {"quant_method": METHOD}
"""The `quantization_config` of a checkpoint that has any."""


@dataclass(frozen=True, slots=True)
class GroupedParts:
    """The tensors of one weight.

    Attributes:
        module: `q` of `q.weight_numbers`.
        names: those of the tensors in the files.
        shape: (outputs, inputs).
    """

    module: str
    names: list[str]
    bits: int
    shape: tuple[int, int]

    def is_grouped(self, _: Callable[[str], torch.Tensor]) -> bool:
        return True

    def grouped(self, read: Callable[[str], torch.Tensor]) -> GroupedWeight:
        """Return the weight as it is stored."""
        ends = (NUMBERS, _SCALES, _MINIMUMS, _VALUES, _HIGH_BITS)
        found = {end: read(name) for end in ends if (name := f"{self.module}.{end}") in self.names}
        numbers, values = found[NUMBERS], found.get(_VALUES)
        if self.bits < 8:
            numbers = torch.stack([numbers & 15, numbers >> 4], 2).flatten(1)
        if (high := found.get(_HIGH_BITS)) is not None:
            places, mask = _places(self.bits - 4)
            numbers |= (high[:, :, None] >> places & mask).flatten(1) << 4
        chosen = tuple(values.tolist()) if values is not None else None
        return GroupedWeight(self.bits, numbers, found[_SCALES], found.get(_MINIMUMS), chosen)

    def floats(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the weight, float32 of `shape`."""
        return self.grouped(read).floats()


def tensors_of(name: str, weight: GroupedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of the weight of that name (`q.weight`), whose inputs are whole groups."""
    weight = weight.with_integers()
    module, numbers = name.rpartition(".")[0], weight.numbers
    high_bits = None
    if 4 < weight.bits < 8:
        places, _ = _places(weight.bits - 4)
        high_bits = (numbers.view(len(numbers), -1, len(places)) >> 4 << places).sum(2, dtype=torch.uint8)
    if weight.bits < 8:
        numbers = numbers[:, 0::2] & 15 | numbers[:, 1::2] << 4
    values = torch.tensor(weight.values).to(torch.int8) if weight.values is not None else None
    tensors = {NUMBERS: numbers, _SCALES: weight.scales, _MINIMUMS: weight.minimums}
    tensors |= {_VALUES: values, _HIGH_BITS: high_bits}
    return {f"{module}.{end}": part.contiguous() for end, part in tensors.items() if part is not None}


def _places(bits: int) -> tuple[torch.Tensor, int]:
    """The shifts of the numbers of so many bits in a byte, uint8, and their mask."""
    return torch.arange(0, 8, bits, dtype=torch.uint8), 2**bits - 1


def grouped_parts(name: str, tensors: Mapping[str, TensorInfo], checkpoint: Path) -> GroupedParts:
    """Return the tensors of the weight whose numbers have this name.

    Raises:
        CheckpointError: one of them is missing, or has the wrong type or shape.
    """
    module, numbers = name.rpartition(".")[0], tensors[name]
    ends = (_SCALES, _MINIMUMS, _VALUES, _HIGH_BITS)
    scales, minimums, values, high_bits = (f"{module}.{end}" for end in ends)
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
    high = tensors.get(high_bits)
    bits, parts = _form_of(numbers, found, high)
    outputs, groups = found.shape
    inputs = groups * GROUP // parts
    has_no_minimums = values in tensors or parts > 1
    wanted = {
        scales: ("F32", (outputs, -(-groups // parts) * parts)),
        name: ("U8", (outputs, inputs if bits == 8 else inputs // 2)),
        minimums: ("F32", None if has_no_minimums else (outputs, groups)),
        values: ("I8", (_COUNT,) if bits == 4 else None),
        high_bits: ("U8", (outputs, inputs * (bits - 4) // 8) if 4 < bits < 8 else None),
    }
    for part, (dtype, shape) in wanted.items():
        told = tensors.get(part)
        if told is not None and (told.dtype, told.shape) != (dtype, shape):
            expected = "none" if shape is None else f"{dtype}{list(shape)}"
            raise CheckpointError(
                f"{checkpoint}: {part} is {told.dtype}{list(told.shape)}, expected {expected} for numbers of "
                f"{bits} bits with scales of {list(found.shape)}; convert the file again"
            )
    names = [part for part in (name, scales, minimums, values, high_bits) if part in tensors]
    return GroupedParts(module, names, bits, (outputs, inputs))


def _form_of(numbers: TensorInfo, scales: TensorInfo, high_bits: TensorInfo | None) -> tuple[int, int]:
    """The bits of numbers, and the scales of a group, by the bytes of numbers for each scale."""
    parts = 2 if numbers.shape[1] * 4 == scales.shape[1] * GROUP else 1
    if high_bits is not None:
        return 6 if parts == 2 else 5, parts
    return (4, parts) if parts == 2 or numbers.shape[1] * 2 == scales.shape[1] * GROUP else (8, parts)
