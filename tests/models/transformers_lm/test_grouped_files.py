"""Weights in groups in files: they come back as they were written, and damaged ones are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import TensorInfo
from models.grouped_weights import GroupedWeight
from models.transformers_lm.grouped_files import grouped_parts, tensors_of

VALUES = tuple(range(-120, 120, 15))
_DTYPES = {torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32"}


def weight(bits: int, *, has_minimums: bool = False, values: tuple[int, ...] | None = None) -> GroupedWeight:
    by = torch.Generator().manual_seed(bits)
    numbers = torch.randint(0, 2**bits, (6, 64), generator=by, dtype=torch.uint8)
    scales = torch.rand(6, 2, generator=by)
    return GroupedWeight(bits, numbers, scales, -scales if has_minimums else None, values)


def told(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(_DTYPES[one.dtype], tuple(one.shape), one.nbytes) for name, one in tensors.items()
    }


@pytest.mark.parametrize(
    "one",
    [
        weight(4),
        weight(4, has_minimums=True),
        weight(5),
        weight(5, has_minimums=True),
        weight(8),
        weight(8, has_minimums=True),
        weight(4, values=VALUES),
    ],
)
def test_they_come_back_as_they_were_written(one: GroupedWeight) -> None:
    tensors = tensors_of("q.weight", one)

    parts = grouped_parts("q.weight_numbers", told(tensors), Path("x"))
    found = parts.grouped(tensors.__getitem__)

    assert set(parts.names) == tensors.keys()
    assert (found.bits, found.values) == (one.bits, one.values)
    assert torch.equal(found.numbers, one.numbers)
    assert torch.equal(found.floats(), one.floats())


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("q.weight_scales", lambda one: one[:5], r"is \[6, 32\] with scales of \[5, 2\], expected \[5, 32\]"),
        ("q.weight_scales", lambda one: one.to(torch.uint8), r"ones of F32 in q.weight_scales"),
        ("q.weight_values", lambda one: one[:15], r"is I8\[15\] for numbers of 4 bits, expected I8\[16\]"),
        ("q.weight_values", lambda one: one.to(torch.uint8), r"is U8\[16\] for numbers of 4 bits"),
        ("q.weight_fifths", lambda one: one[:, :7], r"is U8\[6, 7\] beside numbers of 4 bits, expected U8"),
        ("q.weight_numbers", lambda one: one.repeat(1, 2), r"is I8\[16\] for numbers of 8 bits"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_told(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    tensors = tensors_of("q.weight", weight(4, values=VALUES) if "fifths" not in name else weight(5))
    tensors[name] = change(tensors[name])

    with pytest.raises(CheckpointError, match=why):
        grouped_parts("q.weight_numbers", told(tensors), Path("x"))
