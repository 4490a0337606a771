"""A generation request to the engine, as token ids and options. Imports no torch."""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from workers.data_plane.port import Array

if TYPE_CHECKING:
    from models.text.guides import CompiledGuide


class FinishReason(StrEnum):
    """Why a sequence ended: the model said so, or the limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen from its logits.

    Attributes:
        temperature: 0 is greedy, and then of the rest only what changes logits matters.
        top_k: keep the k likeliest tokens (and what ties with the last of them); 0 or less is off.
        top_p: of those, keep the fewest that hold this share of the probability; 1 is off.
        min_p: of those, keep the ones at least this times as likely as the likeliest; 0 is off.
        seed: with the draw's index, the node and `sample_index` it keys every draw.
        sample_index: which of several answers to the same request this is.
        repetition_penalty: 1 is off; above, tokens of the prompt and the answer become less likely.
        presence_penalty, frequency_penalty: taken from the logit of a token of the answer, once and for
            each time it was generated.
        logit_bias: token ids, and what is added to their logits.
        bad_words: sequences of token ids that are never completed.
        min_tokens: no token ends the answer before it has so many; a guided one ends where nothing else may
            follow, too.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Items[tuple[int, float]] = ()
    bad_words: Items[Items[int]] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, found {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, found {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, found {self.min_p}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits with a sign, found {self.seed}")
        if not 0 <= self.sample_index < 2**31:
            raise ValueError(f"sample_index must fit 31 bits, found {self.sample_index}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty must be finite and above 0, found {self.repetition_penalty}"
            )
        if not all(self.bad_words):
            raise ValueError("bad_words must have a token each, found one without")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvExport:
    """Where a sequence's keys and values go when it ends: the tensor's key, and its scope in the store."""

    key: str
    scope: str


class PoolingMode(StrEnum):
    """How the states of a prompt's tokens become one vector, or stay; in sentence-transformers' words."""

    FIRST = "cls"
    LAST = "lasttoken"
    MEAN = "mean"
    WEIGHTED_MEAN = "weightedmean"
    """Each state counts as often as its position says, from 1."""
    NONE = "none"
    """They stay: one vector for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How a prompt becomes an embedding.

    Attributes:
        normalize: the vector is brought to length 1.
        dimensions: so many of its first numbers; None is all of them.
    """

    mode: PoolingMode
    normalize: bool = False
    dimensions: int | None = None

    @property
    def needs_all(self) -> bool:
        """Whether every token's state is needed, also of those whose keys and values are cached."""
        return self.mode is not PoolingMode.LAST


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """A request to the engine.

    Keys and values are handed on as one tensor, (layers, 2, tokens, kv_heads, head_dim), of the tokens the
    pool has them of: of a sequence that ended these are all but the last, which was sampled and not run.

    Attributes:
        key: the caller's name for it; unique among the live ones.
        prefix_ids: tokens an earlier attempt generated already.
        max_tokens: at most so many generated tokens, those of the prefix included; 0 is for a prompt that
            is not answered, but scored, pooled or kept.
        eos_ids: tokens that end the answer.
        ignore_eos: take them as any other token.
        stop_token_ids: tokens that end it whatever the model thinks of them.
        guide: what the answer has to be. `exhausts_guide`: it does not end as long as anything else may
            follow.
        logprobs: score each generated token, and so many of the likeliest beside it; None is not.
        scores_prompt: score the prompt's tokens too, all but the first.
        pooling: make one vector of its prompt's hidden states.
        caches_prompt: compute its prompt for others that begin alike.
        export: hand its keys and values on when it ends with a token of its own.
        kv: keys and values of its first tokens, computed elsewhere; they are not computed again.
        priority: who has a higher one comes first; `deadline_ns`: of those who have the same, the earlier.
        tenant: whose it is: of equals, whose are served least come first.
        cache_root: keys and values are shared with those alone that have the same.
        on_kv_read: called in the engine's thread once `kv` was copied and is not looked at any more; what
            it raises, because the bytes were no longer the tensor's, fails the sequence alone.
    """

    key: str
    prompt_ids: list[int]
    max_tokens: int
    prefix_ids: list[int] = field(default_factory=list)
    eos_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    guide: "CompiledGuide | None" = None
    exhausts_guide: bool = False
    logprobs: int | None = None
    scores_prompt: bool = False
    pooling: Pooling | None = None
    caches_prompt: bool = False
    export: KvExport | None = None
    kv: Array | None = None
    on_kv_read: Callable[[], None] | None = None
    priority: int = 0
    deadline_ns: int | None = None
    tenant: str = ""
    cache_root: Hashable = None

    @property
    def has_prompt_output(self) -> bool:
        """Whether there is something to compute where no token is to be generated."""
        is_scored = self.scores_prompt and len(self.prompt_ids) > 1
        return is_scored or self.pooling is not None or self.caches_prompt

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end this answer."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_ids

    @property
    def adjusts_logits(self) -> bool:
        """Whether it is to change logits before a token is chosen from them."""
        sampling = self.sampling
        return bool(
            sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.logit_bias
            or sampling.bad_words
            or self.delays_end
        )

    @property
    def delays_end(self) -> bool:
        """Whether what ends it cannot be chosen at first. Of a guided one that is its guide's matter."""
        return bool(self.sampling.min_tokens and self.ends and self.guide is None)

    @property
    def can_speculate(self) -> bool:
        """Whether tokens may be guessed: nothing is done to its logits that depends on the tokens before."""
        return not self.adjusts_logits and self.logprobs is None and self.guide is None

    @property
    def token_ids_by_field(self) -> dict[str, Items[int]]:
        """All token ids in it, by what names them."""
        sampling = self.sampling
        return {
            "prompt": self.prompt_ids,
            "prefix": self.prefix_ids,
            "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
            "bad_words": [token_id for word in sampling.bad_words for token_id in word],
            "stop_token_ids": list(self.stop_token_ids),
        }

    @property
    def bannable_ids(self) -> frozenset[int]:
        """The tokens that some step may not choose."""
        held = self.ends if self.delays_end else frozenset()
        return held | {word[-1] for word in self.sampling.bad_words}

    @property
    def finished(self) -> FinishReason | None:
        """How the prefix ended the answer already; None while there is something left to compute."""
        if not self.prefix_ids:
            return None
        return self.finish_reason(self.prefix_ids[-1], len(self.prefix_ids))

    def finish_reason(self, token_id: int, generated: int) -> FinishReason | None:
        """Whether the answer ends with `token_id`, the last of `generated` tokens."""
        if token_id in self.stop_token_ids or (token_id in self.eos_ids and not self.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if generated >= self.max_tokens else None
