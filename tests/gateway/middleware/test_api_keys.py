from typing import Any

import pytest

from configs.deployment import GatewaySettings
from configs.secrets import ApiKey
from gateway.middleware.api_keys import bearer
from tests.gateway.test_errors import error_of
from tests.gateway.world import CHAT, deployment

KEYS = (ApiKey(name="alice", secret="sk-alice"), ApiKey(name="bob", secret="sk-bob"))


def authorization(value: str) -> dict[str, str]:
    return {"Authorization": value}


async def test_without_a_key_it_is_401_and_says_which_scheme() -> None:
    async with deployment(keys=KEYS) as world:
        answers = [
            await world.client.post("/v1/chat/completions", json=CHAT, headers=headers)
            for headers in (
                {},
                authorization("Basic c2VjcmV0"),
                authorization("Bearer"),
                authorization("sk-bob"),
            )
        ]

    for answer in answers:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert (error_of(answer)["code"], error_of(answer)["type"]) == (
            "missing_api_key",
            "invalid_request_error",
        )
    assert not world.events("request")


@pytest.mark.slow
@pytest.mark.parametrize("secret", ["sk-alic", "sk-alicee", "SK-ALICE", "alice", "sk-alice sk-bob", "\xff"])
async def test_a_wrong_key_is_401_as_with_openai(secret: str) -> None:
    async with deployment(keys=KEYS) as world:
        answer = await world.client.post(
            "/v1/chat/completions",
            json=CHAT,
            headers=[(b"authorization", f"Bearer {secret}".encode("latin-1"))],
        )

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="dalsegno", error="invalid_token"'
    assert error_of(answer)["code"] == "invalid_api_key"
    assert secret not in answer.text
    assert not world.events("request")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_every_key_opens(scheme: str) -> None:
    async with deployment(keys=KEYS) as world:
        answers = [
            await world.client.post(
                "/v1/chat/completions", json=CHAT, headers=authorization(f"{scheme} {key.secret}")
            )
            for key in KEYS
        ]

    assert [answer.status_code for answer in answers] == [200, 200]


async def test_where_there_are_no_keys_nobody_needs_one() -> None:
    async with deployment() as world:
        answers = [
            await world.client.post("/v1/chat/completions", json=CHAT, headers=headers)
            for headers in ({}, authorization("Bearer whatever"))
        ]

    assert [answer.status_code for answer in answers] == [200, 200]


async def test_health_is_open_and_nothing_else_is() -> None:
    async with deployment(keys=KEYS) as world:
        app: Any = world.client._transport.app  # type: ignore[attr-defined]
        found: dict[str, int] = {}
        for path, operations in app.openapi()["paths"].items():
            for method in operations:
                asked = path.replace("{request_id}", "x").replace("{model}", "demo")
                found[path] = (await world.client.request(method.upper(), asked)).status_code
        found["/nowhere"] = (await world.client.get("/nowhere")).status_code
        found["/openapi.json"] = (await world.client.get("/openapi.json")).status_code

    assert {path for path, status in found.items() if status != 401} == {
        "/health",
        "/health/live",
        "/health/ready",
    }
    assert len(found) > 12


async def test_a_preflight_needs_no_key_but_the_request_does() -> None:
    settings = GatewaySettings(cors_origins=["https://app.example"])
    asks = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    async with deployment(keys=KEYS, settings=settings) as world:
        preflight = await world.client.options("/v1/chat/completions", headers=asks)
        refused = await world.client.post(
            "/v1/chat/completions", json=CHAT, headers={"Origin": "https://app.example"}
        )

    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize(
    ("header", "secret"),
    [
        (None, None), ("", None), ("Bearer", None), ("Bearer  ", None), ("Bearer x", "x"), ("bearer x", "x"),
        ("Bearer  x ", "x"), ("Basic x", None), ("Bearerx", None),
    ],
)  # fmt: skip
def test_the_secret_in_a_header(header: str | None, secret: str | None) -> None:
    assert bearer(header) == secret


@pytest.mark.slow
async def test_the_schema_says_who_needs_a_key() -> None:
    async with deployment(keys=KEYS) as world:
        told = (await world.client.get("/openapi.json", headers=authorization("Bearer sk-bob"))).json()
    async with deployment() as world:
        open_ = (await world.client.get("/openapi.json")).json()

    assert told["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert told["paths"]["/generate"]["post"]["security"] == [{"key": []}]
    assert {"401", "403"} <= set(told["paths"]["/generate"]["post"]["responses"])
    assert "security" not in told["paths"]["/health"]["get"]
    assert "securitySchemes" not in open_["components"]
    assert "401" not in open_["paths"]["/generate"]["post"]["responses"]
