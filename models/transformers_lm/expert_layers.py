"""The experts of transformers' layers, matrix by matrix: files store them so, and CPU kernels pack them so.

Transformers keeps the matrices of all experts of a layer in two parameters: `gate_up_proj`,
(experts, 2 * inner, hidden), and `down_proj`, (experts, hidden, inner).
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
        if self.part == "down":
            down: torch.Tensor = self.experts.down_proj[self.number]
            return down
        halves: torch.Tensor = self.experts.gate_up_proj[self.number].unflatten(0, (2, -1))
        return halves[PARTS.index(self.part)]


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


def mlp_in(layer: Any) -> Any | None:
    """Return the MLP that sees all tokens of a decoder layer; None if there are experts only."""
    return getattr(layer.mlp, "shared_expert", None) if experts_in(layer) is not None else layer.mlp


@contextmanager
def all_chosen(layers: Iterable[Any]) -> Iterator[None]:
    """Let all experts of decoder layers see each token."""
    routers = [layer.mlp.gate for layer in layers if experts_in(layer) is not None]
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
    def forward(
        hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        added = torch.zeros_like(hidden_states)
        for number in sorted(set(top_k_index.flatten().tolist())):
            tokens, choices = torch.where(top_k_index == number)
            gate, up, down = (ExpertMatrix(experts, number, part) for part in PARTS)
            rows = hidden_states[tokens]
            inner = experts.act_fn(multiply(gate, rows)) * multiply(up, rows)
            result = multiply(down, inner) * top_k_weights[tokens, choices, None]
            added.index_add_(0, tokens, result.to(added.dtype))
        return added

    return forward
