"""Attention over the paged pool, as the function that transformers' modules call in every layer.

Transformers passes each layer's queries, keys and values to the function registered under the model's
attention implementation. This function writes keys and values to the pool's slots; then each span attends to
its own history there, by the pool's kernel or by torch. The pool and the step are passed in a thread-local
context and not through the model, because some models drop keyword arguments.

Torch computes spans of similar shape together, with padding (`span_groups`). The groups are made once per
step for all layers with the same window.

In a layer with a sliding window of W, the query at position i sees the keys j with i - W < j <= i, as in
transformers' masks; in a layer with chunks of C, those with i // C * C <= j <= i. Older keys stay in the
pool, but are not gathered. Tokens of a full part, such as an image, see one another: a step with such tokens
has a range of keys for each token (`Step.key_ends`), and torch computes it if the kernel declares no such
mask.

What else a layer's attention is (`models.transformers_lm.attention_forms`) is attached to its module, and
changes queries and outputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import local
from typing import Any, Final, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from models.programs import FRAMES_SUFFIX
from models.transformers_lm.attention_forms import form_of
from models.transformers_lm.indexers import Indexed
from models.transformers_lm.recurrent import mixing_by
from shared.errors import BugError
from workers.kv_engine.attention.choices import ChosenKeys
from workers.kv_engine.attention.encoder_cells import EncoderGroups
from workers.kv_engine.attention.kernels import AttentionKernel, masks_of, warn_of_mask
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.attention.span_groups import Group, group_spans
from workers.kv_engine.attention.states import StateMixer, StatePool
from workers.kv_engine.node import FULL
from workers.kv_engine.step import Step

ATTENTION: Final = "dalsegno_paged"
"""The name of this attention implementation in transformers' registry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scaling of a layer's attention scores.

    Attributes:
        scaling: factor of the query-key products; None is the head dimension to the power of -1/2.
        softcap: limit of the scores' magnitude, applied with tanh (Gemma 2); None is no limit.
        sinks: (H,), of each head a logit without a value that takes part in the softmax (gpt-oss).
    """

    scaling: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class _Context:
    """One step: its pool, the slots of its tokens, and the groups of its spans."""

    def __init__(self, pool: PagedPool, step: Step) -> None:
        self.pool: Final = pool
        self.step: Final = step
        self.slots: Final = step.slots.long()  # (T,)
        self.is_latent: Final = pool.is_latent
        self.kernel: Final = _kernel_for(pool, step)
        self._spans: Final = step.spans
        self._longest: Final = int(step.spans.kv_lengths.max())
        self._groups: Final[dict[tuple[int | None, int | None], Sequence[Group]]] = {}
        self._encoder_groups: EncoderGroups | None = None
        self._chosen: ChosenKeys | None = None

    def groups(self, window: int | None, chunk: int | None = None) -> Sequence[Group]:
        """Return the groups for layers with this window or chunk; they are made at the first call."""
        if window is not None and window >= self._longest:
            window = None
        if chunk is not None and chunk >= self._longest:
            chunk = None
        if (window, chunk) not in self._groups:
            device, dtype = self.slots.device, self.pool.keys[0].dtype
            found = group_spans(self._spans, window, chunk=chunk, device=device, dtype=dtype)
            self._groups[window, chunk] = found
        return self._groups[window, chunk]

    def chosen(self, indexed: Indexed, groups: Sequence[Group]) -> Sequence[Group]:
        """Return the groups for layers with this choice of keys, from those for layers without."""
        if self._chosen is None:
            self._chosen = ChosenKeys(self._spans, self.slots.device)
        return self._chosen.groups(indexed, self.pool.keys[indexed.layer], groups)

    def ties(self) -> list[int | None]:
        """Return of each span its first token whose choice of keys depends on the prompt's length."""
        return [None] * len(self._spans.kv_lengths) if self._chosen is None else self._chosen.ties()

    def encoder_groups(self) -> EncoderGroups:
        """Return the groups for a model whose sequences begin with cells of an encoder."""
        if self._encoder_groups is None:
            self._encoder_groups = EncoderGroups.of(self.step, self.pool.keys[0])
        return self._encoder_groups


def _kernel_for(pool: PagedPool, step: Step) -> AttentionKernel | None:
    """The pool's kernel if it computes the masks of the step; None stands for torch."""
    if pool.kernel is None or step.key_ends is None or FULL in masks_of(pool.kernel):
        return pool.kernel
    warn_of_mask(pool.kernel)
    return None


