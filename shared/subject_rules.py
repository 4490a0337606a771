"""The rules by which readers accept an event on a subject: its type, and its fields. Pure.

A server restricts a writer to its subjects (`shared.log.nats.permissions`), but not the content of its
events. So readers that act on the events of other processes accept on a subject only the event types that
belong there, and only if the event's fields agree with the subject. Otherwise a worker could end a request on
the subject of its chunks, or join with another rank's number on its own subject.

Every reader that acts on an event makes this check; `read_event` decodes and checks a record. The further
rules, which depend on what the log said before (whose request, which incarnation), are in ADR 26.
"""

from typing import Final, NamedTuple

from shared.events import (
    AdapterLoaded,
    AdapterUnloaded,
    AnyEvent,
    BatchCancelled,
    BatchChecked,
    BatchClaimed,
    BatchCreated,
    BatchEnded,
    ConversationChanged,
    ConversationCreated,
    ConversationDeleted,
    DeadlinePassed,
    EpochOpened,
    LogSealed,
    MalformedEventError,
    NodeFired,
    NodeReady,
    OutputChunk,
    OutputFence,
    RequestAdmitted,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
    RequestsRefused,
    RequestSubmitted,
    RequestWatched,
    SegmentStored,
    StreamSent,
    StreamTaken,
    TensorsReleased,
    WalkBegun,
    WalkCompleted,
    WalkFailed,
    WalkProgressed,
    WalkStop,
    WalkStopped,
    WorkerJoined,
    WorkerLeaving,
    WorkerLost,
    decode,
)
from shared.ids import is_token
from shared.log.port import StoredRecord
from shared.subjects import CONDUCTOR_WRITER, Address, Subjects, worker_writer

EVENT_TYPES: Final[dict[str, tuple[type, ...]]] = {  # by kind of subject
    "request": (RequestSubmitted,),
    "control": (RequestCancel, RequestWatched),
    "walk": (
        RequestAdmitted,
        RequestRejected,
        RequestResumed,
        DeadlinePassed,
        RequestFinished,
        RequestFailed,
        RequestCancelled,
    ),
    "ready": (NodeReady, WalkStop),
    "done": (WalkBegun, WalkProgressed, WalkCompleted, WalkFailed, WalkStopped),
    "edge": (NodeFired, StreamSent, StreamTaken, TensorsReleased),
    "worker": (WorkerJoined, WorkerLeaving),
    "conductor": (EpochOpened, WorkerLost, LogSealed),
    "adapter": (AdapterLoaded, AdapterUnloaded),
    "refused": (RequestsRefused,),
    "batch": (BatchCreated, BatchClaimed, BatchChecked, SegmentStored, BatchCancelled, BatchEnded),
    "conversation": (ConversationCreated, ConversationChanged, ConversationDeleted),
    "output": (OutputChunk, OutputFence),
}


def read_event(record: StoredRecord, subjects: Subjects) -> tuple[Address, AnyEvent]:
    """Return a record's parsed subject and its event, which agrees with the subject.

    Raises:
        MalformedEventError: the record is no event, or does not belong on its subject.
    """
    address = subjects.parse(record.subject)
    if address is None:
        raise MalformedEventError(f"{record.subject[:200]} is not a subject of this deployment")
    event = decode(record.data, address.kind)
    check_event_subject(address, event)
    return address, event


def check_event_subject(address: Address, event: AnyEvent) -> None:
    """Check that an event agrees with its subject; `address` is the parsed subject.

    Raises:
        MalformedEventError: its type does not belong on the subject, or a field disagrees with it.
    """
    if not isinstance(event, EVENT_TYPES[address.kind]):
        raise MalformedEventError(f"a {type(event).__name__} does not belong on a {address.kind} subject")
    if address.rank is not None and getattr(event, "rank", address.rank) != address.rank:
        raise MalformedEventError(
            f"expected an event of rank {address.rank} on this subject, found another rank"
        )
    if event.writer and event.writer != (expected := _writer(address) or event.writer):
        raise MalformedEventError(
            f"expected an event of {expected} on this subject, found {event.writer[:80]!r}"
        )
    if isinstance(event, OutputFence) and address.writer != CONDUCTOR_WRITER:
        raise MalformedEventError(
            f"expected a fence on a subject of the {CONDUCTOR_WRITER}, found {address.writer}"
        )
    if isinstance(event, AdapterLoaded | AdapterUnloaded) and event.adapter_name != address.name:
        raise MalformedEventError(f"expected an event of the adapter {address.name}, found another one")
    request_id = address.request_id
    if request_id is None:
        return
    if address.kind == "request" and not is_token(request_id):
        raise MalformedEventError(
            f"request_id {request_id[:80]!r}: expected 1 to 64 letters, digits, '_' or '-'"
        )
    if event.request_id not in (None, request_id):
        raise MalformedEventError(
            f"expected an event of request {request_id} on this subject, found {str(event.request_id)[:80]!r}"
        )


def _writer(address: Address) -> str | None:
    """The only writer of a subject; None for those that any service may write to."""
    match address.kind:
        case "request" | "control" | "adapter" | "batch" | "conversation":
            return None
        case "output":
            return address.writer
        case "refused":
            return address.name
        case "done" | "edge" | "worker" if address.rank is not None:
            return worker_writer(address.rank)
        case _:
            return CONDUCTOR_WRITER


class Writer(NamedTuple):
    """The writer of an event, and the condition under which readers act on it.

    Attributes:
        role: the role that the server lets write on its subject.
        condition: else the event is void.
    """

    role: str
    condition: str


_CONDUCTOR: Final = Writer("conductor", "of the highest epoch opened before it")
_REPORT: Final = Writer("worker", "the rank and its incarnation have the order of this running step")
_EDGE: Final = Writer("worker", "the receiver's order names the sending rank and its incarnation")
WRITERS: Final[dict[type, Writer]] = {
    **dict.fromkeys((*EVENT_TYPES["walk"], *EVENT_TYPES["ready"], OutputFence, WorkerLost), _CONDUCTOR),
    **dict.fromkeys(EVENT_TYPES["done"], _REPORT),
    **dict.fromkeys(EVENT_TYPES["edge"], _EDGE),
    **dict.fromkeys(
        EVENT_TYPES["conductor"], Writer("conductor", "its epoch is higher than all opened before it")
    ),
    **dict.fromkeys(EVENT_TYPES["adapter"], Writer("gateway", "always; the last of a name counts")),
    WorkerLost: _CONDUCTOR,
    OutputChunk: Writer(
        "worker", "admission, resumption or fence name the rank with its incarnation, and the request is open"
    ),
    **dict.fromkeys(
        (*EVENT_TYPES["batch"], *EVENT_TYPES["conversation"]),
        Writer("gateway", "it follows the last event that its writer has read"),
    ),
    RequestSubmitted: Writer("client", "the first under its id; another one is refused"),
    RequestCancel: Writer("client", "the request is open; its id is its secret"),
    RequestsRefused: Writer("gateway", "never: people read it, by the gateway's subject"),
    RequestWatched: Writer("gateway", "delays the cancel of an answer that nobody reads, at gateways only"),
    WorkerJoined: Writer(
        "worker", "its own rank: a new incarnation, placed only if the deployment has the rank"
    ),
    WorkerLeaving: Writer("worker", "its own rank, in the present incarnation"),
}
"""The writer of each event type (ADR 26). `Cluster`, `Inbox` and `RequestOutput` enforce it."""
