"""Events that clients may publish: a request, its cancellation, and a gateway's readers."""

from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from shared.events.base import Event
from shared.events.inputs import Inputs
from shared.events.json_values import check_json_values
from shared.events.params import Params
from shared.ids import ID_PATTERN
from shared.subjects import CONDUCTOR_WRITER, DEFAULT_ORIGIN

MAX_DEPTH: Final = 32
"""The maximum nesting depth of chat messages."""
Priority = Annotated[int, Meta(ge=-100, le=100)]


class ForkedFrom(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request that this request is a variant of.

    Attributes:
        seq: the log position up to which both requests are equal.
        changes: the values that differ.
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
    """A request. Its output appears under `<prefix>.output.<origin>.<request_id>.*`.

    Attributes:
        parent: the request that this one is a part of: one of several choices, or one prompt of a list. The
            first part has the parent's own id.
        correlation: the submitter's, or a proxy's, name for the request: HTTP's `X-Request-ID`.
        parts: the number of parts of the parent.
        part: the index of this part, from 0. A replay can so tell that a part is missing.
        timeout_s: the time limit from storage in the log, by the log's clock. A request that exceeds it fails
            (`deadline.passed`). None is no limit.
        forked_from: the request, and its log position, that this request is a variant of.
        priority: requests of a higher priority are served first; among equals, those of the tenant that has
            the fewest.
        created_s: when the client sent the request, in seconds since 1970. Every answer repeats it.
        is_first: the log ensured that no event was stored under the request's id before this one. If the id
            is known nevertheless, the log has deleted the earlier request.
        api_fields: what the API that the request came by needs to show it again, such as its metadata. The
            answer does not depend on it.
    """

    model: Annotated[str, Meta(max_length=256)]
    inputs: Inputs
    params: Params = Params()
    origin: Annotated[str, Meta(pattern=ID_PATTERN)] = DEFAULT_ORIGIN
    parent: Annotated[str, Meta(pattern=ID_PATTERN)] | None = None
    correlation: Annotated[str, Meta(max_length=128)] | None = None
    parts: Annotated[int, Meta(ge=1)] = 1
    part: Annotated[int, Meta(ge=0)] = 0
    timeout_s: Annotated[float, Meta(gt=0, le=604_800)] | None = None
    forked_from: "ForkedFrom | None" = None
    priority: Priority = 0
    tenant: Annotated[str, Meta(max_length=64)] | None = None
    created_s: int | None = None
    is_first: bool = False
    api_fields: dict[str, Any] = {}


class RequestCancel(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="request.cancel.v1", tag_field="type"
):
    """A client's cancellation of a request. The log's order decides whether it was in time.

    Attributes:
        deletes: gateways give out the request's output no more, also if it has ended before. Records of the
            log are never removed one by one: the output leaves the log with its age.
    """

    reason: Annotated[str, Meta(max_length=1024)] = "cancelled"
    deletes: bool = False


class RequestWatched(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="request.watched.v1", tag_field="type"
):
    """The gateway `writer` has clients that read a request's answer, or no longer has any.

    A gateway cancels a request when its last client disconnects, unless another gateway reports readers. A
    gateway at which the request was resumed publishes this event; then the request's own gateway does too, if
    it still has clients. No other request has such events. No decision depends on them.

    Attributes:
        is_over: the gateway has no clients left for the request.
    """

    is_over: bool = False


PublicEvent: TypeAlias = RequestSubmitted | RequestCancel | RequestWatched


def check_public(event: PublicEvent) -> None:
    """Check what the types cannot express about an event that any client may write.

    Raises:
        ValueError: every reader of the log would refuse the event.
    """
    # The epoch fence applies to the conductor's events, so readers would drop the event without an error.
    if event.writer == CONDUCTOR_WRITER:
        raise ValueError(f"{CONDUCTOR_WRITER!r} is reserved for the conductor - at `$.writer`")
    if isinstance(event, RequestSubmitted):
        _check_messages(event.inputs.messages or [])


def _check_messages(messages: list[dict[str, Any]]) -> None:
    try:
        check_json_values(messages, MAX_DEPTH)
    except ValueError as error:
        raise ValueError(f"{error} - at `$.inputs.messages`") from error
