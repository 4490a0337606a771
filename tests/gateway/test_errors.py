import asyncio
import re
from typing import Any

import httpx
import pytest

from gateway.errors import InvalidParamError, of_exception, of_failure
from gateway.requests import submission
from shared.errors import CapacityError, ClientError, DalSegnoError, WorkerError
from shared.events import Failure
from shared.log.port import LogRegressedError, LogUnavailableError, PayloadTooLargeError
from tests.gateway.world import CHAT, MESSAGES, deployment


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error in a response, checked against OpenAI's schema."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


@pytest.mark.parametrize(
    ("error", "status", "code", "type_"),
    [
        (ClientError("x"), 400, "invalid_request", "invalid_request_error"),
        (InvalidParamError("top_p", "x"), 400, "invalid_value", "invalid_request_error"),
        (PayloadTooLargeError("x"), 413, "payload_too_large", "invalid_request_error"),
        (CapacityError("x"), 503, "overloaded", "service_unavailable_error"),
        (CapacityError("x", status=429), 429, "overloaded", "rate_limit_error"),
        (LogUnavailableError("x"), 503, "log_unavailable", "service_unavailable_error"),
        (LogRegressedError("x"), 503, "log_regressed", "service_unavailable_error"),
        (WorkerError("x"), 500, "worker_failed", "server_error"),
        (DalSegnoError("x"), 500, "internal_error", "server_error"),
        (ZeroDivisionError("secret"), 500, "internal_error", "server_error"),
    ],
)
def test_the_table_from_errors_to_http(error: Exception, status: int, code: str, type_: str) -> None:
    found = of_exception(error)

    assert (found.status, found.code, found.body["error"]["type"]) == (status, code, type_)
    assert "secret" not in found.message
    assert ("retry-after" in found.headers) == (status in (429, 503))


@pytest.mark.parametrize(("status", "expected"), [(400, 400), (503, 503), (200, 500), (-1, 500), (9999, 500)])
def test_a_failure_with_an_impossible_status_is_our_own(status: int, expected: int) -> None:
    assert of_failure(Failure(code="x", message="y", status=status)).status == expected


async def test_an_unknown_route_and_a_wrong_method_have_openais_schema() -> None:
    async with deployment() as world:
        missing = await world.client.get("/v1/nothing")
        wrong = await world.client.get("/generate")
        shared_path = await world.client.put("/v1/requests/x")

    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert shared_path.headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/generate/", "did you mean /generate?"),
        ("/models", "did you mean /v1/models?"),
        ("/v2/messages/list", "GET /openapi.json lists all routes"),
        ("/docs", "GET /openapi.json lists all routes"),
        ("//", "GET /openapi.json lists all routes"),
        ("/" + "x" * 60_000, "GET /openapi.json lists all routes"),
    ],
)
async def test_an_unknown_route_says_the_nearest_or_where_all_are(path: str, hint: str) -> None:
    async with deployment() as world:
        response = await world.client.post(f"http://127.0.0.1{path}", json={})

    assert response.status_code == 404
    assert error_of(response)["message"] == f"there is no route POST {path}; {hint}"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "gpt-4", "messages": MESSAGES}),
        ("/v1/completions", {"model": "gpt-4", "prompt": "x"}),
        ("/generate", {"model": "gpt-4", "text": "x"}),
    ],
)
async def test_an_unknown_model_is_404(path: str, body: dict[str, object]) -> None:
    async with deployment() as world:
        response = await world.client.post(path, json=body)
        listed = await world.client.get("/v1/models/gpt-4")

    for found in (response, listed):
        assert found.status_code == 404
        assert (error_of(found)["code"], error_of(found)["param"]) == ("model_not_found", "model")


PATHS = ["/v1/chat/completions", "/v1/completions", "/generate"]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"nonsense", b"[]", b"null", b'"text"', b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe",
        b'{"a": NaN}',
    ],
)  # fmt: skip
async def test_what_is_no_json_object_is_400(path: str, content: bytes) -> None:
    async with deployment() as world:
        kind = {"content-type": "application/json"}
        response = await world.client.post(path, content=content, headers=kind)

    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"
    assert ("the body is empty" in error_of(response)["message"]) == (not content)


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (rb'{"role": "user", "content": "\ud800"}', 400),
        (rb'{"role": "user", "content": "\ud83c\udfbc"}', 200),
        (b'{"role": "user", "content": "\xed\xa0\x80"}', 400),
        (b'{"role": "user", "content": "x", "weight": 1' + b"0" * 40 + b"}", 400),
        (b'{"role": "user", "content": "x", "a": ' + b"[" * 40 + b"]" * 40 + b"}", 400),
    ],
)
async def test_what_cannot_be_on_the_log_is_400(message: bytes, status: int) -> None:
    content = b'{"model": "demo", "messages": [' + message + b"]}"
    async with deployment() as world:
        response = await world.client.post("/v1/chat/completions", content=content)

    assert response.status_code == status
    if status == 400:
        assert error_of(response)["type"] == "invalid_request_error"


