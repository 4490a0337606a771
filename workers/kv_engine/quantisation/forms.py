"""The form in which our kernels multiply each matrix of a model: floats, or numbers of few bits.

Numbers of four or eight bits come from the checkpoint as it stores them, or are chosen, matrix by matrix,
while the model is packed (`Quantiser`). What the checkpoint stores in fewer bits stays as it is. The head
gets eight bits, for an error there is an error of every token.

`quantised_layers` lets the stock model compute what the kernels compute: with the same weights, and inputs of
matrices rounded as theirs. So the check at load compares like with like.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias

import torch

from models.grouped_weights import GROUP, GroupedWeight
from models.transformers_lm.expert_layers import ExpertMatrix, experts_computed_by, matrix_named
from workers.kv_engine.kernel_models import TextModel
from workers.kv_engine.quantisation.kept_weights import KeptWeights
from workers.kv_engine.quantisation.matrices import Left, experts_of, left_in, linears_of, names_of
from workers.kv_engine.quantisation.wanted import Quantisation

_HEAD_BITS: Final = 8
_LEAST: Final = 1e-30
"""Smaller activations count as zero, as in `grouped.h`."""
_MOST_IMPORTANT: Final = 1e4
"""The largest factor of a squared error, and one divided by the smallest."""

Weight: TypeAlias = torch.Tensor | GroupedWeight


class Quantiser(Protocol):
    """Chooses numbers of few bits, and computes the weights that they stand for in its kernels.

    Attributes:
        rounds_inputs: its kernels round the inputs of such matrices, too (`rounded`).
    """

    @property
    def rounds_inputs(self) -> bool: ...

    def quantised(
        self, weight: torch.Tensor, bits: int, importance: torch.Tensor | None = None
    ) -> GroupedWeight:
        """Return a matrix in numbers of few bits, with the least squared error.

        Args:
            weight: (n, k) floats.
            bits: of a number, 4 or 8.
            importance: (k,) float32: factors of the squared errors of an input, relative to each other.
        """
        ...

    def dequantised(self, weight: GroupedWeight) -> torch.Tensor:
        """Return the weights that are multiplied in the dtype of the model, but for rounded scales."""
        ...


def floats_of(linear: Any, left: Left) -> torch.Tensor:
    """Return a weight that is stored as floats."""
    found: torch.Tensor = left[linear]() if linear in left else linear.weight
    return found


@contextmanager
def float_layers(linears: Iterable[Any], experts: Sequence[Any], left: Left) -> Iterator[None]:
    """Let linear layers and experts compute with floats, also with those that are in the files."""

    def product(matrix: ExpertMatrix, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, floats_of(matrix, left))

    with experts_computed_by(product, experts), _linears_from_files(linears, left):
        yield


@contextmanager
def _linears_from_files(linears: Iterable[Any], left: Left) -> Iterator[None]:
    """Let linear layers whose floats are in the files read them when they compute."""
    with ExitStack() as hooks:
        for linear in linears:
            if linear in left:
                for handle in _hooks(linear, left[linear], rounds_inputs=False):
                    hooks.enter_context(handle)
        yield


class Forms:
    """Returns each matrix of a model in its form.

    Args:
        quantiser: see `Quantiser`.
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
        quantiser: Quantiser,
        *,
        bits: int | None,
        stored: Mapping[Any, Callable[[], GroupedWeight]],
        left: Left,
        head: Any,
        importance: Mapping[Any, torch.Tensor],
        kept: KeptWeights | None = None,
        names: Mapping[Any, str] = MappingProxyType({}),
    ) -> None:
        self._quantiser: Final = quantiser
        self._bits: Final = bits
        self._stored: Final = stored
        self._left: Final = left
        self._head: Final = head
        self._importance: Final = importance
        self._files: Final = kept
        self._names: Final = names
        self._kept: Final[dict[Any, GroupedWeight]] = {}

    @property
    def rounds_inputs(self) -> bool:
        """See `Quantiser`."""
        return self._quantiser.rounds_inputs

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
        return self._quantiser.dequantised(weight)

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
        quantised = self._quantiser.quantised(weight, bits, self._importance.get(linear))
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
            few_bits = partial(_few_bits, forms, linear)
            for handle in _hooks(linear, few_bits, rounds_inputs=forms.rounds_inputs):
                hooks.enter_context(handle)
        yield


def _few_bits(forms: Forms, matrix: Any) -> torch.Tensor | None:
    """The values of a matrix of few bits; None if it has floats."""
    weight = forms.of(matrix)
    return forms.dequantised(weight) if isinstance(weight, GroupedWeight) else None


def _product(forms: Forms, matrix: ExpertMatrix, rows: torch.Tensor) -> torch.Tensor:
    weight = forms.of(matrix)
    if isinstance(weight, GroupedWeight):
        weight, rows = forms.dequantised(weight), rounded(rows) if forms.rounds_inputs else rows
    return torch.nn.functional.linear(rows, weight)


def _hooks(linear: Any, weight: Callable[[], torch.Tensor | None], *, rounds_inputs: bool) -> Iterator[Any]:
    """Give a layer another weight while it computes, unless it is None; its inputs may be rounded then."""
    own: list[torch.Tensor] = []

    def before(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        own.append(linear.weight.data)
        found = weight()
        if found is None:
            return inputs
        linear.weight.data = found
        return (rounded(inputs[0]), *inputs[1:]) if rounds_inputs else inputs

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


def relative(importance: torch.Tensor) -> torch.Tensor:
    """Return factors near 1. An input without importance has a little, or its weights would become zero."""
    found = (importance / importance.mean()).nan_to_num(1.0, _MOST_IMPORTANT, 1.0)
    return found.clamp(1 / _MOST_IMPORTANT, _MOST_IMPORTANT).contiguous()


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

    linears = list(linears)
    with (
        ExitStack() as hooks,
        experts_computed_by(multiply, experts),
        _linears_from_files(linears, left),
    ):
        for linear in linears:
            handle = linear.register_forward_pre_hook(lambda linear, inputs: observe(linear, inputs[0]))
            hooks.enter_context(handle)
        yield found


def forms_of(
    node: Any, quantiser: Quantiser, quantisation: Quantisation, kept: KeptWeights | None = None
) -> Forms:
    """Return the forms of a node's matrices, after a pass over the text for calibration, if there is one."""
    model, left = TextModel.of(node), left_in(node)
    importance: dict[Any, torch.Tensor] = {}
    is_known = kept is not None and kept.is_whole
    if quantisation.bits is not None and quantisation.calibration and not is_known:
        with observed_inputs(linears_of(model), experts_of(model), left) as importance:
            node.reference(torch.tensor(quantisation.calibration, device=node.device))
    readers = getattr(node, "stored_weights", {}) if quantisation.keeps_stored else {}
    stored = {matrix_named(node.model, name): read for name, read in readers.items()}
    return Forms(
        quantiser,
        bits=quantisation.bits,
        stored=stored,
        left=left,
        head=model.head,
        importance=importance,
        kept=kept,
        names=names_of(model) if kept is not None else {},
    )
