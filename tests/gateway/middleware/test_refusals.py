"""Each request that is refused before it is on the log is recorded once, with what the client was told."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from configs.deployment import GatewaySettings
from configs.secrets import ApiKey
from gateway.middleware.refusals import unread
from shared.errors import ClientError
from shared.events import Failure, Refusal, RequestsRefused
from shared.log.memory import MemoryLog
from shared.log.port import Log
from tests.gateway.world import CHAT, Performance, World, deployment, listening

KEYS = (ApiKey(name="alice", secret="sk-secret"), ApiKey(name="bob", secret="sk-other"))
ALICE = {"Authorization": "Bearer sk-secret"}


async def recorded(world: World) -> list[RequestsRefused]:
    """The events after the gateway has stored what it refused."""

    @asynccontextmanager
    async def open_log() -> AsyncGenerator[Log, None]:
        yield MemoryLog(world.server)

    await world.gateway.refusals.finish(open_log, 30)
    return [one for one in world.events("refused") if isinstance(one, RequestsRefused)]


async def samples(world: World) -> list[Refusal]:
    return [one for event in await recorded(world) for one in event.samples]


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "status", "route", "param"),
    [
        ("POST", "/v1/chat/completions", CHAT | {"model": "other"}, "model_not_found", 404, None, "model"),
        (
            "POST",
            "/v1/chat/completions",
            CHAT | {"temperature": -1},
            "invalid_value",
            400,
            None,
            "temperature",
        ),
        ("POST", "/v1/chat/completions", CHAT | {"nosuch": 1}, "unknown_parameter", 400, None, "nosuch"),
        ("POST", "/v1/chat/completions", "{", "invalid_json", 400, None, None),
        ("POST", "/v1/chat/completions", "x" * 5000, "body_too_large", 413, None, None),
        ("POST", "/generate", {}, "missing_required_parameter", 400, None, "text"),
        ("GET", "/v1/models/other", None, "model_not_found", 404, "GET /v1/models/{model:path}", "model"),
        ("GET", "/sk-secret", None, "not_found", 404, "GET other", None),
        ("GET", "/v1/chat/completions", None, "method_not_allowed", 405, None, None),
    ],
)
async def test_a_refused_request_is_a_sample_with_its_tenant(
    method: str, path: str, body: Any, code: str, status: int, route: str | None, param: str | None
) -> None:
    async with deployment(keys=KEYS, max_body_bytes=4096) as world:
        content = body if isinstance(body, str) else None
        answer = await world.client.request(
            method,
            path,
            json=None if isinstance(body, str) else body,
            content=content,
            headers=ALICE | ({"content-type": "application/json"} if content else {}),
        )
        [event] = await recorded(world)

    [count], [found] = event.counts, event.samples
    assert answer.status_code == status
    assert (count.code, count.status, count.tenant, count.count) == (code, status, "alice", 1)
    assert (found.code, found.status, found.tenant, found.param) == (code, status, "alice", param)
    assert found.route == (route or f"{method} {path}")
    assert found.message
    assert found.message[:100] in answer.json()["error"]["message"].replace("sk-secret", "[key]")
    assert found.correlation == answer.headers["x-request-id"]
    assert "sk-secret" not in str(found)


async def test_a_key_that_is_sent_as_anthropics_clients_do_is_in_no_sample() -> None:
    async with deployment(keys=KEYS) as world:
        answer = await world.client.get("/v1/models/sk-secret", headers={"x-api-key": "sk-secret"})
        [event] = await recorded(world)
    [found] = event.samples
    assert (answer.status_code, found.tenant) == (404, "alice")
    assert "[key]" in found.message
    assert "sk-secret" not in str(found)


@pytest.mark.parametrize(
    ("headers", "code"), [({}, "missing_api_key"), ({"Authorization": "Bearer sk-wrong"}, "invalid_api_key")]
)
async def test_without_a_valid_key_there_is_no_tenant(headers: dict[str, str], code: str) -> None:
    async with deployment(keys=KEYS) as world:
        await world.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        [found] = await samples(world)
    assert (found.code, found.status, found.tenant) == (code, 401, None)
    assert found.route == "POST /v1/chat/completions"
    assert "sk-wrong" not in str(found)


async def test_a_client_above_its_rate_is_counted_exactly() -> None:
    async with deployment(keys=KEYS, settings=GatewaySettings(requests_per_minute=1)) as world:
        for _ in range(6):
            await world.client.get("/v1/models", headers=ALICE)
        [event] = await recorded(world)
    [count] = event.counts
    assert (count.code, count.status, count.tenant, count.count) == ("rate_limit_exceeded", 429, "alice", 5)
    assert len(event.samples) == 4


async def test_pages_of_other_origins_and_forms_are_recorded() -> None:
    async with deployment() as world:
        await world.client.post("/v1/chat/completions", json=CHAT, headers={"origin": "http://evil.example"})
        await world.client.post("/v1/chat/completions", content="{}", headers={"content-type": "text/plain"})
        found = await samples(world)
    assert [(one.code, one.status) for one in found] == [
        ("origin_not_allowed", 403), ("unsupported_media_type", 415),
    ]  # fmt: skip


async def test_a_request_is_found_by_its_own_id_and_by_its_clients_name() -> None:
    body = CHAT | {"request_id": "mine-1", "temperature": -1}
    async with deployment() as world:
        await world.client.post("/v1/chat/completions", json=body, headers={"X-Request-ID": "from-proxy"})
        [found] = await samples(world)
    assert (found.request_id, found.correlation) == ("mine-1", "from-proxy")


async def test_an_id_that_is_none_is_not_recorded() -> None:
    async with deployment() as world:
        await world.client.post("/v1/chat/completions", json=CHAT | {"request_id": "no id"})
        [found] = await samples(world)
    assert found.request_id is None
    assert found.code == "invalid_request_id"


async def test_a_gateway_that_takes_nothing_records_what_it_refused() -> None:
    async with deployment(worker_joined=False) as world:
        answer = await world.client.post("/v1/chat/completions", json=CHAT)
        world.gateway.is_draining = True
        await world.client.post("/v1/chat/completions", json=CHAT)
        found = await samples(world)
    assert [(one.code, one.status) for one in found] == [("not_ready", 503), ("shutting_down", 503)]
    assert found[0].request_id == answer.headers["x-dalsegno-request-id"]


async def test_a_conflict_with_a_published_request_is_a_refusal_of_the_second() -> None:
    async with deployment() as world:
        await world.client.post("/v1/chat/completions", json=CHAT | {"request_id": "r-1"})
        other = CHAT | {"request_id": "r-1", "max_tokens": 3}
        await world.client.post("/v1/chat/completions", json=other)
        [found] = await samples(world)
    assert (found.code, found.status, found.request_id) == ("request_id_conflict", 409, "r-1")


# ---- what is no refusal ------------------------------------------------------------------------------
async def reject(performance: Performance) -> None:
    performance.reject(Failure(code="context_length_exceeded", message="too long", status=400))


async def fail(performance: Performance) -> None:
    performance.say("a part")
    performance.fail(Failure(code="worker_failed", message="died", status=500))


async def silence(performance: Performance) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("script", [reject, fail])
async def test_what_the_log_has_already_is_not_counted_again(script: Any) -> None:
    async with deployment(script) as world:
        answer = await world.client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code >= 400
        assert await recorded(world) == []


async def test_a_time_limit_after_the_submission_is_no_refusal() -> None:
    async with deployment(keeps_limits=True, script=silence) as world:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(
                world.client.post("/v1/chat/completions", json=CHAT | {"timeout_s": 0.05})
            )
            performance = await world.performance()
            await asyncio.wait({asking})
            performance.finish()
        assert asking.result().status_code == 504
        assert await recorded(world) == []


async def test_answers_and_health_checks_are_no_refusals() -> None:
    async with deployment() as world:
        assert (await world.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert (await world.client.get("/health/ready")).status_code == 503  # no conductor beats here
        assert await recorded(world) == []


# ---- before the application ----------------------------------------------------------------------------
async def test_a_request_that_cannot_be_read_is_recorded_too() -> None:
    async with deployment() as world, listening(world) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(b"no http at all\r\n\r\n")
        answer = await reader.read()
        writer.close()
        [found] = await samples(world)
    assert b" 400 " in answer
    assert found.status == 400
    assert found.route == ""
    assert found.correlation is not None
    assert found.correlation.encode() in answer


async def test_an_unread_requests_error_is_what_the_client_is_told() -> None:
    found: list[Refusal] = []
    unread(found.append)(ClientError("no head", code="header_timeout", status=408), "req-1")
    assert [(one.code, one.status, one.message, one.correlation) for one in found] == [
        ("header_timeout", 408, "no head", "req-1")
    ]


async def test_refusals_at_the_same_time_are_all_counted() -> None:
    async with deployment() as world, listening(world) as url:
        async with httpx.AsyncClient(base_url=url) as client, asyncio.TaskGroup() as tasks:
            for _ in range(20):
                tasks.create_task(client.get("/nowhere"))
        [event] = await recorded(world)
    assert [one.count for one in event.counts] == [20]
