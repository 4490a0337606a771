"""The packing of a model's matrices for the kernels; bfloat16 matrices are also squeezed if possible.

`tiles.h` describes the packed format, and `squeezed.h` the squeezed one.
"""

import ctypes
import mmap
from collections.abc import Sequence
from ctypes import byref, c_int32
from enum import IntEnum
from typing import Any, Final

import torch

from workers.cpu_kernels.library import BFLOAT16, FLOAT32, Library, Matrix, Patch
from workers.machine import memory

DTYPES: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
LANES: Final = 16
_UNIT: Final = 64  # columns computed together
_MIN_WEIGHTS_PER_PATCH: Final = 256
"""Squeezing is worthwhile with at most one patch per this many weights."""


class _Columns(IntEnum):
    """The mapping of the rows of a matrix to the columns of the packed matrix (`tiles.h`)."""

    PLAIN = 0
    GATE = 1
    UP = 2


class MatrixPacker:
    """Packs matrices, and keeps their memory alive.

    Args:
        context: the library's context; its threads do the work.
        dtype: the dtype of the packed weights.

    Attributes:
        nbytes: total size of all packed matrices.
    """

    def __init__(self, kernels: Library, context: Any, dtype: torch.dtype) -> None:
        self._kernels: Final = kernels
        self._context: Final = context
        self._dtype: Final = dtype
        self._memory: Final[list[Any]] = []
        self.nbytes = 0

    def stack(self, weights: Sequence[torch.Tensor]) -> Matrix:
        """Return several (n, k) matrices as one, stacked along n."""
        matrix, pages = self._zeros(sum(len(weight) for weight in weights), weights[0].shape[1])
        offset = 0
        for weight in weights:
            self._pack(matrix, weight, _Columns.PLAIN, offset)
            offset += len(weight)
        return self._finish(matrix, pages)

    def interleave(self, gate: torch.Tensor, up: torch.Tensor) -> Matrix:
        """Return gate and up, both (n, k), as one matrix in which each column is next to its counterpart."""
        filled = -(-len(gate) // LANES) * LANES
        matrix, pages = self._zeros(2 * filled, gate.shape[1])
        self._pack(matrix, gate, _Columns.GATE, 0)
        self._pack(matrix, up, _Columns.UP, 0)
        return self._finish(matrix, pages)

    def _zeros(self, n: int, k: int) -> tuple[Matrix, mmap.mmap]:
        """Allocate huge pages if the operating system has them: a step reads all of a matrix once."""
        pages = memory.zeros(self._kernels.packed_bytes(DTYPES[self._dtype], n, k))
        return Matrix(data=_address(pages), n=n, k=k), pages

    def _pack(self, matrix: Matrix, weight: torch.Tensor, columns: _Columns, offset: int) -> None:
        weight = weight.to(self._dtype).contiguous()
        n, k = weight.shape
        dtype = DTYPES[self._dtype]
        self._kernels.pack(self._context, dtype, matrix.data, weight.data_ptr(), n, k, k, columns, offset)

    def _finish(self, matrix: Matrix, pages: mmap.mmap) -> Matrix:
        """Return the matrix, squeezed if possible."""
        squeezed = self._squeeze(matrix) if self._dtype == torch.bfloat16 else None
        if squeezed is not None:
            return squeezed
        self._keep(pages)
        return matrix

    def _squeeze(self, matrix: Matrix) -> Matrix | None:
        """Return None if the processor cannot do it, or if too many weights need a patch."""
        nbytes = self._kernels.squeezed_bytes(matrix.n, matrix.k)
        if not nbytes:
            return None
        lists = (c_int32 * -(-matrix.n // _UNIT))()
        count = self._kernels.count_patches(self._context, byref(matrix), lists)
        if count > len(lists) + matrix.n * matrix.k // _MIN_WEIGHTS_PER_PATCH:
            return None
        pages, patches = memory.zeros(nbytes), (Patch * count)()
        self._kernels.squeeze(self._context, byref(matrix), lists, _address(pages), patches)
        self._keep(pages, lists, patches)
        return Matrix(
            data=_address(pages),
            lists=ctypes.addressof(lists),
            patches=ctypes.addressof(patches),
            n=matrix.n,
            k=matrix.k,
        )

    def _keep(self, pages: mmap.mmap, *others: Any) -> None:
        self._memory.append((pages, *others))
        self.nbytes += len(pages) + sum(map(ctypes.sizeof, others))


def _address(pages: mmap.mmap) -> int:
    """The address of the pages, valid as long as there is a reference to them."""
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))
