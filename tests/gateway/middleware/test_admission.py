import asyncio

import httpx
import pytest

from configs.deployment import GatewaySettings
from tests.gateway.test_errors import error_of
from tests.gateway.world import CHAT, Performance, deployment, listening


async def test_more_answers_than_are_given_at_a_time_are_429_until_one_has_ended() -> None:
    go_on = asyncio.Event()

    async def wait(performance: Performance) -> None:
        await go_on.wait()
        performance.finish()

    async with deployment(wait, settings=GatewaySettings(max_in_flight=2)) as world:
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(world.client.post("/v1/chat/completions", json=CHAT)) for _ in range(2)
            ]
            await world.performance(1)
            refused = await world.client.post("/v1/chat/completions", json=CHAT)
            looked = await world.client.get("/v1/models")
            go_on.set()
        after = await world.client.post("/v1/chat/completions", json=CHAT)
        submissions = world.events("request")

    assert [task.result().status_code for task in asking] == [200, 200]
    assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_requests")
    assert int(refused.headers["retry-after"]) > 0
    assert (looked.status_code, after.status_code) == (200, 200)
    assert len(submissions) == 3  # the one that was refused is not on the log


@pytest.mark.processes
async def test_a_request_whose_client_left_gives_its_place_back() -> None:
    async def wait_for_cancel(performance: Performance) -> None:
        performance.say("begun")
        await performance.cancelled.wait()

    settings = GatewaySettings(max_in_flight=1)
    async with (
        deployment(wait_for_cancel, settings=settings) as world,
        listening(world) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        for _ in range(3):
            body = CHAT | {"stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                await anext(answer.aiter_lines())
            await world.until(lambda: not world.gateway.in_flight.count)


@pytest.mark.processes
async def test_a_gateway_that_ends_takes_nothing_new_and_lets_go_of_its_connections() -> None:
    async with deployment() as world, listening(world) as url, httpx.AsyncClient(base_url=url) as client:
        before = await client.get("/v1/models")
        world.gateway.is_draining = True
        refused = await client.post("/v1/chat/completions", json=CHAT)
        looked = await client.get("/health")

    assert "connection" not in before.headers
    assert (refused.status_code, error_of(refused)["code"]) == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) > 0
    assert refused.headers["connection"] == looked.headers["connection"] == "close"
    assert looked.json()["state"] == "draining"
