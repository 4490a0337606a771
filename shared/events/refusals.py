"""The event about requests that a gateway refused before anything of them was on the log."""

import msgspec

from shared.events.base import Event


class RefusalCount(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The number of requests that were refused in the same way.

    Attributes:
        code: of the error.
        status: of the HTTP response.
        tenant: the name of the API key; None if the request had no valid one.
    """

    code: str
    status: int
    tenant: str | None = None
    count: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One refused request, as a sample. It has no key, no header and no body.

    Attributes:
        time_ns: when it was refused, in nanoseconds since 1970 by the gateway's clock.
        code: of the error.
        status: of the HTTP response.
        tenant: the name of the API key; None if the request had no valid one.
        route: the method and the path's template; empty for a request that could not be read.
        message: of the error, cut. It may quote the request.
        param: the name of the wrong field, if known, cut.
        request_id: the id that the client chose, or that the request got here; None if it had none yet.
        correlation: the client's, or the gateway's, name for the request: HTTP's `X-Request-ID`.
    """

    time_ns: int
    code: str
    status: int
    tenant: str | None = None
    route: str = ""
    message: str = ""
    param: str | None = None
    request_id: str | None = None
    correlation: str | None = None


class RequestsRefused(
    Event, frozen=True, kw_only=True, omit_defaults=True, tag="requests.refused.v1", tag_field="type"
):
    """A gateway refused requests that it did not publish. No decision depends on it.

    The counts are of this event alone, and exact; the samples are some of the counted requests.

    Attributes:
        since_ns: when the first of them was refused, in nanoseconds since 1970 by the gateway's clock.
    """

    since_ns: int
    counts: list[RefusalCount]
    samples: list[Refusal] = []
