"""The packing of a model's matrices for the kernels; bfloat16 matrices are also squeezed if possible.

`tiles.h` describes the packed format, `squeezed.h` the squeezed one, and `grouped.h` that of weights of four
and eight bits.
"""

import ctypes
import mmap
from collections.abc import Sequence
from ctypes import byref, c_int32
from enum import IntEnum
from typing import Any, Final, cast

import torch

from models.grouped_weights import GROUP, GroupedWeight, alike, factor_of
from workers.cpu_kernels.library import BFLOAT16, FLOAT32, Library, Matrix, Patch
from workers.kv_engine.quantisation.forms import Weight, relative
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


def kind_of(weight: Weight) -> tuple[int, int, tuple[float, ...] | None] | None:
    """Return `GroupedWeight.kind`; None of floats."""
    return weight.kind if isinstance(weight, GroupedWeight) else None


class MatrixPacker:
    """Packs matrices, and keeps their memory alive, as that of norms and biases.

    Args:
        context: the library's context; its threads do the work.
        dtype: the dtype of the packed weights.

    Attributes:
        nbytes: total size of all packed matrices.
        rounds_inputs: see `workers.kv_engine.quantisation.forms.Quantiser`.
    """

    rounds_inputs: Final = True

    def __init__(self, kernels: Library, context: Any, dtype: torch.dtype) -> None:
        self._kernels: Final = kernels
        self._context: Final = context
        self.dtype: Final = dtype
        self._memory: Final[list[Any]] = []
        self._zeros: Final = memory.Zeros()
        self.nbytes = 0

    def stack(self, weights: Sequence[Weight]) -> Matrix:
        """Return several (n, k) matrices as one, stacked along n.

        It has weights in groups if all of them have, those of the most bits.
        """
        offsets = [sum(weight.shape[0] for weight in weights[:at]) for at in range(len(weights) + 1)]
        places = [(_Columns.PLAIN, offset) for offset in offsets[:-1]]
        return self._packed(weights, places, columns=offsets[-1])

    def interleave(self, gate: Weight, up: Weight) -> Matrix:
        """Return gate and up, both (n, k), as one matrix in which each column is next to its counterpart."""
        columns = 2 * _filled(gate.shape[0], LANES)
        return self._packed([gate, up], [(_Columns.GATE, 0), (_Columns.UP, 0)], columns=columns)

    def of_experts(self, experts: Sequence[Sequence[Weight]]) -> Matrix:
        """Return the matrices of all experts as one, in which each expert begins with a whole unit.

        Args:
            experts: of each expert its gate and up, which are interleaved, or one matrix.
        """
        is_pair = len(experts[0]) == 2
        width = _filled(len(experts[0]) * _filled(experts[0][0].shape[0], LANES), _UNIT)
        mappings = (_Columns.GATE, _Columns.UP) if is_pair else (_Columns.PLAIN,)
        places = [(mapping, number * width) for number in range(len(experts)) for mapping in mappings]
        return self._packed(
            [one for expert in experts for one in expert], places, columns=len(experts) * width
        )

    def biases(self, *parts: torch.Tensor) -> int:
        """Return the address of the biases of experts, in the columns of `of_experts`.

        Args:
            parts: (experts, n): those of gate and up, or of one matrix.
        """
        runs = [_padded(part, LANES).reshape(len(part), -1, LANES) for part in parts]
        return self.floats(_padded(torch.stack(runs, 2).flatten(1), _UNIT))

    def floats(self, values: torch.Tensor) -> int:
        """Return the address of a float32 copy of a norm or a bias."""
        copy = values.detach().to(torch.float32, copy=True).contiguous()
        self._memory.append(copy)
        return copy.data_ptr()

    def quantised(
        self, weight: torch.Tensor, bits: int, importance: torch.Tensor | None = None
    ) -> GroupedWeight:
        """See `workers.kv_engine.quantisation.forms.Quantiser`."""
        weight = weight.to(weight.dtype if weight.dtype in DTYPES else torch.float32).contiguous()
        n, k = weight.shape
        numbers = torch.empty(n, k, dtype=torch.uint8)
        scales = torch.empty(n, -(-k // GROUP))
        factors = relative(importance) if importance is not None else None
        self._kernels.quantise(
            *(self._context, DTYPES[weight.dtype], weight.data_ptr(), n, k, bits),
            *(factors.data_ptr() if factors is not None else None, numbers.data_ptr(), scales.data_ptr()),
        )
        return GroupedWeight(bits, numbers, scales)

    def dequantised(self, weight: GroupedWeight) -> torch.Tensor:
        """See `workers.kv_engine.quantisation.forms.Quantiser`."""
        weight = weight.with_integers()
        n, k = weight.shape
        found = torch.empty(n, k, dtype=self.dtype)
        parts = [
            part.contiguous() if part is not None else None
            for part in (weight.numbers, weight.factors, weight.scales, weight.minimums)
        ]
        self._kernels.dequantise(
            *(self._context, DTYPES[self.dtype]),
            *(part.data_ptr() if part is not None else None for part in parts),
            *(weight.parts, n, k, found.data_ptr()),
        )
        return found

    def _packed(
        self, weights: Sequence[Weight], places: Sequence[tuple[_Columns, int]], *, columns: int
    ) -> Matrix:
        k = weights[0].shape[1]
        if all(isinstance(weight, GroupedWeight) for weight in weights):
            return self._in_groups(cast(Sequence[GroupedWeight], weights), places, columns=columns)
        matrix, pages = self._unpacked(columns, k)
        for weight, (mapping, offset) in zip(weights, places, strict=True):
            floats = weight.floats() if isinstance(weight, GroupedWeight) else weight
            self._pack(matrix, floats, mapping, offset)
        return self._finish(matrix, pages)

    def _in_groups(
        self, weights: Sequence[GroupedWeight], places: Sequence[tuple[_Columns, int]], *, columns: int
    ) -> Matrix:
        weights = [weight.with_integers() for weight in alike(weights)]
        first, values = weights[0], weights[0].values
        tables = [part for one in weights for part in (one.scales, one.minimums) if part is not None]
        factor = factor_of(tables)
        matrix = Matrix(
            n=columns,
            k=first.shape[1],
            bits=first.bits,
            parts=first.parts,
            has_minimums=first.minimums is not None,
            has_values=values is not None,
            factor=factor,
            values=tuple(int(value) for value in values) if values is not None else (),
        )
        pages = self._zeros.take(self._kernels.grouped_bytes(byref(matrix)))
        matrix.data = _address(pages)
        for weight, (mapping, offset) in zip(weights, places, strict=True):
            numbers = weight.numbers.contiguous()
            scales, minimums = (
                (table / factor).half().contiguous() if table is not None else None
                for table in (weight.scales, weight.minimums)
            )
            assert scales is not None
            self._kernels.pack_groups(
                *(self._context, byref(matrix), numbers.data_ptr(), scales.data_ptr()),
                minimums.data_ptr() if minimums is not None else None,
                *(len(numbers), mapping, offset),
            )
        self._keep(pages)
        return matrix

    def _unpacked(self, n: int, k: int) -> tuple[Matrix, mmap.mmap]:
        """A matrix of floats in memory of its own, which is freed if it is squeezed."""
        pages = memory.zeros(self._kernels.packed_bytes(DTYPES[self.dtype], n, k))
        return Matrix(data=_address(pages), n=n, k=k), pages

    def _pack(self, matrix: Matrix, weight: torch.Tensor, columns: _Columns, offset: int) -> None:
        weight = weight.to(self.dtype).contiguous()
        n, k = weight.shape
        dtype = DTYPES[self.dtype]
        self._kernels.pack(self._context, dtype, matrix.data, weight.data_ptr(), n, k, k, columns, offset)

    def _finish(self, matrix: Matrix, pages: mmap.mmap) -> Matrix:
        """Return the matrix, squeezed if possible."""
        squeezed = self._squeeze(matrix) if self.dtype == torch.bfloat16 else None
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
        pages, patches = self._zeros.take(nbytes), (Patch * count)()
        self._kernels.squeeze(self._context, byref(matrix), lists, _address(pages), patches)
        self._keep(pages, lists, patches)
        return Matrix(
            data=_address(pages),
            lists=ctypes.addressof(lists),
            patches=ctypes.addressof(patches),
            n=matrix.n,
            k=matrix.k,
        )

    def _keep(self, pages: mmap.mmap | memoryview, *others: Any) -> None:
        self._memory.append((pages, *others))
        self.nbytes += len(pages) + sum(map(ctypes.sizeof, others))


def _filled(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """Rows with zeros behind them, up to a multiple of numbers."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % multiple))


def _address(pages: mmap.mmap | memoryview) -> int:
    """The address of the pages, valid as long as there is a reference to them."""
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))
