"""Weights in groups stand for the same floats in every form."""

import pytest
import torch

from models.grouped_weights import GroupedWeight, per_group


def weight(bits: int = 4) -> GroupedWeight:
    by = torch.Generator().manual_seed(bits)
    numbers = torch.randint(0, 2**bits, (3, 80), generator=by, dtype=torch.uint8)
    return GroupedWeight(bits, numbers, torch.rand(3, 3, generator=by))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_the_number_less_the_zero_times_the_scale_of_its_group(bits: int) -> None:
    one = weight(bits)

    found = one.floats()

    assert found[1, 40] == (int(one.numbers[1, 40]) - 2 ** (bits - 1)) * one.scales[1, 1]
    assert found[2, 79] == (int(one.numbers[2, 79]) - 2 ** (bits - 1)) * one.scales[2, 2]


def test_minimums_and_more_bits_change_no_weight() -> None:
    one = weight()

    for other in (one.with_minimums(), one.in_bytes()):
        torch.testing.assert_close(other.floats(), one.floats(), rtol=1e-6, atol=1e-6)
    assert one.in_bytes().bits == 8
    assert one.with_minimums().with_minimums() is not one


def test_a_larger_group_is_several_of_32() -> None:
    values = torch.tensor([[1.0, 2.0]])

    assert per_group(values, 64, 128).tolist() == [[1, 1, 2, 2]]
    assert per_group(values, 96, 160).tolist() == [[1, 1, 1, 2, 2]]
    assert per_group(values[:, :1], 80, 80).tolist() == [[1, 1, 1]]
