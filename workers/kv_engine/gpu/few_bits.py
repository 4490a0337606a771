"""Matrices of few bits in a GPU's memory, and the choice of their numbers there.

    numbers   (n, k / 2) uint8: of each group of 32 inputs, byte i has input i in its low bits, and input
              16 + i in its high ones. Numbers of eight bits: (n, k), in order
    upper     of numbers of five and six bits, what exceeds four: (n, k / 8) or (n, k / 4). Byte i of a group
              has the bits of four or two bytes of `numbers`, two or four each: those of the lower input first
    scales    (n, tables) of float16: for each group, two halves of it, or as many groups as share one
    minimums  likewise

k is filled up to whole groups; the kernels give what is filled no input. `models.grouped_weights` says what
numbers stand for, and `triton_few_bits` multiplies them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from models.grouped_weights import FLOAT8, GROUP, GroupedWeight, alike, factor_of
from workers.kv_engine.quantisation.forms import relative

_HALF: Final = GROUP // 2
_LEAST: Final = 1e-30
"""Weights below are zero, as in `grouped.h`."""
_TRIES: Final = 4
"""Scales of numbers of four bits that are tried on each side of the first, as in `grouped.h`."""
_STEP: Final = 0.2
_AT_ONCE: Final = 2**24
"""Weights that are quantised at a time: it takes some hundred megabytes."""
_LARGEST_FLOAT: Final = 448.0
"""Of eight bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewBits:
    """A matrix of n outputs and k inputs, as the module describes.

    Attributes:
        inputs: k.
        values: (16,) float32, what numbers of four bits stand for, if they have a table.
        groups: those that share a scale.
        parts: scales of a group, 1 or 2; with 2, `groups` is 1.
        factor: of scales and minimums, a power of two.
        is_float: numbers are floats of eight bits.
    """

    bits: int
    inputs: int
    numbers: torch.Tensor
    upper: torch.Tensor | None
    scales: torch.Tensor
    minimums: torch.Tensor | None
    values: torch.Tensor | None
    groups: int
    parts: int
    factor: float
    is_float: bool

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.numbers), self.inputs

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        tensors = (self.numbers, self.upper, self.scales, self.minimums, self.values)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def packed(weights: Sequence[GroupedWeight], device: torch.device, dtype: torch.dtype) -> FewBits:
    """Return matrices of the same inputs as one, stacked along their outputs.

    Args:
        weights: rounded to a common kind if they have several (`alike`).
        device: of the result.
        dtype: of the model. Scales are float16, and float32 if it is.
    """
    same = alike([_filled(weight.to(device)) for weight in weights])
    first = same[0]
    tables = [torch.cat([weight.scales for weight in same])]
    if first.minimums is not None:
        tables.append(torch.cat([weight.minimums for weight in same if weight.minimums is not None]))
    groups = 1 if first.parts > 1 else _groups_sharing(tables)
    tables = [table[:, ::groups] for table in tables]
    is_exact = dtype is torch.float32
    factor = 1.0 if is_exact else factor_of(tables)
    scales, *minimums = [
        (table / factor).to(torch.float32 if is_exact else torch.float16).contiguous() for table in tables
    ]
    numbers = torch.cat([weight.numbers for weight in same])
    halves = numbers.view(len(numbers), -1, 2, _HALF)
    has_table = first.values is not None and not first.is_float
    return FewBits(
        bits=first.bits,
        inputs=weights[0].shape[1],
        numbers=numbers if first.bits == 8 else _bytes_of(halves & 15, 4),
        upper=_bytes_of(halves >> 4, first.bits - 4) if 4 < first.bits < 8 else None,
        scales=scales,
        minimums=minimums[0] if minimums else None,
        values=first.factors if has_table else None,
        groups=groups,
        parts=first.parts,
        factor=factor,
        is_float=first.is_float,
    )


def _filled(weight: GroupedWeight) -> GroupedWeight:
    filled = torch.nn.functional.pad(weight.numbers, (0, -weight.shape[1] % GROUP))
    return replace(weight, numbers=filled)


