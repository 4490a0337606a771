"""A Llama-like decoder on a CPU whose layers are computed by the CPU kernels: a node of the engine.

It is made from a loaded node, and packs the weights layer by layer. Transformers' modules still compute the
embedding, and the angles of positions of one or more axes. Everything from there to the last norm is one
call per step, whatever the number of layers and requests. No result depends on the other sequences in the
step. Weights may have four or eight bits (`workers.cpu_kernels.quantisation`).

`workers.kv_engine.kernel_models` lists the supported models. As for every node, the results are checked
at load against transformers' model (`workers.kv_engine.selfcheck`).
"""

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from models.base import KVLayout, TokenStep
from models.checkpoints.files import UnsupportedArchitectureError
from models.transformers_lm.expert_layers import all_chosen, has_biases, matrix_named
from shared.errors import BugError, WorkerError
from workers.cpu_kernels import library
from workers.cpu_kernels.kept_weights import KeptWeights, Origin
from workers.cpu_kernels.layer_packing import LayerPacker, experts_of, inner_width_of, linears_of, names_of
from workers.cpu_kernels.library import Library
from workers.cpu_kernels.packing import DTYPES, LANES, MatrixPacker
from workers.cpu_kernels.quantisation import (
    Forms,
    Left,
    float_experts,
    observed_inputs,
    quantised_layers,
)
from workers.kv_engine import kernel_models
from workers.kv_engine.attention import paged
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.kernel_models import Inputs, LlamaLike, SplicedInputs, TextModel
from workers.kv_engine.node import FULL, KVNode, fill, token_programs_of, towers_of
from workers.kv_engine.programs.towers import shares_cells
from workers.kv_engine.selfcheck import is_exact, masked_logits, text_for
from workers.kv_engine.step import Step
from workers.kv_engine.text_logits import Comparison, Predictions, predictions

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """The wanted number of bits of a model's weights, and of its keys and values.

    Attributes:
        bits: of weights, 4 or 8; None is as the checkpoint stores them.
        keeps_stored: keep numbers of few bits as the checkpoint stores them, rather than as floats.
        calibration: token ids of a text; squared errors of weights are weighted by the inputs that it causes.
        measured: token ids of another text, for which the predictions with floats and with few bits are
            compared.
        rounds_cells: keys and values have eight bits.
        kept_beside: the folder of the checkpoint, beside which chosen numbers are kept (`kept_weights`); None
            keeps none.
    """

    bits: int | None = None
    keeps_stored: bool = True
    calibration: Sequence[int] = ()
    measured: Sequence[int] = ()
    rounds_cells: bool = False
    kept_beside: Path | None = None

    @property
    def wanted(self) -> str:
        """The key and the value in `model_kwargs` that nothing but the CPU kernels computes; or empty."""
        if self.bits is not None:
            return f"quantize is int{self.bits}"
        return "kv_cache is int8" if self.rounds_cells else ""


AS_STORED: Final = Quantisation()


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
    if kernels is None and quantisation.wanted:
        raise UnsupportedArchitectureError(
            f"model_kwargs.{quantisation.wanted}, but the CPU kernels "
            + (
                f"do not support {reason} of {node.architecture}"
                if reason
                else "are not available here (see above)"
            )
            + ": leave it out"
        )
    if reason:
        _LOGGER.info("%s is computed by torch: the CPU kernels do not support %s", node.name, reason)
    if kernels is None:
        fill(node)
        return node
    kept = _kept_weights_of(node, quantisation)
    is_known = kept is not None and kept.is_whole
    if (quantisation.bits is not None and not is_known) or not quantisation.keeps_stored:
        fill(node, but=getattr(node, "left_floats", {}))  # integers are computed with as floats
    many = "1 thread" if threads == 1 else f"{threads} threads"
    _LOGGER.info("%s is computed by the CPU kernels for %s, %s", node.name, kernels.variant, many)
    text = list(quantisation.measured)
    if len(text) < 2 or token_programs_of(node):  # these do not predict the next token of a text
        text = []
    floats = None
    if text and quantisation.bits is not None and not is_known:
        with float_experts(experts_of(TextModel.of(node)), _left_in(node)):
            floats = Predictions.of(node.reference(torch.tensor(text)), text)
    decoder = NativeDecoder(node, kernels, threads=threads, quantisation=quantisation, kept=kept)
    error = kept.error if kept is not None else None
    few = None
    if floats is not None or (text and quantisation.rounds_cells):
        with decoder.exact_cells():
            few = predictions(decoder, text)
    if floats is not None and few is not None:
        error = Comparison.of(few, floats)
    if error is not None:
        _LOGGER.info("%s: weights of int%d: %s", node.name, quantisation.bits, error)
    if few is not None and quantisation.rounds_cells:
        _LOGGER.info(
            "%s: keys and values of int8: %s", node.name, Comparison.of(predictions(decoder, text), few)
        )
    if kept is not None:
        kept.finish(error)
    return decoder


