"""Streamed completions: each token is counted when its chunk comes, whatever the chunks are."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from benchmarks.peers.streams import complete

pytestmark = pytest.mark.processes


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def _event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


def _usage(tokens: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode() + b"\n\n"


@contextmanager
def _server(head: bytes, *pieces: bytes) -> Iterator[str]:
    """Answers one request with these chunks; what it was asked is not looked at."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(head)
            for piece in [*pieces, b""]:
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        served = threads.submit(serve)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        served.result()


def test_tokens_of_one_chunk_came_at_the_same_time_and_later_ones_later() -> None:
    with _server(HEAD, _event(" ab"), _event(" cd ef"), _usage(3), DONE) as url:
        [answer] = complete(url, "any", [[1, 2]], 3)

    assert answer.text == " ab cd ef"
    first, second, third = answer.arrivals
    assert 0 < first <= second == third


def test_an_event_may_be_cut_by_the_chunks() -> None:
    event = _event(" ab")
    with _server(HEAD, event[:9], event[9:] + _usage(1), DONE) as url:
        assert complete(url, "any", [[1]], 1)[0].text == " ab"


def test_a_count_that_is_not_the_servers_is_an_error() -> None:
    with (
        pytest.raises(ExceptionGroup) as raised,
        _server(HEAD, _event(" ab"), _usage(2), DONE) as url,
    ):
        complete(url, "any", [[1]], 2)
    assert "expected as many tokens as the usage says" in str(raised.value.exceptions[0])


def test_a_refusal_is_an_error_that_has_its_words() -> None:
    refusal = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\n"
    with pytest.raises(ExceptionGroup) as raised, _server(refusal, b"too long") as url:
        complete(url, "any", [[1]], 2)
    assert "400 Bad Request" in str(raised.value.exceptions[0])
