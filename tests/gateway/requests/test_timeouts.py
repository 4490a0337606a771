import asyncio
from typing import Any

import httpx
import pytest

from configs.deployment import GatewaySettings
from gateway import request_limits
from gateway.requests import response as answer
from shared.events import RequestCancel, RequestSubmitted
from tests.gateway.generate.test_routes import lines
from tests.gateway.openai.test_routes import events
from tests.gateway.world import CHAT, Performance, World, deployment

SOON_S = 0.02
SOON = GatewaySettings(request_timeout_s=SOON_S)
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/chat/completions", CHAT | {"n": 2}),
    ("/v1/completions", {"model": "demo", "prompt": "x"}),
    ("/generate", {"text": "x"}),
    ("/generate", {"text": "x", "streaming": False}),
]


async def silent(performance: Performance) -> None:
    await performance.cancelled.wait()


async def begins(performance: Performance) -> None:
    performance.say("begun")
    await performance.cancelled.wait()


async def cancels(world: World, count: int = 1) -> list[RequestCancel]:
    for number in range(count):
        await (await world.performance(number)).cancelled.wait()
    return [event for event in world.events("control") if isinstance(event, RequestCancel)]


def check_is_504(response: httpx.Response) -> None:
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
    assert "longer than its 0.02 s" in error["message"]
    assert response.headers["x-should-retry"] == "false"  # OpenAI's clients would retry


def recorded(world: World) -> list[float | None]:
    """The time limits in the submitted events."""
    return [event.timeout_s for event in world.events("request") if isinstance(event, RequestSubmitted)]


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_what_takes_longer_than_the_deployment_allows_fails_on_the_log_with_504(
    path: str, body: dict[str, Any]
) -> None:
    count = body.get("n", 1)
    async with deployment(silent, settings=SOON) as world:
        response = await world.client.post(path, json=body)
        await world.until(lambda: not world.gateway.in_flight.count)
        line = world.gateway.follower.connection
        assert line is not None
        held = (len(line.submissions._router), len(line.submissions.readers))

    check_is_504(response)
    assert recorded(world) == [SOON_S] * count
    assert held == (0, 0)


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_what_the_log_says_nothing_of_is_given_up_soon_after(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "LIMIT_GRACE_S", 0)
    count = body.get("n", 1)
    async with deployment(silent, settings=SOON, keeps_limits=False) as world:
        response = await world.client.post(path, json=body)
        found = await cancels(world, count)

    check_is_504(response)
    assert {event.reason for event in found} == {"it took longer than its 0.02 s"}
    assert len(found) == count


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_a_request_may_ask_for_less(path: str, body: dict[str, Any]) -> None:
    async with deployment(silent) as world:
        response = await world.client.post(path, json=body | {"timeout_s": SOON_S})

    check_is_504(response)
    assert set(recorded(world)) == {SOON_S}


async def test_a_request_may_not_ask_for_more() -> None:
    async with deployment(silent, settings=SOON) as world:
        check_is_504(await world.client.post("/generate", data={"text": "x", "timeout_s": "1000"}))


async def test_without_a_limit_none_is_recorded() -> None:
    async with deployment(settings=GatewaySettings(request_timeout_s=0)) as world:
        await world.client.post("/generate", json={"text": "x"})

    assert recorded(world) == [None]


@pytest.mark.parametrize("found", ["soon", "-1", "0", "nan", "inf", True])
async def test_a_time_limit_that_is_none_is_refused(found: object) -> None:
    async with deployment() as world:
        response = await world.client.post("/generate", json={"text": "x", "timeout_s": found})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "timeout_s"


async def test_a_stream_that_has_begun_ends_with_the_error() -> None:
    async with deployment(begins, settings=SOON) as world:
        sse = await world.client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        ndjson = await world.client.post("/generate", json={"text": "x"})

    assert (sse.status_code, ndjson.status_code) == (200, 200)
    last = events(sse)[-1]
    assert isinstance(last, dict)
    assert last["error"]["code"] == "deadline_exceeded"
    assert lines(ndjson)[-1]["metadata"]["status"] == 504


@pytest.mark.parametrize(
    ("asked_s", "allowed_s", "expected_s"),
    [(None, 600, 600), (5, 600, 5), (900, 600, 600), (5, 0, 5), (None, 0, None)],
)
def test_the_smaller_limit_applies_and_0_is_none(
    asked_s: float | None, allowed_s: float, expected_s: float | None
) -> None:
    assert request_limits.time_limit_s(asked_s, GatewaySettings(request_timeout_s=allowed_s)) == expected_s


async def test_one_clients_limit_does_not_end_the_answer_of_another() -> None:
    hurried = {"text": "x", "request_id": "shared", "timeout_s": SOON_S}
    async with deployment(begins) as world:
        async with asyncio.TaskGroup() as tasks:
            body = {"text": "x", "request_id": "shared", "streaming": False}
            patient = tasks.create_task(world.client.post("/generate", json=body))
            performance = await world.performance()
            first = await world.client.post("/generate", json=hurried)
            assert world.events("control") == []
            performance.finish()
        second = patient.result()

    assert lines(first)[-1]["metadata"]["code"] == "deadline_exceeded"
    assert second.status_code == 200


@pytest.mark.parametrize("n", [1, 2])
async def test_a_limit_that_is_over_before_the_log_took_the_request_cancels_it_as_well(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "LIMIT_GRACE_S", 0)
    body = CHAT | {"n": n, "linger_s": 600, "request_id": "mine"}
    async with deployment(silent, settings=SOON, keeps_limits=False) as world:
        world.server.stall()
        response = await world.client.post("/v1/chat/completions", json=body)
        world.server.unstall()
        found = await cancels(world, n)

    check_is_504(response)
    assert {event.reason for event in found} == {"it took longer than its 0.02 s"}
