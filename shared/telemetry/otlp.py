"""Export of spans over OTLP/HTTP with the OpenTelemetry SDK. `tracing` imports it only if it is configured.

A thread exports from a bounded queue: a slow or dead collector loses spans but never delays an answer. A
failure of the export is logged once.
"""

import logging
from threading import Thread
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Tracer

from shared.telemetry.settings import TraceSettings

_LOGGER: Final = logging.getLogger(__name__)
_LIBRARY: Final = logging.getLogger("opentelemetry")
PATH: Final = "/v1/traces"
EXPORT_EVERY_S: Final = 1.0
EXPORT_TIMEOUT_S: Final = 5.0
_EXPORTER_STOP_S: Final = 1.0
MAX_WAITING: Final = 8192
"""The maximum number of spans that wait for export; beyond it the oldest are dropped."""


class OtlpExport:
    """The export of one process's spans to one collector.

    Attributes:
        tracer: makes the spans.
    """

    def __init__(self, settings: TraceSettings, role: str) -> None:
        assert settings.endpoint is not None
        endpoint = settings.endpoint.rstrip("/")
        url = endpoint if endpoint.endswith(PATH) else f"{endpoint}{PATH}"
        kind, _, number = role.partition("-")
        resource = {"service.namespace": "dalsegno", "service.name": f"dalsegno-{kind}"}
        self._warnings = _FirstWarning(url)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
            resource=Resource.create(resource | ({"dalsegno.rank": int(number)} if number else {})),
            shutdown_on_exit=False,
        )
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter, max_queue_size=MAX_WAITING, schedule_delay_millis=1000 * EXPORT_EVERY_S
            )
        )
        self.tracer: Tracer = self._provider.get_tracer("dalsegno")

    def shut_down(self, within_s: float) -> None:
        """Export the remaining spans, for at most about `within_s`."""
        # In a thread: with a dead collector the provider's `shutdown` blocks for a whole export timeout.
        flush = Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        flush.start()
        flush.join(within_s)
        if flush.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # ends the wait for a retry
            flush.join(_EXPORTER_STOP_S)
        self._warnings.close()


class _FirstWarning(logging.Handler):
    """Passes on the library's first warning; the library logs one per failed export."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._has_warned = False
        _LIBRARY.addHandler(self)
        _LIBRARY.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING or self._has_warned:
            return
        self._has_warned = True
        _LOGGER.warning(
            "some traces do not reach %s (logged once; requests are served without traces): %s",
            self._url,
            record.getMessage(),
        )

    def close(self) -> None:
        _LIBRARY.removeHandler(self)
        _LIBRARY.propagate = True
        super().close()
