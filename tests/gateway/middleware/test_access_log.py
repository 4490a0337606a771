import logging
from typing import Any

import httpx
import pytest

from configs.secrets import ApiKey
from tests.gateway.world import CHAT, Performance, World, deployment, listening

KEYS = (ApiKey(name="alice", secret="sk-secret"),)


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "gateway.middleware.access_log"]


def facts(record: logging.LogRecord) -> dict[str, Any]:
    return vars(record)


async def test_a_request_is_a_line_with_who_what_and_how_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with deployment(keys=KEYS) as world:
            answer = await world.client.post(
                "/v1/chat/completions?secret=1", json=CHAT, headers={"Authorization": "Bearer sk-secret"}
            )

    [line] = lines(caplog)
    found = facts(line)
    assert (found["method"], found["path"], found["status"]) == ("POST", "/v1/chat/completions", 200)
    assert found["bytes"] == len(answer.content)
    assert found["duration_ms"] > 0
    assert (found["key"], found["client"], found["complete"]) == ("alice", "127.0.0.1", True)
    assert found["request_id"] == answer.json()["id"]
    for word in ("POST", "/v1/chat/completions", "200", "alice", answer.json()["id"]):
        assert word in line.getMessage()
    assert "secret" not in str(found)


async def test_what_was_refused_is_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with deployment(keys=KEYS) as world:
            refused = await world.client.get("/v1/models")

    [line] = lines(caplog)
    found = facts(line)
    assert (found["status"], found["key"], found["error"]) == (401, None, "missing_api_key")
    assert found["request_id"] == refused.headers["x-request-id"]
    assert f"error missing_api_key, request {found['request_id']}" in line.getMessage()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b'{"model": "other"}', "missing_required_parameter"),
        (b"x" * 2000, "body_too_large"),
    ],
)
async def test_a_refusal_of_a_route_names_its_error(
    body: bytes, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with deployment(max_body_bytes=1024) as world:
            refused = await world.client.post("/v1/chat/completions", content=body)

    [line] = lines(caplog)
    assert (facts(line)["error"], facts(line)["request_id"]) == (code, refused.headers["x-request-id"])


async def test_an_answer_has_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with deployment() as world:
            await world.client.post("/v1/chat/completions", json=CHAT)

    [line] = lines(caplog)
    assert facts(line)["error"] is None
    assert "error" not in line.getMessage()


async def test_health_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with deployment() as world:
            for path in ("/health", "/health/live", "/metrics"):
                await world.client.get(path)

    assert [line.levelno for line in lines(caplog)] == [logging.DEBUG] * 3


async def test_without_lines_for_requests_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with deployment(logs_requests=False) as world:
            await world.client.post("/v1/chat/completions", json=CHAT)

    assert not lines(caplog)


async def test_an_answer_that_its_client_left_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def wait_for_cancel(performance: Performance) -> None:
        performance.say("begun")
        await performance.cancelled.wait()

    with caplog.at_level(logging.INFO):
        async with deployment(wait_for_cancel) as world:
            await leave(world)

    [line] = lines(caplog)
    assert facts(line)["complete"] is False
    assert "left before its end" in line.getMessage()


async def leave(world: World) -> None:
    """Request a stream, and disconnect once it has begun."""
    app: Any = world.client._transport.app  # type: ignore[attr-defined]
    begun: list[dict[str, Any]] = []
    body = b'{"model": "demo", "stream": true, "messages": [{"role": "user", "content": "x"}]}'

    async def receive() -> dict[str, Any]:
        if not begun:
            begun.append({})
            return {"type": "http.request", "body": body, "more_body": False}
        await world.until(lambda: len(begun) > 2)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        begun.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": [],
        "client": ("10.0.0.7", 1), "server": ("x", 1), "scheme": "http", "http_version": "1.1",
        "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)


@pytest.mark.processes
async def test_a_bug_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with deployment() as world, listening(world) as url, httpx.AsyncClient(base_url=url) as client:
        world.gateway.served = None  # type: ignore[assignment]
        answer = await client.get("/v1/models")
        again = await client.get("/v1/models")  # on the same connection

    assert (answer.status_code, again.status_code) == (500, 500)
    assert answer.json()["error"]["code"] == "internal_error"
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert found == ["a bug while answering a request"] * 2
