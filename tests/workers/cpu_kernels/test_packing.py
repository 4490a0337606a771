"""Squeezed matrices are identical to the bit, and smaller; others stay plain."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.workers.cpu_kernels.libraries import NAMES, library
from workers.cpu_kernels.compilation import processor_flags
from workers.cpu_kernels.library import BFLOAT16, Library, Matrix
from workers.cpu_kernels.packing import MatrixPacker

NARROW = ("plain", "avx_vnni")
"""The variants for processors without AVX-512."""
ROWS = (1, 2, 5, 6, 7, 13, 16, 33, 200)


class Packed(MatrixPacker):
    """A packer that multiplies, and can switch squeezing off."""

    def __init__(self, by: Library, *, threads: int = 2, squeezes: bool = True) -> None:
        self._by, self.context = by, by.open(threads)
        self._squeezes = squeezes
        super().__init__(by, self.context, torch.bfloat16)

    def _squeeze(self, matrix: Matrix) -> Matrix | None:
        return super()._squeeze(matrix) if self._squeezes else None

    def product(self, matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
        y = torch.full((len(x), matrix.n), 7.0)
        told = ctypes.byref(matrix), x.data_ptr(), len(x), y.data_ptr(), matrix.n
        assert self._by.linear(self.context, BFLOAT16, *told) == 0
        return y


@contextmanager
def packed(name: str, *, squeezes: bool = True, threads: int = 2) -> Iterator[Packed]:
    by = library(name)
    found = Packed(by, squeezes=squeezes, threads=threads)
    yield found
    by.close(found.context)


def normal(n: int, k: int) -> torch.Tensor:
    torch.manual_seed(n + k)
    return (torch.randn(n, k) * 0.02).bfloat16()


def squeezes(name: str) -> bool:
    return bool(library(name).squeezed_bytes(64, 32))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_every_processor_with_avx512_squeezes() -> None:
    has_avx512 = "avx512f" in processor_flags()
    assert [name for name in NAMES if squeezes(name)] == [
        name for name in NAMES if name not in NARROW and has_avx512
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "k"), [(64, 32), (200, 96), (517, 80), (70, 3000), (17, 1100)])
def test_products_are_the_same_to_the_bit(name: str, n: int, k: int) -> None:
    weight = normal(n, k)
    with packed(name) as one, packed(name, squeezes=False) as other:
        squeezed, plain = one.stack([weight]), other.stack([weight])
        assert bool(squeezed.lists) is squeezes(name)
        assert not plain.lists
        for rows in ROWS:
            x = torch.randn(rows, k)
            assert same_bits(one.product(squeezed, x), other.product(plain, x))


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_any_kind_come_through(name: str) -> None:
    """Read each weight back: multiply with a row that has a one in its place."""
    weight = normal(128, 640)
    rare = [0.0, -0.0, 1e-38, -1e-40, 3e38, -3e38, 1.0, -65504.0, 1e-20, float("inf"), float("-inf")]
    places = torch.randperm(weight.numel())[: len(rare)]
    weight.view(-1)[places] = torch.tensor(rare).bfloat16()
    # Several at the same two k, at the very first and the very last.
    weight[3:9, 100:102] = 2.0**-100
    weight[0, 0] = weight[127, 639] = 2.0**100
    with packed(name) as one:
        matrix = one.stack([weight])
        assert bool(matrix.lists) is squeezes(name)
        found = torch.cat([one.product(matrix, rows) for rows in torch.eye(640).view(128, 5, 640)])
    finite = weight.isfinite().all(dim=1)
    # Denormal numbers count as zero where the processor multiplies bfloat16 by itself.
    exact = weight.float().T
    exact = torch.where(exact.abs() < 2.0**-126, 0.0, exact)
    found = torch.where(found.abs() < 2.0**-126, 0.0, found)
    assert torch.equal(found[:, finite], exact[:, finite])
    assert found[:, ~finite].isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_a_number_stays_none_in_its_column(name: str) -> None:
    weight = normal(64, 96)
    weight[5, 17] = torch.nan
    with packed(name) as one:
        y = one.product(one.stack([weight]), torch.ones(9, 96))
    assert y.isnan().any(dim=0).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_all_magnitudes_stay_as_they_are(name: str) -> None:
    torch.manual_seed(1)
    # Each power of two is as likely as any other.
    weight = (torch.randn(256, 256) * 2.0 ** torch.randint(-60, 60, (256, 256))).bfloat16()
    x = torch.randn(7, 256)
    with packed(name) as one, packed(name, squeezes=False) as other:
        matrix = one.stack([weight])
        assert not matrix.lists
        assert one.nbytes == library(name).packed_bytes(BFLOAT16, 256, 256)
        assert same_bits(one.product(matrix, x), other.product(other.stack([weight]), x))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NARROW])
def test_three_quarters_of_the_memory_are_left(name: str) -> None:
    if not squeezes(name):
        pytest.skip("this processor has no AVX-512: matrices stay plain")
    weight = normal(1024, 1024)
    with packed(name) as one, packed(name, squeezes=False) as other:
        one.stack([weight])
        other.stack([weight])
        assert 0.75 < one.nbytes / other.nbytes < 0.76


@pytest.mark.parametrize("name", NAMES)
def test_pairs_lie_beside_each_other_and_stacks_below_whoever_does_it(name: str) -> None:
    gate, up, x = normal(80, 64), normal(80, 64).flip(0), torch.randn(3, 64)
    with packed(name) as one, packed(name, threads=3) as three:
        pairs = [by.product(by.interleave(gate, up), x) for by in (one, three)]
        apart = [one.product(one.stack([weight]), x) for weight in (gate, up)]
        stacked = three.product(three.stack([gate, up]), x)
    assert torch.equal(pairs[0], pairs[1])
    assert torch.equal(pairs[0].view(3, -1, 2, 16).transpose(1, 2).reshape(3, 2, -1), torch.stack(apart, 1))
    assert torch.equal(stacked, torch.cat(apart, 1))


def test_numbers_of_32_bits_are_not_squeezed() -> None:
    by = library(NAMES[-1])
    context = by.open(1)
    assert not MatrixPacker(by, context, torch.float32).stack([normal(64, 64).float()]).lists
    by.close(context)
