"""Forgotten requests are 410, and never a part of an answer; the log's answers can be read again."""

import re
import time
from typing import Any

import httpx
import pytest

from gateway.requests import request_ids
from gateway.requests.request_ids import request_id_of
from shared.events import RequestSubmitted
from tests.gateway.world import CHAT, World, deployment

BODY = {"text": "one two", "request_id": "r-1"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


def check_is_expired(response: httpx.Response) -> None:
    assert response.status_code == 410, response.text
    assert (error_of(response)["code"], error_of(response)["type"]) == ("request_expired", "gone_error")


def asked(world: World) -> int:
    return sum(isinstance(event, RequestSubmitted) for event in world.events("request"))


def forget_the_head(world: World) -> None:
    """Forget the submission, and the records before it."""
    submission = next(record for record in world.server.records if ".request." in record.subject)
    world.server.forget(submission.seq)


async def test_a_finished_answer_comes_again_as_often_as_it_is_asked_for() -> None:
    async with deployment() as world:
        answers = [await world.client.post("/generate", json=BODY) for _ in range(3)]

    assert len({answer.content for answer in answers}) == 1
    assert len(world.performances) == 1


async def test_an_answer_that_the_log_has_forgotten_is_not_made_anew_under_its_id() -> None:
    async with deployment() as world:
        await world.client.post("/generate", json=BODY)
        world.server.forget(len(world.server.records))
        for _ in range(2):  # the first attempt is refused by the conductor, and that is on the log
            check_is_expired(await world.client.post("/generate", json=BODY))

    assert len(world.performances) == 1
    assert asked(world) == 2


@pytest.mark.slow
@pytest.mark.parametrize("forgets", ["all", "the head", "nothing of it, for it never was"])
@pytest.mark.parametrize(
    ("path", "body", "position"),
    [
        ("/generate", BODY, "0"),
        ("/v1/chat/completions", CHAT | {"stream": True, "request_id": "r-1"}, "b"),
        ("/v1/chat/completions", CHAT | {"stream": True, "request_id": "r-1", "n": 2}, "0,-"),
    ],
)
async def test_of_what_a_client_has_a_part_of_nothing_is_run(
    path: str, body: dict[str, Any], position: str, forgets: str
) -> None:
    async with deployment() as world:
        if not forgets.startswith("nothing"):
            await world.client.post(path, json=body)
        if forgets == "all":
            world.server.forget(len(world.server.records))
        elif forgets == "the head":
            forget_the_head(world)
        performed = set(world.performances)
        check_is_expired(await world.client.post(path, json=body, headers={"last-event-id": position}))
        await world.until(lambda: not world.gateway.in_flight.count)

    assert set(world.performances) - performed <= {"r-1-1"}  # a choice that the client has nothing of


async def test_what_is_forgotten_while_it_is_read_is_no_fault_of_ours() -> None:
    async with deployment() as world:
        await world.client.post("/generate", json=BODY)
        read = world.gateway.log.read

        def read_late(subjects: Any, start_seq: int) -> Any:
            forget_the_head(world)
            world.server.forget(world.server.forgotten + 1)
            return read(subjects, start_seq)

        world.gateway.log.read = read_late  # type: ignore[method-assign]
        response = await world.client.post("/generate", json=BODY)

    check_is_expired(response)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_how_a_forgotten_request_stood_is_not_known(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_ids, "MOST", 0)  # like a gateway that started later
    async with deployment() as world:
        finished = await world.client.post("/generate", json={"text": "one two"})
        made_here = finished.headers["x-dalsegno-request-id"]
        await world.client.post("/generate", json=BODY)
        before = await world.client.request("GET", "/v1/requests/r-1")
        forget_the_head(world)
        world.server.forget(world.server.forgotten + 5)  # of both their submissions; the ends are there
        with_its_end = await world.client.request(method, "/v1/requests/r-1")
        world.server.forget(len(world.server.records))
        without = await world.client.request(method, f"/v1/requests/{made_here}")
        chosen = await world.client.request(method, "/v1/requests/r-1")
        never = await world.client.request(method, "/v1/requests/never")

    assert before.json()["status"] == "finished"
    check_is_expired(with_its_end)
    check_is_expired(without)
    for unknown in (chosen, never):
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "request_not_found")


async def test_a_gateway_remembers_the_requests_that_it_saw_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_ids, "MOST", 2)
    async with deployment() as world:
        for name in ("r-1", "r-2", "r-3"):
            await world.client.post("/generate", json=BODY | {"request_id": name})
        world.server.forget(len(world.server.records))
        found = [await world.client.get(f"/v1/requests/r-{number}") for number in (1, 2, 3)]

    assert [response.status_code for response in found] == [404, 410, 410]


async def test_an_id_that_a_gateway_made_is_known_for_forgotten_by_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with deployment() as world:
        first = await world.client.post("/v1/chat/completions", json=CHAT)
        made_here = first.json()["id"]
        assert re.fullmatch(r"chatcmpl-[0-9a-f]{8}-[0-9a-f]{16}", made_here)
        again = await world.client.post("/v1/chat/completions", json=CHAT | {"request_id": made_here})
        world.server.forget(len(world.server.records))
        check_is_expired(
            await world.client.post("/v1/chat/completions", json=CHAT | {"request_id": made_here})
        )
        monkeypatch.setattr(time, "time", lambda: time.time_ns() / 1e9 - 100)
        old = request_id_of(None, "gen")
        monkeypatch.undo()
        world.server.forget(0)
        check_is_expired(await world.client.get(f"/v1/requests/{old}"))

    assert again.content == first.content
    assert asked(world) == 1
