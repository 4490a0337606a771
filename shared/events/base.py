"""The base class of all events, with the fields that every event has."""

from typing import Annotated

import msgspec
from msgspec import Meta

# Every struct repeats its options: mypy does not inherit `frozen`, msgspec does not inherit `kw_only`.


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of every event.

    Attributes:
        id: equal in all duplicates of one event; readers keep the first one in the log.
        writer: the process that wrote it: a gateway's name, `conductor`, `w<rank>`, or a service's name.
        number: the writer's count of its events, from 1 in each incarnation. A gap is an error.
        request_id: the request that the event belongs to; None if it belongs to none.
        epoch: the conductor's epoch, in the conductor's events and in the replies to them.
        attempt: which attempt at the request, from 1; 0 before the first one.
        incarnation: the worker's incarnation that the event is for or from.
        index: the position in its sequence: of the step in the plan run, of the chunk in the output.
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
