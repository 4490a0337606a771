"""The content types of bodies, and the marks that they may begin with."""

import json

import pytest

from tests.gateway.world import CHAT, deployment

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


@pytest.mark.parametrize("path", [path for path in ROUTES if path != "/generate"])
async def test_a_form_is_not_read_as_json(path: str) -> None:
    async with deployment() as world:
        answer = await world.client.post(path, files={"messages": b"[]"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", None]
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
