"""A Llama-like decoder on a GPU with fused layers: a node of the engine.

    qkv ── rotate, store ── attend ── out ── add, norm ── gate, up ── silu, mul ── down ── add, norm ── next

A layer takes nine launches, six of one row, and some sixty with transformers' modules. Recorded in a CUDA
graph (`workers.kv_engine.gpu.cuda_graphs`), a step of decodes is limited by reading its weights and not by
its launches. Transformers' modules still compute embeddings and the angles of positions, and the head unless
weights have few bits.

Weights that are multiplied by the same states are stored as one matrix. The model's own parameters become
views of it, so no weight is stored twice, and the model runs as before. `workers.kv_engine.kernel_models`
lists the supported models. As for every node, the results are checked at load
(`workers.kv_engine.selfcheck`).

Of a node that a tensor-parallel group shares, a member's part is computed in the same way. Its `out` and
`down` add up what all members have, so they are called, for one row, too.

Weights may have four to eight bits (`workers.kv_engine.quantisation`). Then they are packed layer by layer,
and freed in the model.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from models.base import TokenStep
from models.transformers_lm.sharding import is_part, joins_parts
from workers.kv_engine import kernel_models
from workers.kv_engine.attention import paged
from workers.kv_engine.gpu.cuda_graphs import CudaCapture, fastest_s
from workers.kv_engine.gpu.few_bits import GpuQuantiser
from workers.kv_engine.gpu.kernel_checks import check_few_bits
from workers.kv_engine.gpu.matrices import FloatMatrix, Matrix, MatrixMaker, ModuleMatrix
from workers.kv_engine.gpu.triton_layers import add_rms_norm, rotate_and_store, silu_and_mul
from workers.kv_engine.kernel_models import Inputs, Kind, LlamaLike, SplicedInputs, TextModel
from workers.kv_engine.node import KVNode, fill
from workers.kv_engine.quantisation.forms import Forms, forms_of
from workers.kv_engine.quantisation.kept_weights import KeptWeights
from workers.kv_engine.quantisation.matrices import gate_and_up, linears_in, projections
from workers.kv_engine.quantisation.measured import measured
from workers.kv_engine.quantisation.references import References
from workers.kv_engine.quantisation.wanted import AS_STORED, Quantisation, refuse
from workers.kv_engine.selfcheck import masked_logits

_LOGGER: Final = logging.getLogger(__name__)


def fuse(node: KVNode, quantisation: Quantisation = AS_STORED) -> KVNode:
    """Return the node with fused layers, or the node itself if the kernels do not support it; log which.

    Raises:
        UnsupportedArchitectureError: weights shall be quantised, and the kernels do not support the node.
    """
    if reason := _unsupported(node):
        refuse(quantisation, f"the GPU kernels do not support {reason} of {node.architecture}")
        _LOGGER.info("%s is computed by torch: the GPU kernels do not support %s", node.name, reason)
        fill(node)
        return node
    _LOGGER.info("%s is computed by the GPU kernels", node.name)
    return measured(node, quantisation, lambda kept: FusedDecoder(node, quantisation=quantisation, kept=kept))


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
    qkv: Matrix  # (H + 2K) * D outputs
    norms: tuple[torch.Tensor, torch.Tensor] | None
    out: Matrix
    norm_post: torch.Tensor
    gate_up: Matrix  # 2 * inner outputs
    down: Matrix
    window: int | None
    scaling: float


class FusedDecoder(LlamaLike):
    """A `workers.kv_engine.node.KVNode` with the same results as `node`, computed by the fused kernels.

    Args:
        node: of a model of floats, whose weights stay in it; or with weights of few bits, in its files or as
            `quantisation` says, which are packed and freed.
        quantisation: see `Quantisation`.
        kept: quantised matrices that are in files, or are written to them.
    """

    def __init__(
        self, node: Any, *, quantisation: Quantisation = AS_STORED, kept: KeptWeights | None = None
    ) -> None:
        super().__init__(node, "triton")
        model = TextModel.of(node)
        body = model.body
        self._norm: Final[torch.Tensor] = body.norm.weight
        self._eps: Final[float] = body.norm.variance_epsilon
        self._references: References | None = None
        self._head: Matrix | None = None
        with torch.no_grad():
            quantiser = GpuQuantiser(node.device, node.dtype, is_float=quantisation.is_float)
            forms = forms_of(node, quantiser, quantisation, kept)
            if not forms.has_few_bits:
                fill(node)
            self._layers: Final = (
                self._packed(node, forms)
                if forms.has_few_bits
                else [_layer_of(layer, self._kind, _merged) for layer in body.layers]
            )
            is_shared = any(map(is_part, body.modules()))
            self._uses_row_product: Final = not is_shared and _are_rows_faster(self._layers, self._eps)

    def _packed(self, node: Any, forms: Forms) -> list[_Layer]:
        """Pack the weights of all layers and of the head, and free them in the model."""
        model, maker = TextModel.of(node), MatrixMaker(node.device, node.dtype)
        layers: list[_Layer] = []

        def merged(linears: Sequence[Any]) -> Matrix:
            return maker.stacked([forms.of(one) for one in linears], _bias_of(linears))

        def pack(number: int) -> None:
            layer = model.body.layers[number]
            layers.append(_layer_of(layer, self._kind, merged))
            for linear in linears_in(layer):
                linear.weight.data = linear.weight.data.new_empty(0)

        self._references = References.while_packing(node, forms, pack)
        self._head = merged([model.head])
        forms.forget()
        if model.head.weight is not self._embed.weight:
            model.head.weight.data = model.head.weight.data.new_empty(0)
        maker.use_scratch()
        check_few_bits(maker.made)
        if close_files := getattr(node, "close_files", None):
            close_files()
        _LOGGER.info(
            "%s: weights packed into %.0f MB", node.name, sum(one.nbytes for one in maker.made) / 1e6
        )
        return layers

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
            product = layer.qkv.products(normed)
            queries = rotate_and_store(product, layer.norms, self._eps, cos, sin, batch.slots, keys, values)
            attended = paged.attend(queries, number, scaling=layer.scaling, window=layer.window)
            attended = layer.out.products(attended.flatten(1))
            normed = add_rms_norm(states, attended, layer.norm_post, self._eps)
            mlp = layer.down.products(silu_and_mul(layer.gate_up.products(normed)))
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
            product = layer.qkv.row_product(states, norm=(layer.norm_in, self._eps))
            queries = rotate_and_store(product, layer.norms, self._eps, cos, sin, batch.slots, keys, values)
            attended = paged.attend(queries, number, scaling=layer.scaling, window=layer.window)
            layer.out.row_product(attended.flatten(1), added_to=states)
            gated = layer.gate_up.row_product(states, norm=(layer.norm_post, self._eps), is_gated=True)
            layer.down.row_product(gated, added_to=states)
        return add_rms_norm(states, None, self._norm, self._eps)

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if self._head is not None:  # supported models change nothing after the matrix
            chosen = hidden.index_select(0, indices)
            is_row = len(chosen) == 1 and self._uses_row_product
            return (self._head.row_product(chosen) if is_row else self._head.products(chosen)).float()
        logits: torch.Tensor = self._node.head(hidden, indices)
        return logits

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._references is not None:
            return self._references.of(token_ids)
        logits: torch.Tensor = self._node.reference(token_ids)
        return logits

    def masked_reference(self) -> torch.Tensor:
        """Return the logits for the mask `full` in the self-check, (T, vocab_size), without fused layers."""
        if self._references is not None:
            return self._references.of_mask
        return masked_logits(self._node, by_torch=True)


def _are_rows_faster(layers: list[_Layer], eps: float) -> bool:
    """True if our products of one row are faster than others with kernels around them, measured here.

    Those of floats are cuBLAS'. On a CPU, in Triton's interpreter, ours are used.
    """
    norm = layers[0].norm_in
    if norm.device.type != "cuda":
        return True
    states = norm.new_zeros(1, len(norm))
    attended = norm.new_zeros(1, layers[0].out.inputs)

    def ours() -> None:
        for layer in layers:
            layer.qkv.row_product(states, norm=(layer.norm_in, eps))
            layer.out.row_product(attended, added_to=states)
            gated = layer.gate_up.row_product(states, norm=(layer.norm_post, eps), is_gated=True)
            layer.down.row_product(gated, added_to=states)

    def theirs() -> None:
        for layer in layers:
            layer.qkv.products(add_rms_norm(states, None, layer.norm_in, eps))
            normed = add_rms_norm(states, layer.out.products(attended), layer.norm_post, eps)
            layer.down.products(silu_and_mul(layer.gate_up.products(normed)))

    # Recorded, as they run in a step.
    own_s, others_s = fastest_s(
        [CudaCapture(norm.device).capture(work) for work in (ours, theirs)], norm.device
    )
    _LOGGER.info(
        "layers of one row without attention: %.2f ms by products of one row, %.2f ms by those of many; the "
        "faster serve",
        1e3 * own_s,
        1e3 * others_s,
    )
    return own_s < others_s


def _layer_of(layer: Any, kind: Kind, merged: Callable[[Sequence[Any]], Matrix]) -> _Layer:
    """Return a layer; `merged` makes one matrix of several linear layers."""
    own, mlp = layer.self_attn, layer.mlp
    return _Layer(
        norm_in=layer.input_layernorm.weight,
        qkv=merged(projections(own)),
        norms=(own.q_norm.weight, own.k_norm.weight) if hasattr(own, "q_norm") else None,
        out=merged([own.o_proj]),
        norm_post=layer.post_attention_layernorm.weight,
        gate_up=merged(gate_and_up(mlp)),
        down=merged([mlp.down_proj]),
        window=kind.window(own),
        scaling=own.scaling,
    )


def _merged(linears: Sequence[Any]) -> Matrix:
    """Return linear layers as one matrix, and make their weights views of it."""
    if len(linears) == 1:
        linears[0].weight.data = linears[0].weight.data.contiguous()
        return ModuleMatrix(linears[0])
    whole = torch.cat([linear.weight for linear in linears])
    parts = torch.split(whole, [len(linear.weight) for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight.data = part
    return FloatMatrix(whole, _bias_of(linears))


def _bias_of(linears: Sequence[Any]) -> torch.Tensor | None:
    """The biases of linear layers, one after the other; None if they have none."""
    return torch.cat([linear.bias for linear in linears]) if linears[0].bias is not None else None
