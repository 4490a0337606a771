"""The experts of transformers' layers, matrix by matrix: files store them so, and CPU kernels pack them so.

Transformers keeps the matrices of all experts of a layer in two parameters: `gate_up_proj`,
(experts, 2 * inner, hidden), and `down_proj`, (experts, hidden, inner). Those of gpt-oss have their inputs
first, the columns of gate and up alternate, and there are biases.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import torch

Part: TypeAlias = Literal["gate", "up", "down"]
PARTS: Final[tuple[Part, ...]] = ("gate", "up", "down")
_PARTS_IN_FILES: Final[Mapping[str, Part]] = MappingProxyType(
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
)
_IN_FILES: Final = re.compile(
    rf"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.({'|'.join(_PARTS_IN_FILES)})"
)


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One matrix of one expert, which has a `weight` as linear layers have.

    Attributes:
        experts: transformers' module of all experts of a layer.
        number: of the expert.
    """

    experts: Any
    number: int
    part: Part

    @property
    def weight(self) -> torch.Tensor:
        """A view, (outputs, inputs)."""
        is_down = self.part == "down"
        matrix: torch.Tensor = (self.experts.down_proj if is_down else self.experts.gate_up_proj)[self.number]
        if _has_inputs_first(self.experts):
            matrix = matrix.T
        return matrix if is_down else _half(matrix, self.part, self.experts)

    @property
    def bias(self) -> torch.Tensor | None:
        """(outputs,); None if experts have none."""
        return bias_of(self.experts, self.part)[self.number] if has_biases(self.experts) else None


def has_biases(experts: Any) -> bool:
    """True if each matrix of these experts has a bias."""
    return getattr(experts, "gate_up_proj_bias", None) is not None


def bias_of(experts: Any, part: Part) -> torch.Tensor:
    """Return the biases of one part of all experts that have them, (experts, outputs)."""
    found: torch.Tensor = experts.down_proj_bias if part == "down" else experts.gate_up_proj_bias
    return found if part == "down" else _half(found.T, part, experts).T


def _has_inputs_first(experts: Any) -> bool:
    return bool(getattr(experts, "is_transposed", False))


def _half(rows: torch.Tensor, part: Part, experts: Any) -> torch.Tensor:
    """The rows of gate or up, which alternate or follow each other."""
    at = PARTS.index(part)
    return rows[at::2] if _has_inputs_first(experts) else rows.chunk(2)[at]


Multiply: TypeAlias = Callable[[ExpertMatrix, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class NameInFiles:
    """The name of an expert's matrix in files.

    Attributes:
        layer: the name of the decoder layer.
    """

    layer: str
    number: int
    part: Part


def name_in_files(name: str) -> NameInFiles | None:
    """Return the parts of a module's name in a checkpoint's files; None if it is no expert's."""
    found = _IN_FILES.fullmatch(name)
    return NameInFiles(found[1], int(found[2]), _PARTS_IN_FILES[found[3]]) if found else None


def matrix_named(model: Any, name: str) -> Any:
    """Return the linear layer, or the matrix of an expert, that has a name in a checkpoint's files.

    Raises:
        AttributeError: the model has none.
    """
    if found := name_in_files(name):
        return ExpertMatrix(experts_in(model.get_submodule(found.layer)), found.number, found.part)
    return model.get_submodule(name)


def experts_in(layer: Any) -> Any | None:
    """Return the module of a decoder layer's experts; None if it has none."""
    return getattr(layer.mlp, "experts", None)


def router_in(layer: Any) -> Any | None:
    """Return the module that chooses a decoder layer's experts; None if it has none."""
    if experts_in(layer) is None:
        return None
    return getattr(layer.mlp, "gate", None) or layer.mlp.router


def mlp_in(layer: Any) -> Any | None:
    """Return the MLP that sees all tokens of a decoder layer; None if there are experts only."""
    if experts_in(layer) is None:
        return layer.mlp
    return getattr(layer.mlp, "shared_expert", None) or getattr(layer.mlp, "shared_experts", None)


@contextmanager
def all_chosen(layers: Iterable[Any]) -> Iterator[None]:
    """Let all experts of decoder layers see each token."""
    routers = [found for layer in layers if (found := router_in(layer)) is not None]
    own = [router.top_k for router in routers]
    for router in routers:
        router.top_k = router.num_experts
    try:
        yield
    finally:
        for router, top_k in zip(routers, own, strict=True):
            router.top_k = top_k


@contextmanager
def experts_computed_by(multiply: Multiply, all_experts: Sequence[Any]) -> Iterator[None]:
    """Let modules of experts compute each product by `multiply`, of a matrix and the rows that it gets."""
    for experts in all_experts:
        experts.forward = _forward_of(experts, multiply)
    try:
        yield
    finally:
        for experts in all_experts:
            del experts.forward


def _forward_of(experts: Any, multiply: Multiply) -> Callable[..., torch.Tensor]:
    def product(matrix: ExpertMatrix, rows: torch.Tensor) -> torch.Tensor:
        result = multiply(matrix, rows)
        return result if matrix.bias is None else result + matrix.bias

    def forward(
        hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        added = torch.zeros_like(hidden_states)
        for number in sorted(set(top_k_index.flatten().tolist())):
            tokens, choices = torch.where(top_k_index == number)
            gate, up, down = (ExpertMatrix(experts, number, part) for part in PARTS)
            rows = hidden_states[tokens]
            inner = _activated(experts, product(gate, rows), product(up, rows))
            result = product(down, inner) * top_k_weights[tokens, choices, None]
            added.index_add_(0, tokens, result.to(added.dtype))
        return added

    return forward


def _activated(experts: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if _has_inputs_first(experts):
        both = torch.stack([gate, up], -1).flatten(-2)
        inner: torch.Tensor = experts._apply_gate(both)  # noqa: SLF001 - no public function
    else:
        inner = experts.act_fn(gate) * up
    return inner
