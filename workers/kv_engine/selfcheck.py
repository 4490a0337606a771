"""Self-check at load: the logits over the paged pool must be those of the stock model.

A short text is computed twice: by the stock model in one pass; and over the pool, cut into spans, over
scattered blocks, in a batch with another sequence at the largest positions. The last steps are of decodes
alone: of one, and of both.

If the logits differ by more than rounding, the model has a feature that the engine does not support: its own
positions, rotary angles that depend on the longest sequence of the batch, or a state besides keys and values.
It is refused by name, for otherwise its answers would be slightly wrong.

Where tokens may see later ones (the mask `full`), the text is computed once more with such tokens, and
compared with torch's attention over the layers of transformers.

Indexers choose keys, and routers choose experts, by scores that rounding changes. Another choice changes
logits by more than rounding. So all keys, and all experts of the CPU kernels, are chosen here where there is
rounding.

Of a node without a language head, embeddings and states are compared in place of ids and logits.
"""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from math import isnan, nan
from typing import Any, Final, cast

import numpy as np
import torch

from models.checkpoints.files import UnsupportedArchitectureError
from workers.kv_engine.attention.kernels import AttentionKernel
from workers.kv_engine.attention.paged import attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.node import (
    FULL,
    HeadlessNode,
    KVNode,
    choosing_all_of,
    exact_cells_of,
    has_head,
    masks_of,
    rotary_change_of,
    rounds_inputs_of,
    splice,
)
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.step import StepBuilder

_BLOCK_SIZE: Final = 4
_TEXT_BLOCKS: Final = (3, 0, 4)
_OTHER_BLOCKS: Final = (2, 1)
_CUTS: Final = (0, 5, 10, 11, 12)
"""The span boundaries: two spans of a prompt, a decode alone, and one beside another."""