async def test_a_form_with_half_a_surrogate_harms_nobody() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="text"\r\n\r\n\\ud800\r\n--b--\r\n'
    kind = {"content-type": "multipart/form-data; boundary=b; charset=unicode_escape"}
    async with deployment() as world:
        response = await world.client.post("/generate", content=part, headers=kind)

    assert response.status_code in (200, 400)  # the charset is ignored, or the text refused: never a 500


@pytest.mark.parametrize("content", [b"", b"nonsense", b"--b\r\nbroken", b"--b--\r\n"])
async def test_a_malformed_form_is_400(content: bytes) -> None:
    async with deployment() as world:
        kind = {"content-type": "multipart/form-data; boundary=b"}
        response = await world.client.post("/generate", content=content, headers=kind)
        no_boundary = await world.client.post(
            "/generate", content=content, headers={"content-type": "multipart/form-data"}
        )

    assert response.status_code == 400
    assert no_boundary.status_code == 400
    error_of(response)
    error_of(no_boundary)


async def test_a_body_over_the_limit_is_413_whether_its_length_is_told_or_not() -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    async with deployment(max_body_bytes=1000) as world:
        announced = await world.client.post("/v1/chat/completions", content=b"x" * 1001)
        chunked = await world.client.post("/v1/chat/completions", content=pieces())
        form = await world.client.post("/generate", data={"text": "x" * 2000})
        below = await world.client.post("/generate", data={"text": "x" * 500})

    for response in (announced, chunked, form):
        assert response.status_code == 413
        assert error_of(response)["code"] == "body_too_large"
    assert below.status_code == 200


async def test_a_request_too_large_for_the_log_is_413() -> None:
    async with deployment() as world:
        world.server.max_payload = 1000
        response = await world.client.post("/generate", json={"text": "x" * 2000})

    assert response.status_code == 413
    assert error_of(response)["code"] == "payload_too_large"


async def test_without_a_log_it_is_503_with_retry_after() -> None:
    async with deployment() as world:
        world.server.stop()
        response = await world.client.post("/v1/chat/completions", json=CHAT)

    assert response.status_code == 503
    assert error_of(response)["code"] == "log_unavailable"
    assert int(response.headers["retry-after"]) > 0


async def test_a_log_that_never_acks_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "ACCEPT_S", 0.02)
    async with deployment() as world:
        world.server.stall()
        response = await world.client.post("/v1/chat/completions", json=CHAT)

    assert response.status_code == 503
    assert error_of(response)["code"] == "log_unavailable"


async def test_before_any_worker_was_ready_it_is_503() -> None:
    async with deployment(worker_joined=False) as world:
        response = await world.client.post("/v1/chat/completions", json=CHAT)

    assert response.status_code == 503
    assert error_of(response)["code"] == "not_ready"
    assert int(response.headers["retry-after"]) > 0


async def test_a_bug_is_500_and_shows_nothing_of_itself() -> None:
    async with deployment() as world:

        async def broken(asked: object) -> None:
            raise RuntimeError("the secret inside")

        world.gateway.submit = broken  # type: ignore[assignment, method-assign]
        response = await world.client.post("/v1/chat/completions", json=CHAT)

    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert not re.search("secret|Traceback|RuntimeError", response.text)


@pytest.mark.parametrize("is_stored", [True, False])
async def test_losing_the_log_for_good_ends_a_waiting_request_with_503(is_stored: bool) -> None:
    async with deployment(performing=False) as world:
        if not is_stored:
            world.server.stall()
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(world.client.post("/v1/chat/completions", json=CHAT))
            if is_stored:
                await world.stored("request")
            else:
                await world.until(lambda: world.gateway.in_flight.count == 1)
            world.server.recreate()
            await world.regressed.wait()
        later = await world.client.post("/v1/chat/completions", json=CHAT)

    for response in (asking.result(), later):
        assert response.status_code == 503
        assert error_of(response)["code"] in ("log_unavailable", "log_regressed")


def test_a_failure_names_the_parameter_that_a_worker_found_wrong() -> None:
    assert of_failure(Failure(code="invalid_value", message="width: ...", param="width")).param == "width"
    assert of_failure(Failure(code="internal_error", message="y")).param is None
