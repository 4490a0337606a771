import logging

import httpx
import pytest

from gateway.middleware.request_id import valid_name
from shared.events import RequestSubmitted
from tests.gateway.world import CHAT, World, deployment


def submitted(world: World) -> RequestSubmitted:
    [event] = world.events("request")
    assert isinstance(event, RequestSubmitted)
    return event


async def test_a_clients_name_is_echoed_and_recorded_beside_the_requests_own_id() -> None:
    async with deployment() as world:
        answer = await world.client.post(
            "/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "web:7/a"}
        )
        event = submitted(world)

    assert answer.headers["x-request-id"] == "web:7/a"
    assert answer.headers["x-dalsegno-request-id"] == answer.json()["id"] == event.request_id
    assert event.correlation == "web:7/a"


async def test_without_one_the_requests_own_id_is_its_name() -> None:
    async with deployment() as world:
        answer = await world.client.post("/v1/chat/completions", json=CHAT)
        event = submitted(world)

    assert answer.headers["x-request-id"] == answer.headers["x-dalsegno-request-id"] == answer.json()["id"]
    assert event.correlation is None


async def test_the_same_name_twice_is_two_requests() -> None:
    async with deployment() as world:
        answers = [
            await world.client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "again"})
            for _ in range(2)
        ]

    assert len({answer.json()["id"] for answer in answers}) == 2


async def test_the_same_request_under_another_name_attaches() -> None:
    async with deployment() as world:
        bodies = [
            (
                await world.client.post(
                    "/v1/chat/completions", json=CHAT | {"request_id": "one"}, headers={"X-Request-ID": name}
                )
            ).json()["choices"]
            for name in ("first", "second")
        ]

    assert bodies[0] == bodies[1]


@pytest.mark.parametrize("header", ["", "a b", "a\tb", "x" * 129, "<script>", "né"])
def test_what_cannot_be_a_name_is_none(header: str) -> None:
    assert valid_name(header) is None


async def test_every_answer_has_a_name_also_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async with deployment() as world:
        answers: list[httpx.Response] = [
            await world.client.get("/nowhere"),
            await world.client.post("/v1/chat/completions", content=b"{"),
            await world.client.get("/health", headers={"X-Request-ID": "not a name"}),
        ]

    names = [answer.headers["x-request-id"] for answer in answers]
    assert all(name.startswith("req-") for name in names)
    assert len(set(names)) == 3


@pytest.mark.slow
async def test_a_bug_is_answered_under_its_name_too(caplog: pytest.LogCaptureFixture) -> None:
    async with deployment() as world:

        async def broken(asked: object) -> None:
            raise RuntimeError("broken")

        world.gateway.submit = broken  # type: ignore[assignment, method-assign]
        with caplog.at_level(logging.ERROR):
            answer = await world.client.get("/v1/models", headers={"X-Request-ID": "mine"})
            failed = await world.client.post(
                "/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "mine"}
            )

    assert (answer.status_code, failed.status_code) == (200, 500)
    assert failed.headers["x-request-id"] == "mine"
    assert "x-content-type-options" in failed.headers