_thread: Final = local()


class Attended(Protocol):
    """What is known of a step's attention after its forward."""

    def ties(self) -> list[int | None]:
        """Return of each span its first token whose choice of keys depends on the prompt's length.

        Tokens of a span count from 0. It is None for a span without one, and of nodes without indexers.
        """
        ...


@contextmanager
def attention_context(pool: PagedPool, step: Step) -> Iterator[Attended]:
    """Inside, attention in this thread reads and writes `pool` for `step`."""
    _thread.context = context = _Context(pool, step)
    try:
        with nullcontext() if pool.states is None else _mixing(pool.states, step):
            yield context
    finally:
        _thread.context = None


@contextmanager
def observed_windows() -> Iterator[dict[int, int | None]]:
    """Inside, the window of each layer that attends to the pool in this thread is noted by its number."""
    _thread.windows = found = dict[int, int | None]()
    try:
        yield found
    finally:
        _thread.windows = None


def _mixing(states: StatePool, step: Step) -> AbstractContextManager[None]:
    """Let layers with recurrent states continue from those in the pool."""
    return mixing_by(StateMixer(states, step.spans, step.slots.device).mix)


def current() -> tuple[PagedPool, Step]:
    """Return the pool and the step of this thread."""
    context: _Context | None = getattr(_thread, "context", None)
    if context is None:
        raise BugError("no step is set in this thread: expected a call inside attention_context")
    return context.pool, context.step


def note_windows(of: Mapping[int, int | None]) -> None:
    """Note the windows of layers that attend to the pool, if windows are observed in this thread."""
    if (windows := getattr(_thread, "windows", None)) is not None:
        windows.update(of)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, H, T, D)
    key: torch.Tensor,  # (1, K, T, D)
    value: torch.Tensor,  # (1, K, T, D)
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    after_frames: bool = False,
    indices: Indexed | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention. `kwargs` were checked when the checkpoint was loaded.

    `s_aux` is transformers' name for sinks, and `indices` that for the choice of an indexer.

    `after_frames` is given by the decoder of an encoder-decoder model (`encoder_cells`): tokens attend to the
    cells after those of their sequence's frames.
    """
    context: _Context | None = getattr(_thread, "context", None)
    if context is None:
        raise BugError("paged attention was called outside of an engine step")
    layer: Any = module.layer_idx
    keys, values = context.pool.keys[layer], context.pool.values[layer]  # (slots, K, D)
    if indices is not None and indices.layer == layer:  # its keys are the end of this layer's rows
        key = torch.cat([key, indices.keys[None, None]], dim=-1)
    keys.index_copy_(0, context.slots, key[0].transpose(0, 1))
    if not context.is_latent[layer]:
        values.index_copy_(0, context.slots, value[0].transpose(0, 1))

    scores, queries = Scores(scaling=scaling, softcap=softcap, sinks=s_aux), query[0].transpose(0, 1)
    if after_frames:
        own = context.encoder_groups().own
        return _over_groups(context, queries, layer, scores, own)[None], None
    form = form_of(module)
    if form is None:
        return _over_pool(context, queries, layer, scores, sliding_window)[None], None
    queries = form.queries(queries, context.step.positions)
    out = _over_pool(context, queries, layer, scores, sliding_window, form.chunk, indices)
    return form.outputs(out)[None], None


def attend(
    queries: torch.Tensor, layer: int, *, scaling: float | None = None, window: int | None = None
) -> torch.Tensor:
    """Return the attention of a layer, (T, H, D), over keys and values that are in the pool already."""
    context: _Context | None = getattr(_thread, "context", None)
    if context is None:
        raise BugError("attention was called outside of an engine step")
    return _over_pool(context, queries, layer, Scores(scaling=scaling), window)


def _over_pool(
    context: _Context,
    queries: torch.Tensor,
    layer: int,
    scores: Scores,
    window: int | None,
    chunk: int | None = None,
    indices: Indexed | None = None,
) -> torch.Tensor:
    """Attend by the step's kernel, or by torch: (T, H, D) from queries of that shape.

    Kernels are not chosen for models with sinks, chunks or indexers (`kernels.kernel_for`).
    """
    keys, values = context.pool.keys[layer], context.pool.values[layer]
    note_windows({layer: window})
    if context.kernel is not None:
        return context.kernel(
            queries,
            keys,
            values,
            context.step,
            scaling=scores.scaling,
            window=window,
            softcap=scores.softcap,
        )
    groups = context.groups(window, chunk)
    if indices is not None:
        groups = context.chosen(indices, groups)
        keys = keys[..., : queries.shape[-1]]  # without those of the indexer
    if len(groups) == 1:  # the group has all tokens, in order
        return _attend(queries, keys, values, groups[0], scores)
    out = queries.new_empty((*queries.shape[:-1], values.shape[-1]))
    for group in groups:
        out.index_copy_(0, group.tokens, _attend(queries, keys, values, group, scores))
    return out


AttentionInterface.register(ATTENTION, paged_attention)


def frames_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, H, T, D)
    *,
    scaling: float | None = None,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention to the cells of the encoder's frames, which an earlier pass has written.

    Tokens of a sequence without frames get zeros.
    """
    context: _Context | None = getattr(_thread, "context", None)
    if context is None:
        raise BugError("attention to frames was called outside of an engine step")
    layer: Any = module.layer_idx
    groups = context.encoder_groups().crossed
    out = _over_groups(context, query[0].transpose(0, 1), layer, Scores(scaling=scaling), groups)
    return out[None], None


