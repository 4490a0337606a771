"""Which events belong on which subjects. Pure.

A server holds a writer to its subjects (`shared.log.nats.permissions`), not to what it says there. So every
reader
takes from a subject only the kinds of events that belong there, and only where they agree with it: else a
worker could end a request on the subject of its chunks, or join as another rank on its own.
"""

from typing import Final

from shared.events import (
    AnyEvent,
    DeadlinePassed,
    EpochOpened,
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
    RequestSubmitted,
    RequestWatched,
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
)
from shared.ids import is_token
from shared.subjects import CONDUCTOR_WRITER, Address

_KINDS: Final[dict[str, tuple[type, ...]]] = {
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
    "conductor": (EpochOpened, WorkerLost),
    "output": (OutputChunk, OutputFence),
}


def check_address(address: Address, event: AnyEvent) -> None:
    """Hold what an event says against the subject it is on.

    Raises:
        MalformedEventError: they do not agree.
    """
    if not isinstance(event, _KINDS[address.kind]):
        raise MalformedEventError(f"a {type(event).__name__} does not belong on a {address.kind} subject")
    if address.rank is not None and getattr(event, "rank", address.rank) != address.rank:
        raise MalformedEventError(f"the subject is of rank {address.rank}, the event of another")
    if isinstance(event, OutputFence) and address.writer != CONDUCTOR_WRITER:
        raise MalformedEventError(f"a fence is the {CONDUCTOR_WRITER}'s; the subject is of {address.writer}")
    request_id = address.request_id
    if request_id is None:
        return
    if address.kind == "request" and not is_token(request_id):
        raise MalformedEventError(
            f"request_id {request_id[:80]!r}: expected 1 to 64 letters, digits, '_' or '-'"
        )
    if event.request_id not in (None, request_id):
        raise MalformedEventError(
            f"the subject is of request {request_id}, the event of {str(event.request_id)[:80]!r}"
        )
