"""The matrices of the fused layers: of floats, of few bits, or a member's part of a shared layer."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
from torch.nn.functional import linear

from models.grouped_weights import GroupedWeight
from workers.kv_engine.gpu.few_bits import FewBits, packed
from workers.kv_engine.gpu.triton_few_bits import dequantised, few_bits_row, few_bits_rows
from workers.kv_engine.gpu.triton_layers import row_product, silu_and_mul
from workers.kv_engine.quantisation.forms import Weight

MOST_ROWS: Final = 128
"""More rows are multiplied by cuBLAS, with weights that have become floats before."""
_MOST_FLOATS: Final = 2**26
"""Those of a block of outputs: 128 MB in bfloat16."""

Norm = tuple[torch.Tensor, float]
"""The weights of an RMS norm, (k,), and its epsilon."""


class Matrix(Protocol):
    """A matrix of n outputs and k inputs, with its bias."""

    @property
    def inputs(self) -> int:
        """K."""
        ...

    def products(self, states: torch.Tensor) -> torch.Tensor:
        """Return the products of (T, k) states: (T, n)."""
        ...

    def row_product(
        self,
        states: torch.Tensor,
        *,
        norm: Norm | None = None,
        is_gated: bool = False,
        added_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the product of one row, (1, k), and what is fused with it (`triton_layers.row_product`)."""
        ...


class FloatMatrix:
    """A matrix of floats."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight: Final = weight
        self._bias: Final = bias

    @property
    def inputs(self) -> int:
        return self._weight.shape[1]

    def products(self, states: torch.Tensor) -> torch.Tensor:
        return linear(states, self._weight, self._bias)

    def row_product(
        self,
        states: torch.Tensor,
        *,
        norm: Norm | None = None,
        is_gated: bool = False,
        added_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return row_product(states, self._weight, self._bias, norm=norm, is_gated=is_gated, added_to=added_to)


class ModuleMatrix(FloatMatrix):
    """The matrix of a linear layer. The part of a tensor-parallel member adds up what all members have."""

    def __init__(self, module: Any) -> None:
        super().__init__(module.weight, module.bias)
        self._module: Final = module

    def products(self, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._module(states)
        return found


class FewBitsMatrix:
    """Matrices of few bits, stacked along their outputs: one for each kind of numbers that follow each other.

    Args:
        parts: have the same inputs.
        bias: of all outputs.
        scratch: floats become here what is multiplied by cuBLAS.
    """

    def __init__(self, parts: Sequence[FewBits], bias: torch.Tensor | None, scratch: "Scratch") -> None:
        self._parts: Final = parts
        self._outs: Final = [part.shape[0] for part in parts]
        self._biases: Final = [None] * len(parts) if bias is None else torch.split(bias, self._outs)
        self._scratch: Final = scratch
        for part in parts:
            scratch.reserve(part)

    @property
    def inputs(self) -> int:
        return self._parts[0].inputs

    @property
    def nbytes(self) -> int:
        """The bytes of the numbers and scales."""
        return sum(part.nbytes for part in self._parts)

    @property
    def device(self) -> torch.device:
        return self._parts[0].numbers.device

    @property
    def dtype(self) -> torch.dtype:
        """Of states and products."""
        return self._scratch.dtype

    def __str__(self) -> str:
        kinds = " and ".join(f"{part.bits} bits" for part in self._parts)
        return f"{sum(self._outs)} x {self.inputs} weights of {kinds}"

    def products(self, states: torch.Tensor) -> torch.Tensor:
        out = states.new_empty(len(states), sum(self._outs))
        for part, bias, into in self._each(out):
            if len(states) <= MOST_ROWS:
                few_bits_rows(states, part, bias, into=into)
                continue
            for start, some in self._scratch.blocks_of(part):
                torch.mm(states, some.T, out=into[:, start : start + len(some)])
            if bias is not None:
                into.add_(bias)
        return out

    def row_product(
        self,
        states: torch.Tensor,
        *,
        norm: Norm | None = None,
        is_gated: bool = False,
        added_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if is_gated and len(self._parts) == 1:
            return few_bits_row(states, self._parts[0], self._biases[0], norm=norm, is_gated=True)
        out = added_to if added_to is not None else states.new_empty(1, sum(self._outs))
        for part, bias, into in self._each(out):
            few_bits_row(states, part, bias, norm=norm, into=into, is_added=added_to is not None)
        return silu_and_mul(out) if is_gated else out

    def _each(self, out: torch.Tensor) -> Iterable[tuple[FewBits, torch.Tensor | None, torch.Tensor]]:
        """The parts with their biases, and their outputs in `out`."""
        return zip(self._parts, self._biases, torch.split(out, self._outs, 1), strict=True)


class Scratch:
    """Memory for the floats of outputs of one matrix at a time. A recorded step keeps its address."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._size = 0
        self._device: Final = device
        self.dtype: Final = dtype
        self._floats: torch.Tensor | None = None

    def reserve(self, weight: FewBits) -> None:
        """Let there be room for a matrix. Call it for all of them before the first use."""
        assert self._floats is None, "its memory is in use"
        outs, inputs = weight.shape
        self._size = max(self._size, min(outs * inputs, max(_MOST_FLOATS, inputs)))

    def blocks_of(self, weight: FewBits) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the first of some outputs, and their weights as floats, (count, k), until all were there.

        The next ones overwrite them.
        """
        floats, (outs, inputs) = self.allocated(), weight.shape
        most = len(floats) // inputs
        for start in range(0, outs, most):
            count = min(most, outs - start)
            yield start, dequantised(weight, floats, start=start, count=count)

    def allocated(self) -> torch.Tensor:
        """Return the memory, flat, in the dtype of the model."""
        if self._floats is None:
            self._floats = torch.empty(self._size, device=self._device, dtype=self.dtype)
        return self._floats


class MatrixMaker:
    """Makes matrices of weights in any form.

    Attributes:
        made: the matrices of few bits.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device: Final = device
        self._dtype: Final = dtype
        self._scratch: Final = Scratch(device, dtype)
        self.made: Final[list[FewBitsMatrix]] = []

    def stacked(self, weights: Sequence[Weight], bias: torch.Tensor | None = None) -> Matrix:
        """Return matrices of the same inputs as one, stacked along their outputs.

        It has few bits if all of them have. Those of several kinds stay as they are.
        """
        if not all(isinstance(weight, GroupedWeight) for weight in weights):
            first, *others = [self._floats_of(weight) for weight in weights]
            return FloatMatrix(torch.cat([first, *others]) if others else first, bias)
        runs: list[list[GroupedWeight]] = []
        for weight in weights:
            assert isinstance(weight, GroupedWeight)
            if runs and runs[-1][-1].kind == weight.kind:
                runs[-1].append(weight)
            else:
                runs.append([weight])
        parts = [packed(run, self._device, self._dtype) for run in runs]
        made = FewBitsMatrix(parts, bias, self._scratch)
        self.made.append(made)
        return made

    def use_scratch(self) -> None:
        """Allocate the memory for floats now, so that it is counted."""
        self._scratch.allocated()

    def _floats_of(self, weight: Weight) -> torch.Tensor:
        floats = weight.to(self._device).floats() if isinstance(weight, GroupedWeight) else weight
        return floats.detach().to(self._device, self._dtype).contiguous()
