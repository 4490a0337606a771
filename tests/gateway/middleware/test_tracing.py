"""The gateway's spans: one for each admitted request, and the parent of what follows."""

from collections.abc import Iterator

import pytest

from shared.events import Failure, RequestSubmitted
from shared.telemetry import tracing
from shared.telemetry.settings import TraceSettings
from tests.collector import Collected, Collector, collecting
from tests.gateway.world import CHAT, Performance, World, deployment

pytestmark = pytest.mark.processes


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ROUTE = "/v1/chat/completions"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        tracing.set_up(TraceSettings(endpoint=collector.endpoint), "gateway")
        yield collector
        tracing.shut_down()


def exported(collector: Collector) -> list[Collected]:
    """The spans of HTTP requests; those of answers are in `tests.gateway.requests.test_generation_span`."""
    tracing.shut_down()
    return [span for span in collector.spans if "gen_ai.operation.name" not in span.attributes]


def submitted(world: World) -> RequestSubmitted:
    [event] = world.events("request")
    assert isinstance(event, RequestSubmitted)
    return event


async def test_an_answer_is_a_span_and_its_request_belongs_to_it(collector: Collector) -> None:
    async with deployment() as world:
        response = await world.client.post(
            ROUTE, json=CHAT, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}
        )
        event = submitted(world)
    [span] = exported(collector)
    [answer] = [one for one in collector.spans if one is not span]

    assert (span.service, span.name, span.trace, span.parent) == (
        "dalsegno-gateway", f"POST {ROUTE}", TRACE, PARENT,
    )  # fmt: skip
    assert answer.parent == span.id
    assert event.trace == f"00-{TRACE}-{answer.id}-01"
    assert not span.is_error
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": ROUTE,
        "http.response.status_code": 200,
        "url.path": ROUTE,
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "server.address": "127.0.0.1",
        "dalsegno.request_id": response.json()["id"],
        "dalsegno.outcome": "finished",
        "dalsegno.tokens": 4,
    }


async def test_a_client_that_does_not_want_a_trace_gets_none(collector: Collector) -> None:
    async with deployment() as world:
        await world.client.post(ROUTE, json=CHAT, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        event = submitted(world)

    assert exported(collector) == []
    assert event.trace is not None
    assert event.trace.startswith(f"00-{TRACE}-")
    assert event.trace.endswith("-00")


async def test_without_tracing_the_clients_own_goes_into_the_request() -> None:
    async with deployment() as world:
        await world.client.post(ROUTE, json=CHAT, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})

        assert submitted(world).trace == f"00-{TRACE}-{PARENT}-01"


async def test_an_answer_that_fails_in_the_middle_is_a_failed_span(collector: Collector) -> None:
    async def break_off(performance: Performance) -> None:
        performance.say("begun")
        performance.fail(Failure(code="worker_lost", message="they died"))

    async with deployment(break_off) as world:
        response = await world.client.post(ROUTE, json=CHAT | {"stream": True})
    [span] = exported(collector)

    assert response.status_code == 200
    assert span.is_error
    assert (span.attributes["dalsegno.outcome"], span.attributes["error.type"]) == ("worker_lost",) * 2


async def test_a_refusal_has_the_code_of_its_error_and_is_no_failed_span(collector: Collector) -> None:
    async with deployment() as world:
        response = await world.client.post(ROUTE, json=CHAT | {"temperature": -1})
    [span] = exported(collector)

    assert response.status_code == 400
    assert not span.is_error
    assert span.attributes["http.response.status_code"] == 400
    assert span.attributes["error.type"] == response.json()["error"]["code"] == "invalid_value"
    assert collector.spans == [span]


async def test_an_answer_that_the_server_cannot_give_is_a_failed_span(collector: Collector) -> None:
    async with deployment() as world:
        world.server.stop()
        response = await world.client.post(ROUTE, json=CHAT)
    [span] = exported(collector)

    assert response.status_code == 503
    assert span.is_error
    assert span.attributes["error.type"] == response.json()["error"]["code"] == "log_unavailable"


async def test_a_path_that_is_no_unicode_is_exported(collector: Collector) -> None:
    async with deployment() as world:
        await world.client.post("/v1/%ff%ed%a0%80" + "x" * 300, json={})
    [span] = exported(collector)

    assert str(span.attributes["url.path"]).startswith("/v1/")
    assert len(str(span.attributes["url.path"])) == 200


async def test_looking_after_the_gateway_is_not_traced(collector: Collector) -> None:
    async with deployment() as world:
        await world.client.get("/metrics")
        await world.client.get("/health")

    assert exported(collector) == []


async def test_no_word_of_a_client_is_in_a_span(collector: Collector) -> None:
    async with deployment() as world:
        await world.client.post("/generate?text=query", json={"text": "prompt"})
    [span] = exported(collector)

    told = f"{span.name} {span.attributes}"
    assert "prompt" not in told
    assert "query" not in told
