"""Heads of requests that the parser accepts and the server refuses, on real sockets."""

import json
import logging

import pytest

from gateway.http.request_head import origin_form
from tests.gateway.http.test_framing import DOCUMENT, exchange
from tests.gateway.world import deployment

pytestmark = pytest.mark.processes
POST = b"POST /v1/chat/completions HTTP/1.1\r\nConnection: close\r\n"
BODY = b"Content-Length: %d\r\n\r\n%s" % (len(DOCUMENT), DOCUMENT)
HOST = b"Host: localhost\r\n"
CHUNK = b"\r\n2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        pytest.param(POST + BODY, 400, "invalid_http", id="no Host"),
        pytest.param(POST + HOST + HOST + BODY, 400, "invalid_http", id="two Hosts"),
        pytest.param(POST + b"Host: localhost/x\r\n" + BODY, 400, "invalid_http", id="a path in Host"),
        pytest.param(POST + b"Host: a@localhost\r\n" + BODY, 400, "invalid_http", id="a user in Host"),
        pytest.param(POST + b"Host: evil.example\r\n" + BODY, 403, "host_not_allowed", id="another Host"),
        pytest.param(
            b"GET http://evil.example/v1/models HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n",
            403, "host_not_allowed", id="another host in the target",
        ),
        pytest.param(
            POST + HOST + b"Transfer-Encoding: gzip, chunked\r\n" + CHUNK,
            501, "transfer_coding_not_supported", id="gzip, chunked",
        ),
        pytest.param(
            POST + HOST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n" + CHUNK,
            501, "transfer_coding_not_supported", id="gzip and chunked",
        ),
        pytest.param(
            POST + HOST + b"Transfer-Encoding: identity\r\n\r\n",
            501, "transfer_coding_not_supported", id="identity",
        ),
        pytest.param(
            POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n" + CHUNK,
            400, "invalid_http", id="chunks in HTTP/1.0",
        ),
        pytest.param(
            POST + HOST + b"Transfer-Encoding: chunked\r\n" + BODY, 400, "invalid_http", id="two lengths"
        ),
        pytest.param(POST + HOST + b"Content-Length: -1\r\n\r\n", 400, "invalid_http", id="negative length"),
        pytest.param(
            POST + HOST + b"Content-Length: 2\r\n" + BODY, 400, "invalid_http", id="Content-Length twice"
        ),
        pytest.param(POST + HOST + b"X: %s\r\n" % (b"x" * 70_000), 431, "headers_too_large", id="long"),
        pytest.param(
            POST.replace(b"1.1", b"2.0") + HOST + BODY, 505, "http_version_not_supported", id="HTTP/2"
        ),
        pytest.param(b"GET /\r\n\r\n", 505, "http_version_not_supported", id="HTTP/0.9"),
    ],
)  # fmt: skip
async def test_a_wrong_head_is_refused_by_name(
    request_bytes: bytes, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with deployment() as world:
            answer = await exchange(world, request_bytes)
            assert not world.events("request")

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["code"] == code
    [line] = [record for record in caplog.records if record.name == "gateway.middleware.access_log"]
    assert (line.__dict__["status"], line.__dict__["error"]) == (status, code)
    assert b"x-request-id: " + line.__dict__["request_id"].encode() in head


async def test_http_1_0_needs_no_host() -> None:
    async with deployment() as world:
        answer = await exchange(world, b"GET /v1/models HTTP/1.0\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("target", ["http://localhost/v1/models", "HTTP://127.0.0.1:1/v1/models?x=1"])
async def test_a_whole_url_is_read_as_its_path(target: str) -> None:
    request = f"GET {target} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".encode()
    async with deployment() as world:
        assert (await exchange(world, request)).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_url_without_a_path_is_the_root() -> None:
    assert origin_form(b"http://a:1?x=1") == (b"/?x=1", b"a:1")
    assert origin_form(b"/a?http://b") == (b"/a?http://b", None)
