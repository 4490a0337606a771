"""The content types of bodies, and the marks that they may begin with."""

import asyncio
import json
import shutil
import subprocess

import pytest

from tests.gateway.world import CHAT, deployment, listening

ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "demo", "prompt": "a"},
    "/v1/embeddings": {"model": "demo", "input": "a"},
    "/v1/audio/speech": {"model": "demo", "input": "a"},
    "/generate": {"text": "a", "streaming": False},
    "/warm": {"text": "a"},
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "TEXT/Plain; charset=application/json",
        "application/x-www-form-urlencoded",
        "application/xml",
    ],
)
async def test_a_form_capable_type_is_not_read_as_json(path: str, kind: str) -> None:
    async with deployment() as world:
        answer = await world.client.post(
            path, content=json.dumps(ROUTES[path]), headers={"content-type": kind}
        )
        assert not world.events("request")

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (415, "unsupported_media_type")
    assert "-H 'content-type: application/json'" in error["message"]


FORM = {"content-type": "application/x-www-form-urlencoded", "user-agent": "curl/8.5.0"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/warm"])
async def test_json_of_curl_is_read_without_a_header(path: str) -> None:
    async with deployment() as world:
        answer = await world.client.post(path, content=json.dumps(ROUTES[path]), headers=FORM)
        form = await world.client.post("/generate", content=b"text=a", headers=FORM)

    assert (answer.status_code, form.status_code) == (200, 200)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
@pytest.mark.parametrize(
    "headers",
    [
        {"user-agent": "Mozilla/5.0 curl/8"},
        {"user-agent": ""},
        {"content-type": "text/plain"},
        {"referer": "http://127.0.0.1/"},
        {"origin": "http://127.0.0.1"},
        {"sec-fetch-mode": "no-cors"},
        {"sec-ch-ua": "x"},
    ],
)
async def test_a_form_of_anything_that_may_be_a_browser_is_not_read_as_json(
    path: str, headers: dict[str, str]
) -> None:
    async with deployment() as world:
        answer = await world.client.post(path, content=json.dumps(ROUTES[path]), headers=FORM | headers)

    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
async def test_curl_needs_no_header() -> None:
    async with deployment() as world, listening(world) as url:
        process = await asyncio.create_subprocess_exec(
            "curl", "-s", f"{url}/v1/chat/completions", "-d", json.dumps(CHAT), stdout=subprocess.PIPE
        )
        printed, _ = await process.communicate()

    assert json.loads(printed)["object"] == "chat.completion"


@pytest.mark.parametrize("path", [path for path in ROUTES if path != "/generate"])
async def test_a_form_is_not_read_as_json(path: str) -> None:
    async with deployment() as world:
        answer = await world.client.post(path, files={"messages": b"[]"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/vnd.api+json",
        "application/octet-stream",
        None,
    ],
)
async def test_json_is_read(kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    async with deployment() as world:
        answer = await world.client.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers)

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [("content-type", "application/json"), ("content-type", "text/plain")],
        [("content-type", "application/json"), ("content-encoding", "gzip")],
    ],
)
async def test_two_types_and_a_compressed_body_are_refused(headers: list[tuple[str, str]]) -> None:
    async with deployment() as world:
        answer = await world.client.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers)

    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
async def test_a_byte_order_mark_is_left_out(path: str) -> None:
    async with deployment() as world:
        answer = await world.client.post(path, content=b"\xef\xbb\xbf" + json.dumps(ROUTES[path]).encode())

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "body",
    [b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"a": 1e999}', b"[" * 100_000, b'{"a":' * 5000],
)
async def test_what_is_no_json_is_refused(body: bytes) -> None:
    async with deployment() as world:
        answer = await world.client.post("/v1/chat/completions", content=body)

    assert answer.status_code == 400
