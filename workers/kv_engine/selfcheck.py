"""The proof, at load, that the paged pool gives what the stock model gives.

A short text is run twice: by transformers as it is, in one go; and through the pool, cut into spans,
over scattered blocks, with a stranger beside it in the batch who stands at the end of the longest text; the
last step is of decodes alone.
If the logits differ by more than rounding, the model has something the engine does not serve (positions
of its own, angles that turn with the batch's longest text, a state beside keys and values), and it is
refused by name instead of answering slightly wrong for ever.
"""

from itertools import pairwise
from typing import Final

import torch

from models.checkpoints.files import UnsupportedArchitectureError
from workers.kv_engine.attention.kernels import AttentionKernel
from workers.kv_engine.attention.paged import attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.node import KVNode
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.step import StepBuilder

_BLOCK_SIZE: Final = 4
_TEXT_BLOCKS: Final = (3, 0, 4)
_STRANGER_BLOCKS: Final = (2, 1)
_CUTS: Final = (0, 6, 11, 12)
"""Two spans of a prompt, and a decode."""

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""In standard deviations of the logits. A wrong position or mask costs one and more."""


def text_for(node: KVNode) -> torch.Tensor:
    """The ids of the text it is shown on. Any do, as long as they vary: a stride through the vocabulary."""
    ids = [(7919 * (index + 1)) % node.vocab_size for index in range(_CUTS[-1])]
    return torch.tensor(ids, device=node.device)


@torch.inference_mode()
def check_node(node: KVNode, kernel: AttentionKernel | None = None) -> None:
    """Compare pool and stock model on one short text; the node must use the pool's attention.

    `kernel` attends over the pool, as `PagedPool.of` has it.

    Raises:
        UnsupportedArchitectureError: they differ, or the model cannot be run like this at all.
    """
    text = text_for(node)
    expected = node.reference(text)
    try:
        found = _paged_logits(node, text.tolist(), kernel)
    except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as stumble:
        raise UnsupportedArchitectureError(
            f"{node.architecture} is not served: it cannot be run over the paged pool "
            f"({type(stumble).__name__}: {stumble})"
        ) from stumble
    error = float((found - expected).abs().max() / expected.std())
    if not error <= _TOLERANCE[node.dtype]:
        raise UnsupportedArchitectureError(
            f"{node.architecture} is not served: over the paged pool its logits differ from its own by "
            f"{error:.2g} standard deviations, expected at most {_TOLERANCE[node.dtype]:.2g} in "
            f"{node.dtype}; something in the model goes past attention and positions as the engine knows them"
        )


def _paged_logits(node: KVNode, ids: list[int], kernel: AttentionKernel | None = None) -> torch.Tensor:
    text = _seated("text", ids, _TEXT_BLOCKS, row=1)
    stranger = _seated("stranger", ids[::-1][:7], _STRANGER_BLOCKS, row=0)
    builder = StepBuilder(
        max_sequences=2, max_step_tokens=32, max_blocks=3, block_size=_BLOCK_SIZE, device=node.device
    )
    slots = _BLOCK_SIZE * (len(_TEXT_BLOCKS) + len(_STRANGER_BLOCKS))
    pool = PagedPool.of(node, slots=slots, kernel=kernel)
    logits = []
    for start, end in pairwise(_CUTS):
        # Where the text decodes the stranger does, too: a step of decodes alone may be computed otherwise.
        known = len(stranger.ids) - 1 if end - start == 1 else 0
        spans = [Span(text, start, end - start), Span(stranger, known, len(stranger.ids) - known)]
        step = builder.build(spans)
        # Far away: some models choose their angles by the largest position they are shown.
        step.positions[end - start :] += max(node.max_positions - len(stranger.ids), 0)
        with attention_context(pool, step):
            hidden = node.forward(node.embed(step.token_ids), step)
        logits.append(node.head(hidden, torch.arange(end - start, device=node.device)))
    return torch.cat(logits)


def _seated(key: str, ids: list[int], blocks: tuple[int, ...], row: int) -> Sequence:
    sequence = Sequence(SequenceSpec(key=key, prompt_ids=ids, max_tokens=1))
    sequence.blocks, sequence.row = list(blocks), row
    return sequence
