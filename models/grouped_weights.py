"""Weights of four to eight bits in groups of 32, as our kernels multiply them.

A weight is `scale * (number - zero)`, with a zero of 8, 16, 32 or 128, or `scale * number + minimum`, or
`scale * values[number]`, with a table of sixteen values. Numbers are unsigned. Scale and minimum belong to
an output and to 32 consecutive inputs. Weights of four bits without minimums may have a scale for each half
of such a group, and those of six bits always do. Formats with larger groups (GPTQ, AWQ) repeat theirs.

Floats of eight bits (E4M3) are numbers of eight bits with a table, `FLOAT8`. The GPU kernels alone know them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch

GROUP: Final = 32
"""Inputs of a group. The last group of a row may be smaller."""
_LARGEST: Final = 127
_LARGEST_EXPONENT: Final = 15
"""Of float16, whose largest number is just below 2**16."""
FLOAT8: Final = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist())
"""The values of floats of eight bits, by their bits (Micikevicius et al. 2022); two are NaN."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A matrix of n outputs and k inputs.

    Attributes:
        bits: of a number: 4, 5, 6 or 8.
        numbers: (n, k) uint8, one number in each.
        scales: (n, groups) float32, or (n, 2 * groups).
        minimums: (n, groups) float32; None if weights are `scale * (number - zero)`, as with two scales.
        values: what each number of four bits stands for, or `FLOAT8`; such weights have no minimums.
    """

    bits: int
    numbers: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None = None
    values: tuple[float, ...] | None = None

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def is_float(self) -> bool:
        """True if numbers are floats of eight bits."""
        return self.values is FLOAT8

    @property
    def kind(self) -> tuple[int, int, tuple[float, ...] | None]:
        """Bits, parts and values. Matrices of one kind can be multiplied together (`alike`)."""
        return self.bits, self.parts, self.values

    @property
    def zero(self) -> int:
        """The number of the weight 0, unless there are minimums or values."""
        return int(2 ** (self.bits - 1))

    @property
    def factors(self) -> torch.Tensor:
        """The factor of the scale for each number, (2**bits,) float32."""
        device = self.numbers.device
        if self.values is not None:
            return torch.tensor(self.values, dtype=torch.float32, device=device)
        numbers = torch.arange(2**self.bits, dtype=torch.float32, device=device)
        return numbers if self.minimums is not None else numbers - self.zero

    @property
    def parts(self) -> int:
        """The number of scales of a group."""
        return self.scales.shape[1] // -(-self.numbers.shape[1] // GROUP)

    def to(self, device: torch.device) -> "GroupedWeight":
        """Return the same weight with its tensors on a device."""
        minimums = self.minimums.to(device) if self.minimums is not None else None
        return replace(
            self, numbers=self.numbers.to(device), scales=self.scales.to(device), minimums=minimums
        )

    def outputs(self, start: int, end: int) -> "GroupedWeight":
        """Return the rows of some outputs."""
        minimums = self.minimums[start:end] if self.minimums is not None else None
        return replace(
            self, numbers=self.numbers[start:end], scales=self.scales[start:end], minimums=minimums
        )

    def with_minimums(self) -> "GroupedWeight":
        """Return the same weights with minimums; those of values or with two scales get eight bits."""
        if self.values is not None or self.parts > 1:
            return self.widened(8).with_minimums()
        return self if self.minimums is not None else replace(self, minimums=self.scales * -self.zero)

    def with_integers(self) -> "GroupedWeight":
        """Return the same weights with integers of eight bits as values, to which others are rounded."""
        if self.values is None:
            return self
        values, unit = integers_for(self.values)
        return replace(self, values=values, scales=self.scales * unit)

    def widened(self, bits: int) -> "GroupedWeight":
        """Return the same weights with numbers of more bits, if they have fewer.

        Those with values or two scales get eight bits, to which they are rounded.
        """
        if self.parts > 1 or self.is_float:
            return rounded(self.floats())
        if self.values is not None:
            whole = self.with_integers()
            bytes_of = (whole.factors + 128).to(torch.uint8)
            return GroupedWeight(8, bytes_of[self.numbers.int()], whole.scales)
        if self.bits >= bits:
            return self
        return replace(self.with_minimums(), bits=bits)

    def floats(self) -> torch.Tensor:
        """Return the weights, (n, k) float32."""
        inputs = self.shape[1]
        if inputs % GROUP:
            filled = torch.nn.functional.pad(self.numbers, (0, -inputs % GROUP))
            return replace(self, numbers=filled).floats()[:, :inputs].contiguous()
        if self.is_float:
            numbers = self.numbers.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
        elif self.values is not None:
            numbers = self.factors[self.numbers.int()]
        elif self.minimums is None:
            numbers = self.numbers.to(torch.float32).sub_(self.zero)
        else:
            numbers = self.numbers.to(torch.float32)
        floats = numbers.view(len(numbers), -1, GROUP // self.parts).mul_(self.scales[:, :, None])
        if self.minimums is not None:
            floats.add_(self.minimums[:, :, None])
        return floats.flatten(1)


def alike(weights: Sequence[GroupedWeight]) -> list[GroupedWeight]:
    """Return weights as ones of the same kind, all with minimums or none: that of the most bits.

    They are the same weights if they have one kind, or if none has values or two scales. Others are rounded.
    """
    found = list(weights)
    if len({weight.kind for weight in found}) > 1:
        is_plain = all(weight.values is None and weight.parts == 1 for weight in found)
        most = max(weight.bits for weight in found) if is_plain else 8
        found = [weight.widened(most) for weight in found]
    if any(weight.minimums is not None for weight in found):
        found = [weight.with_minimums() for weight in found]
    return found


def factor_of(tables: Sequence[torch.Tensor]) -> float:
    """Return a power of two, by which scales and minimums are divided to be in the range of float16."""
    most = max(float(table.nan_to_num(0.0, 0.0, 0.0).abs().max()) for table in tables)
    return float(2.0 ** (math.frexp(most)[1] - _LARGEST_EXPONENT)) if most else 1.0


def rounded(weight: torch.Tensor) -> GroupedWeight:
    """Return floats, (n, k) with whole groups, as numbers of eight bits.

    This adds at most 1/254 of the largest weight of a group.
    """
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scales = groups.abs().amax(-1) / _LARGEST
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    numbers = (groups * inverse[..., None]).round() + 128
    return GroupedWeight(8, numbers.to(torch.uint8).flatten(1), scales)


@cache
def integers_for(table: tuple[float, ...]) -> tuple[tuple[int, ...], float]:
    """Return integers of eight bits in the proportions of a table, and what one of them stands for.

    Integers stay what they are. Of others the largest becomes 64 to 127, whichever has the least squared
    error: none if all are multiples of one.
    """
    if all(number.is_integer() and -128 <= number <= 127 for number in map(float, table)):
        return tuple(int(number) for number in table), 1.0
    numbers = torch.tensor(table, dtype=torch.float64)
    most = float(numbers.abs().max()) or 1.0

    def error(steps: int) -> float:
        return float(((numbers / most * steps).round() / steps - numbers / most).square().sum())

    steps = min(range(64, 128), key=error)
    return tuple(int(value) for value in (numbers / most * steps).round()), most / steps


def per_group(values: torch.Tensor, size: int, inputs: int) -> torch.Tensor:
    """Return the values of groups of 32, (n, groups), from those of larger ones, of `size` inputs each.

    `size` is a multiple of 32, unless there is one group.
    """
    count = -(-inputs // GROUP)
    return values.repeat_interleave(max(1, -(-size // GROUP)), 1)[:, :count].contiguous()
