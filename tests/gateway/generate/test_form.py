"""The form that M*'s SDK sends: the SDK must work unmodified, so these tests send its exact requests.

The bodies are byte for byte those of `requests`: URL-encoded without files, multipart with them, every value
a string, `model_kwargs` as JSON. The SDK sends `Accept: */*`, reads lines, and knows errors by their status.
"""

import json
from base64 import b64decode
from typing import Any

import pytest

from shared.events import RequestSubmitted
from tests.gateway.world import beat, deployment

BOUNDARY = "5c02a4a0f1b94d3b9c5b2a6b0b7c1d2e"
_HEADERS = {"accept": "*/*", "accept-encoding": "gzip, deflate", "connection": "keep-alive"}
_FORM = {**_HEADERS, "content-type": "application/x-www-form-urlencoded"}
_MULTIPART = {**_HEADERS, "content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def multipart(fields: dict[str, str], files: dict[str, bytes]) -> bytes:
    """A multipart body: fields without a content type, then each file with only its name."""
    parts = [
        f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()
        for name, value in fields.items()
    ]
    parts += [
        f'Content-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode() + data
        for name, data in files.items()
    ]
    return b"".join(b"--%s\r\n%s\r\n" % (BOUNDARY.encode(), part) for part in parts) + (
        b"--%s--\r\n" % BOUNDARY.encode()
    )


async def test_health_says_healthy_where_a_request_would_be_served() -> None:
    async with deployment() as world:
        before = (await world.client.get("/health", headers=_HEADERS)).json()["status"]
        beat(world, "conductor", "c", "leading")
        beat(world, "worker", "0", "ready")
        after = await world.client.get("/health", headers=_HEADERS)

    assert (before, after.status_code, after.json()["status"]) == ("loading", 200, "healthy")


async def test_a_whole_answer_is_a_document_by_modality() -> None:
    body = (
        b"output_modalities=text&streaming=false&text=one+two%3F&input_modalities=text&request_id=mine"
        b"&model_kwargs=%7B%22temperature%22%3A+0.7%2C+%22max_output_tokens%22%3A+256%7D"
    )
    async with deployment() as world:
        response = await world.client.post("/generate", content=body, headers=_FORM)
        [event] = world.events("request")

    document = response.json()
    assert (response.status_code, document["request_id"]) == (200, "mine")
    [entry] = document["outputs"]["text"]
    assert b64decode(entry["data"]) == b"one two?"
    assert isinstance(event, RequestSubmitted)
    assert (event.params.temperature, event.params.max_tokens) == (0.7, 256)


async def test_a_stream_is_lines_of_a_modality_base64_and_metadata() -> None:
    body = b"output_modalities=text&streaming=true&text=gr%C3%B6%C3%9Fer+als"
    async with deployment() as world:
        response = await world.client.post("/generate", content=body, headers=_FORM)

    assert response.headers["content-type"] == "application/x-ndjson"
    told: list[dict[str, Any]] = [json.loads(line) for line in response.text.split("\n") if line.strip()]
    assert {line["modality"] for line in told} == {"text"}
    assert all(isinstance(line["metadata"], dict) for line in told)
    assert b"".join(b64decode(line["data"]) for line in told).decode() == "größer als"


async def test_a_chat_with_a_file_is_a_form_of_parts_and_a_text_model_says_that_it_takes_none() -> None:
    fields = {"output_modalities": "text,audio", "streaming": "false", "text": "hi", "model_kwargs": "{}"}
    for told, param in ((fields | {"output_modalities": "text"}, "files[0]"), (fields, "output_modalities")):
        files = {"cat.png": b"\x89PNG"} if param == "files[0]" else {}
        async with deployment() as world:
            response = await world.client.post(
                "/generate", content=multipart(told, files), headers=_MULTIPART
            )
            assert not world.events("request")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert response.json()["error"]["code"] == "unsupported_modality"


async def test_parts_without_a_file_are_the_same_request() -> None:
    fields = {"output_modalities": "text", "streaming": "false", "text": "one two"}
    async with deployment() as world:
        response = await world.client.post("/generate", content=multipart(fields, {}), headers=_MULTIPART)

    assert b64decode(response.json()["outputs"]["text"][0]["data"]) == b"one two"


@pytest.mark.parametrize(
    ("body", "is_draining", "status"),
    [
        (b"output_modalities=text&streaming=true", False, 400),
        (b"text=hi&streaming=true&model_kwargs=%7B", False, 400),
        (b"text=hi&streaming=true", True, 503),
    ],
)
async def test_what_cannot_be_answered_has_an_error_status_also_for_a_stream(
    body: bytes, is_draining: bool, status: int
) -> None:
    async with deployment() as world:
        world.gateway.is_draining = is_draining
        response = await world.client.post("/generate", content=body, headers=_FORM)

    assert response.status_code == status


@pytest.mark.slow
async def test_a_field_may_be_as_large_as_this_deployment_takes_a_body() -> None:
    body = multipart({"text": "x" * (33 << 20)}, {})
    async with deployment(max_body_bytes=64 << 20) as world:
        response = await world.client.post("/generate", content=body, headers=_MULTIPART)

    assert response.json()["error"]["code"] == "payload_too_large"  # the log's error
