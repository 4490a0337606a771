"""Encoding and decoding of events: MessagePack, and JSON at the public subjects."""

from contextlib import suppress
from typing import Final, TypeAlias

import msgspec

from shared.events.adapters import AdapterLoaded, AdapterUnloaded
from shared.events.base import Event
from shared.events.batches import BatchEvent
from shared.events.conversations import ConversationEvent
from shared.events.decisions import (
    MAX_MESSAGE_CHARS,
    DeadlinePassed,
    RequestAdmitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RequestResumed,
)
from shared.events.edges import NodeFired, StreamSent, StreamTaken, TensorsReleased
from shared.events.membership import EpochOpened, WorkerJoined, WorkerLeaving, WorkerLost
from shared.events.orders import NodeReady, WalkStop
from shared.events.outputs import OutputChunk, OutputFence
from shared.events.refusals import RequestsRefused
from shared.events.requests import PublicEvent, RequestCancel, RequestSubmitted, RequestWatched, check_public
from shared.events.results import WalkBegun, WalkCompleted, WalkFailed, WalkProgressed, WalkStopped
from shared.events.seals import LogSealed

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
    | LogSealed
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
GatewayEvent: TypeAlias = AdapterLoaded | AdapterUnloaded | RequestsRefused | BatchEvent | ConversationEvent
AnyEvent: TypeAlias = ConductorEvent | WorkerEvent | EdgeEvent | PublicEvent | GatewayEvent


class _UntaggedCancel(RequestCancel, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=False):
    """A cancel without its type tag."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_PACKED: Final[msgspec.msgpack.Decoder[AnyEvent]] = msgspec.msgpack.Decoder(AnyEvent)
_JSON: Final[msgspec.json.Decoder[AnyEvent]] = msgspec.json.Decoder(AnyEvent)
_PACKED_BY_KIND: Final[dict[str, msgspec.msgpack.Decoder[PublicEvent]]] = {
    "request": msgspec.msgpack.Decoder(RequestSubmitted),
    "control": msgspec.msgpack.Decoder(_UntaggedCancel),
}
_JSON_BY_KIND: Final[dict[str, msgspec.json.Decoder[PublicEvent]]] = {
    "request": msgspec.json.Decoder(RequestSubmitted),
    "control": msgspec.json.Decoder(_UntaggedCancel),
}
_JSON_STARTS: Final = (b"{", b" ", b"\n", b"\t", b"\r")
"""First bytes of JSON. In MessagePack `{` and white space are small integers, so no map starts with them."""
_SERVER_REPLIES: Final = (b'{"type":"io.nats.', b'{"stream":"', b'{"error":{"code":')


class MalformedEventError(ValueError):
    """A record of the log that is not an event. The message says what was expected and found."""


def is_answer_of_server(data: bytes) -> bool:
    """Return whether a record is a NATS server's API reply and not an event.

    A client that may use the server's API can direct a reply to any subject, and so into the log, regardless
    of its publish permissions (ADR 11). Such a record has no author; every reader skips it.
    """
    return data.startswith(_SERVER_REPLIES)


def encode(event: Event) -> bytes:
    """Return the event as MessagePack."""
    return _ENCODER.encode(event)


def decode(data: bytes, kind: str | None = None) -> AnyEvent:
    """Return the event in `data`: JSON if the first byte opens a JSON object, else MessagePack.

    Args:
        data: the record's bytes.
        kind: the kind of the record's subject (`shared.subjects.Address`). At the public subjects, `request`
            and `control`, the type tag may be missing: the event is then a request or a cancel. A cancel
            without a tag must have no unknown field, so that no server reply passes as one.

    Raises:
        MalformedEventError: the data is neither format, or is not an event that this version knows.
    """
    is_json = data.startswith(_JSON_STARTS)
    try:
        if kind not in _PACKED_BY_KIND:
            return _JSON.decode(data) if is_json else _PACKED.decode(data)
        event = _decode_public(data, kind, is_json=is_json)
        check_public(event)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        message = f"not an event of this version: {error}"
        raise MalformedEventError(message[:MAX_MESSAGE_CHARS]) from error
    return event


def _decode_public(data: bytes, kind: str, *, is_json: bool) -> PublicEvent:
    try:
        event = _JSON_BY_KIND[kind].decode(data) if is_json else _PACKED_BY_KIND[kind].decode(data)
        return RequestCancel(**msgspec.structs.asdict(event)) if isinstance(event, _UntaggedCancel) else event
    except msgspec.ValidationError:
        with suppress(msgspec.ValidationError):
            tagged = _JSON.decode(data) if is_json else _PACKED.decode(data)
            if kind == "control" and isinstance(tagged, RequestCancel | RequestWatched):
                return tagged
        raise
