"""Spans of a request's trace, made through the OpenTelemetry API; exported only if an endpoint is configured.

A trace is a tree of spans over all processes. Each event of a request carries the W3C `traceparent` that
links them. A request that came over NATS without one has no spans, and neither has a replay.

    gateway: the HTTP request, and in it the answer
                                 └─traceparent─┬─> conductor: each decision, from its cause to its ack
                                               └─> worker: each order, and in it each walk

Each process has one tracer, which its entry point sets up (`set_up`). Without one every function returns
`INVALID_SPAN`, which ignores all calls, and no SDK is imported. Of a client's text, an attribute contains the
path of the request and the texts that end an answer; prompts and answers only if the operator configures it
(`traces.contents`).
"""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import (
    INVALID_SPAN,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)

from shared.errors import ClientError
from shared.telemetry.settings import TraceSettings

if TYPE_CHECKING:
    from shared.telemetry.otlp import OtlpExport

__all__ = ["INVALID_SPAN", "Span", "get_current_span"]  # re-exported; the rest is public by name

Attributes: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str]]

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
FLUSH_S: Final = 2.0
"""The time limit for the export of the last spans when the process ends."""

_export: "OtlpExport | None" = None
_content_bytes = 0


class TracesError(ClientError):
    """Traces are configured but cannot be exported."""

    code = "invalid_config"


def set_up(settings: TraceSettings, role: str) -> None:
    """Trace this process if an endpoint is configured. `role` is the process's name: `gateway`, `worker-0`.

    Raises:
        TracesError: the OpenTelemetry SDK or its exporter is not installed.
    """
    global _export, _content_bytes
    shut_down()
    if settings.endpoint is None:
        return
    try:
        from shared.telemetry.otlp import OtlpExport  # noqa: PLC0415 - needs the extra `traces`
    except ModuleNotFoundError as error:
        raise TracesError(
            f"traces.endpoint is {settings.endpoint}, but {error.name} is not installed: "
            "pip install 'dalsegno[traces]', or remove the endpoint"
        ) from error
    _export = OtlpExport(settings, role)
    _content_bytes = settings.max_content_bytes if settings.contents else 0


def shut_down() -> None:
    """Export the remaining spans, within `FLUSH_S`, and stop tracing."""
    global _export, _content_bytes
    export, _export, _content_bytes = _export, None, 0
    if export is not None:
        export.shut_down(FLUSH_S)


def is_on() -> bool:
    """Return whether this process traces."""
    return _export is not None


def content_bytes() -> int:
    """Return the maximum size of recorded prompts and answers; 0 if they are not recorded."""
    return _content_bytes


def valid_traceparent(header: str | None) -> str | None:
    """Return `header` if it is a W3C `traceparent`, else None."""
    return header if header is not None and _TRACEPARENT.fullmatch(header) else None


def traceparent_of(span: Span) -> str | None:
    """Return the `traceparent` for children of `span`; None for `INVALID_SPAN`."""
    context = span.get_span_context()
    if not context.is_valid:
        return None
    trace_id, span_id = format_trace_id(context.trace_id), format_span_id(context.span_id)
    return f"00-{trace_id}-{span_id}-{context.trace_flags:02x}"


def start_server_span(name: str, traceparent: str | None, attributes: Attributes) -> Span:
    """Start the span of an HTTP request: part of the client's trace, or else the root of a new one."""
    if _export is None:
        return INVALID_SPAN
    parent = _context(valid_traceparent(traceparent))
    return _export.tracer.start_span(name, parent, SpanKind.SERVER, attributes=attributes)


def start_span(
    name: str, traceparent: str | None, attributes: Attributes, *, start_ns: int | None = None
) -> Span:
    """Start a span in the trace of an event. An event without a trace, or of an unsampled one, has no spans.

    `start_ns` is the span's start in nanoseconds since 1970, if it is earlier than now.
    """
    parent = valid_traceparent(traceparent)
    if _export is None or parent is None or not int(parent[-2:], 16) & 1:
        return INVALID_SPAN
    return _export.tracer.start_span(name, _context(parent), attributes=attributes, start_time=start_ns)


def start_child(parent: Span, name: str, attributes: Attributes | None = None) -> Span:
    """Start a span within `parent`; `INVALID_SPAN` if that is not recorded."""
    if _export is None or not parent.is_recording():
        return INVALID_SPAN
    return _export.tracer.start_span(name, set_span_in_context(parent, Context()), attributes=attributes)


def exportable(text: str, max_chars: int) -> str:
    """Return the beginning of `text`, in Unicode: OTLP could not encode half of a surrogate pair."""
    return text[:max_chars].encode("utf-8", "replace").decode()


@contextmanager
def ending(span: Span) -> Iterator[Span]:
    """End the span with the block, as failed if an exception leaves the block.

    OpenTelemetry's own context manager would also record the exception's message, which may quote a client.
    """
    try:
        yield span
    except asyncio.CancelledError:
        span.set_attribute("dalsegno.outcome", "cancelled")  # cancellation is not a failure
        raise
    except BaseException as error:
        fail(span, str(getattr(error, "code", type(error).__name__)))
        raise
    finally:
        if span.is_recording():
            span.end()


@contextmanager
def current(span: Span) -> Iterator[None]:
    """Make `get_current_span` return this span, in this task and in the tasks that it starts."""
    token = attach(set_span_in_context(span))
    try:
        yield
    finally:
        detach(token)


def fail(span: Span, code: str) -> None:
    """Mark the span as failed; `code` is an error's code."""
    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, code))


def _context(traceparent: str | None) -> Context:
    """Return a context with only the parent span, independent of the task's own context."""
    if traceparent is None:
        return Context()
    _, trace, span, flags = traceparent.split("-")
    parent = SpanContext(
        int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())
