"""A log that fills up: new requests are refused, running ones end, and room is noticed."""

import asyncio
from typing import Any

import pytest

from tests.gateway.world import CHAT, Performance, World, beat, deployment, echo

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/completions", {"model": "demo", "prompt": "x"}),
    ("/generate", {"text": "x"}),
]


async def fill(world: World, used: float) -> None:
    """Set the log's limit so that this share of it is used, and let the gateway read its state."""
    world.server.max_bytes = round(world.server.nbytes / used)
    await look(world)


async def look(world: World) -> None:
    line = world.gateway.follower.connection
    assert line is not None
    await line.room.poll()


@pytest.mark.slow
@pytest.mark.parametrize("used", [0.95, 1.0])
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_nothing_new_is_taken_and_that_is_said_at_once(
    path: str, body: dict[str, Any], used: float
) -> None:
    async with deployment() as world:
        await fill(world, used)
        before = len(world.server.records)
        response = await world.client.post(path, json=body)

        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"]["code"] == "log_full"
        assert len(world.server.records) == before


async def test_with_room_again_all_goes_on() -> None:
    async with deployment() as world:
        await fill(world, 0.95)
        refused = await world.client.post("/v1/chat/completions", json=CHAT)
        world.server.max_bytes = None
        await look(world)
        response = await world.client.post("/v1/chat/completions", json=CHAT)

    assert [refused.status_code, response.status_code] == [503, 200]


async def test_what_is_under_way_ends_and_may_be_asked_for_again() -> None:
    going_on = asyncio.Event()

    async def patient(performance: Performance) -> None:
        performance.say("one ")
        await going_on.wait()
        performance.say("two")
        performance.finish()

    body = CHAT | {"request_id": "mine"}
    async with deployment(patient) as world, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(world.client.post("/v1/chat/completions", json=body))
        await world.performance()
        await fill(world, 0.95)
        attached = tasks.create_task(world.client.post("/v1/chat/completions", json=body))
        other = await world.client.post("/v1/chat/completions", json=body | {"request_id": "other"})
        going_on.set()

    answers = [(await one).json()["choices"][0]["message"]["content"] for one in (first, attached)]
    assert answers == ["one two", "one two"]
    assert other.status_code == 503


async def test_a_log_whose_bound_nobody_knows_says_itself_that_it_is_full() -> None:
    async with deployment() as world:
        world.server.max_messages = len(world.server.records)  # and the state was not read since
        first = await world.client.post("/v1/chat/completions", json=CHAT)
        await look(world)
        second = await world.client.post("/v1/chat/completions", json=CHAT)

    assert [one.json()["error"]["code"] for one in (first, second)] == ["log_full", "log_full"]


async def test_health_says_how_full_the_log_is() -> None:
    async with deployment(echo) as world:
        beat(world, "conductor", "c-1", "leading")
        beat(world, "worker", "0", "ready")
        ready = await world.client.get("/health/ready")
        await fill(world, 0.95)
        full = await world.client.get("/health/ready")

    assert [ready.status_code, full.status_code] == [200, 503]
    [missing] = full.json()["missing"]
    assert missing.startswith("the log is nearly full (")
    assert full.json()["status"] == "degraded"
