"""Traces: what a process did for a request, told to an OpenTelemetry collector; nothing unless configured.

A trace is a tree of spans over all processes. Its thread is the W3C `traceparent` that every event of a
request carries: a request that came over NATS without one has no spans, and a replay has none.

    gateway: the answer ─traceparent─┬─> conductor: each decision, from the record it rests on to its ack
                                     └─> worker: each order, and in it each walk

As with `logging` there is one tracer per process; a role's entry calls `set_up`. Off, a span costs a call
that does nothing, and OpenTelemetry is not imported. No text that a client wrote ever is an attribute.
"""

import asyncio
import re
from collections.abc import Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias

from shared.errors import ClientError
from shared.telemetry.settings import TraceSettings

Attributes: TypeAlias = Mapping[str, str | int | float | bool]

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
FLUSH_S: Final = 2.0
"""How long a process that ends waits for its last spans to be taken."""


class TracesError(ClientError):
    """Traces are configured and cannot be exported."""

    code = "invalid_config"


class Span:
    """A piece of work while it is done. This one records nothing: tracing is off, or nobody wants its trace.

    As a context manager it ends with its block, and fails with the exception that leaves it.

    Attributes:
        traceparent: what its children are given; None where there is nothing to belong to.
    """

    traceparent: str | None = None

    def set(self, attributes: Attributes) -> None:
        """Say more about it."""

    def name(self, name: str) -> None:
        """Call it otherwise, now that more is known."""

    def child(self, name: str) -> "Span":
        """A part of it that begins now."""
        return self

    def fail(self, code: str) -> None:
        """It did not come to what was wanted; `code` is an error's."""

    def end(self) -> None:
        """It is over. Only the first time counts."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            self.set({"dalsegno.outcome": "cancelled"})  # somebody wanted it so
        elif error is not None:
            self.fail(str(getattr(error, "code", type(error).__name__)))
        self.end()


NOTHING: Final = Span()


class Tracer(Protocol):
    """What makes spans (`shared.telemetry.otlp.OtlpTracer`)."""

    def span(
        self,
        name: str,
        traceparent: str | None,
        *,
        is_server: bool,
        since_ns: int | None,
        attributes: Attributes,
    ) -> Span: ...
    def shut_down(self, within_s: float) -> None: ...


_tracer: Tracer | None = None
_current: Final[ContextVar[Span]] = ContextVar("span", default=NOTHING)


def set_up(settings: TraceSettings, role: str) -> None:
    """Trace this process, if an endpoint is configured. `role` is its name: `gateway`, `worker-0`.

    Raises:
        TracesError: OpenTelemetry is not installed.
    """
    global _tracer
    shut_down()
    if settings.endpoint is None:
        return
    try:
        from shared.telemetry.otlp import OtlpTracer  # noqa: PLC0415 - only who traces needs the library
    except ModuleNotFoundError as error:
        raise TracesError(
            f"traces.endpoint is {settings.endpoint}, but {error.name} is not installed: "
            "pip install 'dalsegno[traces]', or leave the endpoint out"
        ) from error
    _tracer = OtlpTracer(settings, role)


def shut_down() -> None:
    """Export what is left, within `FLUSH_S`; from here on nothing is traced."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.shut_down(FLUSH_S)


def is_on() -> bool:
    """Whether this process traces."""
    return _tracer is not None


def traceparent_in(header: str | None) -> str | None:
    """A W3C `traceparent` if it is one; others are not worth an error."""
    return header if header is not None and _TRACEPARENT.fullmatch(header) else None


def serve(name: str, traceparent: str | None, attributes: Attributes) -> Span:
    """The span of a request from outside: of the client's trace, or the first of a new one."""
    if _tracer is None:
        return NOTHING
    parent = traceparent_in(traceparent)
    return _tracer.span(name, parent, is_server=True, since_ns=None, attributes=attributes)


def start(name: str, traceparent: str | None, attributes: Attributes, *, since_ns: int | None = None) -> Span:
    """A span of the trace an event belongs to; nothing when it belongs to none, or to one not sampled.

    `since_ns` is when it began (nanoseconds since 1970), if that was before now.
    """
    parent = traceparent_in(traceparent)
    if _tracer is None or parent is None or not int(parent[-2:], 16) & 1:
        return NOTHING
    return _tracer.span(name, parent, is_server=False, since_ns=since_ns, attributes=attributes)


def current() -> Span:
    """The span of the request that is served here and now."""
    return _current.get()


def make_current(span: Span) -> Token[Span]:
    """Have `current` give this span in this task, and in those it starts."""
    return _current.set(span)


def restore(token: Token[Span]) -> None:
    """Undo `make_current`."""
    _current.reset(token)
