"""A Llama-like decoder on a GPU with fused layers: a node of the engine.

    qkv ── rotate, store ── attend ── out ── add, norm ── gate, up ── silu, mul ── down ── add, norm ── next

A layer takes nine launches, six of one row, and some sixty with transformers' modules. Recorded in a CUDA
graph (`workers.kv_engine.gpu.cuda_graphs`), a step of decodes is limited by reading its weights and not by
its launches. Transformers' modules still compute the embedding, the angles of positions and the head.

Weights that are multiplied by the same states are stored as one matrix. The model's own parameters become
views of it, so no weight is stored twice, and the model runs as before. `workers.kv_engine.kernel_models`
lists the supported models. As for every node, the results are checked at load
(`workers.kv_engine.selfcheck`).

Of a node that a tensor-parallel group shares, a member's part is computed in the same way. Its `out` and
`down` add up what all members have, so they are called, for one row, too.
"""

import logging
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import linear

from models.base import TokenStep
from models.transformers_lm.sharding import is_part, joins_parts
from workers.kv_engine import kernel_models
from workers.kv_engine.attention import paged
from workers.kv_engine.gpu.cuda_graphs import CudaCapture, fastest_s
from workers.kv_engine.gpu.triton_layers import add_rms_norm, rotate_and_store, row_product, silu_and_mul
from workers.kv_engine.kernel_models import Inputs, Kind, LlamaLike, SplicedInputs, TextModel
from workers.kv_engine.node import KVNode
from workers.kv_engine.selfcheck import masked_logits

_LOGGER: Final = logging.getLogger(__name__)


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
    text = TextModel.of(node)
    assert text.kind is not None
    partial = (getattr(text.config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    checks = {
        f"the experts of {type(text.body).__name__}": not text.kind.has_experts,
        str(node.architecture): text.kind.is_on_gpu,
        f"the activation {text.activation}": text.activation == "silu",
        "angles for a part of a head": partial == 1.0,
        "parts of queries, keys, values or gates that members join": not any(
            map(joins_parts, text.body.modules())
        ),
        "weights of several dtypes": len({weight.dtype for weight in node.model.parameters()}) == 1,
    }
    return kernel_models.first_unknown(checks)


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
            self._layers: Final = [_layer_of(layer, self._kind) for layer in body.layers]
            is_shared = any(map(is_part, body.modules()))
            self._uses_row_product: Final = not is_shared and _are_rows_faster(self._layers, self._eps)

    def forward(self, inputs: Inputs, step: TokenStep) -> torch.Tensor:
        pool, batch = paged.current()
        embedded = inputs.embeds if isinstance(inputs, SplicedInputs) else inputs
        # Always a copy: the layers add to it in place.
        states = embedded.to(self.dtype, copy=True) if embedded.is_floating_point() else self._embed(embedded)
        if len(states) == 1 and self._uses_row_product and not isinstance(inputs, SplicedInputs):
            return self._forward_row(states, step)
        cos, sin = self._angles_of(states, step)
        normed = add_rms_norm(states, None, self._layers[0].norm_in, self._eps)
        for number, layer in enumerate(self._layers):
            keys, values = pool.keys[number], pool.values[number]
            product = linear(normed, layer.qkv, layer.qkv_bias)
            queries = rotate_and_store(product, layer.norms, self._eps, cos, sin, batch.slots, keys, values)
            attended = paged.attend(queries, number, scaling=layer.scaling, window=layer.window)
            normed = add_rms_norm(states, layer.out(attended.flatten(1)), layer.norm_post, self._eps)
            mlp = layer.down(silu_and_mul(linear(normed, layer.gate_up)))
            if isinstance(inputs, SplicedInputs) and (rows := inputs.rows_after(number)) is not None:
                states.index_add_(0, inputs.at, rows.to(self.dtype))
            is_last = number + 1 == len(self._layers)
            next_norm = self._norm if is_last else self._layers[number + 1].norm_in
            normed = add_rms_norm(states, mlp, next_norm, self._eps)
        return normed

    def _forward_row(self, states: torch.Tensor, step: TokenStep) -> torch.Tensor:
        """The same for one token: six launches per layer."""
        pool, batch = paged.current()
        cos, sin = self._angles_of(states, step)
        for number, layer in enumerate(self._layers):
            keys, values = pool.keys[number], pool.values[number]
            product = row_product(states, layer.qkv, layer.qkv_bias, norm=(layer.norm_in, self._eps))
            queries = rotate_and_store(product, layer.norms, self._eps, cos, sin, batch.slots, keys, values)
            attended = paged.attend(queries, number, scaling=layer.scaling, window=layer.window)
            row_product(attended.flatten(1), layer.out.weight, layer.out.bias, added_to=states)
            gated = row_product(states, layer.gate_up, norm=(layer.norm_post, self._eps), is_gated=True)
            row_product(gated, layer.down.weight, layer.down.bias, added_to=states)
        return add_rms_norm(states, None, self._norm, self._eps)

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._node.head(hidden, indices)
        return logits

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._node.reference(token_ids)
        return logits

    def masked_reference(self) -> torch.Tensor:
        """Return the logits for the mask `full` in the self-check, (T, vocab_size), without fused layers."""
        return masked_logits(self._node, by_torch=True)


def _are_rows_faster(layers: list[_Layer], eps: float) -> bool:
    """True if our products of one row are faster than cuBLAS' with kernels around them, measured here.

    On a CPU, in Triton's interpreter, they are used.
    """
    device = layers[0].qkv.device
    if device.type != "cuda":
        return True
    states = torch.zeros(1, layers[0].qkv.shape[1], device=device, dtype=layers[0].qkv.dtype)
    attended = torch.zeros(1, layers[0].out.weight.shape[1], device=device, dtype=states.dtype)

    def ours() -> None:
        for layer in layers:
            row_product(states, layer.qkv, norm=(layer.norm_in, eps))
            row_product(attended, layer.out.weight, added_to=states)
            gated = row_product(states, layer.gate_up, norm=(layer.norm_post, eps), is_gated=True)
            row_product(gated, layer.down.weight, added_to=states)

    def theirs() -> None:
        for layer in layers:
            linear(add_rms_norm(states, None, layer.norm_in, eps), layer.qkv)
            normed = add_rms_norm(states, linear(attended, layer.out.weight), layer.norm_post, eps)
            linear(silu_and_mul(linear(normed, layer.gate_up)), layer.down.weight)

    # Recorded, as they run in a step.
    own_s, cublas_s = fastest_s([CudaCapture(device).capture(work) for work in (ours, theirs)], device)
    _LOGGER.info(
        "layers of one row without attention: %.2f ms by our products, %.2f ms by cuBLAS; the faster serve",
        1e3 * own_s,
        1e3 * cublas_s,
    )
    return own_s < cublas_s


def _layer_of(layer: Any, kind: Kind) -> _Layer:
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
        window=kind.window(own),
        scaling=own.scaling,
    )


def _merge_weights(projections: list[Any]) -> torch.Tensor:
    """Return the weights as one matrix, and make the projections views of it."""
    whole = torch.cat([projection.weight for projection in projections])
    parts = torch.split(whole, [len(projection.weight) for projection in projections])
    for projection, part in zip(projections, parts, strict=True):
        projection.weight.data = part
    return whole
