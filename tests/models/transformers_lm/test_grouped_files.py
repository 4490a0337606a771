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


def weight(
    bits: int, *, parts: int = 1, has_minimums: bool = False, values: tuple[int, ...] | None = None
) -> GroupedWeight:
    by = torch.Generator().manual_seed(bits)
    numbers = torch.randint(0, 2**bits, (6, 64), generator=by, dtype=torch.uint8)
    scales = torch.rand(6, 2 * parts, generator=by)
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
        weight(4, parts=2),
        weight(6, parts=2),
        weight(8),
        weight(8, has_minimums=True),
        weight(4, values=VALUES),
        weight(4, parts=2, values=VALUES),
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


Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    ("bits", "name", "change", "why"),
    [
        (4, "scales", lambda one: one[:5], r"numbers is U8\[6, 32\], expected U8\[5, 32\] for numbers of 4"),
        (4, "scales", lambda one: one.to(torch.uint8), "ones of F32 in q.weight_scales"),
        (4, "values", lambda one: one[:15], r"is I8\[15\], expected I8\[16\] for numbers of 4 bits"),
        (4, "values", lambda one: one.to(torch.uint8), r"is U8\[16\], expected I8\[16\]"),
        (4, "numbers", lambda one: one.repeat(1, 2), r"is I8\[16\], expected none for numbers of 8 bits"),
        (5, "high_bits", lambda one: one[:, :7], r"is U8\[6, 7\], expected U8\[6, 8\] for numbers of 5 bits"),
        (
            6,
            "high_bits",
            lambda one: one[:, :7],
            r"is U8\[6, 7\], expected U8\[6, 16\] for numbers of 6 bits",
        ),
        (
            6,
            "scales",
            lambda one: one[:, :3],
            r"numbers is U8\[6, 32\], expected U8\[6, 48\] for numbers of 5",
        ),
    ],
)
def test_parts_that_do_not_fit_are_told(bits: int, name: str, change: Change, why: str) -> None:
    tensors = tensors_of(
        "q.weight", weight(bits, parts=2 if bits == 6 else 1, values=VALUES if bits == 4 else None)
    )
    tensors[f"q.weight_{name}"] = change(tensors[f"q.weight_{name}"])

    with pytest.raises(CheckpointError, match=why):
        grouped_parts("q.weight_numbers", told(tensors), Path("x"))


@pytest.mark.parametrize(("bits", "columns"), [(4, 2), (6, 4)])
def test_neither_values_nor_six_bits_have_minimums(bits: int, columns: int) -> None:
    tensors = tensors_of(
        "q.weight", weight(bits, parts=2 if bits == 6 else 1, values=VALUES if bits == 4 else None)
    )
    tensors["q.weight_minimums"] = torch.zeros(6, columns)

    with pytest.raises(CheckpointError, match=r"q.weight_minimums is F32.*, expected none"):
        grouped_parts("q.weight_numbers", told(tensors), Path("x"))


def test_six_bits_have_whole_groups() -> None:
    one = weight(6, parts=2)
    half = GroupedWeight(6, one.numbers[:, :48].contiguous(), one.scales[:, :3])

    with pytest.raises(CheckpointError, match=r"q.weight_scales is F32\[6, 3\], expected F32\[6, 4\]"):
        grouped_parts("q.weight_numbers", told(tensors_of("q.weight", half)), Path("x"))
