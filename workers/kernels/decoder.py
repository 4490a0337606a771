"""A Llama-like decoder whose layers are computed by the CPU kernels: a node of the engine.

Made from a loaded node, whose weights it packs for the kernels, layer by layer. Embeddings and the angles of
positions stay with transformers' modules; between them and the logits a step is one call, whatever number of
layers and requests it has. Of the kernels' results none depends on who else is in the step.

Which models are computed like this: `workers.engine.llama_like`. That it is computed right is shown for each
checkpoint when it is loaded, as for every node: against the model as transformers runs it
(`workers.engine.selfcheck`).
"""

import ctypes
import logging
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final

import torch

from shared.errors import BugError, WorkerError
from workers import memory
from workers.engine import attention, llama_like
from workers.engine.attention import PagedPool
from workers.engine.llama_like import LlamaLike
from workers.engine.node import Node, TokenStep
from workers.engine.selfcheck import text_for
from workers.engine.step import Step
from workers.kernels import library
from workers.kernels.library import Library

_LOGGER: Final = logging.getLogger(__name__)

_DTYPES: Final = {torch.float32: library.FLOAT32, torch.bfloat16: library.BFLOAT16}
_LANES: Final = 16
_MOST_DIM: Final = 256
_MOST_SHARERS: Final = 32
"""Heads that share a head of keys, at most."""


class _Columns(IntEnum):
    """Where the columns of a matrix go in the packed one; see `tiles.h`."""

    PLAIN = 0
    GATE = 1
    UP = 2


def by_cpu_kernels(node: Node, *, threads: int) -> Node:
    """A CPU's node, computed by the kernels where they can; else as it is, and the log says why.

    Call it before the node is proven; what is packed is let go of in transformers' model, layer by layer.
    """
    if reason := _in_the_way(node):
        _LOGGER.info("%s is computed by torch: the CPU kernels do not know %s", node.name, reason)
        return node
    kernels = library.load()
    if kernels is None:
        return node
    _LOGGER.info("%s is computed by the CPU kernels for %s, %d threads", node.name, kernels.variant, threads)
    return NativeDecoder(node, kernels, threads=threads)


def _in_the_way(node: Any) -> str:
    """What of a node the kernels do not know; empty where they know all."""
    if unknown := llama_like.unknown_in(node):
        return unknown
    if node.dtype not in _DTYPES:
        return str(node.dtype)
    config = node.model.config
    dim = node.model.model.layers[0].self_attn.head_dim
    sharers = config.num_attention_heads // config.num_key_value_heads
    checks = {
        f"heads of {dim}": dim % (2 * _LANES) == 0 and dim <= _MOST_DIM,
        f"states of {config.hidden_size}": config.hidden_size % _LANES == 0,
        f"{sharers} heads on one of keys": sharers <= _MOST_SHARERS,
    }
    return llama_like.first_unknown(checks)


class NativeDecoder(LlamaLike):
    """A node that has the results of `node`, computed by the kernels (`workers.engine.node.Node`)."""

    def __init__(self, node: Any, kernels: Library, *, threads: int) -> None:
        super().__init__(node, kernels.variant)
        self._kernels: Final = kernels
        self._context: Final = kernels.open(threads)
        if not self._context:
            raise MemoryError
        self._dtype: Final = _DTYPES[node.dtype]
        self._kept: Final[list[Any]] = []
        text = text_for(node)
        # Now, while there is a model to ask.
        self._proof: Final[tuple[torch.Tensor, torch.Tensor]] = (text, node.reference(text))
        self._pool: PagedPool | None = None
        self._cells: tuple[Any, Any] = (None, None)
        body = node.model.model
        self._hidden: Final[int] = node.model.config.hidden_size
        head = node.model.lm_head.weight
        self._head: Final = self._packed([head], self._hidden)
        if head is not self._embed.weight:
            head.data = head.data.new_empty(0)
        self._layers: Final = (library.Layer * self.layout.layers)(*map(self._layer, body.layers))
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

    def __del__(self) -> None:
        if context := getattr(self, "_context", None):
            self._kernels.close(context)

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        """The T tokens' hidden states, (T, hidden) float32.

        Raises:
            WorkerError: there is no memory for them.
        """
        pool, whole = attention.current()
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
    def _layer(self, layer: Any) -> library.Layer:
        own, mlp = layer.self_attn, layer.mlp
        projections = (own.q_proj, own.k_proj, own.v_proj)
        biases = [projection.bias for projection in projections]
        wide = mlp.gate_proj.weight.shape[0]
        norms = [getattr(own, name, None) for name in ("q_norm", "k_norm")]
        packed = library.Layer(
            qkv=self._packed([projection.weight for projection in projections], self._hidden),
            o=self._packed([own.o_proj.weight], own.o_proj.weight.shape[1]),
            gate_up=self._gate_up(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=self._packed([mlp.down_proj.weight], wide),
            norm_in=self._floats(layer.input_layernorm.weight),
            norm_post=self._floats(layer.post_attention_layernorm.weight),
            q_norm=self._floats(norms[0].weight) if norms[0] is not None else None,
            k_norm=self._floats(norms[1].weight) if norms[1] is not None else None,
            qkv_bias=self._floats(torch.cat(biases)) if biases[0] is not None else None,
            o_bias=self._floats(own.o_proj.bias) if own.o_proj.bias is not None else None,
            window=llama_like.window_of(self.architecture, own) or 0,
        )
        for parameter in layer.parameters():
            parameter.data = parameter.data.new_empty(0)
        return packed

    def _packed(self, weights: Iterable[torch.Tensor], k: int) -> library.Matrix:
        """One matrix of several, one below the other."""
        parts = list(weights)
        matrix = self._matrix(sum(part.shape[0] for part in parts), k)
        offset = 0
        for part in parts:
            self._pack(matrix, part, _Columns.PLAIN, offset)
            offset += part.shape[0]
        return matrix

    def _gate_up(self, gate: torch.Tensor, up: torch.Tensor) -> library.Matrix:
        filled = -(-gate.shape[0] // _LANES) * _LANES
        matrix = self._matrix(2 * filled, gate.shape[1])
        self._pack(matrix, gate, _Columns.GATE, 0)
        self._pack(matrix, up, _Columns.UP, 0)
        return matrix

    def _matrix(self, n: int, k: int) -> library.Matrix:
        """Zeros, in large pages where the operating system has them: a step reads all of it once."""
        pages = memory.zeros(self._kernels.packed_bytes(self._dtype, n, k))
        at = (ctypes.c_char * len(pages)).from_buffer(pages)
        self._kept.append(at)
        return library.Matrix(data=ctypes.addressof(at), n=n, k=k)

    def _pack(self, matrix: library.Matrix, weight: torch.Tensor, columns: _Columns, offset: int) -> None:
        weight = weight.to(self.dtype).contiguous()
        n, k = weight.shape
        self._kernels.pack(
            *(self._context, self._dtype, matrix.data, weight.data_ptr(), n, k, k, columns, offset)
        )

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
