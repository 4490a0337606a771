"""Weights in all forms that the GPU kernels multiply."""

from typing import Final

import torch

from models.grouped_weights import FLOAT8, GROUP, GroupedWeight

CASES: Final = (
    *("4", "5", "8", "4 with minimums", "5 with minimums", "8 with minimums", "4 in halves", "6 in halves"),
    *("4 with values", "4 with values in halves", "4 in groups of 128", "floats of 8"),
)


def case(name: str, outputs: int = 70, inputs: int = 96) -> GroupedWeight:
    """A random weight of a form."""
    generator = torch.Generator().manual_seed(0)
    groups = -(-inputs // GROUP)

    def scales(count: int = groups) -> torch.Tensor:
        return torch.rand(outputs, count, generator=generator) + 0.1

    bits = int(name.removeprefix("floats of ")[0])
    numbers = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, generator=generator)
    if name.endswith("minimums"):
        return GroupedWeight(bits, numbers, scales(), -5 * scales())
    halves = 2 if name.endswith("halves") else 1
    if "values" in name:
        values = tuple(torch.randn(16, generator=generator).tolist())
        return GroupedWeight(4, numbers, scales(halves * groups), values=values)
    if halves > 1:
        return GroupedWeight(bits, numbers, scales(halves * groups))
    if name.endswith("128"):
        shared = scales(-(-groups // 4)).repeat_interleave(4, 1)[:, :groups].contiguous()
        return GroupedWeight(4, numbers, shared)
    if name.startswith("floats"):
        finite = numbers.where(numbers & 127 != 127, 0)
        return GroupedWeight(8, finite, scales(1).expand(-1, groups), values=FLOAT8)
    return GroupedWeight(bits, numbers, scales())
