"""Matrices of few bits for GPUs: their memory, the choice of numbers, and what is stacked."""

import pytest
import torch

from models.grouped_weights import FLOAT8, GroupedWeight
from tests.workers.kv_engine.gpu.few_bits_cases import case
from workers.cpu_kernels import library
from workers.cpu_kernels.packing import MatrixPacker
from workers.kv_engine.gpu.few_bits import GpuQuantiser, packed

CPU = torch.device("cpu")
NEEDED = {"4": 4.5, "5": 5.5, "8": 8.5, "4 with minimums": 5, "6 in halves": 7, "4 in groups of 128": 4.125}


@pytest.mark.parametrize("name", NEEDED)
def test_a_weight_takes_its_bits_and_its_share_of_a_scale(name: str) -> None:
    found = packed([case(name, 64, 1024)], CPU, torch.bfloat16)

    assert found.nbytes * 8 / (64 * 1024) == NEEDED[name]


def test_floats_of_eight_bits_have_one_scale_for_each_output() -> None:
    found = packed([case("floats of 8", 64, 1024)], CPU, torch.bfloat16)

    assert found.is_float
    assert found.scales.shape == (64, 1)


def test_scales_are_shared_by_as_many_groups_as_have_the_same() -> None:
    weight = case("4", 3, 320)
    every_third = weight.scales[:, ::3].repeat_interleave(3, 1)[:, :10].contiguous()
    every_fourth = weight.scales[:, ::4].repeat_interleave(4, 1)[:, :10].contiguous()

    assert packed([GroupedWeight(4, weight.numbers, every_third)], CPU, torch.float32).groups == 1
    assert packed([GroupedWeight(4, weight.numbers, every_fourth)], CPU, torch.float32).groups == 4


def test_large_and_small_scales_are_within_float16() -> None:
    numbers = torch.full((2, 32), 9, dtype=torch.uint8)
    found = packed([GroupedWeight(4, numbers, torch.tensor([[3e5], [2e5]]))], CPU, torch.bfloat16)

    assert found.scales.dtype is torch.float16
    assert (found.scales.float() * found.factor).flatten().tolist() == pytest.approx([3e5, 2e5], rel=1e-3)


def test_matrices_of_several_kinds_are_stacked_in_the_wider_one() -> None:
    weights = [case("4", 8, 64), case("8", 8, 64)]

    found = packed(weights, CPU, torch.float32)

    assert (found.bits, found.shape) == (8, (16, 64))
    assert found.minimums is not None
    scales, minimums = (table.repeat_interleave(32, 1) for table in (found.scales, found.minimums))
    floats = torch.cat([weight.floats() for weight in weights])
    assert torch.allclose(found.numbers * scales + minimums, floats, atol=1e-5)


def squared_error(
    weight: torch.Tensor, found: GroupedWeight, importance: torch.Tensor | float = 1.0
) -> float:
    return float(((found.floats() - weight).square() * importance).sum())


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(40, 200, generator=torch.Generator().manual_seed(1))


def test_more_bits_have_smaller_errors(weight: torch.Tensor) -> None:
    quantiser = GpuQuantiser(CPU, torch.float32)
    floats = GpuQuantiser(CPU, torch.float32, is_float=True)

    of_four, of_eight = (squared_error(weight, quantiser.quantised(weight, bits)) for bits in (4, 8))
    of_float = squared_error(weight, floats.quantised(weight, 8))

    assert of_eight < of_float / 10 < of_four / 50
    assert floats.quantised(weight, 8).values is FLOAT8
    assert floats.quantised(weight, 4).values is None


def test_errors_are_smaller_where_they_are_important(weight: torch.Tensor) -> None:
    importance = torch.rand(200, generator=torch.Generator().manual_seed(2)).square() + 1e-3
    quantiser = GpuQuantiser(CPU, torch.float32)

    plain, weighted = (quantiser.quantised(weight, 4, one) for one in (None, importance))

    assert squared_error(weight, weighted, importance) < squared_error(weight, plain, importance)


def test_the_numbers_do_not_depend_on_how_many_rows_are_computed_at_a_time(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = GpuQuantiser(CPU, torch.float32).quantised(weight, 4)
    monkeypatch.setattr("workers.kv_engine.gpu.few_bits._AT_ONCE", 1000)
    in_parts = GpuQuantiser(CPU, torch.float32).quantised(weight, 4)

    assert torch.equal(whole.numbers, in_parts.numbers)
    assert torch.equal(whole.scales, in_parts.scales)


@pytest.mark.parametrize(("bits", "is_float"), [(4, False), (8, False), (8, True)])
def test_zeros_stay_zero_and_what_is_no_number_is_none_afterwards(bits: int, is_float: bool) -> None:
    weight = torch.zeros(3, 64)
    weight[1, 40], weight[2, 3] = torch.nan, torch.inf

    found = GpuQuantiser(CPU, torch.float32, is_float=is_float).quantised(weight, bits).floats()

    assert not found[0].any()
    assert found[1, 32:].isnan().all()
    assert found[2, :32].isnan().all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.skipif(library.load() is None, reason="there are no CPU kernels on this machine")
def test_the_numbers_are_those_that_the_cpu_kernels_choose(
    weight: torch.Tensor, bits: int, is_weighted: bool
) -> None:
    importance = torch.rand(200, generator=torch.Generator().manual_seed(2)) if is_weighted else None
    kernels = library.load()
    assert kernels is not None
    context = kernels.open(1)

    expected = MatrixPacker(kernels, context, torch.float32).quantised(weight, bits, importance)
    found = GpuQuantiser(CPU, torch.float32).quantised(weight, bits, importance)

    kernels.close(context)
    assert float((found.numbers != expected.numbers).float().mean()) < 1e-3  # ties
    assert torch.allclose(found.scales, expected.scales, rtol=1e-2)
    assert squared_error(weight, found) == pytest.approx(squared_error(weight, expected), rel=1e-4)
