"""The matrices of a model that our kernels multiply: linear layers, and those of experts."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, TypeAlias

import torch

from models.transformers_lm.expert_layers import PARTS, ExpertMatrix, experts_in, matrix_named, mlp_in
from workers.kv_engine.kernel_models import TextModel

Left: TypeAlias = Mapping[Any, Callable[[], torch.Tensor]]
"""By linear layer or matrix of an expert, what reads its floats, if they are not in the model."""


def linears_of(model: TextModel) -> Iterator[Any]:
    """Yield the linear layers that the kernels compute."""
    for layer in model.body.layers:
        yield from linears_in(layer)
    yield model.head


def linears_in(layer: Any) -> Iterator[Any]:
    """Yield those of one decoder layer."""
    own, mlp = layer.self_attn, mlp_in(layer)
    yield from (*projections(own), own.o_proj)
    if mlp is not None:
        yield from (*gate_and_up(mlp), mlp.down_proj)


def projections(attention: Any) -> tuple[Any, ...]:
    """Return the linear layers to queries, keys and values: one, or one for each."""
    if hasattr(attention, "qkv_proj"):
        return (attention.qkv_proj,)
    return attention.q_proj, attention.k_proj, attention.v_proj


def gate_and_up(mlp: Any) -> tuple[Any, ...]:
    """Return the linear layers to gate and up: one, or one for each."""
    return (mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj)


def experts_of(model: TextModel) -> list[Any]:
    """Return the modules of experts, one for each layer that has them."""
    return [found for layer in model.body.layers if (found := experts_in(layer)) is not None]


def names_of(model: TextModel) -> dict[Any, str]:
    """Return a name for each linear layer and each expert's matrix that the kernels compute."""
    modules = {module: name for name, module in model.body.named_modules()}
    names = {linear: modules.get(linear, "head") for linear in linears_of(model)}
    for experts in experts_of(model):
        for number, part in product(range(experts.num_experts), PARTS):
            names[ExpertMatrix(experts, number, part)] = f"{modules[experts]}.{number}.{part}"
    return names


def left_in(node: Any) -> Left:
    """Return what reads the floats that are still in a node's files."""
    readers = getattr(node, "left_floats", {})
    return {matrix_named(node.model, name): read for name, read in readers.items()}
