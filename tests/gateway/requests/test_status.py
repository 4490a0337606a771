"""The status of a request and its cancel, at any gateway."""

import asyncio
from typing import Any

import httpx
import pytest

from gateway.requests import status as requests
from shared.events import (
    Failure,
    Inputs,
    Limits,
    OutputTotals,
    Pins,
    RequestAdmitted,
    RequestCancel,
    RequestFinished,
    RequestRejected,
    RequestSubmitted,
    Usage,
    encode,
)
from tests.gateway.test_errors import error_of
from tests.gateway.world import CHAT, Performance, World, deployment

LIMITS = Limits(max_seq_len=8, kv_tokens=8, default_max_tokens=8)
PINS = Pins(graph="", plan="", config="", core="", submission="")


async def wait_for_cancel(performance: Performance) -> None:
    performance.say("begun")
    await performance.cancelled.wait()


def submit(world: World, request_id: str, **fields: Any) -> None:
    """Submit a request as another gateway or a service does."""
    event = RequestSubmitted(
        request_id=request_id, model="demo", inputs=Inputs(text="x"), origin="other", **fields
    )
    world.server.append(world.subjects.request(request_id), encode(event))


def cancels(world: World) -> list[str | None]:
    events = world.events("control")
    assert all(isinstance(event, RequestCancel) for event in events)
    return [event.request_id for event in events]


@pytest.mark.slow
async def test_an_answered_request_is_told_with_its_usage() -> None:
    async with deployment() as world:
        answer = (await world.client.post("/v1/chat/completions", json=CHAT)).json()
        told = await world.client.get(f"/v1/requests/{answer['id']}")

    assert told.status_code == 200
    found = told.json()
    assert (found["id"], found["object"], found["status"], found["model"]) == (
        answer["id"], "request", "finished", "demo",
    )  # fmt: skip
    assert found["usage"].items() <= answer["usage"].items()
    assert len(found["usage"]) == 3
    assert found["finish_reason"] == "stop"
    assert found["ended"] >= found["created"] > 0
    assert "What does len do?" not in told.text


async def test_a_failure_is_told_with_its_code() -> None:
    async def fail(performance: Performance) -> None:
        performance.fail(Failure(code="step_failed", message="so it goes"))

    async with deployment(fail) as world:
        await world.client.post("/v1/chat/completions", json=CHAT | {"request_id": "one"})
        found = (await world.client.get("/v1/requests/one")).json()

    assert (found["status"], found["error"]) == ("failed", {"code": "step_failed", "message": "so it goes"})


async def test_a_malformed_submission_is_told_as_rejected_and_why() -> None:
    async with deployment(performing=False) as world:
        path, subject = "/v1/requests/mine", world.subjects.request("mine")
        seq = world.server.append(subject, b'{"model": 5}').seq
        waiting = (await world.client.get(path)).json()
        failure = Failure(code="malformed_request", message="model: expected a string", status=400)
        for other in (seq + 5, seq):
            rejected = RequestRejected(
                id=f"r.{other}", writer="conductor", epoch=1, failure=failure, submission_seq=other
            )
            world.server.append(world.subjects.walk("mine"), encode(rejected))
        told = (await world.client.get(path)).json()
        cancelled = await world.client.delete(path)
        submit(world, "mine")
        after = (await world.client.get(path)).json()

    assert (waiting["status"], waiting["model"], waiting["error"]) == ("waiting", None, None)
    assert (told["status"], told["model"]) == ("rejected", None)
    assert told["error"] == {"code": "malformed_request", "message": "model: expected a string"}
    assert told["ended"] >= told["created"] > 0
    assert (cancelled.status_code, error_of(cancelled)["code"]) == (409, "request_ended")
    assert (after["status"], after["error"], after["ended"]) == ("waiting", None, None)


async def test_a_reply_of_the_server_on_a_submissions_subject_is_no_request() -> None:
    async with deployment(performing=False) as world:
        world.server.append(world.subjects.request("mine"), b'{"type":"io.nats.jetstream.api.v1.x_response"}')
        told = await world.client.get("/v1/requests/mine")

    assert told.status_code == 404


async def test_a_request_is_waiting_then_running() -> None:
    async with deployment(performing=False) as world:
        submit(world, "one")
        waiting = (await world.client.get("/v1/requests/one")).json()["status"]
        admitted = RequestAdmitted(
            writer="conductor", epoch=1, family="f", seed=1, placement={}, reason="",
            limits=LIMITS, pins=PINS,
        )  # fmt: skip
        world.server.append(world.subjects.walk("one"), encode(admitted))
        running = (await world.client.get("/v1/requests/one")).json()["status"]

    assert (waiting, running) == ("waiting", "running")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize(("request_id", "status"), [("nobody", 404), ("not%20an%20id", 400), ("x" * 65, 400)])
async def test_what_the_log_does_not_hold_is_not_found(method: str, request_id: str, status: int) -> None:
    async with deployment() as world:
        response = await world.client.request(method, f"/v1/requests/{request_id}")

    assert response.status_code == status
    assert error_of(response)["code"] in ("request_not_found", "invalid_request_id")
    assert not world.events("control")


async def test_a_request_of_this_gateway_is_cancelled_and_its_client_told() -> None:
    async with deployment(wait_for_cancel) as world:
        async with asyncio.TaskGroup() as tasks:
            body = CHAT | {"request_id": "one"}
            asking = tasks.create_task(world.client.post("/v1/chat/completions", json=body))
            await world.performance()
            cancelled = await world.client.delete("/v1/requests/one")
        again = await world.client.delete("/v1/requests/one")

    assert cancelled.status_code == again.status_code == 200
    assert cancelled.json()["status"] == again.json()["status"] == "cancelled"
    assert (asking.result().status_code, error_of(asking.result())["code"]) == (410, "request_cancelled")
    assert cancels(world) == ["one"]


