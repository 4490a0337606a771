"""Weights in groups stand for the same floats in every form."""

import pytest
import torch

from models.grouped_weights import GroupedWeight, integers_for, per_group


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

    for other in (one.with_minimums(), one.widened(8)):
        torch.testing.assert_close(other.floats(), one.floats(), rtol=1e-6, atol=1e-6)
    assert one.widened(8).bits == 8
    assert one.with_minimums().with_minimums() is not one


def test_a_larger_group_is_several_of_32() -> None:
    values = torch.tensor([[1.0, 2.0]])

    assert per_group(values, 64, 128).tolist() == [[1, 1, 2, 2]]
    assert per_group(values, 96, 160).tolist() == [[1, 1, 1, 2, 2]]
    assert per_group(values[:, :1], 80, 80).tolist() == [[1, 1, 1]]


def test_a_number_of_four_bits_can_choose_a_value() -> None:
    values = tuple(range(-128, 128, 16))
    one = weight()
    chosen = GroupedWeight(4, one.numbers, one.scales, values=values)

    found = chosen.floats()

    expected = torch.tensor(values)[one.numbers.long()] * one.scales.repeat_interleave(32, 1)[:, :80]
    torch.testing.assert_close(found, expected)
    for other in (chosen.widened(8), chosen.with_minimums()):
        assert (other.bits, other.values) == (8, None)
        torch.testing.assert_close(other.floats(), expected)


def test_multiples_of_one_number_become_exact_integers() -> None:
    table = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -6.0)

    integers, factor = integers_for(table)

    assert [one * factor for one in integers] == pytest.approx(table, rel=1e-15)
    assert 64 <= max(map(abs, integers)) <= 127


def test_integers_stay_what_they_are() -> None:
    assert integers_for((0.0, 3.0, -128.0, 12.0)) == ((0, 3, -128, 12), 1.0)


def test_values_that_are_no_integers_are_rounded_for_products_only() -> None:
    one, values = weight(), tuple(number / 7.3 for number in range(-8, 8))
    chosen = GroupedWeight(4, one.numbers, one.scales, values=values)

    whole = chosen.with_integers()

    expected = torch.tensor(values)[one.numbers.long()] * one.scales.repeat_interleave(32, 1)[:, :80]
    torch.testing.assert_close(chosen.floats(), expected)
    assert all(float(value).is_integer() for value in whole.values or ())
    error = (whole.floats() - expected).abs()
    assert 0 < error.max() < expected.abs().max() / 254
    assert torch.equal(chosen.widened(8).floats(), whole.floats())


def test_other_numbers_become_the_nearest_integers() -> None:
    table = (-1.0, -0.6961928, -0.52507305, 0.0795803, 0.33791524, 1.0)

    integers, factor = integers_for(table)

    assert max(abs(one * factor - number) for one, number in zip(integers, table, strict=True)) < 1 / 254
