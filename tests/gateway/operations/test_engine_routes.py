"""`/v1/engine/*`, the usage of diffusion language models in answers, and their metrics."""

import json
from typing import Any

import pytest

from shared.events import Failure
from tests.gateway.operations.test_metrics import scraped
from tests.gateway.world import CHAT, Performance, beat, deployment

COUNTS = {"forwards": 4, "parallel_tokens": 2}


async def diffuse(performance: Performance) -> None:
    """Two tokens for each pass; a request with a seed fails."""
    if performance.event.params.seed is not None:
        performance.fail(Failure(code="too_large", message="no", status=400))
        return
    performance.say("a b c d", [1, 2, 3, 4])
    performance.finish(counts=COUNTS)


def stream_events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


async def test_answers_have_the_counts_of_the_model() -> None:
    async with deployment(diffuse) as world:
        document = (await world.client.post("/v1/chat/completions", json=CHAT)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = (await world.client.post("/v1/chat/completions", json=CHAT | options)).text
        completion = (
            await world.client.post("/v1/completions", json={"model": "demo", "prompt": "a", "n": 2})
        ).json()
        generated = (await world.client.post("/generate", json={"text": "a", "streaming": False})).json()

    last = stream_events(stream)[-1]
    for found in (document, last):
        assert found["usage"]["counts"] == COUNTS
        assert found["parallel_tokens_decoded"] == 2
    assert completion["usage"]["counts"] == {"forwards": 8, "parallel_tokens": 4}
    assert completion["parallel_tokens_decoded"] == 4
    assert generated["outputs"]["text"][0]["metadata"]["usage"]["counts"] == COUNTS


async def test_answers_without_counts_stay_as_they_are() -> None:
    async with deployment() as world:
        document = (await world.client.post("/v1/chat/completions", json=CHAT)).json()
    assert "counts" not in document["usage"]
    assert "parallel_tokens_decoded" not in document


async def test_stats_count_answers_tokens_and_passes() -> None:
    async with deployment(diffuse) as world:
        for body in (CHAT, CHAT, CHAT | {"seed": 1}):
            await world.client.post("/v1/chat/completions", json=body)
        found = (await world.client.get("/v1/engine/stats")).json()
        series = await scraped(world.client)

    assert (found["requests_processed"], found["requests_failed"], found["requests_timeout"]) == (2, 1, 0)
    assert (found["tokens_generated"], found["avg_tokens_per_step"]) == (8, 1.0)
    assert found["counts"] == {"forwards": 8, "parallel_tokens": 4}
    assert found["avg_latency_ms"] > 0
    assert found["server"]["total_requests"] == 3
    assert found["server"]["active_requests"] == 0
    assert series["dalsegno_diffusion_forwards_total"] == 8
    assert series["dalsegno_diffusion_tokens_total{kind=generated}"] == 8
    assert series["dalsegno_diffusion_tokens_total{kind=parallel}"] == 4


async def test_the_engines_are_unhealthy_while_a_part_is_missing() -> None:
    async with deployment() as world:
        response = await world.client.get("/v1/engine/health")
    found = response.json()
    assert response.status_code == 200
    assert (found["status"], found["model_loaded"]) == ("unhealthy", False)
    assert found["missing"]


@pytest.mark.parametrize("state", ["ready", "loading"])
async def test_the_state_of_each_engine(state: str) -> None:
    async with deployment() as world:
        beat(world, "conductor", "c-1", "leading", waiting=2)
        beat(world, "worker", "0", state, waiting=1)
        response = await world.client.get("/v1/engine/health")
    found = response.json()
    assert found["engines"] == {"0": state}
    assert found["model_loaded"] == (state == "ready")
    assert found["queue_size"] == 3
    expected = ("healthy", "busy") if state == "ready" else ("unhealthy", "loading")
    assert (found["status"], found["state"]) == expected
