"""MXFP4: weights of four bits with a power of two per 32 of them, as gpt-oss's experts are published.

    experts.gate_up_proj_blocks   (experts, outputs, inputs / 32, 16) bytes, two numbers in each
    experts.gate_up_proj_scales   (experts, outputs, inputs / 32) bytes, exponents with an offset of 127

Source: OCP Microscaling Formats (MX) specification 1.0, sections 5.3.3 (FP4 E2M1) and 5.4.1 (E8M0). Each
number is read exactly: it fits even in bfloat16. All are multiples of one half, so as weights in groups
(`models.grouped_weights`) they choose integers from a table, exactly, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from models.checkpoints.weights import TensorInfo
from models.grouped_weights import GroupedWeight

METHOD: Final = "mxfp4"
BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"
_PER_SCALE: Final = 32
_OFFSET: Final = 127
_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of E2M1 with a positive sign; the fourth bit is the sign."""
_NUMBERS: Final = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
UNIT: Final = 0.5
VALUES: Final = tuple(int(number / UNIT) for number in _NUMBERS)
"""The numbers as multiples of `UNIT`."""
_PARTS: Final = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
"""The rows of the matrices in a weight of experts: those of gate and up alternate."""


@dataclass(frozen=True, slots=True)
class Mxfp4Parts:
    """The tensors of one weight, by their names in the files.

    Attributes:
        shape: the shape of the weight as transformers has it: (experts, inputs, outputs).
    """

    blocks: str
    scales: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, blocks: str, shape: tuple[int, ...]) -> "Mxfp4Parts":
        """Return the parts whose blocks have this name and shape."""
        experts, outputs, groups, each = shape
        scales = blocks.removesuffix(BLOCKS) + SCALES
        return cls(blocks, scales, (experts, groups * each * 2, outputs))

    @property
    def names(self) -> list[str]:
        return [self.blocks, self.scales]

    def floats(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the weight, float32 of `shape`."""
        numbers = torch.tensor(_NUMBERS)[_unpacked(read(self.blocks)).long()]
        scaled = numbers * scales_of(read(self.scales))[..., None]
        return scaled.flatten(-2).transpose(1, 2).contiguous()

    def grouped(self, name: str, files: Mapping[str, Any]) -> dict[str, Callable[[], GroupedWeight]]:
        """Return readers of each expert's matrices as they are stored: (outputs, inputs).

        Args:
            name: of the weight. The matrices of `experts.down_proj` are `experts.0.down_proj` and so on.
            files: slices of the files, by the names of tensors.
        """
        module, _, kind = name.rpartition(".")

        def read(number: int, rows: slice) -> GroupedWeight:
            blocks, scales = (files[part][number][rows] for part in (self.blocks, self.scales))
            return GroupedWeight(4, _unpacked(blocks).flatten(1), scales_of(scales) * UNIT, values=VALUES)

        return {
            f"{module}.{number}.{part}": partial(read, number, rows)
            for number in range(self.shape[0])
            for part, rows in _PARTS.get(kind, {}).items()
        }


def _unpacked(blocks: torch.Tensor) -> torch.Tensor:
    """The numbers in bytes, the first of two in the lower half: (..., 16) becomes (..., 32)."""
    stored = blocks.view(torch.uint8)
    return torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2)


def scales_of(stored: torch.Tensor) -> torch.Tensor:
    """Return the powers of two that bytes stand for, float32."""
    exponents = stored.view(torch.uint8).int() - _OFFSET
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def is_weight(blocks: TensorInfo, scales: TensorInfo | None) -> bool:
    """Return whether blocks and their scales are a weight."""
    shape = blocks.shape
    is_blocks = len(shape) == 4 and shape[-1] * 2 == _PER_SCALE and blocks.dtype == "U8"
    return is_blocks and scales is not None and (scales.dtype, scales.shape) == ("U8", shape[:-1])
