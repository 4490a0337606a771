import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from shared.telemetry import tracing
from shared.telemetry.settings import TraceSettings
from tests.collector import Collector, collecting

pytestmark = pytest.mark.processes


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    tracing.shut_down()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        tracing.set_up(TraceSettings(endpoint=collector.endpoint), "worker-3")
        yield collector
        tracing.shut_down()


class TestOff:
    def test_without_an_endpoint_nothing_is_recorded(self) -> None:
        tracing.set_up(TraceSettings(), "gateway")

        assert not tracing.is_on()
        assert tracing.start_server_span("x", SAMPLED, {}) is tracing.INVALID_SPAN
        assert tracing.start_span("x", SAMPLED, {}) is tracing.INVALID_SPAN

    def test_what_records_nothing_takes_every_call(self) -> None:
        with tracing.ending(tracing.INVALID_SPAN) as span:
            span.set_attributes({"a": 1})
            span.update_name("other")
            tracing.fail(span, "bug")

        assert tracing.start_child(span, "part") is span
        assert tracing.traceparent_of(span) is None

    def test_no_sdk_is_imported(self) -> None:
        program = (
            "import sys; from shared.telemetry import tracing;"
            "from shared.telemetry.settings import TraceSettings;"
            "tracing.set_up(TraceSettings(), 'gateway');"
            "assert not [name for name in sys.modules"
            " if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

    def test_a_library_that_is_not_installed_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "shared.telemetry.otlp", raising=False)
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

        with pytest.raises(tracing.TracesError, match=r"opentelemetry.* is not installed: pip install"):
            tracing.set_up(TraceSettings(endpoint="http://127.0.0.1:4318"), "gateway")
        assert not tracing.is_on()


class TestSpans:
    def test_a_span_arrives_under_its_parent_with_what_was_said_of_it(self, collector: Collector) -> None:
        with (
            tracing.ending(tracing.start_span("order", SAMPLED, {"dalsegno.rank": 3})) as span,
            tracing.ending(tracing.start_child(span, "walk")) as part,
        ):
            part.set_attributes({"dalsegno.tokens": 5})
        tracing.shut_down()

        walk, order = collector.spans
        assert (order.service, order.name, order.trace, order.parent) == (
            "dalsegno-worker", "order", TRACE, PARENT,
        )  # fmt: skip
        assert tracing.traceparent_of(span) == f"00-{TRACE}-{order.id}-01"
        assert (walk.name, walk.trace, walk.parent) == ("walk", TRACE, order.id)
        assert (order.attributes, walk.attributes) == ({"dalsegno.rank": 3}, {"dalsegno.tokens": 5})

    def test_a_span_may_have_begun_before(self, collector: Collector) -> None:
        tracing.start_span("decide", SAMPLED, {}, start_ns=time.time_ns() - 3_000_000_000).end()
        tracing.shut_down()

        assert 3.0 <= collector.spans[0].duration_s < 60.0

    def test_an_error_is_its_spans_failure(self, collector: Collector) -> None:
        with pytest.raises(ZeroDivisionError), tracing.ending(tracing.start_span("order", SAMPLED, {})):
            raise ZeroDivisionError
        tracing.shut_down()

        assert collector.spans[0].is_error
        assert collector.spans[0].attributes == {"error.type": "ZeroDivisionError"}

    def test_a_cancellation_is_none(self, collector: Collector) -> None:
        with pytest.raises(asyncio.CancelledError), tracing.ending(tracing.start_span("order", SAMPLED, {})):
            raise asyncio.CancelledError
        tracing.shut_down()

        assert not collector.spans[0].is_error
        assert collector.spans[0].attributes == {"dalsegno.outcome": "cancelled"}

    def test_a_span_ends_once(self, collector: Collector) -> None:
        span = tracing.start_span("order", SAMPLED, {})
        span.end()
        span.end()
        tracing.shut_down()

        assert len(collector.spans) == 1


class TestWhatIsSampled:
    @pytest.mark.parametrize(
        "header",
        [None, "", "junk", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"{SAMPLED}\n"],
    )
    def test_a_request_without_a_trace_begins_one(self, collector: Collector, header: str | None) -> None:
        tracing.start_server_span("POST", header, {}).end()
        tracing.shut_down()

        [span] = collector.spans
        assert span.parent == ""
        assert span.trace not in (TRACE, "0" * 32)

    def test_a_client_that_samples_is_followed(self, collector: Collector) -> None:
        tracing.start_server_span("POST", SAMPLED, {}).end()
        tracing.shut_down()

        assert (collector.spans[0].trace, collector.spans[0].parent) == (TRACE, PARENT)

    def test_a_client_that_does_not_sample_is_followed_too(self, collector: Collector) -> None:
        span = tracing.start_server_span("POST", UNSAMPLED, {})
        traceparent = tracing.traceparent_of(span)
        assert traceparent is not None
        later = tracing.start_span("order", traceparent, {})
        assert later is tracing.start_child(span, "part") is tracing.INVALID_SPAN
        span.end()
        later.end()
        tracing.shut_down()

        assert traceparent.startswith(f"00-{TRACE}-")
        assert traceparent.endswith("-00")
        assert not collector.spans

    @pytest.mark.parametrize("header", [None, "junk", f"00-{'0' * 32}-{PARENT}-01"])
    def test_an_event_of_no_trace_has_no_spans(self, collector: Collector, header: str | None) -> None:
        assert tracing.start_span("order", header, {}) is tracing.INVALID_SPAN

    def test_the_ratio_counts_where_the_client_said_nothing(self) -> None:
        with collecting() as collector:
            tracing.set_up(TraceSettings(endpoint=collector.endpoint, sample_ratio=0.0), "gateway")
            tracing.start_server_span("POST", None, {}).end()
            tracing.start_server_span("POST", SAMPLED, {}).end()
            tracing.shut_down()

        assert [span.trace for span in collector.spans] == [TRACE]


class TestADeadCollector:
    def test_it_costs_neither_time_nor_more_than_one_line(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tracing, "FLUSH_S", 0.2)
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with caplog.at_level(logging.DEBUG, logger="shared"):
            tracing.set_up(TraceSettings(endpoint=endpoint), "gateway")
            begun_s = time.monotonic()
            for _ in range(10_000):  # more than may wait
                tracing.start_server_span("POST", None, {}).end()
            serving_s = time.monotonic() - begun_s
            begun_s = time.monotonic()
            tracing.shut_down()
            ending_s = time.monotonic() - begun_s

        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert endpoint in said[0]
        assert not [thread for thread in threading.enumerate() if thread.name == "last spans"]
        assert serving_s < 10.0
        assert ending_s < 5.0


class TestTheCurrentSpan:
    def test_it_is_the_tasks_own(self, collector: Collector) -> None:
        mine = tracing.start_span("order", SAMPLED, {})
        with tracing.current(mine):
            found = tracing.get_current_span()

        assert found is mine
        assert tracing.get_current_span() is tracing.INVALID_SPAN
