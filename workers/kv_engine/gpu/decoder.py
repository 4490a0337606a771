"""A Llama-like decoder on a GPU with fused layers: a node of the engine.

    qkv ── rotate, store ── attend ── out ── add, norm ── gate, up ── silu, mul ── down ── add, norm ── next

A layer takes nine launches, eight of one row, and some sixty with transformers' modules. Recorded in a CUDA
graph (`workers.kv_engine.gpu.cuda_graphs`), a step of decodes is limited by reading its weights and not by
its launches. Transformers' modules still compute the embedding, the angles of positions and the head.

Weights that are multiplied by the same states are stored as one matrix. The model's own parameters become
views of it, so no weight is stored twice, and the model runs as before. `workers.kv_engine.kernel_models`
lists the supported models. As for every node, the results are checked at load
(`workers.kv_engine.selfcheck`).
"""

import logging
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import linear

from models.base import TokenStep
from workers.kv_engine import kernel_models
from workers.kv_engine.attention import paged
from workers.kv_engine.gpu.cuda_graphs import CudaCapture
from workers.kv_engine.gpu.triton_layers import add_rms_norm, rotate_and_store, row_product, silu_and_mul
from workers.kv_engine.kernel_models import Inputs, LlamaLike, SplicedInputs, TextModel
from workers.kv_engine.node import KVNode
from workers.kv_engine.selfcheck import masked_logits

_LOGGER: Final = logging.getLogger(__name__)

_ROUNDS: Final = 5
"""Of measured products; the fastest counts."""


def fuse(node: KVNode) -> KVNode:
    """Return the node with fused layers, or the node itself if the kernels do not support it; log which."""
    if reason := _unsupported(node):
        _LOGGER.info("%s is computed by torch: the GPU kernels do not support %s", node.name, reason)
        return node
    _LOGGER.info("%s is computed by the GPU kernels", node.name)
    return FusedDecoder(node)


def _unsupported(node: Any) -> str:
    """The property of the node that the kernels do not support; empty if none."""
    if unknown := kernel_models.unknown_in(node):
        return unknown
    dtypes = {weight.dtype for weight in node.model.parameters()}
    return "weights of several dtypes" if len(dtypes) > 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The weights of one layer, as they are multiplied."""

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
    """A `workers.kv_engine.node.KVNode` with the same results as `node`, computed by the fused kernels."""

    def __init__(self, node: Any) -> None:
        super().__init__(node, "triton")
        text = TextModel.of(node)
        body = text.body
        self._norm: Final[torch.Tensor] = body.norm.weight
        self._eps: Final[float] = body.norm.variance_epsilon
        with torch.no_grad():
            self._layers: Final = [_layer_of(layer, text.name) for layer in body.layers]
            self._own: Final = _own_products(self._layers)

    def forward(self, inputs: Inputs, step: TokenStep) -> torch.Tensor:
        pool, batch = paged.current()
        embedded = inputs.embeds if isinstance(inputs, SplicedInputs) else inputs
        # Always a copy: the layers add to it in place.
        states = embedded.to(self.dtype, copy=True) if embedded.is_floating_point() else self._embed(embedded)
        cos, sin = self._angles_of(states, step.positions)
        normed = add_rms_norm(states, None, self._layers[0].norm_in, self._eps)
        for number, layer in enumerate(self._layers):
            keys, values = pool.keys[number], pool.values[number]
            product = self._product("qkv", normed, layer.qkv, layer.qkv_bias)
            queries = rotate_and_store(product, layer.norms, self._eps, cos, sin, batch.slots, keys, values)
            attended = paged.attend(queries, number, scaling=layer.scaling, window=layer.window)
            added = self._product("out", attended.flatten(1), layer.out.weight, layer.out.bias)
            normed = add_rms_norm(states, added, layer.norm_post, self._eps)
            gated = self._gated(normed, layer.gate_up)
            mlp = self._product("down", gated, layer.down.weight, layer.down.bias)
            if isinstance(inputs, SplicedInputs) and (rows := inputs.rows_after(number)) is not None:
                states.index_add_(0, inputs.at, rows.to(self.dtype))
            is_last = number + 1 == len(self._layers)
            next_norm = self._norm if is_last else self._layers[number + 1].norm_in
            normed = add_rms_norm(states, mlp, next_norm, self._eps)
        return normed

    def _product(
        self, kind: str, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if len(states) == 1 and kind in self._own:
            return row_product(states, weight, bias)
        return linear(states, weight, bias)

    def _gated(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of the product with the weights of both."""
        if len(states) == 1 and "gate_up" in self._own:
            return row_product(states, weight, is_gated=True)
        return silu_and_mul(linear(states, weight))

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._node.head(hidden, indices)
        return logits

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._node.reference(token_ids)
        return logits

    def masked_reference(self) -> torch.Tensor:
        """Return the logits for the mask `full` in the self-check, (T, vocab_size), without fused layers."""
        return masked_logits(self._node, by_torch=True)


def _own_products(layers: list[_Layer]) -> frozenset[str]:
    """The products of which one row is computed by our kernel: those in which it is faster, measured here.

    On a CPU, in Triton's interpreter, all.
    """
    kinds = {
        "qkv": [layer.qkv for layer in layers],
        "out": [layer.out.weight for layer in layers],
        "gate_up": [layer.gate_up for layer in layers],
        "down": [layer.down.weight for layer in layers],
    }
    if not layers[0].qkv.is_cuda:
        return frozenset(kinds)
    took_s = {kind: _row_seconds(weights, is_gated=kind == "gate_up") for kind, weights in kinds.items()}
    said = ", ".join(f"{kind} {ours / theirs:.2f}" for kind, (ours, theirs) in took_s.items())
    _LOGGER.info("products of one row, time of our kernel over cuBLAS' (the faster one is used): %s", said)
    return frozenset(kind for kind, (ours, theirs) in took_s.items() if ours < theirs)


def _row_seconds(weights: list[torch.Tensor], *, is_gated: bool) -> tuple[float, float]:
    """Seconds of one product of a row with each of the weights, by our kernel and by cuBLAS."""
    device = weights[0].device
    row = torch.randn(1, weights[0].shape[1], device=device, dtype=weights[0].dtype)

    def ours() -> None:
        for weight in weights:
            row_product(row, weight, is_gated=is_gated)

    def theirs() -> None:
        for weight in weights:
            product = linear(row, weight)
            if is_gated:
                silu_and_mul(product)

    # Recorded, as they run in a step; in turns, so that both see the same clocks.
    replays = [CudaCapture(device).capture(work) for work in (ours, theirs)]
    taken_s: list[list[float]] = [[], []]
    for _ in range(_ROUNDS):
        for replay, taken in zip(replays, taken_s, strict=True):
            torch.cuda.synchronize(device)
            begun_s = time.perf_counter()
            replay()
            torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - begun_s)
    return min(taken_s[0]), min(taken_s[1])


def _layer_of(layer: Any, body: str) -> _Layer:
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
        window=kernel_models.window_of(body, own),
        scaling=own.scaling,
    )


def _merge_weights(projections: list[Any]) -> torch.Tensor:
    """Return the weights as one matrix, and make the projections views of it."""
    whole = torch.cat([projection.weight for projection in projections])
    parts = torch.split(whole, [len(projection.weight) for projection in projections])
    for projection, part in zip(projections, parts, strict=True):
        projection.weight.data = part
    return whole
