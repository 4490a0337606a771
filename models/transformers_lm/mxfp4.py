"""MXFP4: weights of four bits with a power of two per 32 of them, as gpt-oss's experts are published.

    experts.gate_up_proj_blocks   (experts, outputs, inputs / 32, 16) bytes, two numbers in each
    experts.gate_up_proj_scales   (experts, outputs, inputs / 32) bytes, exponents with an offset of 127

Source: OCP Microscaling Formats (MX) specification 1.0, sections 5.3.3 (FP4 E2M1) and 5.4.1 (E8M0). Each
number is read exactly: it fits even in bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

METHOD: Final = "mxfp4"
BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"
_PER_SCALE: Final = 32
_OFFSET: Final = 127
_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of E2M1 with a positive sign; the fourth bit is the sign."""


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
        numbers = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
        stored = read(self.blocks).view(torch.uint8)
        # The first of two numbers is in the lower half of its byte.
        pairs = torch.stack([numbers[(stored & 15).long()], numbers[(stored >> 4).long()]], dim=-1)
        exponents = read(self.scales).view(torch.uint8).int() - _OFFSET
        scaled = torch.ldexp(pairs.flatten(-2), exponents[..., None])
        return scaled.flatten(-2).transpose(1, 2).contiguous()


def is_weight(shape: tuple[int, ...], dtype: str, scales: tuple[int, ...] | None) -> bool:
    """Return whether blocks of this shape and dtype and their scales are a weight."""
    is_blocks = len(shape) == 4 and shape[-1] * 2 == _PER_SCALE and dtype == "U8"
    return is_blocks and scales == shape[:-1]