async def test_a_request_of_another_gateway_is_cancelled_too() -> None:
    async with deployment(wait_for_cancel) as world:
        submit(world, "theirs")
        await world.performance()
        cancelled = await world.client.delete("/v1/requests/theirs")

    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")


async def test_all_answers_of_one_question_are_cancelled_together_and_no_others() -> None:
    async with deployment(wait_for_cancel) as world:
        submit(world, "q", parts=3)
        for part in (1, 2):
            submit(world, f"q-{part}", parent="q", parts=3)
        submit(world, "q-3", parent="q", parts=3)  # not one of its parts
        submit(world, "r", parts=2)
        submit(world, "r-1")  # another request with such an id
        await world.performance(5)
        one = await world.client.delete("/v1/requests/q")
        other = await world.client.delete("/v1/requests/r")

    assert [part["id"] for part in one.json()["parts"]] == ["q", "q-1", "q-2"]
    assert {part["status"] for part in one.json()["parts"]} == {"cancelled"}
    assert other.json()["status"] == "cancelled"
    assert cancels(world) == ["q", "q-1", "q-2", "r"]


async def test_a_question_has_ended_when_all_its_answers_have() -> None:
    async def one_waits(performance: Performance) -> None:
        performance.say("x", [1, 2])
        if performance.request_id == "q-3":
            await performance.cancelled.wait()
        else:
            performance.finish("length")

    async with deployment(one_waits) as world:
        asking = asyncio.create_task(
            world.client.post(
                "/v1/completions", json={"model": "demo", "prompt": ["a", "b"], "n": 2, "request_id": "q"}
            )
        )
        await world.until(lambda: len(world.events("walk")) == 4 + 3)  # all are admitted
        running = (await world.client.get("/v1/requests/q")).json()
        world.performances["q-3"].finish()
        answer = (await asking).json()
        finished = (await world.client.get("/v1/requests/q")).json()
        world.performances["q-3"].cancelled.set()

    assert [part["status"] for part in running["parts"]] == ["finished"] * 3 + ["running"]
    assert [running[name] for name in ("status", "ended", "finish_reason", "usage")] == ["running"] + [
        None
    ] * 3
    assert finished["status"] == "finished"
    assert finished["ended"] == max(part["ended"] for part in finished["parts"])
    assert finished["usage"] == answer["usage"]
    assert finished["usage"]["prompt_tokens"] == 14
    assert finished["finish_reason"] == "length"


async def test_a_question_fails_as_its_answer_did() -> None:
    async def second_fails(performance: Performance) -> None:
        if performance.request_id == "q-1":
            performance.fail(Failure(code="step_failed", message="it broke", status=500))
        else:
            await performance.cancelled.wait()

    async with deployment(second_fails) as world:
        await world.client.post(
            "/v1/completions", json={"model": "demo", "prompt": "a", "n": 2, "request_id": "q"}
        )
        await (await world.performance()).cancelled.wait()
        told = (await world.client.get("/v1/requests/q")).json()

    assert [part["status"] for part in told["parts"]] == ["cancelled", "failed"]
    assert (told["status"], told["error"]) == ("failed", {"code": "step_failed", "message": "it broke"})


async def test_what_has_ended_cannot_be_cancelled() -> None:
    async with deployment() as world:
        await world.client.post("/v1/chat/completions", json=CHAT | {"request_id": "one"})
        response = await world.client.delete("/v1/requests/one")

    assert (response.status_code, error_of(response)["code"]) == (409, "request_ended")
    assert not world.events("control")


async def test_a_cancel_that_comes_too_late_is_told_so() -> None:
    async with deployment(performing=False) as world:
        submit(world, "one")

        async def conduct() -> None:
            await world.stored("control")
            world.server.append(
                world.subjects.walk("one"),
                encode(
                    RequestFinished(
                        writer="conductor", epoch=1, usage=Usage(), finish_reasons=["stop"],
                        output=OutputTotals(), history=b"",
                    )
                ),
            )  # fmt: skip

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(conduct())
            response = await world.client.delete("/v1/requests/one")

    assert (response.status_code, error_of(response)["code"]) == (409, "request_ended")


async def test_without_a_conductor_a_cancel_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "CANCEL_S", 0.01)
    async with deployment(performing=False) as world:
        submit(world, "one")
        response = await world.client.delete("/v1/requests/one")
        later = await world.client.get("/v1/requests/one")

    assert (response.status_code, later.status_code) == (202, 200)
    assert response.json()["status"] == later.json()["status"] == "cancelling"
    assert cancels(world) == ["one"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_without_a_log_nobody_knows(method: str) -> None:
    async with deployment(performing=False) as world:
        world.server.recreate()
        await world.regressed.wait()
        response: httpx.Response = await world.client.request(method, "/v1/requests/one")

    assert (response.status_code, error_of(response)["code"]) == (503, "log_unavailable")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_log_that_is_away_is_not_waited_for(method: str) -> None:
    async with deployment(performing=False) as world:
        submit(world, "one")
        world.server.stop()
        response = await world.client.request(method, "/v1/requests/one")

    assert (response.status_code, error_of(response)["code"]) == (503, "log_unavailable")


async def test_a_cancel_that_is_not_acked_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LOG_S", 0.05)
    async with deployment(performing=False) as world:
        submit(world, "one")
        world.server.set_max_messages(0)  # full: it keeps what is posted waiting
        response = await world.client.delete("/v1/requests/one")

    assert (response.status_code, error_of(response)["code"]) == (503, "log_unavailable")
