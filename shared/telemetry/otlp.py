"""Spans by OpenTelemetry, exported over OTLP/HTTP. Imported by `tracing`, and only when configured.

Exporting is a thread's business, with a bounded queue: a collector that is slow or dead costs spans, and
never an answer. It is said once, whatever the library has to say of it.
"""

import logging
from threading import Thread
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan

from shared.telemetry.settings import TraceSettings
from shared.telemetry.tracing import NOTHING, Attributes, Span

_LOGGER: Final = logging.getLogger(__name__)
_LIBRARY: Final = logging.getLogger("opentelemetry")
PATH: Final = "/v1/traces"
EXPORT_EVERY_S: Final = 1.0
EXPORT_TIMEOUT_S: Final = 5.0
_GIVE_UP_S: Final = 1.0
MAX_WAITING: Final = 8192
"""Spans that wait to be exported; of more the oldest are lost."""


class OtlpTracer:
    """One process's spans, on their way to one collector."""

    def __init__(self, settings: TraceSettings, role: str) -> None:
        assert settings.endpoint is not None
        endpoint = settings.endpoint.rstrip("/")
        url = endpoint if endpoint.endswith(PATH) else f"{endpoint}{PATH}"
        kind, _, number = role.partition("-")
        resource = {"service.namespace": "dalsegno", "service.name": f"dalsegno-{kind}"}
        self._voice = _Voice(url)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
            resource=Resource.create(resource | ({"dalsegno.rank": int(number)} if number else {})),
            shutdown_on_exit=False,
        )
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=MAX_WAITING,
                schedule_delay_millis=1000 * EXPORT_EVERY_S,
            )
        )
        self._tracer = self._provider.get_tracer("dalsegno")

    def span(
        self,
        name: str,
        traceparent: str | None,
        *,
        is_server: bool,
        since_ns: int | None,
        attributes: Attributes,
    ) -> Span:
        span = self._tracer.start_span(
            name,
            context=_context(traceparent),
            kind=SpanKind.SERVER if is_server else SpanKind.INTERNAL,
            start_time=since_ns,
            attributes=attributes,
        )
        return _Recorded(self, span)

    def shut_down(self, within_s: float) -> None:
        # In a thread: a dead collector would hold its own `shutdown` up for as long as an export may take.
        last = Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(within_s)
        if last.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # what waits to try again gives up
            last.join(_GIVE_UP_S)
        self._voice.close()


class _Recorded(Span):
    """A span that is, or may be, exported."""

    def __init__(self, tracer: OtlpTracer, span: OtelSpan) -> None:
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        self._tracer = tracer
        self._span = span
        self._has_ended = False

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def name(self, name: str) -> None:
        self._span.update_name(name)

    def child(self, name: str) -> Span:
        if not self._span.is_recording():
            return NOTHING
        return self._tracer.span(name, self.traceparent, is_server=False, since_ns=None, attributes={})

    def fail(self, code: str) -> None:
        self._span.set_attribute("error.type", code)
        self._span.set_status(Status(StatusCode.ERROR, code))

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._span.end()


class _Voice(logging.Handler):
    """What the library has to say, which is a line per failed export: the first is passed on."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._said = False
        _LIBRARY.addHandler(self)
        _LIBRARY.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING or self._said:
            return
        self._said = True
        _LOGGER.warning(
            "traces do not all reach %s (said once; serving goes on without): %s",
            self._url,
            record.getMessage(),
        )

    def close(self) -> None:
        _LIBRARY.removeHandler(self)
        _LIBRARY.propagate = True
        super().close()


def _context(traceparent: str | None) -> Context:
    """What a span begins in: its parent, or nothing at all, whatever the task's own context holds."""
    if traceparent is None:
        return Context()
    _, trace, span, flags = traceparent.split("-")
    parent = SpanContext(
        int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())
