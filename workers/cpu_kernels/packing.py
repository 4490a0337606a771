"""A model's matrices as the kernels read them: packed, and of bfloat16 squeezed where that can be done.

What a format is, is told where it is read: `tiles.h`, `squeezed.h`.
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
_UNIT: Final = 64  # columns that are computed together
_FEW: Final = 256
"""One patch in so many weights is worth it."""


class _Columns(IntEnum):
    """Where the rows of a matrix go among the columns of the packed one (`tiles.h`)."""

    PLAIN = 0
    GATE = 1
    UP = 2


class Packing:
    """Packs matrices, and keeps the memory of what it packed.

    Args:
        context: of the library, whose threads do it.
        dtype: what the weights are made to be.

    Attributes:
        nbytes: of all that was packed.
    """

    def __init__(self, kernels: Library, context: Any, dtype: torch.dtype) -> None:
        self._kernels: Final = kernels
        self._context: Final = context
        self._dtype: Final = dtype
        self._kept: Final[list[Any]] = []
        self.nbytes = 0

    def stacked(self, weights: Sequence[torch.Tensor]) -> Matrix:
        """One matrix of several (n, k), one below the other."""
        matrix, pages = self._zeros(sum(len(weight) for weight in weights), weights[0].shape[1])
        offset = 0
        for weight in weights:
            self._pack(matrix, weight, _Columns.PLAIN, offset)
            offset += len(weight)
        return self._finished(matrix, pages)

    def paired(self, gate: torch.Tensor, up: torch.Tensor) -> Matrix:
        """One of two (n, k), each column of the first beside that of the second it is multiplied with."""
        filled = -(-len(gate) // LANES) * LANES
        matrix, pages = self._zeros(2 * filled, gate.shape[1])
        self._pack(matrix, gate, _Columns.GATE, 0)
        self._pack(matrix, up, _Columns.UP, 0)
        return self._finished(matrix, pages)

    def _zeros(self, n: int, k: int) -> tuple[Matrix, mmap.mmap]:
        """In large pages where the operating system has them: a step reads all of it once."""
        pages = memory.zeros(self._kernels.packed_bytes(DTYPES[self._dtype], n, k))
        return Matrix(data=_address(pages), n=n, k=k), pages

    def _pack(self, matrix: Matrix, weight: torch.Tensor, columns: _Columns, offset: int) -> None:
        weight = weight.to(self._dtype).contiguous()
        n, k = weight.shape
        dtype = DTYPES[self._dtype]
        self._kernels.pack(self._context, dtype, matrix.data, weight.data_ptr(), n, k, k, columns, offset)

    def _finished(self, matrix: Matrix, pages: mmap.mmap) -> Matrix:
        """The matrix squeezed, or as it is."""
        squeezed = self._squeezed(matrix) if self._dtype == torch.bfloat16 else None
        if squeezed is not None:
            return squeezed
        self._keep(pages)
        return matrix

    def _squeezed(self, matrix: Matrix) -> Matrix | None:
        """None where the processor cannot, or too many weights would need a patch."""
        nbytes = self._kernels.squeezed_bytes(matrix.n, matrix.k)
        if not nbytes:
            return None
        lists = (c_int32 * -(-matrix.n // _UNIT))()
        count = self._kernels.count_patches(self._context, byref(matrix), lists)
        if count > len(lists) + matrix.n * matrix.k // _FEW:
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
        self._kept.append((pages, *others))
        self.nbytes += len(pages) + sum(map(ctypes.sizeof, others))


def _address(pages: mmap.mmap) -> int:
    """Where they are; they stay there while there is a reference to them."""
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))