def _bytes_of(halves: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of so many bits in bytes, (n, ...), from (n, groups, 2, 16)."""
    pairs = (halves[:, :, 0] | halves[:, :, 1] << bits).flatten(1)
    in_byte = 4 // bits
    places = torch.arange(in_byte, device=pairs.device, dtype=torch.uint8) * (2 * bits)
    return (pairs.view(len(pairs), -1, in_byte) << places).sum(2, dtype=torch.uint8)


def _groups_sharing(tables: Sequence[torch.Tensor]) -> int:
    """The most groups of which all rows have the same scale and minimum: all of them, or a power of two."""
    count = tables[0].shape[1]

    def are_shared(groups: int) -> bool:
        spread = (table[:, ::groups].repeat_interleave(groups, 1)[:, :count] for table in tables)
        return all(torch.equal(table, wide) for table, wide in zip(tables, spread, strict=True))

    if are_shared(count):
        return count
    shared = 1
    while 2 * shared < count and are_shared(2 * shared):
        shared *= 2
    return shared


class GpuQuantiser:
    """Chooses numbers on a device, as `grouped.h` does on a CPU; see `forms.Quantiser`.

    Args:
        device: computes; weights may come from elsewhere.
        dtype: of the model.
        is_float: weights of eight bits become floats.
    """

    rounds_inputs: Final = False

    def __init__(self, device: torch.device, dtype: torch.dtype, *, is_float: bool = False) -> None:
        self._device: Final = device
        self._dtype: Final = dtype
        self._is_float: Final = is_float

    @torch.no_grad()
    def quantised(
        self, weight: torch.Tensor, bits: int, importance: torch.Tensor | None = None
    ) -> GroupedWeight:
        """See `forms.Quantiser`. A weight that is not finite makes its group's scale NaN."""
        k = weight.shape[1]
        rows = max(1, _AT_ONCE // k)
        factors = relative(importance).to(self._device) if importance is not None else None
        found = [self._chosen(part, bits, factors) for part in torch.split(weight, rows)]
        numbers, scales = (torch.cat(parts) for parts in zip(*found, strict=True))
        values = FLOAT8 if self._is_float and bits == 8 else None
        return GroupedWeight(bits, numbers[:, :k].contiguous(), scales, values=values)

    def dequantised(self, weight: GroupedWeight) -> torch.Tensor:
        """See `forms.Quantiser`."""
        return weight.to(self._device).floats().to(self._dtype)

    def _chosen(
        self, weight: torch.Tensor, bits: int, importance: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers (rows, k in whole groups), and scales (rows, groups)."""
        floats = _in_groups(weight.to(self._device, torch.float32))
        if self._is_float and bits == 8:
            return _as_floats(floats)
        factors = torch.ones_like(floats[:1])
        if importance is not None:
            factors = _in_groups(importance[None])
        numbers, scales = _integers(floats, factors, bits)
        return numbers.flatten(1), scales


def _in_groups(rows: torch.Tensor) -> torch.Tensor:
    """(n, groups, 32), filled with zeros."""
    filled = torch.nn.functional.pad(rows, (0, -rows.shape[1] % GROUP))
    return filled.view(len(rows), -1, GROUP)


def _as_floats(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Floats of eight bits, with one scale for each output."""
    flat = groups.flatten(1)
    scales = flat.abs().amax(1, keepdim=True) / _LARGEST_FLOAT
    inverse = torch.where(scales > _LEAST, 1 / scales, 0.0)
    numbers = (flat * inverse).clamp(-_LARGEST_FLOAT, _LARGEST_FLOAT).to(torch.float8_e4m3fn)
    return numbers.view(torch.uint8), scales.expand(-1, groups.shape[1])


def _integers(groups: torch.Tensor, factors: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers and the scale of each group with the least squared error, as `choose` in `grouped.h`.

    Args:
        groups: (n, groups, 32).
        factors: (1, groups, 32) of squared errors.
        bits: of a number.
    """
    zero, tries = 2 ** (bits - 1), _TRIES if bits == 4 else 0
    at = groups.abs().argmax(2, keepdim=True)
    extreme = groups.gather(2, at)
    best = torch.full_like(extreme, -1.0)
    chosen = torch.zeros_like(extreme)
    numbers = torch.zeros_like(groups)
    for attempt in range(-tries, tries + 1):
        # With four bits the largest weight is -8: one step more than +7.
        steps = -(zero + _STEP * attempt) if bits == 4 else zero - 1.0
        tried = (groups * (steps / extreme)).round_().clamp_(-zero, zero - 1)
        along = (factors * groups * tried).sum(2, keepdim=True)
        length = (factors * tried * tried).sum(2, keepdim=True)
        gain = torch.where(length > 0, along * along / length, -1.0)  # what the error is less than without
        is_better = gain > best
        best = torch.where(is_better, gain, best)
        chosen = torch.where(is_better, along / length, chosen)
        numbers = torch.where(is_better, tried, numbers)
    is_zero = extreme.abs() < _LEAST
    chosen = torch.where(is_zero, 0.0, chosen)
    chosen = torch.where(extreme.isfinite(), chosen, torch.nan)
    numbers = torch.where(is_zero | ~extreme.isfinite(), 0.0, numbers)
    return (numbers + zero).to(torch.uint8), chosen[:, :, 0]
