"""A Llama-like decoder on a CPU whose layers are computed by the CPU kernels: a node of the engine.

It is made from a loaded node, and packs the weights layer by layer. Transformers' modules still compute the
embedding, and the angles of positions of one or more axes. Everything from there to the last norm is one
call per step, whatever the number of layers and requests. No result depends on the other sequences in the
step. Weights may have four or eight bits (`workers.kv_engine.quantisation`).

`workers.kv_engine.kernel_models` lists the supported models. As for every node, the results are checked
at load against transformers' model (`workers.kv_engine.selfcheck`).
"""

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final

import torch

from models.base import KVLayout, TokenStep
from models.transformers_lm.expert_layers import all_chosen, has_biases
from shared.errors import WorkerError
from workers.cpu_kernels import library
from workers.cpu_kernels.layer_packing import LayerPacker, inner_width_of
from workers.cpu_kernels.library import Library
from workers.cpu_kernels.packing import DTYPES, LANES, MatrixPacker
from workers.kv_engine import kernel_models
from workers.kv_engine.attention import paged
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.kernel_models import Inputs, LlamaLike, SplicedInputs, TextModel
from workers.kv_engine.node import KVNode, fill, towers_of
from workers.kv_engine.programs.towers import shares_cells
from workers.kv_engine.quantisation.forms import forms_of
from workers.kv_engine.quantisation.kept_weights import KeptWeights
from workers.kv_engine.quantisation.matrices import experts_of
from workers.kv_engine.quantisation.measured import measured
from workers.kv_engine.quantisation.references import References
from workers.kv_engine.quantisation.wanted import AS_STORED, Quantisation, refuse
from workers.kv_engine.selfcheck import is_exact
from workers.kv_engine.step import Step

_LOGGER: Final = logging.getLogger(__name__)

_ACTIVATIONS: Final = {"silu": 0, "gelu_pytorch_tanh": 1}
"""By transformers' names, those of the kernels (`Model` in body.cpp)."""
_MIN_HEAD_DIM: Final = 32
"""No published model has smaller heads."""
_MAX_HEAD_DIM: Final = 256
_BYTES_OF_SCALE: Final = 4  # as in `dalsegno.check.command`
_MAX_HEADS_PER_KV_HEAD: Final = 32
"""The most heads that share one head of keys."""
_MAX_EXPERTS: Final = 1024


def use_cpu_kernels(node: KVNode, *, threads: int, quantisation: Quantisation = AS_STORED) -> KVNode:
    """Return the node computed by the CPU kernels, or the node itself if they cannot do it; log which.

    Call it before the node is checked. Weights are freed in transformers' model as they are packed.

    Raises:
        UnsupportedArchitectureError: weights, or keys and values, shall be quantised, and the kernels cannot
            do it.
    """
    reason = _unsupported(node)
    if quantisation.rounds_cells and any(map(shares_cells, towers_of(node).values())):
        reason = reason or "a tower that reads the node's keys and values"
    kernels = None if reason else library.load()
    if kernels is None:
        does_not = f"do not support {reason} of {node.architecture}" if reason else "are not available here"
        refuse(quantisation, f"the CPU kernels {does_not}" + ("" if reason else " (see above)"))
    if reason:
        _LOGGER.info("%s is computed by torch: the CPU kernels do not support %s", node.name, reason)
    if kernels is None:
        fill(node)
        return node
    many = "1 thread" if threads == 1 else f"{threads} threads"
    _LOGGER.info("%s is computed by the CPU kernels for %s, %s", node.name, kernels.variant, many)
    return measured(
        node,
        quantisation,
        lambda kept: NativeDecoder(node, kernels, threads=threads, quantisation=quantisation, kept=kept),
    )


def _unsupported(node: Any) -> str:
    """The property of the node that the kernels do not support; empty if none."""
    if unknown := kernel_models.unknown_in(node):
        return unknown
    if node.dtype not in DTYPES:
        return str(node.dtype)
    text = TextModel.of(node)
    config, dim = text.config, text.body.layers[0].self_attn.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    checks = {
        f"the activation {text.activation}": text.activation in _ACTIVATIONS,
        f"heads of {dim}": dim % LANES == 0 and _MIN_HEAD_DIM <= dim <= _MAX_HEAD_DIM,
        f"states of {config.hidden_size}": config.hidden_size % LANES == 0,
        f"{group} heads per KV head": group <= _MAX_HEADS_PER_KV_HEAD,
    }
    for experts in experts_of(text):
        count, chosen = experts.num_experts, config.num_experts_per_tok
        checks[f"{chosen} of {count} experts"] = 0 < chosen <= count <= _MAX_EXPERTS
        if has_biases(experts):  # the activation of those has a limit
            checks[f"swiglu_limit {experts.limit}"] = bool(experts.limit) and experts.limit > 0
    return kernel_models.first_unknown(checks)


