"""A Llama-like decoder whose layers are computed by the CPU kernels: a node of the engine.

Made from a loaded node, whose weights it packs for the kernels, layer by layer. Embeddings and the angles of
positions stay with transformers' modules; between them and the logits a step is one call, whatever number of
layers and requests it has. Of the kernels' results none depends on who else is in the step.

Which models are computed like this: `workers.kv_engine.kernel_models`. That it is computed right is shown
for each checkpoint when it is loaded, as for every node: against the model as transformers runs it
(`workers.kv_engine.selfcheck`).
"""

import ctypes
import logging
from typing import Any, Final

import torch

from shared.errors import BugError, WorkerError
from workers.cpu_kernels import library
from workers.cpu_kernels.library import Library
from workers.cpu_kernels.packing import DTYPES, LANES, Packing
from workers.kv_engine import kernel_models
from workers.kv_engine.attention import paged
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.kernel_models import LlamaLike
from workers.kv_engine.node import KVNode, TokenStep
from workers.kv_engine.selfcheck import text_for
from workers.kv_engine.step import Step

_LOGGER: Final = logging.getLogger(__name__)

_MOST_DIM: Final = 256
_MOST_SHARERS: Final = 32
"""Heads that share a head of keys, at most."""


def use_cpu_kernels(node: KVNode, *, threads: int) -> KVNode:
    """A CPU's node, computed by the kernels where they can; else as it is, and the log says why.

    Call it before the node is proven; what is packed is let go of in transformers' model, layer by layer.
    """
    if reason := _in_the_way(node):
        _LOGGER.info("%s is computed by torch: the CPU kernels do not support %s", node.name, reason)
        return node
    kernels = library.load()
    if kernels is None:
        return node
    many = "1 thread" if threads == 1 else f"{threads} threads"
    _LOGGER.info("%s is computed by the CPU kernels for %s, %s", node.name, kernels.variant, many)
    return NativeDecoder(node, kernels, threads=threads)


def _in_the_way(node: Any) -> str:
    """What of a node the kernels do not know; empty where they know all."""
    if unknown := kernel_models.unknown_in(node):
        return unknown
    if node.dtype not in DTYPES:
        return str(node.dtype)
    config = node.model.config
    dim = node.model.model.layers[0].self_attn.head_dim
    sharers = config.num_attention_heads // config.num_key_value_heads
    checks = {
        f"heads of {dim}": dim % (2 * LANES) == 0 and dim <= _MOST_DIM,
        f"states of {config.hidden_size}": config.hidden_size % LANES == 0,
        f"{sharers} heads on one of keys": sharers <= _MOST_SHARERS,
    }
    return kernel_models.first_unknown(checks)


