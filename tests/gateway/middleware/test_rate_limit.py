import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from limits.storage import memory
from starlette.types import Receive, Send

from configs.deployment import GatewaySettings
from configs.secrets import ApiKey
from gateway.middleware import rate_limit
from tests.gateway.test_errors import error_of
from tests.gateway.world import CHAT, deployment

KEYS = (ApiKey(name="alice", secret="sk-alice"), ApiKey(name="bob", secret="sk-bob"))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that advances the clock by so many seconds."""
    now_s = time.time()

    def pass_by(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    clock = SimpleNamespace(time=lambda: now_s)
    monkeypatch.setattr(memory, "time", clock)
    monkeypatch.setattr(rate_limit, "time", clock)
    return pass_by


async def test_who_asks_too_often_is_429_and_told_when_to_come_again(later: Callable[[float], None]) -> None:
    async with deployment(settings=GatewaySettings(requests_per_minute=2)) as world:
        first = await world.client.post("/v1/chat/completions", json=CHAT)
        later(10)
        second = await world.client.get("/v1/models")
        later(20)
        refused = await world.client.post("/v1/chat/completions", json=CHAT)
        later(int(refused.headers["retry-after"]) - 1)
        still = await world.client.post("/v1/chat/completions", json=CHAT)
        later(1.5)
        again = await world.client.post("/v1/chat/completions", json=CHAT)

    assert [answer.status_code for answer in (first, second, refused, still, again)] == [
        200,
        200,
        429,
        429,
        200,
    ]
    assert (error_of(refused)["code"], error_of(refused)["type"]) == (
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    assert refused.headers["retry-after"] == "30"
    told = [answer.headers["x-ratelimit-remaining"] for answer in (first, second, refused)]
    assert told == ["1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit"] for answer in (first, second, refused)} == {"2"}
    assert refused.headers["x-ratelimit-reset"] == "30"


async def test_each_key_has_its_own_count() -> None:
    async with deployment(keys=KEYS, settings=GatewaySettings(requests_per_minute=1)) as world:
        found = [
            (
                await world.client.get("/v1/models", headers={"Authorization": f"Bearer {key.secret}"})
            ).status_code
            for key in (*KEYS, *KEYS)
        ]

    assert found == [200, 200, 429, 429]


async def test_who_was_not_let_in_by_a_key_does_not_count() -> None:
    async with deployment(keys=KEYS, settings=GatewaySettings(requests_per_minute=1)) as world:
        for _ in range(5):
            assert (await world.client.get("/v1/models")).status_code == 401
        found = await world.client.get("/v1/models", headers={"Authorization": "Bearer sk-bob"})

    assert found.status_code == 200


async def test_zero_is_no_limit() -> None:
    async with deployment(settings=GatewaySettings(requests_per_minute=0)) as world:
        answers = [await world.client.get("/v1/models") for _ in range(50)]

    assert {answer.status_code for answer in answers} == {200}
    assert not [name for name in answers[0].headers if name.startswith("x-ratelimit")]


async def test_health_and_metrics_are_never_limited() -> None:
    async with deployment(settings=GatewaySettings(requests_per_minute=1)) as world:
        found = [
            (await world.client.get(path)).status_code
            for path in ("/health", "/health/live", "/metrics", "/metrics.json") * 3
        ]

    assert set(found) == {200}


@pytest.mark.parametrize(
    ("first", "second", "are_one"),
    [
        ("10.0.0.1", "10.0.0.2", False), ("10.0.0.1", "10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff", True), ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False), ("::ffff:10.0.0.1", "10.0.0.1", True),
    ],
)  # fmt: skip
def test_addresses_of_one_owner_count_as_one(first: str, second: str, are_one: bool) -> None:
    found = [rate_limit._client_of({"client": (address, 1)}) for address in (first, second)]

    assert (found[0] == found[1]) is are_one


async def test_who_has_not_asked_for_a_minute_is_forgotten(later: Callable[[float], None]) -> None:
    async def app(*_: object) -> None:
        pass

    limit = rate_limit.RateLimit(app, per_minute=1)

    async def ask(address: str) -> None:
        scope = {"type": "http", "path": "/", "client": (address, 1)}
        await limit(scope, cast("Receive", None), cast("Send", app))

    for number in range(100):
        await ask(f"10.0.0.{number}")
        later(1)

    kept = cast("memory.MemoryStorage", limit._limiter.storage).events
    assert len(kept) == 61
    assert sum(map(len, kept.values())) <= 61
