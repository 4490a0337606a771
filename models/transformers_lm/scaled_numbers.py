"""Weights whose numbers have a byte each: floats of eight bits, or integers, with a scale for each block."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch

from models.checkpoints.files import CheckpointError
from models.grouped_weights import FLOAT8, GROUP, GroupedWeight, per_group


@dataclass(frozen=True, slots=True)
class ScaledParts:
    """The tensors of one quantised weight, by their names in the files.

    Attributes:
        shape: the shape of the weight.
        block: the rows and columns that share a scale.
        divisor: of the scales.
        bits: of its numbers, which are integers of at most so many bits, one in a byte; None if they are
            floats of eight bits.
        is_e4m3: they are floats of this kind.
    """

    weight: str
    scale: str
    zeros: str | None
    shape: tuple[int, int]
    block: tuple[int, int]
    divisor: int = 1
    bits: int | None = None
    is_e4m3: bool = False

    @property
    def blocks(self) -> int:
        """The number of scales."""
        return ceil(self.shape[0] / self.block[0]) * ceil(self.shape[1] / self.block[1])

    @property
    def names(self) -> list[str]:
        return [self.weight, self.scale, *([self.zeros] if self.zeros is not None else [])]

    def floats(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the weight, float32 of `shape`."""
        weight = read(self.weight).to(torch.float32)
        if self.zeros is not None:
            weight -= self._spread(read(self.zeros))
        weight *= self._spread(read(self.scale)) / self.divisor
        return weight

    def is_grouped(self, _: Callable[[str], torch.Tensor]) -> bool:
        """True if its numbers are integers, and its scales are those of whole groups."""
        return self.bits is not None and self._has_whole_groups

    @property
    def is_float8(self) -> bool:
        """True if its numbers are `FLOAT8`, and its scales are those of whole groups."""
        return self.is_e4m3 and self.zeros is None and self._has_whole_groups

    @property
    def _has_whole_groups(self) -> bool:
        wide = self.block[1]
        return wide >= self.shape[1] or not wide % GROUP

    def grouped(self, read: Callable[[str], torch.Tensor]) -> GroupedWeight:
        """Return the weight as it is stored.

        Raises:
            CheckpointError: its numbers have more bits.
        """
        (rows, columns), wide = self.shape, self.block[1]
        scale, zeros = (
            per_group(self._spread(table)[:, :: max(wide, 1)].expand(rows, -1), wide, columns)
            if table is not None
            else None
            for table in (
                read(self.scale).to(torch.float32) / self.divisor,
                read(self.zeros) if self.zeros is not None else None,
            )
        )
        assert scale is not None
        if self.is_e4m3:
            return GroupedWeight(8, read(self.weight).view(torch.uint8), scale, values=FLOAT8)
        bits = 4 if self.bits is not None and self.bits <= 4 else 8
        zero = 2 ** (bits - 1)
        numbers = read(self.weight).to(torch.int16) + zero
        if bool((numbers < 0).any()) or bool((numbers >= 2 * zero).any()):
            raise CheckpointError(
                f"{self.weight} has numbers from {int(numbers.min()) - zero} to {int(numbers.max()) - zero}, "
                f"expected integers of {bits} bits; download it again"
            )
        minimums = None if zeros is None or not bool(zeros.any()) else (zeros + zero) * -scale
        return GroupedWeight(bits, numbers.to(torch.uint8), scale, minimums)

    def _spread(self, stored: torch.Tensor) -> torch.Tensor:
        """Scales or zero points, expanded so that they broadcast with the weight."""
        rows, columns = self.shape
        high, wide = self.block
        found = stored.to(torch.float32).reshape(ceil(rows / high), ceil(columns / wide))
        if 1 < high < rows:
            found = found.repeat_interleave(high, 0)[:rows]
        return found.repeat_interleave(wide, 1)[:, :columns] if 1 < wide < columns else found
