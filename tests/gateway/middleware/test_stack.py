"""CORS, security headers, the order of the middleware, and its headers."""

import re

import pytest
from jsonschema import Draft202012Validator

from configs.deployment import GatewaySettings
from gateway.errors import ANTHROPIC, OLLAMA
from gateway.middleware import security_headers
from tests.gateway.world import CHAT, deployment

ORIGIN = {"Origin": "https://app.example"}
PREFLIGHT = ORIGIN | {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-type",
}


async def test_pages_of_other_origins_may_not_ask_by_default() -> None:
    async with deployment() as world:
        preflight = await world.client.options("/v1/chat/completions", headers=PREFLIGHT)
        answer = await world.client.post("/v1/chat/completions", json=CHAT, headers=ORIGIN)

    for found in (preflight, answer):
        assert (found.status_code, found.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert not [name for name in found.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [["https://app.example", "https://other.example"], ["*"]])
async def test_pages_of_an_origin_that_may_ask_read_answers_and_errors(origins: list[str]) -> None:
    async with deployment(settings=GatewaySettings(cors_origins=origins, max_body_bytes=1024)) as world:
        preflight = await world.client.options("/v1/chat/completions", headers=PREFLIGHT)
        answer = await world.client.post("/v1/chat/completions", json=CHAT, headers=ORIGIN)
        wrong = await world.client.post("/v1/chat/completions", content=b"x" * 2000, headers=ORIGIN)

    expected = "*" if origins == ["*"] else "https://app.example"
    assert (preflight.status_code, answer.status_code, wrong.status_code) == (200, 200, 413)
    for found in (preflight, answer, wrong):
        assert found.headers["access-control-allow-origin"] == expected
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert answer.headers["cross-origin-resource-policy"] == "cross-origin"


async def test_a_page_of_another_origin_may_not() -> None:
    async with deployment(settings=GatewaySettings(cors_origins=["https://other.example"])) as world:
        preflight = await world.client.options("/v1/chat/completions", headers=PREFLIGHT)
        answer = await world.client.post("/v1/chat/completions", json=CHAT, headers=ORIGIN)

    for found in (preflight, answer):
        assert (found.status_code, found.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in found.headers


async def test_every_answer_has_security_headers_unless_they_are_off() -> None:
    paths = ("/v1/models", "/health", "/nowhere")
    async with deployment() as world:
        answers = [await world.client.get(path) for path in paths]
        answers.append(await world.client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    async with deployment(settings=GatewaySettings(security_headers=False)) as world:
        bare = [await world.client.get(path) for path in paths]

    for answer in answers:
        assert {name: answer.headers[name] for name in security_headers.HEADERS} == security_headers.HEADERS
    for answer in bare:
        assert not set(security_headers.HEADERS) & set(answer.headers)


def error_schema_of(path: str) -> str:
    if path.startswith(ANTHROPIC):
        return "AnthropicError"
    return "OllamaError" if path.startswith(OLLAMA) else "Error"


async def test_the_schema_tells_every_error_and_none_of_the_frameworks() -> None:
    async with deployment() as world:
        told = (await world.client.get("/openapi.json")).json()

    for path, operations in told["paths"].items():
        schema = error_schema_of(path)
        assert schema in told["components"]["schemas"]
        for method, operation in operations.items():
            errors = {status for status in operation["responses"] if status >= "400"}
            assert {"400", "404", "413", "429", "500", "503"} <= errors, (path, method)
            for status in errors - {"503"}:
                content = operation["responses"][status]["content"]["application/json"]
                assert content["schema"] == {"$ref": f"#/components/schemas/{schema}"}, (path, status)
    assert "HTTPValidationError" not in str(told)


async def test_the_error_of_every_route_has_the_schema_that_is_told() -> None:
    async with deployment() as world:
        told = (await world.client.get("/openapi.json")).json()
        operations = [(method, path) for path, found in told["paths"].items() for method in found]
        answers = [
            await world.client.request(
                method, re.sub(r"\{.*?\}", "x", path), content=b"{", headers={"content-type": "text/x"}
            )
            for method, path in operations
        ]

    refused = 0
    for (method, path), answer in zip(operations, answers, strict=True):
        if answer.is_success:
            continue
        refused += 1
        response = told["paths"][path][method]["responses"][str(answer.status_code)]
        schema = response["content"]["application/json"].get("schema", {})
        Draft202012Validator(schema | {"components": told["components"]}).validate(answer.json())
    assert refused > 50  # all but those that need nothing


async def test_what_this_is_is_told_at_the_root() -> None:
    async with deployment() as world:
        about = (await world.client.get("/")).json()
        version = (await world.client.get("/version")).json()
        links = [(await world.client.get(link)).status_code for link in about["links"].values()]

    assert about["version"] == version["version"]
    assert set(links) == {200}