class NativeDecoder(LlamaLike):
    """A `workers.kv_engine.node.KVNode` with the same results as `node`, computed by the CPU kernels.

    Attributes:
        kv_dtype: of keys and values. Those of int8 have four more numbers a head: a float, which says what
            one of the others stands for.
    """

    def __init__(
        self,
        node: Any,
        kernels: Library,
        *,
        threads: int,
        quantisation: Quantisation = AS_STORED,
        kept: KeptWeights | None = None,
    ) -> None:
        super().__init__(node, kernels.variant)
        self._kernels: Final = kernels
        self._context: Final = kernels.open(threads)
        if not self._context:
            raise MemoryError
        self._dtype: Final = DTYPES[node.dtype]
        self._pool: PagedPool | None = None
        self._cells: tuple[Any, Any] = (None, None)
        model = TextModel.of(node)
        body, config = model.body, model.config
        packer = MatrixPacker(kernels, self._context, node.dtype)
        forms = forms_of(node, packer, quantisation, kept)
        layers = LayerPacker(kernels, packer, model, forms)
        self._angle_sets: Final = layers.angles
        self._packed: Final = packer  # keeps the memory
        self._has_few_bits: Final = forms.has_few_bits
        self._rounds_cells: bool = quantisation.rounds_cells
        self._layers: Final = (library.Layer * self.layout.layers)()
        inner = inner_width_of(model)

        def pack(number: int) -> None:
            self._layers[number] = layers.packed(body.layers[number])

        # Computed now, because packing frees weights.
        with nullcontext() if is_exact(self) else all_chosen(body.layers):
            self._references: Final = References.while_packing(node, forms, pack)
        self._head: Final = packer.stack([forms.of(model.head)])
        forms.forget()
        if model.head.weight is not self._embed.weight:
            model.head.weight.data = model.head.weight.data.new_empty(0)
        self._model: Final = library.Model(
            dtype=self._dtype,
            layers=self.layout.layers,
            hidden=self._hidden,
            heads=config.num_attention_heads,
            kv_heads=self.layout.kv_heads,
            dim=self.layout.head_dim,
            intermediate=inner,
            activation=_ACTIVATIONS[model.activation],
            norms_whole_heads=self._kind.norms_whole_heads,
            turns_neighbours=self._kind.turns_neighbours,
            eps=config.rms_norm_eps,
            scaling=body.layers[0].self_attn.scaling,
            softcap=model.option("attn_logit_softcapping", 0.0),
            residual=model.option("residual_multiplier", 1.0),
            layer=self._layers,
            norm=layers.norm(body.norm),
        )
        self._embedding_factor: Final = model.option("embedding_multiplier", 1.0)
        self._logit_divisor: Final = model.option("logits_scaling", 1.0)
        self._logit_cap: Final = model.option("final_logit_softcapping", 0.0)
        self._windows: Final = {number: layer.window or None for number, layer in enumerate(self._layers)}
        self._keep_cells(rounded=quantisation.rounds_cells)
        if close_files := getattr(node, "close_files", None):
            close_files()
        _LOGGER.info("%s: weights packed into %.0f MB", node.name, packer.nbytes / 1e6)

    @property
    def rounds_inputs(self) -> bool:
        """True if some matrices have weights of few bits and round their inputs, or if keys are rounded."""
        return self._has_few_bits or self._rounds_cells

    def _keep_cells(self, *, rounded: bool) -> None:
        """Choose the form of keys and values in all pools that are made from now on."""
        self._rounds_cells = rounded
        layout: KVLayout = self._node.layout
        self.layout = replace(layout, head_dim=layout.head_dim + _BYTES_OF_SCALE) if rounded else layout
        self.kv_dtype = torch.int8 if rounded else self.dtype
        self._model.cell_bits = 8 if rounded else 0

    @contextmanager
    def exact_cells(self) -> Iterator[None]:
        """Let keys and values be floats: pools made within this context are used within it."""
        was_rounded = self._rounds_cells
        self._keep_cells(rounded=False)
        try:
            yield
        finally:
            self._keep_cells(rounded=was_rounded)

    def __del__(self) -> None:
        if context := getattr(self, "_context", None):
            self._kernels.close(context)

    def forward(self, inputs: Inputs, step: TokenStep) -> torch.Tensor:
        """Return the T tokens' hidden states, (T, hidden) float32.

        Args:
            inputs: the result of `embed` or `splice`, or embeddings, (T, hidden).
            step: see `workers.kv_engine.node.Backbone`.

        Raises:
            WorkerError: there is not enough memory for the activations.
        """
        pool, batch = paged.current()
        paged.note_windows(self._windows)
        keys, values = self._cells_of(pool)
        embedded = inputs.embeds if isinstance(inputs, SplicedInputs) else inputs
        if not embedded.is_floating_point():
            embedded = self._embed(embedded)
        # Always a copy: the layers overwrite it.
        hidden = embedded.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if self._embedding_factor != 1.0:
            hidden *= self._embedding_factor
        cos, sin = self._all_angles_of(hidden, step)
        c_step = _to_c_step(batch, cos, sin, keys, values, hidden)
        if isinstance(inputs, SplicedInputs):
            added = _AddedRows(inputs, tokens=len(hidden), hidden=self._hidden)
            added.write_to(c_step)
        self._check(self._kernels.body(self._context, self._model, c_step))
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
        if self._logit_divisor != 1.0:
            logits /= self._logit_divisor
        if self._logit_cap:
            logits = logits.div_(self._logit_cap).tanh_().mul_(self._logit_cap)
        return logits

    @contextmanager
    def choosing_all(self) -> Iterator[None]:
        """Let all experts of a layer see each token: which ones are chosen depends on the last bit."""
        own = [layer.experts.choice.chosen for layer in self._layers]
        for layer in self._layers:
            layer.experts.choice.chosen = layer.experts.choice.count
        try:
            yield
        finally:
            for layer, chosen in zip(self._layers, own, strict=True):
                layer.experts.choice.chosen = chosen

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._references.of(token_ids)

    def masked_reference(self) -> torch.Tensor:
        """Return the logits for the mask `full` in the self-check, (T, vocab_size), computed by torch."""
        return self._references.of_mask

    def _all_angles_of(self, states: torch.Tensor, step: TokenStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of all sets of angles, (sets, T, turned)."""
        sets = [self._angles_of(states, step, name) for name in self._angle_sets]
        if len(sets) == 1:
            return sets[0]
        cos, sin = (torch.stack(columns) for columns in zip(*sets, strict=True))
        return cos, sin

    def _cells_of(self, pool: PagedPool) -> tuple[Any, Any]:
        """Return the addresses of the pool's keys and values, by layer."""
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
            raise WorkerError("out of memory: the activations of a step could not be allocated")


class _AddedRows:
    """Rows that the kernels add to hidden states after the first layers, in the form that they read.

    Args:
        tokens: the number of tokens in the step.
        hidden: the width of a state.
    """

    def __init__(self, inputs: SplicedInputs, *, tokens: int, hidden: int) -> None:
        self._rows: Final = inputs.added.float().contiguous()
        self._row_of: Final = torch.full((tokens,), -1, dtype=torch.int32)
        self._row_of[inputs.at] = torch.arange(len(inputs.at), dtype=torch.int32)
        self._layers: Final = self._rows.shape[1] // hidden

    def write_to(self, step: library.Step) -> None:
        """Set the fields of a C step; they are valid as long as this object."""
        step.added_rows, step.added = self._row_of.data_ptr(), self._rows.data_ptr()
        step.added_stride, step.added_layers = self._rows.shape[1], self._layers


def _to_c_step(
    step: Step, cos: torch.Tensor, sin: torch.Tensor, keys: Any, values: Any, hidden: torch.Tensor
) -> library.Step:
    """Return the step as the kernels' structure."""
    return library.Step(
        tokens=len(step.slots),
        spans=len(step.rows),
        block_size=step.spans.block_size,
        table_stride=step.block_table.shape[1],
        slots=step.slots.data_ptr(),
        rows=step.rows.data_ptr(),
        query_offsets=step.query_offsets.data_ptr(),
        kv_lengths=step.kv_lengths.data_ptr(),
        turned=cos.shape[-1],
        block_table=step.block_table.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        keys=ctypes.cast(keys, ctypes.c_void_p),
        values=ctypes.cast(values, ctypes.c_void_p),
        hidden=hidden.data_ptr(),
        key_ends=step.key_ends.data_ptr() if step.key_ends is not None else None,
        full_starts=step.full_starts.data_ptr() if step.full_starts is not None else None,
    )
