"""All events of the log, with their values, their encoding and their digests.

The wire format is MessagePack: one map per event, with a versioned tag in `type`. The public subjects
(`request`, `control`) accept JSON as well; the first byte tells the two formats apart. Names of facts are in
the past tense; the process that observed a fact writes it. Only the conductor writes decisions.

An incompatible change adds a `.v2` event and leaves the `.v1` event as it is, because every later version
replays recorded histories. Unknown fields are ignored, except in `Inputs` and `Params`, which clients write
by hand: there a misspelt name is an error.

This package knows no transport and no clock. The log assigns an event's time and position.
"""

from shared.events.adapters import (
    AdapterLoaded,
    AdapterUnloaded,
)
from shared.events.base import (
    Event,
)
from shared.events.batches import (
    BatchCancelled,
    BatchChecked,
    BatchClaimed,
    BatchCreated,
    BatchEnded,
    BatchEvent,
    BatchProblem,
    SegmentStored,
)
from shared.events.codec import (
    AnyEvent,
    ConductorEvent,
    EdgeEvent,
    MalformedEventError,
    WorkerEvent,
    decode,
    encode,
    is_answer_of_server,
)
from shared.events.conversations import (
    ConversationChanged,
    ConversationCreated,
    ConversationDeleted,
    ConversationEvent,
)
from shared.events.decisions import (
    FORWARDS,
    MAX_MESSAGE_CHARS,
    PARALLEL_TOKENS,
    DeadlinePassed,
    Failure,
    Limits,
    Pins,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    Usage,
)
from shared.events.digests import (
    digest_of,
    submission_digest,
)
from shared.events.edges import (
    NodeFired,
    SequenceHandover,
    StreamSent,
    StreamTaken,
    TensorsReleased,
)
from shared.events.inputs import (
    MAX_TEXTS,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    PROMPTS,
    Effort,
    Function,
    FunctionName,
    Inputs,
    Media,
    NamedTool,
    Tool,
)
from shared.events.membership import (
    EpochOpened,
    ProcessEnd,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
)
from shared.events.orders import (
    NodeReady,
    WalkCall,
    WalkStop,
)
from shared.events.outputs import (
    LikelyToken,
    OutputChunk,
    OutputFence,
    OutputTotals,
    TokenLogprobs,
)
from shared.events.params import (
    MAX_CHOICES,
    MAX_GUIDE_BYTES,
    MAX_LOGPROBS,
    Guide,
    GuideReasoning,
    Params,
)
from shared.events.refusals import (
    Refusal,
    RefusalCount,
    RequestsRefused,
)
from shared.events.requests import (
    ForkedFrom,
    Priority,
    PublicEvent,
    RequestCancel,
    RequestSubmitted,
    RequestWatched,
    check_public,
)
from shared.events.results import (
    MAX_NAMED,
    NodeWork,
    Preemption,
    StreamTotals,
    WalkBegun,
    WalkCompleted,
    WalkFailed,
    WalkProgressed,
    WalkResult,
    WalkStopped,
)
from shared.events.seals import (
    LogSealed,
)

__all__ = [
    "FORWARDS",
    "MAX_CHOICES",
    "MAX_GUIDE_BYTES",
    "MAX_LOGPROBS",
    "MAX_MESSAGE_CHARS",
    "MAX_NAMED",
    "MAX_TEXTS",
    "MAX_TOOLS",
    "MAX_TOOLS_BYTES",
    "PARALLEL_TOKENS",
    "PROMPTS",
    "AdapterLoaded",
    "AdapterUnloaded",
    "AnyEvent",
    "BatchCancelled",
    "BatchChecked",
    "BatchClaimed",
    "BatchCreated",
    "BatchEnded",
    "BatchEvent",
    "BatchProblem",
    "ConductorEvent",
    "ConversationChanged",
    "ConversationCreated",
    "ConversationDeleted",
    "ConversationEvent",
    "DeadlinePassed",
    "EdgeEvent",
    "Effort",
    "EpochOpened",
    "Event",
    "Failure",
    "ForkedFrom",
    "Function",
    "FunctionName",
    "Guide",
    "GuideReasoning",
    "Inputs",
    "LikelyToken",
    "Limits",
    "LogSealed",
    "MalformedEventError",
    "Media",
    "NamedTool",
    "NodeFired",
    "NodeReady",
    "NodeWork",
    "OutputChunk",
    "OutputFence",
    "OutputTotals",
    "Params",
    "Pins",
    "Preemption",
    "Priority",
    "ProcessEnd",
    "PublicEvent",
    "Refusal",
    "RefusalCount",
    "RequestAdmitted",
    "RequestCancel",
    "RequestCancelled",
    "RequestFailed",
    "RequestFinished",
    "RequestRejected",
    "RequestResumed",
    "RequestSubmitted",
    "RequestWatched",
    "RequestsRefused",
    "SegmentStored",
    "SequenceHandover",
    "StreamSent",
    "StreamTaken",
    "StreamTotals",
    "TensorsReleased",
    "TokenLogprobs",
    "Tool",
    "Usage",
    "WalkBegun",
    "WalkCall",
    "WalkCompleted",
    "WalkFailed",
    "WalkProgressed",
    "WalkResult",
    "WalkStop",
    "WalkStopped",
    "WorkerEvent",
    "WorkerJoined",
    "WorkerLeaving",
    "WorkerLost",
    "check_public",
    "decode",
    "digest_of",
    "encode",
    "is_answer_of_server",
    "submission_digest",
]  # fmt: skip
