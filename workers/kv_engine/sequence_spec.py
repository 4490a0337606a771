"""A generation request to the engine, as token ids and options, and its validation. Imports no torch."""

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from models.sequence_request import PromptPart
from shared.adapters import Adapter
from shared.errors import BugError, ClientError
from workers.data_plane.port import Array, DeviceArray, PublishOnDevice
from workers.threads.engine_work import EngineWork

if TYPE_CHECKING:
    from models.text.guides import CompiledGuide


class FinishReason(StrEnum):
    """The reason for the end of a sequence: a stop or end-of-sequence token, or a length limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of the choice of a token from its logits.

    Attributes:
        temperature: 0 is greedy; then only the parameters that change logits have an effect.
        top_k: keep the k likeliest tokens, and those tied with the last of them; 0 or less is off.
        top_p: of those, keep the fewest that hold this share of the probability; 1 is off.
        min_p: of those, keep the ones at least this times as likely as the likeliest; 0 is off.
        seed: keys every random draw, with the index of the draw, the node and `sample_index`.
        sample_index: the number of this answer among several answers to one request.
        repetition_penalty: makes tokens of the prompt and of the answer less likely if above 1; 1 is off.
        presence_penalty, frequency_penalty: subtracted from the logit of a token of the answer, once and for
            each of its occurrences.
        logit_bias: pairs of a token id and the number that is added to its logit.
        bad_words: sequences of token ids that are never completed.
        allowed_token_ids: the only tokens that are chosen, unless a guide ends the answer; empty: all.
        min_tokens: no token ends the answer before it has so many. A guided answer may end earlier if its
            guide allows no other token.
        length_decay: a number of tokens N and a factor F: after N tokens of the answer, the logit of each
            end-of-sequence token grows by its size times F ** (tokens beyond N) - 1; None is off.
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
    allowed_token_ids: Items[int] = ()
    min_tokens: int = 0
    length_decay: tuple[int, float] | None = None

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
            raise ValueError("each of bad_words must have at least one token, found an empty one")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvExport:
    """The destination of exported keys and values: the tensor's key, and its scope in the store.

    `publish` publishes them from GPU memory; None where main memory is to be used.
    """

    key: str
    scope: str
    publish: PublishOnDevice | None = None


class PoolingMode(StrEnum):
    """The reduction of a prompt's hidden states to one vector, named as in sentence-transformers."""

    FIRST = "cls"
    LAST = "lasttoken"
    MAX = "max"
    """The largest of each number."""
    MEAN = "mean"
    MEAN_SQRT = "mean_sqrt_len_tokens"
    """The sum of the states over the root of their number."""
    WEIGHTED_MEAN = "weightedmean"
    """The weight of each state is its position, from 1."""
    NONE = "none"
    """No reduction: one vector for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The computation of an embedding from a prompt.

    Attributes:
        normalize: scale the vector to length 1.
        dimensions: keep so many of its first numbers; None is all of them.
    """

    mode: PoolingMode
    normalize: bool = False
    dimensions: int | None = None

    @property
    def needs_all(self) -> bool:
        """True if the states of all tokens are needed, also of those whose keys and values are cached."""
        return self.mode is not PoolingMode.LAST


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """The input of a sequence on a node whose steps are fed (`workers.kv_engine.stream_nodes.FedNode`).

    Attributes:
        items: (N, ...), the stream's items that its prompt is made of; None without any.
        ended: no items follow: the stream has ended, or there is none.
        args: the arguments of the walk that starts the sequence.
        sampling: for the choices that the node makes after each token.
        penalized_ids: what a repetition penalty counts as its prompt's tokens.
    """

    items: Array | DeviceArray | None = None
    ended: bool = True
    args: Mapping[str, Any] = field(default_factory=dict)
    sampling: Sampling = Sampling()
    penalized_ids: Items[int] = ()