AttentionInterface.register(ATTENTION + FRAMES_SUFFIX, frames_attention)


def _over_groups(
    context: _Context, queries: torch.Tensor, layer: int, scores: Scores, groups: Sequence[Group]
) -> torch.Tensor:
    """Attend by torch in some groups: (T, H, D), zeros for the tokens of no group."""
    keys, values = context.pool.keys[layer], context.pool.values[layer]
    out = torch.zeros_like(queries)
    for group in groups:
        out.index_copy_(0, group.tokens, _attend(queries, keys, values, group, scores))
    return out


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group, scores: Scores
) -> torch.Tensor:
    """Return the attention output of one group: (N, H, D of values) from queries (T, H, D of keys)."""
    slots, kv_heads, dim = keys.shape
    # Gathering whole slots as flat rows is five times faster than indexing (CPU, 512 x 2 x 64).
    history = (group.spans, -1, kv_heads)
    k = keys.view(slots, -1).index_select(0, group.slots).view(*history, dim).transpose(1, 2)  # (B, K, L, D)
    width = values.shape[-1]
    if values.data_ptr() == keys.data_ptr():  # of a latent layer
        v = k[..., :width]
    else:
        v = values.view(slots, -1).index_select(0, group.slots).view(*history, width).transpose(1, 2)
    if group.queries is None or group.kept is None:
        # One query per span: the heads that share a KV head take the place of the queries. This takes
        # half the time of `enable_gqa`.
        q = queries.index_select(0, group.tokens).view(group.spans, kv_heads, -1, dim)
        out = _weighted(q, k, v, group.mask, scores, (kv_heads, -1))
        return out.reshape(group.spans, -1, width)
    q = (
        queries.index_select(0, group.queries).view(group.spans, -1, *queries.shape[1:]).transpose(1, 2)
    )  # (B, H, Q, D)
    out = _weighted(q, k, v, group.mask, scores, (-1, 1))
    return out.transpose(1, 2).flatten(0, 1).index_select(0, group.kept)


def _weighted(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
    heads: tuple[int, int],
) -> torch.Tensor:
    """Return (B, H, Q, D) for queries of that shape, and keys and values (B, K, L, D).

    `heads` is the shape that what each head has takes beside `H, Q`: sinks.
    """
    is_shared = q.shape[1] != k.shape[1]
    if scores.softcap is None and scores.sinks is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scores.scaling, enable_gqa=is_shared
        )
    # `scaled_dot_product_attention` has no softcap and no sinks. The dtypes are those of transformers' code.
    if is_shared:
        k, v = (cells.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for cells in (k, v))
    scaling = q.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    products = torch.matmul(q, k.transpose(2, 3)) * scaling
    if scores.softcap is not None:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    if mask is not None:
        products = products + mask
    if scores.sinks is None:
        weights = torch.softmax(products, dim=-1, dtype=torch.float32)
    else:
        # The softmax over a sink and the keys, of which the sink has no value.
        sinks = scores.sinks.to(products.dtype).view(1, *heads, 1).expand(*products.shape[:-1], 1)
        with_sinks = torch.cat([products, sinks], dim=-1)
        weights = torch.softmax(with_sinks, dim=-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(weights.to(q.dtype), v)
