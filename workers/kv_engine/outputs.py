"""Results of engine steps: generated tokens, prompt scores, embeddings. Imports no torch."""

from dataclasses import dataclass
from typing import TypeAlias

from shared.tensors import Handle
from workers.data_plane.port import Array
from workers.kv_engine.sequence_spec import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    """What the model thought of a token.

    Attributes:
        logprob: raw log-softmax of the logits, in float32, before temperature and filters.
        top: the likeliest tokens in its place, with theirs; the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutput:
    """What a prompt came to: its tokens scored, or all of it pooled or kept.

    Attributes:
        scores: they follow on those of earlier outputs; the prompt's second token comes first.
        finish: the whole prompt is computed, and no answer was asked for; None while something follows.
        step: the engine step that made them, from 1.
        vector: with `finish`, where that was asked for, its embedding, (dimensions,) float32, or its states,
            (tokens, hidden) float32.
        cached_tokens: with `finish`, of so many of its first tokens keys and values are kept now.
    """

    key: str
    scores: tuple[TokenScore, ...]
    finish: FinishReason | None
    step: int
    vector: Array | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One generated token.

    Attributes:
        index: its position among the generated tokens, from 0, those of the prefix included.
        finish: why it is the last one; None while more follow. An end-of-sequence token is put out too.
        step: the engine step that made it, from 1.
        score: what the model thought of it, where that was asked for.
        kv: of the last one, the sequence's keys and values, where they were to be handed on.
    """

    key: str
    token_id: int
    index: int
    finish: FinishReason | None
    step: int
    score: TokenScore | None = None
    kv: Handle | None = None


Output: TypeAlias = PromptOutput | TokenOutput
"""What a step led to. A sequence's prompt is scored before its first token is put out."""
