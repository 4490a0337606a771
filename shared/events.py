"""All event types, and how they become bytes.

The wire format is MessagePack: one map per event, with a versioned tag in `type`. At the public
subjects (`request`, `control`) JSON is accepted too; the first byte tells them apart. Facts are in the
past tense and written by whoever saw them; decisions are written by the conductor alone.

An incompatible change adds a `.v2` beside the `.v1`; it never edits the `.v1`: recorded histories
replay for ever. Fields that are unknown are ignored, except in what clients write by hand
(`Inputs`, `Params`), where a misspelt name is an error.

This module knows no transport: no NATS, no clock. An event's time and position are the log's to give.
"""

import hashlib
import math
from contextlib import suppress
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shared.ids import ID_PATTERN
from shared.subjects import CONDUCTOR_WRITER, DEFAULT_ORIGIN
from shared.tensors import Handle

MAX_DEPTH: Final = 32
"""How deep what clients write may be nested."""
MAX_MESSAGE_CHARS: Final = 2000
"""How long the message of an error may be."""
MAX_CHOICES: Final = 1024
"""How many answers one question may have."""
MAX_LOGPROBS: Final = 20
"""How many of the likeliest tokens may be named beside the one that was taken."""
MAX_BIASES: Final = 1024
"""Of how many tokens a request may change the logits."""
MAX_GUIDE_BYTES: Final = 131_072
"""How large a guide may be, as MessagePack."""
MAX_SCHEMA_DEPTH: Final = 64
"""How deep a guide's JSON schema may be nested."""
MAX_TOOLS: Final = 128
"""How many functions a request may offer."""
MAX_TOOLS_BYTES: Final = 131_072
"""How large they may be together, as MessagePack."""
_ID_DIGITS: Final = 10
_BIASES_SCHEMA: Final = {
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
}
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Priority = Annotated[int, Meta(ge=-100, le=100)]

# Every struct repeats its options: mypy does not inherit `frozen`, msgspec does not inherit `kw_only`.


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every event carries from the first version on.

    Attributes:
        id: the same for every copy of the same event; readers keep the first they see.
        writer: who wrote it: a gateway's name, `conductor`, `w<rank>`, or any service's own name.
        number: the writer's own count of its events, from 1 for each life; a hole is an error.
        request_id: the request it belongs to, where it belongs to one.
        epoch: the conductor's term, on conductor's events and on what answers them.
        attempt: which try of the request, from 1; 0 where there is none yet.
        incarnation: the worker's life it is for or from.
        index: the position among its like: the walk's on the journey, the chunk's in the output.
        trace: W3C `traceparent`.
    """

    id: str = ""
    writer: str = ""
    number: int = 0
    request_id: str | None = None
    epoch: int | None = None
    attempt: int = 0
    incarnation: int | None = None
    index: int = 0
    trace: Annotated[str, Meta(max_length=256)] | None = None


# ---- what a request is ---------------------------------------------------------------------------


class Media(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One medium of a request: inline while small, else a reference into the object store."""

    modality: str
    data: bytes | None = None
    ref: str | None = None
    name: str | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A function that the model may ask its client to call.

    Attributes:
        description: what it does, for the model.
        parameters: a JSON schema of one object; None is a function without parameters.
        strict: its arguments are valid by that schema, also where the model chose to call it.
    """

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.strict is False:  # what says the same is written the same
            msgspec.structs.force_setattr(self, "strict", None)
        if self.parameters is None:
            return
        kind = self.parameters.get("type", "object")
        if kind != "object":
            raise ValueError(f"parameters: expected a schema of the type 'object', found {kind!r:.80}")
        try:
            _check_plain([self.parameters], MAX_SCHEMA_DEPTH)
        except ValueError as error:
            raise ValueError(f"parameters: {error}") from error


class Tool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tool, as OpenAI writes it."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One of the functions."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The tool that is to be used, as OpenAI writes it."""

    type: Literal["function"]
    function: FunctionName


class Inputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The request as the client meant it: one of `messages`, `text` or `token_ids`, and media.

    `messages` are a chat as OpenAI writes it, rendered with the checkpoint's own chat template.
    `text` is a raw prompt when `chat` is false, and one user message when it is true.

    Of a chat, `tools` are functions the model may call, rendered by that template. `tool_choice` says whether
    it does: if it likes (`auto`), not at all (`none`: it is not told of them), at least once (`required`), or
    once, the one that is named. Without `parallel_tool_calls` it calls one at most. The answer is text, with
    the calls as the model writes them (`models.text.tool_calls`).
    """

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]] | None = None
    chat: bool = True
    files: list[Media] = []
    input_modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])
    output_modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True

    def __post_init__(self) -> None:
        given = [n for n in ("messages", "text", "token_ids") if getattr(self, n) is not None]
        if len(given) != 1:
            found = ", ".join(given) if given else "none of them"
            raise ValueError(f"expected one of messages, text, token_ids; found {found}")
        if self.tools:
            self._check_tools()
        elif self.tool_choice not in ("auto", "none"):
            raise ValueError("tool_choice: expected 'auto' or 'none' where there are no tools")

    def _check_tools(self) -> None:
        if self.token_ids is not None or not self.chat:
            raise ValueError("tools: expected a chat, which a template renders with them; found a raw prompt")
        names = [tool.function.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tools: expected each function once, found {name!r} twice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(
                f"tool_choice: expected one of the functions {', '.join(names)[:400]}, "
                f"found {self.tool_choice.function.name!r:.80}"
            )
        try:
            size = len(_ENCODER.encode(self.tools))
        except UnicodeEncodeError as error:
            raise ValueError("tools: expected valid Unicode, found a lone surrogate") from error
        if size > MAX_TOOLS_BYTES:
            raise ValueError(f"tools: expected at most {MAX_TOOLS_BYTES} bytes, found {size}")


class Guide(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the answer has to be, whatever the model thinks: exactly one of these.

    Attributes:
        json_schema: JSON that is valid by this schema. Its properties come in the schema's order.
        json_object: a JSON object of any kind.
        regex: a text that the regular expression matches as a whole, in the syntax of Rust's `regex`.
        grammar: a text of this grammar, in llguidance's dialect of Lark, from the rule `start` on.
        choice: one of these texts.
    """

    json_schema: dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: Annotated[str, Meta(min_length=1)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    choice: (
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)] | None
    ) = None

    def __post_init__(self) -> None:
        names = self.__struct_fields__
        given = [
            n for n in names if getattr(self, n) is not None and (n != "json_object" or self.json_object)
        ]
        if len(given) != 1:
            found = ", ".join(given) if given else "none of them"
            raise ValueError(f"expected one of {', '.join(names)}; found {found}")
        if isinstance(self.json_schema, dict):
            try:
                _check_plain([self.json_schema], MAX_SCHEMA_DEPTH)
            except ValueError as error:
                raise ValueError(f"json_schema: {error}") from error
        try:
            size = len(_ENCODER.encode(self))
        except UnicodeEncodeError as error:
            raise ValueError(f"{given[0]}: expected valid Unicode, found a lone surrogate") from error
        if size > MAX_GUIDE_BYTES:
            raise ValueError(f"{given[0]}: expected at most {MAX_GUIDE_BYTES} bytes, found {size}")