class NativeDecoder(LlamaLike):
    """A node that has the results of `node`, computed by the kernels (`workers.kv_engine.node.KVNode`)."""

    def __init__(self, node: Any, kernels: Library, *, threads: int) -> None:
        super().__init__(node, kernels.variant)
        self._kernels: Final = kernels
        self._context: Final = kernels.open(threads)
        if not self._context:
            raise MemoryError
        self._dtype: Final = DTYPES[node.dtype]
        text = text_for(node)
        # Now, while there is a model to ask.
        self._proof: Final[tuple[torch.Tensor, torch.Tensor]] = (text, node.reference(text))
        self._pool: PagedPool | None = None
        self._cells: tuple[Any, Any] = (None, None)
        body = node.model.model
        self._hidden: Final[int] = node.model.config.hidden_size
        head = node.model.lm_head.weight
        packing = Packing(kernels, self._context, node.dtype)
        self._kept: Final[list[Any]] = [packing]
        self._head: Final = packing.stacked([head])
        if head is not self._embed.weight:
            head.data = head.data.new_empty(0)
        self._layers: Final = (library.Layer * self.layout.layers)(
            *(self._layer(layer, packing) for layer in body.layers)
        )
        self._model: Final = library.Model(
            dtype=self._dtype,
            layers=self.layout.layers,
            hidden=self._hidden,
            heads=node.model.config.num_attention_heads,
            kv_heads=self.layout.kv_heads,
            dim=self.layout.head_dim,
            intermediate=node.model.config.intermediate_size,
            eps=body.norm.variance_epsilon,
            scaling=body.layers[0].self_attn.scaling,
            layer=self._layers,
            norm=self._floats(body.norm.weight),
        )
        _LOGGER.info("%s: packed into %.0f MB", node.name, packing.nbytes / 1e6)

    def __del__(self) -> None:
        if context := getattr(self, "_context", None):
            self._kernels.close(context)

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        """The T tokens' hidden states, (T, hidden) float32.

        Raises:
            WorkerError: there is no memory for them.
        """
        pool, whole = paged.current()
        keys, values = self._cells_of(pool)
        embedded = inputs if inputs.is_floating_point() else self._embed(inputs)
        # A copy in any case: the layers write over it.
        hidden = embedded.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        cos, sin = (one.contiguous() for one in self._angles(hidden[None], step.positions[None]))
        told = _step_of(whole, cos, sin, keys, values, hidden)
        self._check(self._kernels.body(self._context, self._model, told))
        return hidden

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        chosen = hidden.index_select(0, indices).float().contiguous()
        logits = torch.empty(len(chosen), self.vocab_size)
        self._check(
            self._kernels.linear(
                *(self._context, self._dtype, self._head, chosen.data_ptr(), len(chosen)),
                *(logits.data_ptr(), self.vocab_size),
            )
        )
        return logits

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        text, logits = self._proof
        if not torch.equal(text, token_ids):
            raise BugError("the weights are packed: only the text of the proof was run before they were")
        return logits

    # ---- weights -----------------------------------------------------------------------------------
    def _layer(self, layer: Any, packing: Packing) -> library.Layer:
        own, mlp = layer.self_attn, layer.mlp
        projections = (own.q_proj, own.k_proj, own.v_proj)
        biases = [projection.bias for projection in projections]
        norms = [getattr(own, name, None) for name in ("q_norm", "k_norm")]
        packed = library.Layer(
            qkv=packing.stacked([projection.weight for projection in projections]),
            o=packing.stacked([own.o_proj.weight]),
            gate_up=packing.paired(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=packing.stacked([mlp.down_proj.weight]),
            norm_in=self._floats(layer.input_layernorm.weight),
            norm_post=self._floats(layer.post_attention_layernorm.weight),
            q_norm=self._floats(norms[0].weight) if norms[0] is not None else None,
            k_norm=self._floats(norms[1].weight) if norms[1] is not None else None,
            qkv_bias=self._floats(torch.cat(biases)) if biases[0] is not None else None,
            o_bias=self._floats(own.o_proj.bias) if own.o_proj.bias is not None else None,
            window=kernel_models.window_of(self.architecture, own) or 0,
        )
        for parameter in layer.parameters():
            parameter.data = parameter.data.new_empty(0)
        return packed

    def _floats(self, values: torch.Tensor) -> int:
        """The address of a float32 copy that stays."""
        copy = values.detach().to(torch.float32, copy=True).contiguous()
        self._kept.append(copy)
        return copy.data_ptr()

    def _cells_of(self, pool: PagedPool) -> tuple[Any, Any]:
        """The addresses of the pool's keys and values, layer by layer."""
        if pool is not self._pool:
            addresses = ctypes.c_void_p * self.layout.layers
            self._pool = pool
            self._cells = (
                addresses(*(cells.data_ptr() for cells in pool.keys)),
                addresses(*(cells.data_ptr() for cells in pool.values)),
            )
        return self._cells

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise WorkerError("there is no memory left for a step: expected room for its activations")


def _step_of(
    step: Step, cos: torch.Tensor, sin: torch.Tensor, keys: Any, values: Any, hidden: torch.Tensor
) -> library.Step:
    """A step as the kernels are told of it."""
    return library.Step(
        tokens=len(step.positions),
        spans=len(step.rows),
        block_size=step.spans.block_size,
        table_stride=step.block_table.shape[1],
        positions=step.positions.data_ptr(),
        slots=step.slots.data_ptr(),
        rows=step.rows.data_ptr(),
        query_offsets=step.query_offsets.data_ptr(),
        kv_lengths=step.kv_lengths.data_ptr(),
        block_table=step.block_table.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        keys=ctypes.cast(keys, ctypes.c_void_p),
        values=ctypes.cast(values, ctypes.c_void_p),
        hidden=hidden.data_ptr(),
    )
