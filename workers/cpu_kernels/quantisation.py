"""The form in which the CPU kernels multiply each matrix of a model: floats, or numbers of few bits.

Numbers of four or eight bits come from the checkpoint as it stores them, or are chosen here, matrix by
matrix, while the model is packed (`grouped.h`). What the checkpoint stores in fewer bits stays as it is. The
head gets eight bits, for an error there is an error of every token.

`quantised_layers` lets the stock model compute what the kernels compute: with the same weights, and inputs of
matrices rounded as theirs. So the check at load compares like with like.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch

from models.grouped_weights import GROUP, GroupedWeight
from models.transformers_lm.expert_layers import ExpertMatrix, experts_computed_by
from workers.cpu_kernels.kept_weights import KeptWeights
from workers.cpu_kernels.packing import MatrixPacker, Weight

_HEAD_BITS: Final = 8
_LEAST: Final = 1e-30
"""Smaller activations count as zero, as in `grouped.h`."""


Left: TypeAlias = Mapping[Any, Callable[[], torch.Tensor]]
"""By linear layer or matrix of an expert, what reads its floats, if they are not in the model."""


def floats_of(linear: Any, left: Left) -> torch.Tensor:
    """Return a weight that is stored as floats."""
    found: torch.Tensor = left[linear]() if linear in left else linear.weight
    return found


def float_experts(experts: Sequence[Any], left: Left) -> AbstractContextManager[None]:
    """Return a context in which experts are computed with floats, also with those that are in the files."""
    return experts_computed_by(
        lambda matrix, rows: torch.nn.functional.linear(rows, floats_of(matrix, left)), experts
    )


class Forms:
    """Returns each matrix of a model in its form.

    Args:
        packer: quantises.
        bits: of the numbers that are chosen here, 4 or 8; None leaves floats as they are.
        stored: by linear layer or matrix of an expert, what reads it as the checkpoint stores it.
        left: what reads floats that are not in the model.
        head: the linear layer from states to logits.
        importance: by the same, the factors of squared errors, one for each input.
        kept: the quantised matrices that are in files, or are written to them, if any.
        names: those of the matrices in `kept`.
    """

    def __init__(
        self,
        packer: MatrixPacker,
        *,
        bits: int | None,
        stored: Mapping[Any, Callable[[], GroupedWeight]],
        left: Left,
        head: Any,
        importance: Mapping[Any, torch.Tensor],
        kept: KeptWeights | None = None,
        names: Mapping[Any, str] = MappingProxyType({}),
    ) -> None:
        self._packer: Final = packer
        self._bits: Final = bits
        self._stored: Final = stored
        self._left: Final = left
        self._head: Final = head
        self._importance: Final = importance
        self._files: Final = kept
        self._names: Final = names
        self._kept: Final[dict[Any, GroupedWeight]] = {}

    @property
    def has_few_bits(self) -> bool:
        """True if any matrix has numbers of few bits."""
        return self._bits is not None or bool(self._stored)

    def of(self, linear: Any) -> Weight:
        """Return the weight of a linear layer or of an expert, (outputs, inputs).

        Numbers of few bits are kept until `forget`.
        """
        if linear in self._kept:
            return self._kept[linear]
        found = self._of(linear)
        if isinstance(found, GroupedWeight):
            self._kept[linear] = found
        return found

    def dequantised(self, weight: GroupedWeight) -> torch.Tensor:
        """Return the weights as floats, in the dtype of the model."""
        return self._packer.dequantised(weight)

    def forget(self) -> None:
        """Free the numbers that were returned so far."""
        self._kept.clear()
        if self._files is not None:
            self._files.flush()

    def _of(self, linear: Any) -> Weight:
        if self._files is not None and (found := self._files.get(self._names[linear])) is not None:
            return found
        bits = self._bits
        if bits is not None and linear is self._head:
            bits = max(bits, _HEAD_BITS)
        stored = self._stored[linear]() if linear in self._stored else None
        if stored is not None and (bits is None or stored.bits <= bits):
            return stored
        weight = floats_of(linear, self._left) if stored is None else stored.floats()
        if bits is None:
            return weight
        quantised = self._packer.quantised(weight, bits, self._importance.get(linear))
        if self._files is not None:
            self._files.add(self._names[linear], quantised)
        return quantised


@contextmanager
def quantised_layers(linears: Iterable[Any], experts: Sequence[Any], forms: Forms) -> Iterator[None]:
    """Let linear layers and experts compute what the kernels do with quantised weights; others stay.

    One matrix at a time is there as floats.
    """
    with ExitStack() as hooks, experts_computed_by(partial(_product, forms), experts):
        for linear in linears:
            for handle in _hooks(linear, forms):
                hooks.enter_context(handle)
        yield


def _product(forms: Forms, matrix: ExpertMatrix, rows: torch.Tensor) -> torch.Tensor:
    weight = forms.of(matrix)
    if isinstance(weight, GroupedWeight):
        weight, rows = forms.dequantised(weight), rounded(rows)
    return torch.nn.functional.linear(rows, weight)


def _hooks(linear: Any, forms: Forms) -> Iterator[Any]:
    own: list[torch.Tensor] = []

    def before(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        own.append(linear.weight.data)
        weight = forms.of(linear)
        if not isinstance(weight, GroupedWeight):
            return inputs
        linear.weight.data = forms.dequantised(weight)
        return (rounded(inputs[0]), *inputs[1:])

    def after(*_: Any) -> None:
        linear.weight.data = own.pop()

    yield linear.register_forward_pre_hook(before)
    yield linear.register_forward_hook(after, always_call=True)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return activations, (..., k), rounded as the kernels do: to eight bits, with a scale for each group."""
    k = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -k % GROUP))
    groups = padded.reshape(*padded.shape[:-1], -1, GROUP)
    most = groups.abs().amax(-1, keepdim=True)
    # Not 127 / most, which torch computes as a product with the reciprocal.
    inverse = torch.where(most < _LEAST, 0.0, torch.full_like(most, 127) / most)
    numbers: torch.Tensor = (groups.double() * inverse).round().float()  # the exact products, as there
    return (numbers * (most / 127)).flatten(-2)[..., :k].to(x.dtype)


@contextmanager
def observed_inputs(
    linears: Iterable[Any], experts: Sequence[Any], left: Left
) -> Iterator[dict[Any, torch.Tensor]]:
    """Yield the mean square of each input of linear layers and of matrices of experts, (inputs,) float32.

    Forward passes within the block fill it. Experts that get no token are not in it.
    """
    found: dict[Any, torch.Tensor] = {}

    def observe(matrix: Any, inputs: torch.Tensor) -> None:
        rows = inputs.float().reshape(-1, inputs.shape[-1])
        found[matrix] = rows.square().mean(0) + found.get(matrix, 0.0)

    def multiply(matrix: ExpertMatrix, rows: torch.Tensor) -> torch.Tensor:
        observe(matrix, rows)
        return torch.nn.functional.linear(rows, floats_of(matrix, left))

    with ExitStack() as hooks, experts_computed_by(multiply, experts):
        for linear in linears:
            handle = linear.register_forward_pre_hook(lambda linear, inputs: observe(linear, inputs[0]))
            hooks.enter_context(handle)
        yield found
