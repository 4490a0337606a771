"""Typed arguments and facts of walks over KV nodes: what a plan orders, and what workers report.

A plan builds these structs, `Walk(args=...)` encodes them, and a worker decodes them once. On the wire they
are maps. A field that keeps its default is absent: orders that were recorded before a field existed decode,
and a plan that does not use the field writes the same bytes as before.

The conductor imports this module: it knows neither tensors nor tokenizers.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

import msgspec

from shared.errors import BugError, ClientError
from shared.events import Guide, Inputs, Params, Usage, WalkCall
from shared.plans import Finish

PROMPT_OUTPUT_ARGS: Final = frozenset({"echo", "pooling", "warm"})
"""Arguments of a walk for which its KV nodes emit something of the prompt itself, or nothing at all."""


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a `prepare` walk: the request as the client wrote it."""

    inputs: Inputs
    params: Params

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Self:
        """Decode the arguments of a `prepare` walk.

        Raises:
            ClientError: the request is malformed.
        """
        try:
            return msgspec.convert(args, cls)
        except msgspec.ValidationError as error:
            raise ClientError(f"the request is malformed: {error}") from error


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Effective sampling parameters: the request's over the checkpoint's defaults.

    The fields mean the same as in `shared.events.Params`. None and empty values have no effect.

    Attributes:
        logit_bias: pairs of a token id and the value that is added to its logit.
        bad_words: sequences of token ids that the answer must not contain.
        length_decay: a number of tokens N and a factor F: after N tokens of the answer, the logit of each
            end-of-sequence token grows by its size times F ** (tokens beyond N) - 1. Only checkpoints ask for
            it (`exponential_decay_length_penalty`).
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: list[tuple[int, float]] = []
    bad_words: list[list[int]] = []
    allowed_token_ids: list[int] = []
    min_tokens: int | None = None
    length_decay: tuple[int, float] | None = None


class PoolingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The pooling of a prompt's hidden states into an embedding.

    Attributes:
        mode: a pooling mode in sentence-transformers' names; `none` keeps one vector per token.
        normalize: scale the embedding to length 1.
        dimensions: the number of leading dimensions to keep; None keeps all.
    """

    mode: str
    normalize: bool | None = None
    dimensions: int | None = None


class PromptReasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reasoning that an answer may begin with.

    Attributes:
        format: its format, one of `models.text.reasoning`.
        is_inside: the prompt ends with the opening mark.
    """

    format: str
    is_inside: bool = False


class PreparedPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts that a `prepare` node reports to the plan. The token ids are one of its outputs.

    Attributes:
        prompt_tokens: the number of tokens of the prompt.
        prompt_text: the prompt as text, for an echo; empty if only its ids are echoed.
        pooling: for an embedding, or for hidden states.
        guide: for a chat with tools, or of a model that thinks: the guide of the answer, None if it is free.
            Absent where it is that of the request.
        stop: the checkpoint's own texts that end an answer, for a request without any.
        reasoning: what the answer may begin with, for a chat with a model that thinks.
    """

    prompt_tokens: int
    sampling: SamplingParams
    prompt_text: str | None = None
    pooling: PoolingParams | None = None
    guide: Guide | msgspec.UnsetType | None = msgspec.UNSET
    stop: list[str] = []
    reasoning: PromptReasoning | None = None


class PromptPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A run of prompt tokens that stand for a medium, or for a part of one.

    Attributes:
        start: the index of its first token in the prompt.
        count: the number of its tokens.
        digest: names the rows that replace the tokens' embeddings: of the medium, and of everything else that
            changes the rows (hex). Empty: the tokens keep their own embeddings.
        grid: frames, rows and columns, for positions of several axes.
        full: its tokens see one another in both directions.
        seconds: the time between two frames of a video, for positions of several axes.
        modality: `image` or `video`.
    """

    start: int
    count: int
    digest: str = ""
    grid: tuple[int, ...] = ()
    full: bool = False
    seconds: float = 0.0
    modality: str = ""


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of the walk that starts a sequence on a KV node.

    Walks may carry further arguments for their other nodes; they are ignored here.

    Attributes:
        max_tokens: the limit of new tokens; resident loops name it as their `max_iters`.
        sampling: None is greedy.
        stop: strings that end the answer.
        ignore_eos: the model's end-of-sequence tokens do not end the answer.
        stop_token_ids: tokens that end the answer even with `ignore_eos`.
        choice: the index of the answer, for a request with several.
        logprobs: the number of likeliest tokens to report with each token; None reports nothing.
        guide: constrains the answer.
        exhausts_guide: the answer does not end while the guide allows another token.
        echo: the prompt's text, which is emitted before the answer, with the ids of its tokens.
        echoes_ids: the echo has the ids alone: no text, and no log probabilities.
        pooling: emit an embedding of the prompt, or its hidden states; nothing is generated.
        warm: compute the prompt for the prefix cache; nothing is generated.
        parts: the runs of prompt tokens that stand for media, in order.
        prompt_items: of a node that takes a stream: the number of its first items that the prompt is made of.
        inner_sampling: for the choices that a node makes after each token; None is greedy.
        penalized_ids: of a node that takes a stream: what a repetition penalty counts as its prompt's tokens.
        token_program: the program of the KV node that generates the tokens (`models.programs.TokenProgram`);
            empty for the sampling loop.
        options: its arguments.
        reports_ids: report the tokens of the answer as a fact.
        reasoning: what the answer may begin with.
    """

    max_tokens: int | None = None
    sampling: SamplingParams | None = None
    stop: list[str] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] = []
    choice: int = 0
    logprobs: int | None = None
    guide: Guide | None = None
    exhausts_guide: bool = False
    echo: str | None = None
    echoes_ids: bool = False
    pooling: PoolingParams | None = None
    warm: bool = False
    parts: list[PromptPart] = []
    prompt_items: Annotated[int, msgspec.Meta(ge=0)] = 0
    inner_sampling: SamplingParams | None = None
    penalized_ids: list[int] = []
    token_program: str = ""
    options: dict[str, Any] = {}
    reports_ids: bool = False
    reasoning: PromptReasoning | None = None

    @property
    def echo_logprobs(self) -> int | None:
        """As `logprobs`, for the tokens of an echo."""
        return None if self.echoes_ids else self.logprobs

    @classmethod
    def of(cls, call: WalkCall) -> Self:
        """Decode the arguments of a walk.

        Raises:
            BugError: an argument has the wrong type.
        """
        try:
            return msgspec.convert(call.args, cls)
        except msgspec.ValidationError as error:
            raise BugError(f"walk {call.name!r}: expected arguments for a sequence: {error}") from error


def samples_tokens(call: WalkCall) -> bool:
    """Return whether the `SequenceRequest` of a walk has sampling parameters."""
    return "sampling" in call.args


def runs_token_program(call: WalkCall) -> bool:
    """Return whether the `SequenceRequest` of a walk names a token program."""
    return bool(call.args.get("token_program"))


def changed(call: WalkCall, **fields: Any) -> WalkCall:
    """Return a walk with other values in its `SequenceRequest`; arguments for other nodes are unchanged.

    Raises:
        BugError: an argument has the wrong type.
    """
    request = msgspec.structs.replace(SequenceRequest.of(call), **fields)
    others = {name: value for name, value in call.args.items() if name not in request.__struct_fields__}
    return msgspec.structs.replace(call, args=others | msgspec.to_builtins(request))


class SequenceFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts that a KV node reports when its sequence has ended.

    Attributes:
        cached_tokens: for a `warm` request: the number of leading prompt tokens that are cached now.
        counts: what a token program has counted, such as its forward passes.
        token_ids: the tokens of the answer, where they were asked for (`reports_ids`).
        stop_reason: the stop string, or the id of the token, that ended the answer. Absent if neither did,
            and in logs that are older than the field.
        reasoning_tokens: the tokens among those of the answer that are reasoning, with its marks.
    """

    completion_tokens: int
    finish_reason: str
    stop_reason: str | int | msgspec.UnsetType = msgspec.UNSET
    cached_tokens: int | msgspec.UnsetType = msgspec.UNSET
    counts: dict[str, int] = {}
    token_ids: list[int] = []
    reasoning_tokens: int = 0

    def finish(self, usage: Usage) -> Finish:
        """Return the end of a plan whose only choice this sequence is."""
        stop = self.stop_reason
        return Finish(
            usage=usage,
            finish_reasons=(self.finish_reason,),
            stop_reasons=() if stop is msgspec.UNSET else (stop,),
        )
