"""The conductor's decisions about a whole request: admission, resumption, deadlines, and its end."""

from typing import Final

import msgspec

from shared.adapters import Adapter
from shared.events.base import Event
from shared.events.outputs import OutputTotals

MAX_MESSAGE_CHARS: Final = 2000
"""The maximum length of an error message."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error in the log: `code` for programs, `message` for people, `status` for HTTP.

    Attributes:
        retry_after_s: the time after which a retry may succeed, in seconds; 0 if unknown.
        param: the name of the wrong parameter of the request, if known.
    """

    code: str
    message: str
    status: int = 500
    retry_after_s: int = 0
    param: str | None = None

    def __post_init__(self) -> None:
        # Messages quote clients' texts; a long quotation must not exceed the log's event size.
        if len(self.message) > MAX_MESSAGE_CHARS:
            msgspec.structs.force_setattr(self, "message", f"{self.message[: MAX_MESSAGE_CHARS - 1]}…")


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a request, fixed at admission.

    Attributes:
        max_seq_len: tokens, prompt included.
        kv_tokens: tokens in the KV cache, prompt included.
        default_max_tokens: new tokens, without the prompt.
        max_attempts: the maximum number of consecutive attempts without progress over the previous one.
        max_event_bytes: the log's size limit for one event; 0 if it was not recorded.
        walk_timeouts_s: time limits by walk. A step may take the sum of its walks' limits, if each has one.
        max_tokens_share: the share of the requested new tokens that is granted; below 1 under load.
        absent_nodes: the optional nodes of the model that are placed nowhere.
        concurrent: the number of requests of the model that run, this one included; 0 if it was not recorded.
        max_concurrent: the most that may run; 0 if it was not recorded.
    """

    max_seq_len: int
    kv_tokens: int
    default_max_tokens: int
    max_attempts: int = 2
    max_event_bytes: int = 0
    walk_timeouts_s: dict[str, float] = {}
    max_tokens_share: float = 1.0
    absent_nodes: tuple[str, ...] = ()
    concurrent: int = 0
    max_concurrent: int = 0


class Pins(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Digests of everything except the facts that a decision depends on (hex, blake2b)."""

    graph: str
    plan: str
    config: str
    core: str
    submission: str


FORWARDS: Final = "forwards"
"""In `Usage.counts`, the forward passes of a diffusion language model."""
PARALLEL_TOKENS: Final = "parallel_tokens"
"""In `Usage.counts`, the tokens that were decoded beyond one for each forward pass."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of a request; each token counts once.

    Attributes:
        cached_tokens: the tokens of the prompt whose keys and values were cached before. For a prompt
            computed in advance (`Params.warm`), the number of its leading tokens that are cached now.
        reasoning_tokens: the tokens among those of the answer that are reasoning, with its marks.
        counts: further counts of the model family, such as the forward passes of a diffusion language model.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    counts: dict[str, int] = {}
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class RequestAdmitted(
    Event,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="request.admitted.v1",
    tag_field="type",
):
    """`schedule` admitted a request. Every replay takes the event as recorded: it depends on the world.

    Attributes:
        family: the graph and the plan that the request follows (`models.registry`).
        placement: the rank of each node.
        walk_placement: by walk and node, the rank of a node that runs elsewhere in that walk.
        lives: by writer (`w<rank>`), the incarnation of each rank of the placement: only these may write its
            output (`shared.request_output`). Empty in logs that are older than the field. The keys are
            strings because other MessagePack libraries refuse integers as keys.
        weights: by node, the digest of what its rank has loaded (`worker.joined.node_weights`); by
            `<walk>/<node>` for a node that runs elsewhere in that walk. Empty in older logs.
        revisions: the checkpoints of these ranks on a hub, `org/name@commit`, each once
            (`worker.joined.revision`). Empty for folders, and in older logs.
        adapter: the LoRA adapter that the request is computed with, to its end; None is the plain model.
    """

    family: str
    seed: int
    placement: dict[str, int]
    walk_placement: dict[str, dict[str, int]] = {}
    lives: dict[str, int] = {}
    weights: dict[str, str] = {}
    revisions: list[str] = []
    adapter: Adapter | None = None
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
    """`schedule` placed a held request again (ADR 9). Every replay takes the event as recorded.

    Attributes:
        index: the number of earlier resumptions.
        placement: the rank of each node from now on.
        walk_placement: by walk and node, the rank of a node that runs elsewhere in that walk.
        lives, weights, revisions: as in `RequestAdmitted`, from now on.
        on_probation: the request is quarantined: it may have killed a worker.
        closed: ranks that start no other work during the quarantine. Requests under the same suspicion that
            have made progress may run there concurrently. Empty if the request runs together with others.
        alone_on: those of them on which nothing else runs at all: a worker that dies there died of this
            request.
    """

    placement: dict[str, int]
    walk_placement: dict[str, dict[str, int]] = {}
    lives: dict[str, int] = {}
    weights: dict[str, str] = {}
    revisions: list[str] = []
    on_probation: bool = False
    closed: list[int] = []
    alone_on: list[int] = []
    reason: str


class DeadlinePassed(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="deadline.passed.v1", tag_field="type"
):
    """By the conductor's clock, a time limit has expired. The log's clock decides.

    The event takes effect if it is stored after `deadline_ns`, and is void if it is stored before.

    Attributes:
        deadline_ns: the log's time, in nanoseconds since 1970.
        step: the step of this `attempt` whose limit it is; None means the request's own limit.
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

    Attributes:
        submission_seq: the submission's position in the log, as in its publisher's ack. The rejection does
            not affect an earlier request with the same id.
    """

    failure: Failure
    submission_seq: int
    history: bytes = b""


class RequestFinished(
    Event,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag="request.finished.v1",
    tag_field="type",
):
    """The plan returned. This log position closes the output.

    Attributes:
        stop_reasons: of each choice, the stop string, or the id of the token, that ended it; None for
            neither. Empty where no choice was ended so, and in logs that are older than the field.
    """

    usage: Usage
    finish_reasons: list[str]
    stop_reasons: list[str | int | None] = []
    output: OutputTotals
    history: bytes


class RequestFailed(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="request.failed.v1", tag_field="type"
):
    """The request failed. This log position closes the output."""

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
    """The request was cancelled. This log position closes the output."""

    reason: str
    history: bytes