class Params(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to answer. None means the checkpoint's own default (`generation_config.json`).

    Attributes:
        max_tokens: at most so many new tokens; None is the deployment's `default_max_tokens`. 0 is for an
            echo alone, and for `warm`.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 is off.
        min_p: keep what is at least this times as likely as the likeliest token; 0 is off.
        repetition_penalty: tokens that are in the prompt or the answer become less likely; 1 is off.
        presence_penalty: taken from the logit of each token that is in the answer.
        frequency_penalty: taken from the logit of a token for each time it is in the answer.
        logit_bias: from a token id to what is added to its logit, -100 to 100. The ids are written as
            strings, as in JSON; in MessagePack they may be integers.
        bad_words: texts, or sequences of token ids, that the answer shall not hold.
        min_tokens: no token ends the answer before it has so many; a stop text does.
        seed: chosen from the request id when absent, so that a replay has it.
        stop: texts that end the answer; not part of it.
        stop_token_ids: tokens that end the answer, also with `ignore_eos`; not part of its text.
        choice: which of several answers to one question this is; answers of the same seed differ by it.
        logprobs: with each token its log probability (raw log-softmax) and those of so many of the
            likeliest; None is without.
        echo: the prompt comes first, as text, and with `logprobs` its tokens' log probabilities.
        voice: who speaks, of the voices a speech model has; None is its first.
        guide: what the answer has to be; None is whatever the model says.
        dimensions: of an embedding, how long it is; None is as long as the checkpoint makes it.
        warm: nothing is answered: the prompt is computed for requests that begin alike.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str | int, Any], Meta(extra_json_schema=_BIASES_SCHEMA)] = {}
    bad_words: (
        Annotated[
            list[
                Annotated[str, Meta(min_length=1, max_length=1024)]
                | Annotated[list[_TokenId], Meta(min_length=1, max_length=1024)]
            ],
            Meta(max_length=256),
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=256)] = []
    ignore_eos: bool = False
    choice: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)] = 0
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    voice: Annotated[str, Meta(max_length=64)] | None = None
    guide: Guide | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    warm: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens == 0 and not self.echo and not self.warm:
            raise ValueError("max_tokens: expected an integer >= 1, found 0")
        if self.warm and (self.max_tokens or self.echo):
            raise ValueError("warm: expected no answer beside it, found max_tokens or echo")
        if self.max_tokens and self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: expected at most max_tokens, which is {self.max_tokens}, "
                f"found {self.min_tokens}"
            )
        # What says the same is written the same: equal requests have equal digests.
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name) == 0:
                msgspec.structs.force_setattr(self, name, None)
        if self.logit_bias:
            msgspec.structs.force_setattr(self, "logit_bias", _biases(self.logit_bias))


def _biases(given: dict[str | int, Any]) -> dict[str | int, float]:
    """Biases by token ids in their one spelling, in their order: checked here, so that it says which."""
    if len(given) > MAX_BIASES:
        raise ValueError(f"logit_bias: expected at most {MAX_BIASES} tokens, found {len(given)}")
    found: dict[int, float] = {}
    for key, bias in given.items():
        is_number = isinstance(key, int) or (key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS)
        token_id = int(key) if is_number else -1
        if not 0 <= token_id < 2**31:
            raise ValueError(f"logit_bias: expected token ids, found {str(key)[:80]!r}")
        if token_id in found:
            raise ValueError(f"logit_bias: expected each token once, found {token_id} twice")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(
                f"logit_bias: expected numbers from -100 to 100, found {bias!r:.80} for token {token_id}"
            )
        found[token_id] = float(bias)
    return {str(token_id): found[token_id] for token_id in sorted(found)}


