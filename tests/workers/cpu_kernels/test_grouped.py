"""Products with weights of four and eight bits in groups: exact but for the rounding of activations."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from models.grouped_weights import GROUP, GroupedWeight
from tests.workers.cpu_kernels.libraries import NAMES, library
from workers.cpu_kernels.library import Library, Matrix
from workers.cpu_kernels.packing import DTYPES, MatrixPacker
from workers.kv_engine.quantisation.forms import Weight, rounded

ROWS = (1, 2, 3, 4, 5, 9, 13, 14, 16, 17, 24, 31, 40, 200)
SHAPES = [(64, 32), (200, 96), (517, 80), (70, 3008), (17, 1104)]
"""Whole and partial units of 64 columns; whole and partial groups of 32 inputs."""


class Products(MatrixPacker):
    """A packer that multiplies."""

    def __init__(self, by: Library, dtype: torch.dtype, threads: int) -> None:
        self._by, self.context, self._of = by, by.open(threads), DTYPES[dtype]
        super().__init__(by, self.context, dtype)

    def product(self, matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
        y = torch.full((len(x), matrix.n), 7.0)
        told = ctypes.byref(matrix), x.data_ptr(), len(x), y.data_ptr(), matrix.n
        assert self._by.linear(self.context, self._of, *told) == 0
        return y


@contextmanager
def products(name: str, *, dtype: torch.dtype = torch.float32, threads: int = 2) -> Iterator[Products]:
    by = library(name)
    found = Products(by, dtype, threads)
    yield found
    by.close(found.context)


VALUES = (-128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)
"""No two of them have the same distance, and the first has no counterpart."""


def weight_of(
    n: int,
    k: int,
    bits: int,
    *,
    parts: int = 1,
    has_minimums: bool = False,
    values: tuple[int, ...] | None = None,
) -> GroupedWeight:
    """A weight with any numbers, and scales of several magnitudes."""
    by = torch.Generator().manual_seed(n + k + bits)
    groups = -(-k // GROUP) * parts
    scales = torch.rand(n, groups, generator=by) * 2.0 ** torch.randint(-9, -4, (n, groups), generator=by)
    scales = scales.half().float()
    return GroupedWeight(
        bits,
        torch.randint(0, 2**bits, (n, k), generator=by, dtype=torch.uint8),
        scales,
        (scales * -(2.0 ** (bits - 2))).half().float() if has_minimums else None,
        values,
    )


def inputs(rows: int, k: int) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))


KINDS: dict[str, dict[str, Any]] = {
    "4": {"bits": 4},
    "4 with minimums": {"bits": 4, "has_minimums": True},
    "5": {"bits": 5},
    "5 with minimums": {"bits": 5, "has_minimums": True},
    "4 in halves": {"bits": 4, "parts": 2},
    "6": {"bits": 6, "parts": 2},
    "8": {"bits": 8},
    "8 with minimums": {"bits": 8, "has_minimums": True},
    "values": {"bits": 4, "values": VALUES},
    "values in halves": {"bits": 4, "parts": 2, "values": VALUES},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_product_is_that_of_the_rounded_activations(name: str, kind: str, n: int, k: int) -> None:
    weight = weight_of(n, k, **KINDS[kind])
    with products(name) as one:
        matrix = one.stack([weight])
        assert (matrix.bits, matrix.has_minimums, matrix.has_values) == (
            weight.bits,
            weight.minimums is not None,
            weight.values is not None,
        )
        for rows in ROWS:
            x = inputs(rows, k)
            exact = rounded(x).double() @ weight.floats().double().T
            terms = rounded(x).abs().double() @ weight.floats().abs().double().T
            assert ((one.product(matrix, x) - exact).abs() <= 3e-6 * terms + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_all_processors_come_to_the_same_bits(kind: str, n: int, k: int) -> None:
    weight = weight_of(n, k, **KINDS[kind])
    found = []
    for name in NAMES:
        with products(name) as one:
            matrix = one.stack([weight])
            found.append([one.product(matrix, inputs(rows, k)) for rows in ROWS])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_comes_to_the_same_bits_whoever_is_beside_it_and_whoever_computes(name: str, kind: str) -> None:
    weight, x = weight_of(300, 112, **KINDS[kind]), inputs(40, 112)
    with products(name, threads=1) as one, products(name, threads=3) as three:
        matrices = one.stack([weight]), three.stack([weight])
        together = three.product(matrices[1], x)

        assert torch.equal(
            together, torch.cat([one.product(matrices[0], row[None].contiguous()) for row in x])
        )
        assert torch.equal(
            together, torch.cat([three.product(matrices[1], part.contiguous()) for part in (x[:7], x[7:])])
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_weights_can_be_had_as_floats(name: str, dtype: torch.dtype, kind: str, n: int, k: int) -> None:
    weight = weight_of(n, k, **KINDS[kind])
    with products(name, dtype=dtype) as one:
        found = one.dequantised(weight)
    # The product and the sum with a minimum may be rounded at once.
    torch.testing.assert_close(
        found.float(),
        weight.floats().to(dtype).float(),
        rtol=2**-8 if dtype == torch.bfloat16 else 1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_activations_are_rounded_first(name: str) -> None:
    weight, x = weight_of(70, 96, 8), inputs(19, 96)
    with products(name, dtype=torch.bfloat16) as narrow, products(name) as wide:
        found = narrow.product(narrow.stack([weight]), x)
        assert torch.equal(found, wide.product(wide.stack([weight]), x.bfloat16().float()))
    assert not torch.equal(rounded(x), rounded(x.bfloat16().float()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_a_number_stays_none_in_its_row_and_its_column(name: str, bits: int) -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(0))
    weight[5, 40], weight[9, 3] = torch.nan, torch.inf
    x = inputs(20, 96)
    x[2, 7], x[18, 90] = torch.inf, torch.nan
    with products(name) as one:
        y = one.product(one.stack([one.quantised(weight, bits)]), x)
    expected = torch.zeros(20, 70, dtype=torch.bool)
    expected[[2, 18]] = True
    expected[:, [5, 9]] = True
    assert torch.equal(y.isnan(), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [2.0**-90, 2.0**-40, 2.0**60])
def test_weights_of_any_magnitude_are_multiplied(name: str, magnitude: float) -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(0)) * magnitude
    x = inputs(5, 96)
    with products(name) as one:
        found = one.product(one.stack([one.quantised(weight, 8)]), x)
    exact = x @ weight.T
    assert (found - exact).std() < 0.012 * exact.std()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    with products(name) as one:
        matrix = one.stack([one.quantised(torch.zeros(64, 64), 4)])
        assert not one.product(matrix, inputs(20, 64)).any()
        full = one.stack([weight_of(64, 64, 4, has_minimums=True)])
        assert not one.product(full, torch.zeros(20, 64)).any()


@pytest.mark.parametrize("name", NAMES)
def test_matrices_of_several_kinds_are_stacked(name: str) -> None:
    weights = [weight_of(48, 96, **kind) for kind in KINDS.values() if "parts" not in kind]
    x = inputs(17, 96)
    with products(name) as one:
        stacked = one.stack(weights)
        found, apart = one.product(stacked, x), [one.product(one.stack([weight]), x) for weight in weights]
    assert (stacked.bits, bool(stacked.has_minimums)) == (8, True)
    torch.testing.assert_close(found, torch.cat(apart, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_values_of_one_table_stay_indices_and_those_of_two_get_eight_bits(name: str) -> None:
    one, same = weight_of(48, 96, 4, values=VALUES), weight_of(64, 96, 4, values=VALUES)
    other = weight_of(64, 96, 4, values=VALUES[::-1])
    x = inputs(17, 96)
    with products(name) as by:
        apart = [by.product(by.stack([weight]), x) for weight in (one, same, other)]
        alike, mixed = by.stack([one, same]), by.stack([one, other])
        assert [(matrix.bits, matrix.has_values) for matrix in (alike, mixed)] == [(4, 1), (8, 0)]
        assert torch.equal(by.product(alike, x), torch.cat(apart[:2], 1))
        assert torch.equal(by.product(mixed, x), torch.cat([apart[0], apart[2]], 1))


@pytest.mark.parametrize("name", NAMES)
def test_beside_floats_all_are_floats(name: str) -> None:
    weights: list[Weight] = [weight_of(48, 96, 4), torch.randn(64, 96)]
    with products(name) as one:
        matrix = one.stack(weights)
        x = inputs(3, 96)
        found = one.product(matrix, x)
    assert not matrix.bits
    assert isinstance(weights[0], GroupedWeight)
    torch.testing.assert_close(found[:, :48], x @ weights[0].floats().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_pairs_lie_beside_each_other_whoever_does_it(name: str) -> None:
    gate, up, x = weight_of(80, 64, 4), weight_of(80, 64, 4), inputs(3, 64)
    up = GroupedWeight(4, up.numbers.flip(0), up.scales.flip(0))
    with products(name) as one, products(name, threads=3) as three:
        pairs = [by.product(by.interleave(gate, up), x) for by in (one, three)]
        apart = [one.product(one.stack([weight]), x) for weight in (gate, up)]
    assert torch.equal(pairs[0], pairs[1])
    assert torch.equal(pairs[0].view(3, -1, 2, 16).transpose(1, 2).reshape(3, 2, -1), torch.stack(apart, 1))


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_four_bits_beside_others_of_five_get_five(name: str) -> None:
    weights, x = [weight_of(48, 96, 4), weight_of(64, 96, 5, has_minimums=True)], inputs(17, 96)
    with products(name) as one:
        stacked = one.stack(weights)
        found, apart = one.product(stacked, x), [one.product(one.stack([weight]), x) for weight in weights]
    assert (stacked.bits, bool(stacked.has_minimums)) == (5, True)
    torch.testing.assert_close(found, torch.cat(apart, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_six_bits_beside_others_are_rounded_to_eight(name: str) -> None:
    six, four, x = weight_of(48, 96, 6, parts=2), weight_of(64, 96, 4), inputs(17, 96)
    with products(name) as one:
        matrix = one.stack([six, four])
        found, exact = one.product(matrix, x), one.product(one.stack([six]), x)
    assert (matrix.bits, bool(matrix.has_minimums)) == (8, True)
    assert 0 < (found[:, :48] - exact).std() < 0.01 * exact.std()


@pytest.mark.parametrize(
    ("bits", "parts", "of_a_weight"), [(4, 1, 4.5), (4, 2, 5), (5, 1, 5.5), (6, 2, 7), (8, 1, 8.5)]
)
def test_a_weight_takes_its_bits_and_those_of_its_scales(bits: int, parts: int, of_a_weight: float) -> None:
    with products(NAMES[-1]) as one:
        one.stack([weight_of(1024, 1024, bits, parts=parts)])
        assert one.nbytes * 8 == of_a_weight * 1024 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_the_nearest_and_the_same_by_all(bits: int, dtype: torch.dtype) -> None:
    by = torch.Generator().manual_seed(0)
    weight = (torch.randn(200, 112, generator=by) * 0.02).to(dtype)
    found = []
    for name in NAMES:
        with products(name) as one:
            found.append(one.quantised(weight, bits))
    assert all(torch.equal(one.numbers, found[0].numbers) for one in found[1:])
    assert all(torch.equal(one.scales, found[0].scales) for one in found[1:])
    error = (found[0].floats() - weight.float()).square().mean()
    step = torch.nn.functional.pad(weight.float(), (0, 16)).reshape(200, 4, 32).abs().amax(2) / (
        2 ** (bits - 1) - 0.5
    )
    assert error < (step.square().mean() / 12) * 1.1  # that of an even rounding with the plain scale


@pytest.mark.parametrize("unknown", [0.0, 1e-30, torch.inf, torch.nan])
@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_without_a_known_importance_keep_their_weights(bits: int, unknown: float) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    importance = torch.ones(128)
    importance[:32] = unknown
    with products(NAMES[0]) as one:
        plain, weighted = one.quantised(weight, bits), one.quantised(weight, bits, importance)
    errors = [(found.floats() - weight)[:, :32].square().mean() for found in (plain, weighted)]
    assert errors[1] < 1.1 * errors[0]


def test_errors_are_kept_from_where_they_matter() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    importance = torch.ones(96)
    importance[::8] = 100.0
    with products(NAMES[0]) as one:
        plain, weighted = one.quantised(weight, 4), one.quantised(weight, 4, importance)
    errors = [((found.floats() - weight).square() * importance).mean() for found in (plain, weighted)]
    assert errors[1] < 0.8 * errors[0]
