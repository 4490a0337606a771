"""Checks of every status against OpenAI's schema, and of the schema itself."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from configs.deployment import GatewaySettings
from configs.secrets import ApiKey
from gateway.openai.routes import NOT_SERVED
from gateway.requests import submission
from shared.events import Failure
from tests.gateway.openai_schema import check
from tests.gateway.openai_schema.extract import ROOTS, extract
from tests.gateway.world import CHAT, Performance, deployment, echo

COMPLETION = {"model": "demo", "prompt": "x"}
BODIES: dict[str, dict[str, Any]] = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


def counted(name: str) -> int:
    return check.COUNTS[name]


# ---- the schema ----------------------------------------------------------------------------------------


def test_the_extracted_schema_is_one_and_has_all_it_refers_to() -> None:
    Draft202012Validator.check_schema(check.SCHEMAS)
    for name, schema in check.AS_SERVED.items():
        Draft202012Validator.check_schema(schema)
        assert schema != check.SCHEMAS["$defs"][name.split(" as ")[0]]
    assert set(references(check.SCHEMAS)) <= {f"#/$defs/{name}" for name in check.SCHEMAS["$defs"]}
    assert "nullable" not in str(check.SCHEMAS)


def references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for value in schema.values():
            yield from references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from references(value)


def test_nullable_is_folded_wherever_it_stands() -> None:
    schemas: dict[str, Any] = {
        name: {"type": "object", "properties": {"nullable": {"type": "string", "nullable": True}}}
        for name in ROOTS
    }
    schemas["ListModelsResponse"] = {"$ref": "#/components/schemas/Model", "nullable": True}
    schemas["CreateChatCompletionStreamResponse"] = {"type": "object", "description": "words"}

    found = extract({"info": {"version": "1"}, "components": {"schemas": schemas}})["$defs"]

    assert found["Model"]["properties"] == {"nullable": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    assert found["ListModelsResponse"] == {"anyOf": [{"$ref": "#/$defs/Model"}, {"type": "null"}]}
    assert found["CreateChatCompletionStreamResponse"] == {"type": "object"}


GOOD: dict[str, Any] = {
    "id": "x", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [
        {
            "index": 0, "logprobs": None, "finish_reason": "stop",
            "message": {"role": "assistant", "content": "hi", "refusal": None},
        }
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"id": None}, {"object": "chat"}, {"created": 1.5}, {"choices": None}, {"usage": {}}, {"usage": None},
        {"choices": [{**GOOD["choices"][0], "finish_reason": None}]},
        {"choices": [{**GOOD["choices"][0], "message": {"role": "assistant", "content": "hi"}}]},
        {"choices": [{**GOOD["choices"][0], "logprobs": {"content": []}}]},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_found(change: dict[str, Any]) -> None:
    check.check(check.CHAT, GOOD)
    with pytest.raises(AssertionError, match="CreateChatCompletionResponse"):
        check.check(check.CHAT, GOOD | change)


async def test_a_response_is_checked_whoever_tests_it() -> None:
    async with deployment() as world:
        before = counted(check.CHAT), counted(check.MODELS), counted(check.MODEL)
        await world.client.post("/v1/chat/completions", json=CHAT)
        await world.client.get("/v1/models")
        await world.client.get("/v1/models/demo")

    assert (counted(check.CHAT), counted(check.MODELS), counted(check.MODEL)) == tuple(n + 1 for n in before)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 1}, {"echo": True}, {"max_tokens": 3}])
async def test_all_but_three_nulls_of_a_completions_stream_is_as_published(fields: dict[str, Any]) -> None:
    """The last events of a stream match the published schema; the others do except for `finish_reason`."""
    async with deployment() as world:
        body = COMPLETION | {"prompt": "a b"} | fields
        response = await world.client.post("/v1/completions", json=body | {"stream": True})

    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = httpx.Response(200, content=line.removeprefix("data: ")).json()
        for choice in event["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check.check(check.COMPLETION, event)


# ---- every status of an error --------------------------------------------------------------------------


def failing(code: str, status: int) -> Any:
    async def fail(performance: Performance) -> None:
        performance.fail(Failure(code=code, message="as the worker says", status=status))

    return fail


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (failing("context_length_exceeded", 400), 400, "context_length_exceeded"),
        (failing("payload_too_large", 413), 413, "payload_too_large"),
        (failing("no_chat_template", 422), 422, "no_chat_template"),
        (failing("chat_template_error", 422), 422, "chat_template_error"),
        (failing("overloaded", 429), 429, "overloaded"),
        (failing("worker_lost", 500), 500, "worker_lost"),
        (failing("log_unavailable", 503), 503, "log_unavailable"),
    ],
)
async def test_an_error_of_the_deployment_has_openais_schema(
    path: str, stream: bool, script: Any, status: int, code: str
) -> None:
    before = check.ERROR_STATUSES[status]
    async with deployment(script) as world:
        response = await world.client.post(path, json=BODIES[path] | {"stream": stream})

    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.headers["content-type"] == "application/json"
    assert check.ERROR_STATUSES[status] == before + 1


async def test_an_error_of_the_gateway_has_openais_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "ACCEPT_S", 0.01)
    keyed = GatewaySettings(max_body_bytes=2000, requests_per_minute=7)
    headers = {"authorization": "Bearer right"}
    found: list[int] = []
    async with deployment(settings=keyed, keys=[ApiKey(name="me", secret="right")]) as world:

        async def ask(body: dict[str, Any], **more: Any) -> httpx.Response:
            response = await world.client.post(
                "/v1/chat/completions", json=body, **{"headers": headers, **more}
            )
            found.append(response.status_code)
            return response

        await ask(CHAT, headers={})
        await ask(CHAT | {"top_p": 2})
        await ask(CHAT | {"model": "gpt-4"})
        await ask(CHAT | {"padding": "x" * 3000})
        await ask(CHAT | {"request_id": "mine"})
        await ask(CHAT | {"request_id": "mine", "seed": 1})
        world.server.set_max_messages(0)
        await ask(CHAT)
        world.server.set_max_messages(None)
        limited = await ask(CHAT)
        for _ in range(8):  # until the rate limit
            limited = limited if limited.status_code == 429 else await ask(CHAT)

    assert set(found) >= {400, 401, 404, 413, 409, 429, 503}
    assert limited.status_code == 429
    for status in set(found) - {200}:
        assert check.ERROR_STATUSES[status] > 0


# ---- routes that are not served ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOT_SERVED)
async def test_a_route_of_openais_that_is_not_served_says_what_is(name: str) -> None:
    async with deployment(echo) as world:
        found = [
            await world.client.post(f"/v1/{name}", json={"model": "demo", "input": "x"}),
            await world.client.get(f"/v1/{name}/some/thing"),
            await world.client.delete(f"/v1/{name}/it"),
        ]

    for response in found:
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (
            404, "not_served", "invalid_request_error"
        )  # fmt: skip
        assert "POST /v1/chat/completions" in error["message"]
