"""A minimal trace collector for tests: OTLP over HTTP, in its own thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status

PATIENCE_S = 30.0


Value: TypeAlias = str | int | float | bool | list[str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Noted:
    """An event of a span; `time_ns` counts from 1970."""

    name: str
    time_ns: int
    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Collected:
    """A received span; ids in hex, `parent` empty for the root span of a trace."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    is_error: bool
    duration_s: float
    attributes: dict[str, Value]
    events: tuple[Noted, ...] = ()


@dataclass
class Collector:
    """The spans exported to `endpoint` so far, and the bodies they came in."""

    endpoint: str = ""
    bodies: list[bytes] = field(default_factory=list)
    spans: list[Collected] = field(default_factory=list)
    exports: int = 0
    _news: threading.Condition = field(default_factory=threading.Condition)

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        with self._news:
            self.exports += 1
            self.bodies.append(body)
            self.spans += _spans(request)
            self._news.notify_all()

    def until(self, condition: Callable[[list[Collected]], bool]) -> list[Collected]:
        """Wait for certain spans, and return all."""
        with self._news:
            if not self._news.wait_for(lambda: condition(self.spans), timeout=PATIENCE_S):
                raise AssertionError(f"these spans alone came: {self.spans}")
            return list(self.spans)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["content-encoding"] is None  # so that `bodies` can be searched
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Collected]:
    for resource in request.resource_spans:
        told = dict(map(_value, resource.resource.attributes))
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Collected(
                    service=str(told["service.name"]),
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    is_error=span.status.code == Status.STATUS_CODE_ERROR,
                    duration_s=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                    attributes=dict(map(_value, span.attributes)),
                    events=tuple(
                        Noted(event.name, event.time_unix_nano, dict(map(_value, event.attributes)))
                        for event in span.events
                    ),
                )


def _value(pair: KeyValue) -> tuple[str, Value]:
    if pair.value.HasField("array_value"):
        return pair.key, [_scalar(value) for value in pair.value.array_value.values]
    return pair.key, _scalar(pair.value)


def _scalar(value: AnyValue) -> str | int | float | bool:
    kind = value.WhichOneof("value")
    assert kind is not None
    found: str | int | float | bool = getattr(value, kind)
    return found