def _kept_weights_of(node: Any, quantisation: Quantisation) -> KeptWeights | None:
    """The node's quantised weights in files; None if nothing is quantised, or nothing kept."""
    if quantisation.bits is None or quantisation.kept_beside is None:
        return None
    origin = Origin(
        checkpoint=quantisation.kept_beside,
        node=node.name,
        weights=node.weights_digest,
        dtype=node.dtype,
        bits=quantisation.bits,
        calibration=tuple(quantisation.calibration),
        measured=tuple(quantisation.measured),
    )
    shapes = {name: tuple(matrix.weight.shape) for matrix, name in names_of(TextModel.of(node)).items()}
    try:
        return KeptWeights(origin, shapes)
    except OSError as error:  # the weights are loaded, so this is a link to nowhere, for example
        _LOGGER.warning("quantised weights are neither read nor kept: %s", error)
        return None


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
        forms = _forms_of(node, packer, quantisation, kept)
        layers = LayerPacker(kernels, packer, model, forms)
        self._angle_sets: Final = layers.angles
        self._packed: Final = packer  # keeps the memory
        self._has_few_bits: Final = forms.has_few_bits
        self._rounds_cells: bool = quantisation.rounds_cells
        text = text_for(node)
        self._masked_reference: torch.Tensor | None = None
        self._layers: Final = (library.Layer * self.layout.layers)()
        inner = inner_width_of(model)

        def pack(number: int) -> None:
            self._layers[number] = layers.packed(body.layers[number])
            forms.forget()

        # Computed now, because packing frees weights: those of a layer after its last use.
        with (
            quantised_layers(linears_of(model), experts_of(model), forms),
            nullcontext() if is_exact(self) else all_chosen(body.layers),
        ):
            if FULL in self.masks:
                node.use_attention(paged.ATTENTION)
                with _called_after(body.layers, lambda _: forms.forget()):
                    self._masked_reference = masked_logits(node)
            with _called_after(body.layers, pack):
                self._reference: Final[tuple[torch.Tensor, torch.Tensor]] = (text, node.reference(text))
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
        text, logits = self._reference
        if not torch.equal(text, token_ids):
            raise BugError(
                "the reference logits exist for the text of the self-check only: the weights are packed"
            )
        return logits

    def masked_reference(self) -> torch.Tensor:
        """Return the logits for the mask `full` in the self-check, (T, vocab_size), computed by torch."""
        assert self._masked_reference is not None, "the node declares the mask"
        return self._masked_reference

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


@contextmanager
def _called_after(layers: Sequence[Any], call: Callable[[int], None]) -> Iterator[None]:
    """Within this context, `call` gets the number of each layer after its forward pass."""

    def after(number: int, *_: Any) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():  # what it makes stays in use
            call(number)

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_hook(partial(after, number)))
        yield


def _left_in(node: Any) -> Left:
    """Return what reads the floats that are still in the node's files."""
    readers = getattr(node, "left_floats", {})
    return {matrix_named(node.model, name): read for name, read in readers.items()}


def _forms_of(node: Any, packer: MatrixPacker, quantisation: Quantisation, kept: KeptWeights | None) -> Forms:
    model, left = TextModel.of(node), _left_in(node)
    importance: dict[Any, torch.Tensor] = {}
    is_known = kept is not None and kept.is_whole
    if quantisation.bits is not None and quantisation.calibration and not is_known:
        with observed_inputs(linears_of(model), experts_of(model), left) as importance:
            node.reference(torch.tensor(quantisation.calibration, device=node.device))
    readers = getattr(node, "stored_weights", {}) if quantisation.keeps_stored else {}
    stored = {matrix_named(node.model, name): read for name, read in readers.items()}
    return Forms(
        packer,
        bits=quantisation.bits,
        stored=stored,
        left=left,
        head=model.head,
        importance=importance,
        kept=kept,
        names=names_of(model) if kept is not None else {},
    )


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
