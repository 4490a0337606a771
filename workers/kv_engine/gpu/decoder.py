"""A Llama-like decoder on a GPU, whose layers go through kernels of our own: a node of the engine.

    qkv ── rotate_and_store ── attend ── out ── add_rms_norm ── gate, up ── silu_and_mul ── down ── add_rms_norm ── the next layer

Nine launches for each layer where transformers' modules take some sixty. Once they are recorded
(`workers.kv_engine.gpu.cuda_graphs`), a step of decodes is bound by its weights, and not by its launches.
Embedding, the angles of positions and the head stay with transformers' modules.

Weights that are multiplied together lie one below the other; the model's own parameters are views of them, so
nothing is there twice and the model runs as before. Which models are computed like this:
`workers.kv_engine.kernel_models`. That it is computed right is shown when it is loaded, as for every node
(`workers.kv_engine.selfcheck`).
"""

import logging
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import linear

from workers.kv_engine import kernel_models
from workers.kv_engine.attention import paged
from workers.kv_engine.gpu.triton_layers import add_rms_norm, silu_and_mul, rotate_and_store
from workers.kv_engine.kernel_models import LlamaLike
from workers.kv_engine.node import Node, TokenStep

_LOGGER: Final = logging.getLogger(__name__)


def fuse(node: Node) -> Node:
    """The node, computed by the kernels where they know it; else as it is, and the log says why."""
    if reason := _unsupported(node):
        _LOGGER.info("%s is computed by torch: the GPU kernels do not know %s", node.name, reason)
        return node
    _LOGGER.info("%s is computed by the GPU kernels", node.name)
    return FusedDecoder(node)


def _unsupported(node: Any) -> str:
    """What of a node the kernels do not know; empty where they know all."""
    if unknown := kernel_models.unknown_in(node):
        return unknown
    dtypes = {weight.dtype for weight in node.model.parameters()}
    return "weights of several dtypes" if len(dtypes) > 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer's weights, as they are multiplied."""

    norm_in: torch.Tensor
    qkv: torch.Tensor  # ((H + 2K) * D, C)
    qkv_bias: torch.Tensor | None
    norms: tuple[torch.Tensor, torch.Tensor] | None
    out: torch.nn.Linear
    norm_post: torch.Tensor
    gate_up: torch.Tensor  # (2 * inner, C)
    down: torch.nn.Linear
    window: int | None
    scaling: float


class FusedDecoder(LlamaLike):
    """A node that has the results of `node`, computed by the kernels (`workers.kv_engine.node.Node`)."""

    def __init__(self, node: Any) -> None:
        super().__init__(node, "triton")
        body = node.model.model
        self._norm: Final[torch.Tensor] = body.norm.weight
        self._eps: Final[float] = body.norm.variance_epsilon
        with torch.no_grad():
            self._layers: Final = [_layer_of(layer, node.architecture) for layer in body.layers]

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        pool, whole = paged.current()
        assert pool.kernel is not None, "a pool on this device has a kernel"
        # A copy in any case: the layers add to it.
        states = inputs.to(self.dtype, copy=True) if inputs.is_floating_point() else self._embed(inputs)
        cos, sin = (one[0].contiguous() for one in self._angles(states[None], step.positions[None]))
        normed = add_rms_norm(states, None, self._layers[0].norm_in, self._eps)
        for number, layer in enumerate(self._layers):
            keys, values = pool.keys[number], pool.values[number]
            product = linear(normed, layer.qkv, layer.qkv_bias)
            queries = rotate_and_store(product, layer.norms, self._eps, cos, sin, whole.slots, keys, values)
            seen = pool.kernel(
                queries, keys, values, whole, scaling=layer.scaling, window=layer.window, softcap=None
            )
            normed = add_rms_norm(states, layer.out(seen.flatten(1)), layer.norm_post, self._eps)
            moved = layer.down(silu_and_mul(linear(normed, layer.gate_up)))
            is_last = number + 1 == len(self._layers)
            next_norm = self._norm if is_last else self._layers[number + 1].norm_in
            normed = add_rms_norm(states, moved, next_norm, self._eps)
        return normed

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._node.head(hidden, indices)
        return logits

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._node.reference(token_ids)
        return logits


def _layer_of(layer: Any, architecture: str) -> _Layer:
    own, mlp = layer.self_attn, layer.mlp
    projections = [own.q_proj, own.k_proj, own.v_proj]
    biases = [projection.bias for projection in projections]
    return _Layer(
        norm_in=layer.input_layernorm.weight,
        qkv=_merge_weights(projections),
        qkv_bias=torch.cat(biases) if biases[0] is not None else None,
        norms=(own.q_norm.weight, own.k_norm.weight) if hasattr(own, "q_norm") else None,
        out=own.o_proj,
        norm_post=layer.post_attention_layernorm.weight,
        gate_up=_merge_weights([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj,
        window=kernel_models.window_of(architecture, own),
        scaling=own.scaling,
    )


def _merge_weights(projections: list[Any]) -> torch.Tensor:
    """Their weights as one matrix, of which they are parts from now on."""
    whole = torch.cat([projection.weight for projection in projections])
    parts = torch.split(whole, [len(projection.weight) for projection in projections])
    for projection, part in zip(projections, parts, strict=True):
        projection.weight.data = part
    return whole
