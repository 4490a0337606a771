"""Predictions of a node for a text: the comparison of two forms of one model.

`predictions` computes a text over a small pool of its own, as the engine does.
"""

from dataclasses import dataclass

import torch

from workers.kv_engine.attention.paged import attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.node import KVNode
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.step import StepBuilder

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions of the tokens of a text, from its second on.

    Attributes:
        likeliest: (T - 1,) int64, the most likely tokens.
        log_probs: (T - 1,) float32, of the text's own tokens.
    """

    likeliest: torch.Tensor
    log_probs: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, ids: list[int]) -> "Predictions":
        """Return the predictions in the logits of a text, (T, vocab_size)."""
        before = logits[:-1]
        own = before.gather(1, torch.tensor(ids[1:], device=logits.device)[:, None])[:, 0]
        return cls(before.argmax(1), own - before.logsumexp(1))

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log probability (Jelinek et al. 1977)."""
        return float(self.log_probs.mean().neg().exp())

    def agreement(self, other: "Predictions") -> float:
        """Return the share of tokens of which both predict the same as the most likely, 0 to 1."""
        return float((self.likeliest == other.likeliest).float().mean())


@dataclass(frozen=True, slots=True)
class Comparison:
    """How well a rounded model predicts a text, beside the model with floats.

    Attributes:
        tokens: the length of the text.
        perplexity: of the rounded model.
        float_perplexity: of the model with floats.
        agreement: the share of tokens of which both predict the same as the most likely, 0 to 1.
    """

    tokens: int
    perplexity: float
    float_perplexity: float
    agreement: float

    @classmethod
    def of(cls, few: Predictions, floats: Predictions) -> "Comparison":
        """Compare two models' predictions of one text."""
        return cls(1 + len(few.log_probs), few.perplexity, floats.perplexity, few.agreement(floats))

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.4g} on a text of {self.tokens} tokens, with floats "
            f"{self.float_perplexity:.4g}; the most likely token is the same in "
            f"{100 * self.agreement:.1f} % of places"
        )


def predictions(node: KVNode, ids: list[int]) -> Predictions:
    """Return the predictions of a node for a text of at least two tokens, in one step."""
    return Predictions.of(logits_of(node, ids), ids)


@torch.inference_mode()
def logits_of(node: KVNode, ids: list[int]) -> torch.Tensor:
    """Return the logits of a node for a text, (T, vocab_size), computed in one step."""
    blocks = -(-len(ids) // _BLOCK_SIZE)
    builder = StepBuilder(
        max_sequences=1,
        max_step_tokens=len(ids),
        max_blocks=blocks,
        block_size=_BLOCK_SIZE,
        device=node.device,
    )
    sequence = Sequence(SequenceSpec(key="text", prompt_ids=ids, max_tokens=1))
    sequence.blocks, sequence.row = list(range(blocks)), 0
    step = builder.build([Span(sequence, 0, len(ids))])
    with attention_context(PagedPool.of(node, slots=blocks * _BLOCK_SIZE), step):
        hidden = node.forward(node.embed(step.token_ids), step)
    return node.head(hidden, torch.arange(len(ids), device=node.device))
