"""The span of an answer by OpenTelemetry's conventions, as a collector receives it."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import opentelemetry.semconv._incubating.attributes.gen_ai_attributes as conventions
import pytest

from gateway.anthropic.routes import MESSAGES
from gateway.generate.routes import WARM
from gateway.meters.gen_ai import OPERATIONS, operation_of
from gateway.ollama import routes as ollama
from gateway.openai.routes import CHAT as CHAT_PATH
from gateway.openai.routes import COMPLETIONS
from gateway.speech.routes import SPEECH
from gateway.texts.embeddings import EMBEDDINGS
from gateway.texts.rerank import RERANK
from gateway.texts.score import SCORES
from shared.events import Failure, OutputFence, RequestResumed, RequestSubmitted
from shared.subjects import CONDUCTOR_WRITER
from shared.telemetry import tracing
from shared.telemetry.settings import TraceSettings
from tests.admissions import admitted
from tests.collector import Collected, Collector, collecting
from tests.gateway.requests.test_disconnect import cancelled, raw, wait_for_cancel
from tests.gateway.speech.test_speech import ASKED, SPEAKER, speak
from tests.gateway.world import CHAT, Performance, deployment, listening

pytestmark = pytest.mark.processes

OPERATION: Final = "gen_ai.operation.name"
SECRET: Final = "Xyzzyplugh"
NAMES: Final = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI_")}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        tracing.set_up(TraceSettings(endpoint=collector.endpoint), "gateway")
        yield collector
        tracing.shut_down()


def answers(collector: Collector) -> list[Collected]:
    """The spans of answers: children of those of HTTP requests, with names that the conventions have."""
    tracing.shut_down()
    found = [span for span in collector.spans if OPERATION in span.attributes]
    requests = {span.id for span in collector.spans if span.name.startswith("POST ")}
    assert {span.parent for span in found} <= requests
    for span in found:
        assert {name for name in span.attributes if name.startswith("gen_ai.")} <= NAMES
    return found


def answer(collector: Collector) -> Collected:
    [span] = answers(collector)
    return span


async def test_a_chat_has_the_attributes_of_its_request_its_response_and_its_usage(
    collector: Collector,
) -> None:
    async def cached(performance: Performance) -> None:
        performance.say("len")
        performance.finish("length", cached_tokens=5)

    params = {
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "frequency_penalty": 1.5,
        "presence_penalty": 0.75,
        "seed": 7,
        "stop": ["\n\n"],
    }
    async with deployment(cached) as world:
        response = await world.client.post(CHAT_PATH, json=CHAT | params)
    span = answer(collector)

    first_chunk_s = span.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert isinstance(first_chunk_s, float)
    assert 0 < first_chunk_s < span.duration_s
    assert span.name == "chat demo"
    assert not span.is_error
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dalsegno",
        "gen_ai.request.model": "demo",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.top_k": 4.0,
        "gen_ai.request.frequency_penalty": 1.5,
        "gen_ai.request.presence_penalty": 0.75,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["\n\n"],
        "gen_ai.output.type": "text",
        "gen_ai.response.id": response.json()["id"],
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 1,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "dalsegno.request_id": response.json()["id"],
    }


async def test_a_stream_is_one_span_until_its_end(collector: Collector) -> None:
    async with deployment() as world:
        response = await world.client.post(CHAT_PATH, json=CHAT | {"stream": True})
    span = answer(collector)

    assert response.text.endswith("data: [DONE]\n\n")
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert "gen_ai.response.time_to_first_chunk" in span.attributes


async def test_choices_are_one_answer_and_each_is_a_child_of_its_span(collector: Collector) -> None:
    body = {"model": "demo", "prompt": ["one two", "three"], "n": 2}
    async with deployment() as world:
        response = await world.client.post(COMPLETIONS, json=body)
        events = world.events("request")
    span = answer(collector)

    assert span.name == "text_completion demo"
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert span.attributes["gen_ai.response.id"] == response.json()["id"]
    assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"] * 4
    usage = response.json()["usage"]
    assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] == 14
    assert span.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 6
    assert len(events) == 4
    assert {str(event.trace)[:-3] for event in events} == {f"00-{span.trace}-{span.id}"}
    queued = [event.attributes["dalsegno.request_id"] for event in span.events if event.name == "queued"]
    assert sorted(map(str, queued)) == sorted(str(event.request_id) for event in events)


async def test_embeddings_have_their_dimensions(collector: Collector) -> None:
    async def embed(performance: Performance) -> None:
        performance.vector([1.0, 0.0])
        performance.finish()

    async with deployment(embed) as world:
        await world.client.post(EMBEDDINGS, json={"model": "demo", "input": "one", "dimensions": 2})
    span = answer(collector)

    assert span.name == "embeddings demo"
    assert span.attributes["gen_ai.usage.input_tokens"] == 7
    assert "gen_ai.output.type" not in span.attributes


async def test_speech_is_generated_content(collector: Collector) -> None:
    async with deployment(speak, served=SPEAKER) as world:
        await world.client.post(SPEECH, json=ASKED | {"response_format": "pcm"})
        [event] = world.events("request")
    span = answer(collector)

    assert span.name == "generate_content demo"
    assert span.attributes["gen_ai.output.type"] == "speech"
    assert span.attributes["gen_ai.request.stream"] is True  # pcm is sent as it is made
    assert "gen_ai.response.time_to_first_chunk" in span.attributes
    assert span.attributes["gen_ai.response.id"] == event.request_id


async def test_json_is_an_output_type(collector: Collector) -> None:
    async def write(performance: Performance) -> None:
        performance.say("{}")
        performance.finish()

    async with deployment(write) as world:
        await world.client.post(CHAT_PATH, json=CHAT | {"response_format": {"type": "json_object"}})

    assert answer(collector).attributes["gen_ai.output.type"] == "json"


async def test_a_warmed_prefix_is_written_to_the_cache(collector: Collector) -> None:
    async def warm(performance: Performance) -> None:
        performance.finish(cached_tokens=6)

    async with deployment(warm) as world:
        await world.client.post(WARM, json={"text": "one"})
    span = answer(collector)

    assert span.name == "warm demo"
    assert span.attributes["gen_ai.usage.cache_creation.input_tokens"] == 6
    assert "gen_ai.usage.cache_read.input_tokens" not in span.attributes


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_fails_is_a_failed_span_with_its_code(
    collector: Collector, stream: bool
) -> None:
    async def break_off(performance: Performance) -> None:
        performance.say("begun")
        performance.fail(Failure(code="worker_lost", message=f"it said {SECRET}"))

    async with deployment(break_off) as world:
        await world.client.post(CHAT_PATH, json=CHAT | {"stream": stream})
    span = answer(collector)

    assert span.is_error
    assert span.attributes["error.type"] == "worker_lost"
    assert "gen_ai.usage.output_tokens" not in span.attributes
    assert "gen_ai.response.time_to_first_chunk" in span.attributes
    assert SECRET.encode() not in b"".join(collector.bodies)


async def test_a_rejected_request_was_queued_and_never_admitted(collector: Collector) -> None:
    async def reject(performance: Performance) -> None:
        performance.reject(Failure(code="prompt_too_long", message="no", status=400))

    async with deployment(reject) as world:
        response = await world.client.post(CHAT_PATH, json=CHAT)
    span = answer(collector)
    [http] = [one for one in collector.spans if one.id == span.parent]

    assert response.status_code == 400
    assert span.is_error
    assert span.attributes["error.type"] == http.attributes["error.type"] == "prompt_too_long"
    assert not http.is_error
    assert [event.name for event in span.events] == ["queued"]
    assert "gen_ai.response.time_to_first_chunk" not in span.attributes


async def test_a_request_that_the_log_did_not_take_was_not_queued(collector: Collector) -> None:
    async with deployment() as world:
        world.server.stop()
        response = await world.client.post(CHAT_PATH, json=CHAT)
    span = answer(collector)

    assert response.status_code == 503
    assert span.attributes["error.type"] == "log_unavailable"
    assert span.events == ()


async def test_a_client_that_leaves_ends_the_span(collector: Collector) -> None:
    async with deployment(wait_for_cancel) as world, listening(world) as url:
        async with raw(url, CHAT_PATH, CHAT | {"stream": True}) as reader:
            await reader.readuntil(b"\r\n\r\n")
        await cancelled(world)
        await world.until(lambda: world.gateway.in_flight.count == 0)
    span = answer(collector)
    [http] = [one for one in collector.spans if one.id == span.parent]

    assert span.attributes["error.type"] == http.attributes["error.type"] == "client_disconnected"
    assert (span.is_error, http.is_error) == (True, False)


async def test_a_cancelled_request_has_the_code_of_its_cancellation(collector: Collector) -> None:
    async with deployment(wait_for_cancel) as world, asyncio.TaskGroup() as tasks:
        body = CHAT | {"request_id": "mine"}
        asking = tasks.create_task(world.client.post(CHAT_PATH, json=body))
        await world.performance()
        await world.client.delete("/v1/requests/mine")
        response = await asking
    span = answer(collector)

    assert response.status_code == 410
    assert span.attributes["error.type"] == "request_cancelled"


async def test_milestones_have_the_times_of_the_log(collector: Collector) -> None:
    async def lost_and_back(performance: Performance) -> None:
        performance.walk(admitted(performance.request_id))
        performance.walk(admitted(performance.request_id))  # a copy
        performance.is_admitted = True
        performance.say("one")
        held = OutputFence(writer=CONDUCTOR_WRITER, epoch=1, attempt=2, reason="w0 is lost", history=b"")
        performance.output(held)
        back = RequestResumed(
            writer=CONDUCTOR_WRITER, epoch=1, attempt=2, placement={"node0": 0}, reason="w0 is back"
        )
        performance.walk(back)
        performance.fail(Failure(code="worker_lost", message="again"))

    async with deployment(lost_and_back) as world:
        await world.client.post(CHAT_PATH, json=CHAT)
        [event] = world.events("request")
        _request, first, _copy, _chunk, fence, back, _failed = world.server.records[1:]
    span = answer(collector)

    assert isinstance(event, RequestSubmitted)
    queued, *others = span.events
    assert queued.name == "queued"
    assert queued.time_ns <= others[0].time_ns
    assert [(one.name, one.attributes["dalsegno.reason"]) for one in others] == [
        ("admitted", "a test"), ("held", "w0 is lost"), ("resumed", "w0 is back"),
    ]  # fmt: skip
    assert [one.time_ns for one in others] == [record.time_ns for record in (first, fence, back)]
    assert {one.attributes["dalsegno.request_id"] for one in span.events} == {event.request_id}


async def test_a_client_that_comes_back_has_a_span_of_its_own_with_the_same_milestones(
    collector: Collector,
) -> None:
    body = CHAT | {"request_id": "mine"}
    async with deployment() as world:
        await world.client.post(CHAT_PATH, json=body)
        await world.client.post(CHAT_PATH, json=body)
        submitted_ns = next(one.time_ns for one in world.server.records if ".request." in one.subject)
    first, again = answers(collector)

    assert first.id != again.id
    assert [event.name for event in again.events] == ["queued", "admitted"]
    assert again.events[0].time_ns == submitted_ns
    assert again.events[1] == first.events[1]


# ---- contents ----------------------------------------------------------------------------------------


async def said(**options: Any) -> bytes:
    """The bytes that are exported of an answer that repeats its prompt."""
    with collecting() as collector:
        tracing.set_up(TraceSettings(endpoint=collector.endpoint, **options), "gateway")
        async with deployment() as world:
            content = f"say {SECRET} now"
            body = {"model": "demo", "messages": [{"role": "user", "content": content}], "user": "somebody"}
            response = await world.client.post(f"{CHAT_PATH}?q={SECRET}", json=body)
            assert SECRET in response.text
        tracing.shut_down()
        assert len(collector.spans) == 2
        return b"".join(collector.bodies)


async def test_contents_are_not_exported_unless_they_are_asked_for() -> None:
    assert SECRET.encode() not in await said()
    assert (await said(contents=True)).count(SECRET.encode()) == 2


async def test_contents_are_the_messages_of_the_convention() -> None:
    with collecting() as collector:
        tracing.set_up(TraceSettings(endpoint=collector.endpoint, contents=True), "gateway")
        async with deployment() as world:
            await world.client.post(CHAT_PATH, json=CHAT | {"n": 2})
        span = answer(collector)

    question = "What does len do?"
    assert json.loads(str(span.attributes["gen_ai.input.messages"])) == [
        {"role": "user", "parts": [{"type": "text", "content": question}]}
    ]
    told = {"role": "assistant", "parts": [{"type": "text", "content": question}], "finish_reason": "stop"}
    assert json.loads(str(span.attributes["gen_ai.output.messages"])) == [told, told]


async def test_contents_are_bounded() -> None:
    with collecting() as collector:
        settings = TraceSettings(endpoint=collector.endpoint, contents=True, max_content_bytes=300)
        tracing.set_up(settings, "gateway")
        async with deployment() as world:
            long = {"role": "user", "content": "word " * 400 + "end"}
            await world.client.post(CHAT_PATH, json=CHAT | {"messages": [long]})
        span = answer(collector)

    for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
        document = str(span.attributes[name])
        assert 250 < len(document.encode()) <= 300
        [message] = json.loads(document)
        assert re.fullmatch(r"(word )+\w{0,4}…", message["parts"][0]["content"])


@pytest.mark.parametrize("contents", [True, False])
async def test_text_that_is_no_unicode_is_refused_and_its_span_exported(contents: bool) -> None:
    body = b'{"model":"demo","messages":[{"role":"user","content":"a\\ud800b"}],"stop":["\\ud800"]}'
    with collecting() as collector:
        tracing.set_up(TraceSettings(endpoint=collector.endpoint, contents=contents), "gateway")
        async with deployment() as world:
            response = await world.client.post(
                CHAT_PATH, content=body, headers={"content-type": "application/json"}
            )
        tracing.shut_down()

    assert response.status_code == 400
    code = response.json()["error"]["code"]
    assert {span.attributes["error.type"] for span in collector.spans} == {code}


# ---- names -------------------------------------------------------------------------------------------


def test_operations_belong_to_routes_that_exist() -> None:
    own = {CHAT_PATH, COMPLETIONS, EMBEDDINGS, RERANK, SCORES, WARM}
    assert set(OPERATIONS) == own | {MESSAGES, ollama.CHAT, ollama.EMBED}
    known = {one.value for one in conventions.GenAiOperationNameValues}
    routes = (CHAT_PATH, COMPLETIONS, EMBEDDINGS, SPEECH)
    assert {operation_of(route) for route in routes} <= known


async def test_without_tracing_an_answer_has_no_span() -> None:
    async with deployment() as world:
        response = await world.client.post(CHAT_PATH, json=CHAT)
        [event] = world.events("request")

    assert response.status_code == 200
    assert event.trace is None