class ForkedFrom(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Lineage: the request that this one is another version of.

    `seq` is the position in the log up to which both are the same; `changes` are what was set otherwise.
    """

    request_id: Annotated[str, Meta(pattern=ID_PATTERN)]
    seq: Annotated[int, Meta(ge=1)]
    changes: dict[str, Any] = {}


class RequestSubmitted(
    Event,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="request.submitted.v1",
    tag_field="type",
):
    """A service wants an answer. Outputs appear under `<prefix>.output.<origin>.<request_id>.*`.

    `parent` is the request this one answers a part of: one choice of several, one prompt of a list. There
    are `parts` such parts; the first of them has the parent's own id. `correlation` is what its submitter,
    or a proxy before it, calls it: the `X-Request-ID` of HTTP. `timeout_s`: how long after it was stored it
    is to have ended, by the log's time; later it fails (`deadline.passed`). None is without an end.
    Who has a higher `priority` is served first; of the others, whose `tenant` has least.

    `forked_from` says of which request, and from which position of its log on, this is another version.

    `created_s`: when its client asked, in seconds since 1970; what each answer to it repeats. `is_first`:
    whoever stored it had the log see to it that nothing was stored under its id. So where the id is known
    all the same, the log has forgotten the request that had it.
    """

    model: Annotated[str, Meta(max_length=256)]
    inputs: Inputs
    params: Params = Params()
    origin: Annotated[str, Meta(pattern=ID_PATTERN)] = DEFAULT_ORIGIN
    parent: Annotated[str, Meta(pattern=ID_PATTERN)] | None = None
    correlation: Annotated[str, Meta(max_length=128)] | None = None
    parts: Annotated[int, Meta(ge=1)] = 1
    timeout_s: Annotated[float, Meta(gt=0, le=604_800)] | None = None
    forked_from: "ForkedFrom | None" = None
    priority: Priority = 0
    tenant: Annotated[str, Meta(max_length=64)] | None = None
    created_s: int | None = None
    is_first: bool = False


class RequestCancel(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="request.cancel.v1", tag_field="type"
):
    """Somebody no longer wants the answer. Whether it came in time is decided by log order."""

    reason: Annotated[str, Meta(max_length=1024)] = "cancelled"


class RequestWatched(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="request.watched.v1", tag_field="type"
):
    """The gateway `writer` has clients that read a request's answer, or (`is_over`) has none any more.

    A gateway cancels what its last client left, unless another one watches it. Said by gateways that a
    request was resumed at, and then by its own, where that has clients still; one that nobody resumes is
    not spoken of. No decision depends on it.
    """

    is_over: bool = False


# ---- what the conductor decides ------------------------------------------------------------------


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on the log: `code` for programs, `message` for people, `status` for HTTP."""

    code: str
    message: str
    status: int = 500

    def __post_init__(self) -> None:
        # Messages quote what clients wrote; no quotation may make an event that the log cannot take.
        if len(self.message) > MAX_MESSAGE_CHARS:
            msgspec.structs.force_setattr(self, "message", f"{self.message[: MAX_MESSAGE_CHARS - 1]}…")


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request may use, pinned at admission.

    `max_seq_len` and `kv_tokens` count tokens, prompt included; `default_max_tokens` new ones alone.
    `max_attempts`: so many in a row that came no further than the one before. `max_event_bytes` is what the
    log takes of one event; 0 where that was not recorded. `walk_timeouts_s`: by walk, how long it may take;
    a step may take what its walks may together, where each of them has a limit. `max_tokens_share`: of the
    new tokens that are asked for, so many are given; less than 1 while there is much to do.
    """

    max_seq_len: int
    kv_tokens: int
    default_max_tokens: int
    max_attempts: int = 2
    max_event_bytes: int = 0
    walk_timeouts_s: dict[str, float] = {}
    max_tokens_share: float = 1.0


class Pins(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Digests of everything a decision depends on beside the facts (hex, blake2b)."""

    graph: str
    plan: str
    config: str
    core: str
    submission: str


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens counted once each.

    `cached_tokens`, of a prompt that was computed for others (`Params.warm`): of so many of its first tokens
    keys and values are kept now.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class OutputTotals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an output amounts to: how many chunks, and `shared.transcript`'s digest of them."""

    chunks: int = 0
    digest: str = ""


class WalkCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One walk to run: tensors by handle, everything else as plain values."""

    name: str
    inputs: dict[str, Handle] = {}
    args: dict[str, Any] = {}

    @property
    def choice(self) -> int:
        """The index of the answer that the walk computes, for a request with several answers."""
        return int(self.args.get("choice", 0))


class EpochOpened(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="epoch.opened.v1", tag_field="type"
):
    """A conductor's term begins where this is stored; lower epochs behind it are void."""

    conductor: str
    core: str


class RequestAdmitted(
    Event,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="request.admitted.v1",
    tag_field="type",
):
    """`schedule` let a request in. Taken as it is by every replay: it depends on the world.

    `family` names the graph and plan the request follows (`models.registry`). `placement` says each
    node's rank; `walk_placement`, by walk and node, where it is another one in that walk.
    """

    family: str
    seed: int
    placement: dict[str, int]
    walk_placement: dict[str, dict[str, int]] = {}
    limits: Limits
    pins: Pins
    reason: str


class RequestResumed(
    Event,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="request.resumed.v1",
    tag_field="type",
):
    """`schedule` gave a held request a place again (ADR 9). Every replay takes it as it is.

    Attributes:
        index: how often it was resumed before, from 0.
        placement: each node's rank from here on, and `walk_placement` where that is another one in a walk.
        on_probation: it may be what a worker died of.
        closed: ranks on which nothing else begins while that is so; beside it may run what was under the same
            suspicion and came further. Empty where it is tried beside others.
        alone_on: those of them on which nothing at all runs beside it: who dies there, died of it.
    """

    placement: dict[str, int]
    walk_placement: dict[str, dict[str, int]] = {}
    on_probation: bool = False
    closed: list[int] = []
    alone_on: list[int] = []
    reason: str


class DeadlinePassed(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="deadline.passed.v1", tag_field="type"
):
    """The conductor's clock says that a time limit is over; the log's time has the last word.

    It counts where it is stored after `deadline_ns` (the log's time, Unix nanoseconds), and is void before.

    Attributes:
        step: whose limit it is, in this `attempt`; None is the request's own.
    """

    deadline_ns: int
    step: int | None = None


class RequestRejected(
    Event,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="request.rejected.v1",
    tag_field="type",
):
    """A submission was refused.

    `submission_seq` is its position in the log, as its publisher's ack told: an earlier request under
    the same id is not touched by it.
    """

    failure: Failure
    submission_seq: int
    history: bytes = b""


class NodeReady(Event, frozen=True, kw_only=True, omit_defaults=True, tag="node.ready.v1", tag_field="type"):
    """The decision and the dispatch in one: a rank is to run its part of these walks, one after the other.

    Every rank that hosts a node of the walks is told all of them; it runs its own nodes, and learns of the
    others from the ranks that run those (`NodeFired`).

    Attributes:
        rank: whose it is; `incarnation` says which life of it.
        index: the step on the request's journey, from 0.
        placement: each node's rank, and `walk_placement` where that is another one in a walk.
        lives: the incarnation of every rank the request is placed on, where there are several.
        partition: the sub-plan whose step it is; empty for the plan itself.
        ends: streams that end with this step: no item follows behind it.
        on_probation: a worker died under this request: to be told when it begins (`walk.begun`), and once it
            is further (`walk.progressed`).
        priority, tenant, deadline_ns: who comes first in the rank's engine; the last by the log's time.
        history: the digest of all facts of the request folded so far; replay computes it again.
    """

    rank: int
    model: str
    walks: list[WalkCall]
    placement: dict[str, int]
    origin: str
    seed: int
    reason: str
    history: bytes
    walk_placement: dict[str, dict[str, int]] = {}
    lives: dict[int, int] = {}
    partition: str = ""
    ends: list[str] = []
    on_probation: bool = False
    priority: int = 0
    tenant: str = ""
    deadline_ns: int | None = None


class WalkStop(Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.stop.v1", tag_field="type"):
    """The rank is to stop the step `index` of this attempt and forget it."""

    rank: int
    reason: str
    history: bytes


class OutputFence(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="output.fence.v1", tag_field="type"
):
    """Chunks of an attempt lower than `attempt` stored behind this are void."""

    reason: str
    history: bytes


class RequestFinished(
    Event,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="request.finished.v1",
    tag_field="type",
):
    """The plan returned; the output is closed at this position of the log."""

    usage: Usage
    finish_reasons: list[str]
    output: OutputTotals
    history: bytes


class RequestFailed(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="request.failed.v1", tag_field="type"
):
    """The request cannot be answered; the output is closed at this position of the log."""

    failure: Failure
    history: bytes


class RequestCancelled(
    Event,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="request.cancelled.v1",
    tag_field="type",
):
    """The request was cancelled; the output is closed at this position of the log."""

    reason: str
    history: bytes


class WorkerLost(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="worker.lost.v1", tag_field="type"
):
    """The conductor declares a worker's life (`incarnation`) over: on `conductor.lost`.

    What is stored behind `read_seq` that life had not read when it was heard last.
    """

    rank: int
    reason: str
    read_seq: int | None = None


# ---- what workers report -------------------------------------------------------------------------


class WorkerJoined(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="worker.joined.v1", tag_field="type"
):
    """A rank's process begins a life; the sequence this is stored at is its incarnation.

    A second copy of the same event (same `id`) is no second life: the first copy counts. A living worker
    says it again each day, with its `incarnation`, because the log forgets. `cards` say, by transport, how
    other workers reach the tensors of this life; of a rank that follows another (`tp_size`), `group` says
    where it waits for that. `tool_calls` is how its model writes calls of tools, one of
    `models.text.tool_calls`; empty where it cannot.
    """

    rank: int
    model: str
    nodes: list[str]
    device: str
    kv_tokens: int = 0
    max_seq_len: int = 0
    host: str = ""
    pid: int = 0
    cards: dict[str, bytes] = {}
    tool_calls: str = ""


class WorkerLeaving(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="worker.leaving.v1", tag_field="type"
):
    """A rank's process ends its life in order. `tool_calls` is as it joined: answers are read on."""

    rank: int
    tool_calls: str = ""


class WalkResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one walk came to: facts a plan may branch on, and handles it may pass on unopened."""

    name: str
    facts: dict[str, Any] = {}
    outputs: dict[str, Handle] = {}


class StreamTotals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a stream came to: with its policy (`shared.walks.chunks`) the items say how they were cut.

    Attributes:
        items: all of the stream; of one that was `left`, those that its chunks had.
        left: its taker was done before the stream was: the final chunk was not taken.
    """

    items: int = 0
    chunks: int = 0
    left: bool = False


class WalkCompleted(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.completed.v1", tag_field="type"
):
    """A rank did its part of a step; all its chunks are stored before this is.

    Attributes:
        results: one for each walk of the order, with what this rank's nodes came to.
        output: the output so far, of the track without a name; `tracks` are those that have one.
        streams: what came in on streams: their names, how many items and how many chunks.
    """

    rank: int
    results: list[WalkResult]
    output: OutputTotals = OutputTotals()
    durations_s: dict[str, float] = {}
    tracks: dict[str, OutputTotals] = {}
    streams: dict[str, "StreamTotals"] = {}


class WalkFailed(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.failed.v1", tag_field="type"
):
    """A rank could not do its part of a step.

    `gone` is the key of a tensor whose bytes were not there any more (`failure.code` is `tensor_gone`): its
    producer has to run again. They were last seen on `gone_rank`, in its life `gone_life`.
    """

    rank: int
    failure: Failure
    gone: str | None = None
    gone_rank: int | None = None
    gone_life: int | None = None


class WalkBegun(Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.begun.v1", tag_field="type"):
    """A step on probation is about to be run: stored before anything of it is.

    So a worker that dies before that did not die of it.
    """

    rank: int


class WalkProgressed(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.progressed.v1", tag_field="type"
):
    """A step on probation is further than it was when a worker died under it: it is not what killed that.

    `tokens` are those of the answer so far, where it has any.
    """

    rank: int
    tokens: int = 0


class WalkStopped(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="walk.stopped.v1", tag_field="type"
):
    """A rank obeyed a `walk.stop`: after it was read, `steps_after` more engine steps held the row."""

    rank: int
    steps_after: int
    tokens: int = 0


# ---- what workers tell one another ---------------------------------------------------------------


class SequenceHandover(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row of the KV engine on its way to the rank where it goes on.

    Attributes:
        kv: keys and values of the first tokens, (layers, 2, tokens, kv_heads, head_dim).
        token_ids: what was generated so far; nothing of it is put out yet.
        logprobs: of those tokens, where they were asked for.
        prompt_scores: of the prompt's tokens but the first, where they were asked for: int32 (tokens,
            1 + top, 2), the token and then the likeliest, each an id and the bits of a float32.
    """

    kv: Handle
    token_ids: list[int]
    logprobs: list["TokenLogprobs"] = []
    prompt_scores: Handle | None = None


class NodeFired(Event, frozen=True, kw_only=True, omit_defaults=True, tag="node.fired.v1", tag_field="type"):
    """A node of a walk has fired on one rank: told to every other rank that runs a part of the step.

    So each of them knows the whole walk's state (ADR 7). What names a firing is the place of the walk in
    the order, the node, and its path (the iteration of each loop around it): a second copy is a second copy
    and not the next iteration.

    Attributes:
        index: the step.
        walk: the place of the walk among the order's walks, from 0.
        outputs: its values, by edge.
        stops: loops that end after the iteration under way.
        row: the row of a KV node that goes on, in a later walk of the order, on the rank this is told to.
        to_life: which life of that rank is told; its next one has nothing to do with it.
    """

    walk: int
    node: str
    path: tuple[int, ...]
    outputs: dict[str, Handle] = {}
    stops: list[str] = []
    row: SequenceHandover | None = None
    to_life: int | None = None


class StreamSent(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="stream.sent.v1", tag_field="type"
):
    """Items of a stream, from the rank that makes them to the rank that takes them.

    Attributes:
        index: the number of the first item, from 0.
        stream: the edge's name.
        to: the node that takes it.
        items: a tensor whose first dimension counts the items; None where only the end is told.
        end: no item follows.
        to_life: as in `NodeFired`.
    """

    stream: str
    to: str
    items: Handle | None = None
    end: bool = False
    to_life: int | None = None


class StreamTaken(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="stream.taken.v1", tag_field="type"
):
    """A credit, from the rank that takes a stream to the one that makes it: so many items are used.

    `closed`: the taker is done, before the stream is. Nobody reads an item any more, those that still come
    included: whoever makes them keeps none, sends none, and waits for no credit.
    `to_life`: as in `NodeFired`.
    """

    stream: str
    to: str
    taken: int
    closed: bool = False
    to_life: int | None = None


class TensorsReleased(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="tensors.released.v1", tag_field="type"
):
    """A hint to the rank that owns them: these tensors were read, and will not be read again.

    `to_life`: as in `NodeFired`.
    """

    keys: list[str]
    to_life: int | None = None


class LikelyToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token and its natural log probability. `token` is its bytes: a part of a character, at times."""

    id: int
    token: bytes
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the model thought of one token of the output.

    Attributes:
        logprob: raw log-softmax of the logits, before temperature and filters; None for a prompt's first.
        top: the likeliest tokens in that place, the likeliest first.
    """

    id: int
    token: bytes
    logprob: float | None = None
    top: list[LikelyToken] = []


class OutputChunk(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="output.chunk.v1", tag_field="type"
):
    """A piece of the answer. `index` counts its track's chunks from 0, through all attempts.

    Attributes:
        track: which of the outputs that are written side by side. Empty where a model has but one node that
            speaks.
        token_offset: how many tokens of this choice came before; `token_ids` follow on.
        text_offset: how many characters (code points) of this choice came before; `text` follows on.
        logprobs: of `token_ids`, one for one, where they were asked for. In the chunk of an echo, which
            has `echo` among its metadata and no `token_ids`, of the prompt's tokens.
        data: bytes of a modality other than text.
        metadata: what a client needs to read `data` (sample rate, shape).
    """

    choice: int = 0
    modality: str = "text"
    text: str = ""
    text_offset: int = 0
    token_ids: list[int] = []
    token_offset: int = 0
    logprobs: list[TokenLogprobs] | None = None
    data: bytes | None = None
    metadata: dict[str, Any] = {}
    track: str = ""

    @property
    def is_echo(self) -> bool:
        """Whether it is of the prompt, and not of the answer."""
        return bool(self.metadata.get("echo"))


ConductorEvent: TypeAlias = (
    EpochOpened
    | RequestAdmitted
    | RequestResumed
    | RequestRejected
    | DeadlinePassed
    | NodeReady
    | WalkStop
    | OutputFence
    | RequestFinished
    | RequestFailed
    | RequestCancelled
    | WorkerLost
)
WorkerEvent: TypeAlias = (
    WorkerJoined
    | WorkerLeaving
    | WalkBegun
    | WalkProgressed
    | WalkCompleted
    | WalkFailed
    | WalkStopped
    | OutputChunk
)
EdgeEvent: TypeAlias = NodeFired | StreamSent | StreamTaken | TensorsReleased
PublicEvent: TypeAlias = RequestSubmitted | RequestCancel | RequestWatched
AnyEvent: TypeAlias = ConductorEvent | WorkerEvent | EdgeEvent | PublicEvent

_ENCODER: Final = msgspec.msgpack.Encoder()
_PACKED: Final[msgspec.msgpack.Decoder[AnyEvent]] = msgspec.msgpack.Decoder(AnyEvent)
_JSON: Final[msgspec.json.Decoder[AnyEvent]] = msgspec.json.Decoder(AnyEvent)


class _BareCancel(RequestCancel, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=False):
    """A cancel that does not say that it is one."""


_PACKED_AT: Final[dict[str, msgspec.msgpack.Decoder[PublicEvent]]] = {
    "request": msgspec.msgpack.Decoder(RequestSubmitted),
    "control": msgspec.msgpack.Decoder(_BareCancel),
}
_JSON_AT: Final[dict[str, msgspec.json.Decoder[PublicEvent]]] = {
    "request": msgspec.json.Decoder(RequestSubmitted),
    "control": msgspec.json.Decoder(_BareCancel),
}
_JSON_BEGINS: Final = (b"{", b" ", b"\n", b"\t", b"\r")
"""`{` and white space are small integers in MessagePack, so no map begins with them."""


_ANSWERS: Final = (b'{"type":"io.nats.', b'{"stream":"', b'{"error":{"code":')


class MalformedEventError(ValueError):
    """Bytes on the log that are no event of ours; says what was expected and found."""


def is_answer_of_server(data: bytes) -> bool:
    """Whether a record is no event, but what a NATS server answers.

    Who may ask a server something may have its answer sent to any subject, and so into the log, whatever it
    may publish (ADR 11). It is nobody's word, and every reader passes it over.
    """
    return data.startswith(_ANSWERS)


def encode(event: Event) -> bytes:
    """The event as MessagePack."""
    return _ENCODER.encode(event)


def decode(data: bytes, kind: str | None = None) -> AnyEvent:
    """The event behind `data`: MessagePack, or JSON when the first byte opens a JSON object.

    `kind` is the subject's (`shared.subjects.Address`): at the public ones, `request` and `control`, the
    tag may be left out: it is a request then, or a cancel. A cancel without a tag has no field that a cancel
    has not: what a server answers can be had sent to any subject, and means nothing there.

    Raises:
        MalformedEventError: it is neither, or not an event this version knows.
    """
    is_json = data.startswith(_JSON_BEGINS)
    try:
        if kind not in _PACKED_AT:
            return _JSON.decode(data) if is_json else _PACKED.decode(data)
        event = _decode_public(data, kind, is_json=is_json)
        check_public(event)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        message = f"not an event of this version: {error}"
        raise MalformedEventError(message[:MAX_MESSAGE_CHARS]) from error
    return event


def _decode_public(data: bytes, kind: str, *, is_json: bool) -> PublicEvent:
    try:
        found = _JSON_AT[kind].decode(data) if is_json else _PACKED_AT[kind].decode(data)
        return RequestCancel(**msgspec.structs.asdict(found)) if isinstance(found, _BareCancel) else found
    except msgspec.ValidationError:
        with suppress(msgspec.ValidationError):
            tagged = _JSON.decode(data) if is_json else _PACKED.decode(data)
            if kind == "control" and isinstance(tagged, RequestCancel | RequestWatched):
                return tagged
        raise


def check_public(event: PublicEvent) -> None:
    """What the types cannot say of events that anybody may write.

    Raises:
        ValueError: every reader of the log would refuse the event.
    """
    if event.writer == CONDUCTOR_WRITER:  # whose epochs are fenced: it would be void, and nobody be told
        raise ValueError(f"{CONDUCTOR_WRITER!r} is the conductor's own name - at `$.writer`")
    if isinstance(event, RequestSubmitted):
        _check_messages(event.inputs.messages or [])


def _check_messages(messages: list[dict[str, Any]]) -> None:
    try:
        _check_plain(messages, MAX_DEPTH)
    except ValueError as error:
        raise ValueError(f"{error} - at `$.inputs.messages`") from error


def _check_plain(values: list[Any], depth: int) -> None:
    """Only what JSON can say, in 64 bits, and not too deep: it is written again, and by others."""
    level = values
    for _ in range(depth):
        level = [inner for outer in level for inner in _parts(outer)]
        if not level:
            return
    raise ValueError(f"nested deeper than {depth} levels")


def _parts(value: object) -> list[Any]:
    match value:
        case dict() if all(isinstance(name, str) for name in value):
            return list(value.values())
        case list():
            return value
        case None | str() | bool():
            return []
        case int() if -(2**63) <= value < 2**64:
            return []
        case float() if math.isfinite(value):
            return []
    found = "a map with keys that are no strings" if isinstance(value, dict) else f"{value!r:.80}"
    raise ValueError(f"expected what JSON can say, in 64 bits; found {found}")


def submission_digest(event: RequestSubmitted) -> str:
    """What makes two submissions the same request: model, inputs, parameters. Hex, 32 characters."""
    # As a map: how a struct's map begins depends on how many fields its type has, and that grows.
    return digest_of((event.model, event.inputs, msgspec.to_builtins(event.params)))


def digest_of(value: object) -> str:
    """A digest of any encodable value, the same for equal values. Hex, 32 characters."""
    return hashlib.blake2b(msgspec.msgpack.encode(value, order="sorted"), digest_size=16).hexdigest()
