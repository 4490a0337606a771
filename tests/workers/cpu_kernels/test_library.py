"""Products with packed matrices are those of numpy, and a row's result is its own."""

import ctypes
import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.cpu_kernels.libraries import NAMES, library
from workers.cpu_kernels import compilation
from workers.cpu_kernels import library as kernels
from workers.cpu_kernels.compilation import BuildError, Variant
from workers.cpu_kernels.library import BFLOAT16, FLOAT32, Library, Matrix

DTYPES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}


class Product:
    """y = x W^T by a library, for one W."""

    def __init__(self, by: Library, dtype: int, weight: torch.Tensor, *, threads: int = 2) -> None:
        self._by, self._dtype = by, dtype
        self._n, self._k = weight.shape
        self._context = by.open(threads)
        # Aligned as pages are.
        size = by.packed_bytes(dtype, self._n, self._k)
        self._memory = np.zeros(size + 64, np.uint8)
        self._at = -(-self._memory.ctypes.data // 64) * 64
        by.pack(self._context, dtype, self._at, weight.data_ptr(), self._n, self._k, self._k, 0, 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.full((len(x), self._n), torch.nan)
        matrix = Matrix(data=self._at, n=self._n, k=self._k)
        status = self._by.linear(
            self._context, self._dtype, ctypes.byref(matrix), x.data_ptr(), len(x), y.data_ptr(), self._n
        )
        assert status == 0
        return y

    @property
    def helped(self) -> int:
        """The number of pieces that another thread had taken."""
        found: int = self._by.helped(self._context)
        return found

    def close(self) -> None:
        self._by.close(self._context)


@pytest.mark.processes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "k"), [(64, 32), (200, 96), (517, 80), (17, 50), (70, 28_000)])
def test_a_product_is_the_exact_one_but_for_rounding(name: str, dtype: int, n: int, k: int) -> None:
    torch.manual_seed(n)
    weight = torch.randn(n, k).to(DTYPES[dtype])
    product = Product(library(name), dtype, weight)

    for rows in (1, 2, 5, 6, 7, 13, 16, 19, 33, 200):
        x = torch.randn(rows, k)
        exact = x.to(DTYPES[dtype]).double() @ weight.double().T
        torch.testing.assert_close(product(x).double(), exact, rtol=1e-5, atol=1e-6 * k + 1e-4)
    product.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_comes_to_the_same_bits_whoever_is_beside_it_and_whoever_computes(
    name: str, dtype: int
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(300, 112).to(DTYPES[dtype]), torch.randn(40, 112)
    one, three = (Product(library(name), dtype, weight, threads=threads) for threads in (1, 3))

    together = three(x)

    assert torch.equal(together, torch.cat([one(row[None].contiguous()) for row in x]))
    assert torch.equal(together, torch.cat([three(x[:7]), three(x[7:].contiguous())]))
    one.close()
    three.close()


def test_what_is_not_a_number_stays_none_and_in_its_row() -> None:
    product = Product(library(NAMES[-1]), FLOAT32, torch.ones(64, 32))
    x = torch.ones(3, 32)
    x[1, 5] = torch.nan

    y = product(x)

    assert y.isnan().all(dim=1).tolist() == [False, True, False]
    product.close()


def test_without_a_compiler_torch_computes_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "BUILT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernels.load.cache_clear()

    with caplog.at_level(logging.WARNING):
        found = kernels.load()

    kernels.load.cache_clear()
    assert found is None
    assert "torch computes instead (slower): no C++ compiler was found" in caplog.text


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_where_the_package_cannot_be_written_to_kernels_are_compiled_into_the_users_cache(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compiled(_: Variant, folder: Path) -> Path:
        if folder == kernels.BUILT:
            raise OSError(number, os.strerror(number))
        return folder

    monkeypatch.setattr(kernels, "BUILT", tmp_path / "package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compilation, "build", compiled)

    assert kernels.find_or_build(compilation.VARIANTS[0]) == tmp_path / "dalsegno" / "kernels"


def test_who_has_no_home_has_the_kernels_that_were_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kernels, "BUILT", tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    variant = compilation.VARIANTS[0]

    with pytest.raises(BuildError, match=r"home directory\. \(name a folder in XDG_CACHE_HOME\)"):
        kernels.find_or_build(variant)
    installed = tmp_path / compilation.file_name(variant)
    installed.touch()
    assert kernels.find_or_build(variant) == installed


def test_a_processor_that_is_not_known_has_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compilation, "processor_flags", frozenset)
    kernels.load.cache_clear()

    with caplog.at_level(logging.INFO):
        found = kernels.load()

    kernels.load.cache_clear()
    assert found is None
    assert "there are no CPU kernels for this processor" in caplog.text