def tokens_in(kv_shape: tuple[int, ...]) -> int:
    """The number of tokens in transferred keys and values (`kv_transfer`); 0 for another shape."""
    if len(kv_shape) == 5:  # (layers, 2, tokens, kv_heads, head_dim)
        return kv_shape[2]
    # (numbers per token, tokens), or with recurrent states (1, tokens, numbers).
    return kv_shape[1] if len(kv_shape) in {2, 3} else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """A request to the engine.

    Keys and values are imported and exported as one tensor (`kv_transfer`), for example (layers, 2, tokens,
    kv_heads, head_dim). A finished sequence has them for all tokens but the last, which was sampled but not
    run.

    Attributes:
        key: the caller's name for the sequence; unique among the live ones.
        node: the name of the node, where a rank has several KV nodes.
        prefix_ids: tokens that an earlier attempt generated.
        max_tokens: the most generated tokens, those of the prefix included. 0 is for a prompt without an
            answer: it is scored, pooled or cached.
        eos_ids: the model's end-of-sequence tokens.
        ignore_eos: treat `eos_ids` as any other token.
        stop_token_ids: tokens that always end the answer.
        guide: the grammar of the answer.
        exhausts_guide: the answer does not end while its guide allows any other token.
        logprobs: score each generated token, and report so many of the likeliest; None is no scores.
        scores_prompt: score the prompt's tokens, too, all but the first.
        pooling: compute an embedding of the prompt.
        caches_prompt: compute the prompt for the prefix cache.
        export: export the keys and values when the sequence ends with a token that was sampled here.
        kv: imported keys and values of the first tokens; these tokens are not computed again.
        on_kv_read: called in the engine's thread after `kv` was copied. It raises if the bytes are no longer
            those of the tensor; then only this sequence fails.
        priority: sequences with a higher one come first.
        deadline_ns: at equal priority, sequences with an earlier one come first.
        tenant: at equal deadline, sequences of the tenant that was served least come first.
        cache_root: keys and values are shared only between sequences with an equal one.
        adapter: the LoRA adapter to compute it with; None is the plain model.
        parts: the parts of the prompt that stand for media.
        embeds: (N, width), the rows that replace the embeddings of the parts' tokens; None if the prompt has
            none, or its keys and values are imported.
        sends: the edges of a tensor per token that go into streams.
        feed: the input of a fed sequence besides its prompt.
        token_program: the program of the node that generates the tokens; empty: they are sampled one by one.
        options: of that program.
        work: the record of its work in the engine.
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
    kv: Array | DeviceArray | None = None
    on_kv_read: Callable[[], None] | None = None
    priority: int = 0
    deadline_ns: int | None = None
    tenant: str = ""
    cache_root: Hashable = None
    adapter: Adapter | None = None
    parts: Items[PromptPart] = ()
    embeds: Array | DeviceArray | None = None
    sends: frozenset[str] = frozenset()
    feed: Feed | None = None
    node: str = ""
    token_program: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    work: EngineWork = field(default_factory=EngineWork, compare=False, repr=False)

    @property
    def shared_root(self) -> Hashable:
        """The root of its path in the prefix cache: an adapter's keys and values are its own."""
        return self.cache_root if self.adapter is None else (self.cache_root, self.adapter.digest)

    @property
    def has_prompt_output(self) -> bool:
        """True if the prompt has a result even if no token is generated."""
        is_scored = self.scores_prompt and len(self.prompt_ids) > 1
        return is_scored or self.pooling is not None or self.caches_prompt or bool(self.sends)

    @property
    def end_ids(self) -> frozenset[int]:
        """The token ids that end this answer."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_ids

    @property
    def adjusts_logits(self) -> bool:
        """True if its logits are changed before a token is chosen."""
        sampling = self.sampling
        return bool(
            sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.logit_bias
            or sampling.bad_words
            or self.delays_end
            or self.decaying_ids
        )

    @property
    def is_masked(self) -> bool:
        """True if only some tokens may be chosen."""
        return self.guide is not None or bool(self.sampling.allowed_token_ids)

    @property
    def delays_end(self) -> bool:
        """True if its end tokens are banned at first; the guide bans them in a guided sequence."""
        return bool(self.sampling.min_tokens and self.end_ids and self.guide is None)

    @property
    def decaying_ids(self) -> frozenset[int]:
        """The end-of-sequence tokens that grow likelier with the length of the answer."""
        decays = self.sampling.length_decay is not None and not self.ignore_eos
        return self.eos_ids if decays else frozenset()

    @property
    def can_speculate(self) -> bool:
        """True if tokens may be drafted: nothing but the token itself depends on the step before."""
        return self.can_run_ahead and self.logprobs is None and not self.adjusts_logits

    @property
    def can_run_ahead(self) -> bool:
        """True if its next step may be launched before the token of the last one is known on the host.

        Penalties count that token on the device; masks, and bad words of several tokens, need it on the host.
        """
        has_words = any(len(word) > 1 for word in self.sampling.bad_words)
        return not self.is_masked and not self.sends and not has_words

    def check(self, vocab_size: int, *, is_fed: bool = False) -> None:
        """Check that a model with `vocab_size` tokens can compute this request.

        The prompt of a fed node is rows, and its ids may be of another vocabulary.

        Raises:
            ClientError: the client's part of the request is invalid.
            BugError: the worker built an inconsistent request.
        """
        if self.finished is not None:
            raise BugError(f"sequence {self.key!r} has nothing to compute: its prefix ends the answer")
        if not self.prompt_ids:
            raise ClientError("the prompt is empty: expected at least one token", code="empty_prompt")
        if self.scores_prompt and self.logprobs is None:
            raise BugError(f"sequence {self.key!r} has scores_prompt, but no logprobs: expected a number")
        if self.max_tokens < 1 and not (self.max_tokens == 0 and self.has_prompt_output):
            message = f"max_tokens must be at least 1, found {self.max_tokens}"
            raise ClientError(message, code="invalid_max_tokens")
        if self.pooling is not None and self.max_tokens:
            raise BugError(f"sequence {self.key!r} has pooling and max_tokens: expected one of them")
        sampling = self.sampling
        for field_name, ids in (
            ("prompt", () if is_fed else self.prompt_ids),
            ("prefix", self.prefix_ids),
            ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
            ("bad_words", [token_id for word in sampling.bad_words for token_id in word]),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("stop_token_ids", self.stop_token_ids),
        ):
            if ids and (min(ids) < 0 or max(ids) >= vocab_size):
                found = f"found {min(ids)} to {max(ids)}"
                raise ClientError(
                    f"{field_name}: token ids must be from 0 to {vocab_size - 1}, {found}",
                    code="invalid_token_id",
                )
        delayed = self.decaying_ids | (self.end_ids if self.delays_end else frozenset())
        if len(delayed.union(word[-1] for word in sampling.bad_words)) >= vocab_size:
            message = "bad_words and min_tokens leave no token to choose: remove some bad_words"
            raise ClientError(message, code="nothing_left")

    @property
    def finished(self) -> FinishReason | None:
        """The finish reason if the prefix ends the answer; None if there is something left to compute."""
        if not self.prefix_ids:
            return None
        return self.finish_reason(self.prefix_ids[-1], len(self.prefix_ids))

    def finish_reason(self, token_id: int, generated: int) -> FinishReason | None:
        """Return the finish reason if the answer ends with `token_id`, its token number `generated`."""
        if token_id in self.stop_token_ids or (token_id in self.eos_ids and not self.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if generated >= self.max_tokens else None