_FULL_PART: Final = range(3, 9)
"""The tokens of the text that see one another in the check of the mask `full`."""

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""In standard deviations of the logits. A wrong position or mask causes an error of one and more."""
_TOLERANCE_OF_ROUNDED: Final = 0.5
"""The same where inputs of matrices, or keys and values, are rounded to eight bits: the last bit decides."""
_UNKNOWN: Final = "the model uses positions or a state that the engine does not know"


def text_for(node: KVNode) -> torch.Tensor:
    """Return the token ids of the check: a stride through the vocabulary, for the ids must vary."""
    ids = [(7919 * (index + 1)) % node.vocab_size for index in range(_CUTS[-1])]
    return torch.tensor(ids, device=node.device)


@torch.inference_mode()
def check_node(node: KVNode, kernel: AttentionKernel | None = None) -> None:
    """Compare the logits over the pool with those of the stock model.

    Args:
        node: uses the pool's attention already (`KVNode.use_attention`).
        kernel: the attention kernel; the default of the device if None.

    Raises:
        UnsupportedArchitectureError: the logits differ, or the model cannot be run over a pool at all.
    """
    if not has_head(node):
        node = cast(KVNode, _WithTable(cast(HeadlessNode, node)))
    with nullcontext() if is_exact(node) else choosing_all_of(node):
        exact_cells = exact_cells_of(node)
        if exact_cells is None:
            _check(node, kernel)
            return
        with exact_cells:
            _check(node, kernel)
        _check(node, kernel, "keys and values of eight bits change too much: leave out model_kwargs.kv_cache")


def is_exact(node: KVNode) -> bool:
    """True if a node computes in float32, and does not round to fewer bits."""
    return node.dtype is torch.float32 and not rounds_inputs_of(node)


def _check(node: KVNode, kernel: AttentionKernel | None, reason: str = _UNKNOWN) -> None:
    text = text_for(node)
    expected = node.reference(text)
    try:
        found = _paged_logits(node, text.tolist(), kernel)
    except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as failure:
        raise UnsupportedArchitectureError(
            f"{node.architecture} is not served: it cannot be run over the paged pool "
            f"({type(failure).__name__}: {failure})"
        ) from failure
    _compare(node, found, expected, "its logits", reason)
    if FULL in masks_of(node):
        own = getattr(node, "masked_reference", None)
        expected = own() if own is not None else masked_logits(node, by_torch=True)
        found = masked_logits(node, kernel)
        what = "its logits for tokens that see later ones"
        _compare(node, found, expected, what, "the kernel declares a mask that it does not compute")


class _WithTable:
    """A node without a language head as one with it: ids are rows of a random table, logits are states."""

    def __init__(self, node: HeadlessNode) -> None:
        self._node = node
        self.vocab_size = _CUTS[-1]
        by = torch.Generator().manual_seed(0)
        table = torch.randn(self.vocab_size, node.embed_width, generator=by)
        self._table = table.to(node.device, node.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def embed(self, token_ids: torch.Tensor) -> Any:
        at = torch.arange(len(token_ids), device=token_ids.device)
        return splice(self._node, token_ids, self._table[token_ids.long()], at)

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return hidden[indices.long()].float()

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._node.reference_states(self._table[token_ids]).float()


def _compare(node: KVNode, found: torch.Tensor, expected: torch.Tensor, what: str, reason: str) -> None:
    finite = expected.isfinite()  # a head may exclude tokens
    difference = torch.where(found == expected, 0.0, found - expected)
    error = float(difference.abs().max() / expected[finite].std()) if finite.any() else nan
    tolerance = _TOLERANCE_OF_ROUNDED if rounds_inputs_of(node) else _TOLERANCE[node.dtype]
    if isnan(error):
        reason = "its weights have values that are not numbers: download it again"
    if not error <= tolerance:
        raise UnsupportedArchitectureError(
            f"{node.architecture} is not served: over the paged pool {what} differ from its own by "
            f"{error:.2g} standard deviations, expected at most {tolerance:.2g} in "
            f"{node.dtype}; {reason}"
        )


@torch.inference_mode()
def masked_logits(
    node: KVNode, kernel: AttentionKernel | None = None, *, by_torch: bool = False
) -> torch.Tensor:
    """Return the logits of the text over the pool, (T, vocab_size), where a part of it sees itself.

    Args:
        node: uses the pool's attention already.
        kernel: the attention kernel; the default of the device if None.
        by_torch: torch computes attention.
    """
    ids = text_for(node).tolist()
    builder = StepBuilder(
        max_sequences=2, max_step_tokens=32, max_blocks=3, block_size=_BLOCK_SIZE, device=node.device
    )
    pool = PagedPool.of(node, slots=_BLOCK_SIZE * (max(_TEXT_BLOCKS) + 1), kernel=kernel)
    if by_torch:
        pool.kernel = None
    step = builder.build([Span(_sequence("text", ids, _TEXT_BLOCKS, row=1), 0, len(ids))])
    own = np.arange(len(ids), dtype=np.int32)
    ends, starts = own + 1, own.copy()
    ends[_FULL_PART], starts[_FULL_PART] = _FULL_PART.stop, _FULL_PART.start
    step = replace(
        step,
        key_ends=torch.from_numpy(ends).to(node.device),
        full_starts=torch.from_numpy(starts).to(node.device),
        spans=replace(step.spans, key_ends=ends, full_starts=starts),
    )
    with attention_context(pool, step):
        hidden = node.forward(node.embed(step.token_ids), step)
    return node.head(hidden, torch.arange(len(ids), device=node.device))


def _paged_logits(node: KVNode, ids: list[int], kernel: AttentionKernel | None = None) -> torch.Tensor:
    text = _sequence("text", ids, _TEXT_BLOCKS, row=1)
    other = _sequence("other", ids[::-1][:7], _OTHER_BLOCKS, row=0)
    other.long_factors = rotary_change_of(node) is not None  # its positions are the largest
    builder = StepBuilder(
        max_sequences=2,
        max_step_tokens=32,
        max_blocks=3,
        block_size=_BLOCK_SIZE,
        device=node.device,
        has_states=bool(node.layout.states),
        has_indexers=node.layout.has_indexers,
        has_long_factors=other.long_factors,
    )
    slots = _BLOCK_SIZE * (len(_TEXT_BLOCKS) + len(_OTHER_BLOCKS))
    pool = PagedPool.of(node, slots=slots, kernel=kernel, states=2)
    logits = []
    for start, end in pairwise(_CUTS):
        # Steps of decodes alone have their own kernels, and those of one row further ones.
        is_decode = end - start == 1
        known = len(other.ids) - 1 if is_decode else 0
        spans = [Span(text, start, end - start)]
        if not is_decode or end == len(ids):
            spans.append(Span(other, known, len(other.ids) - known))
        step = builder.build(spans)
        # The largest positions: some models choose their rotary angles by the largest position of a batch.
        step.positions[end - start :] += max(node.max_positions - len(other.ids), 0)
        with attention_context(pool, step):
            hidden = node.forward(node.embed(step.token_ids), step)
        logits.append(node.head(hidden, torch.arange(end - start, device=node.device)))
    return torch.cat(logits)


def _sequence(key: str, ids: list[int], blocks: tuple[int, ...], row: int) -> Sequence:
    sequence = Sequence(SequenceSpec(key=key, prompt_ids=ids, max_tokens=1))
    sequence.blocks, sequence.row = list(blocks), row
    return sequence
