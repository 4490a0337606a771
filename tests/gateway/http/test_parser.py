"""A request that offers an upgrade is parsed like any other, in whatever pieces it arrives."""

from typing import Any

import httptools
import pytest

from gateway.http.parser import UpgradeIgnoringParser

LENGTH = b"Content-Length: 5\r\n\r\nhello"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nTrailer: t\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\n\r\n"
OFFERS = {
    "none": b"",
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "websocket": b"Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n",
}


class Seen:
    """The parser's callbacks: for each message its target, its body, and if it ended."""

    def __init__(self) -> None:
        self.messages: list[list[Any]] = []
        self.heads = 0

    def on_message_begin(self) -> None:
        self.messages.append([b"", b"", False])

    def on_url(self, url: bytes) -> None:
        self.messages[-1][0] += url

    def on_header(self, name: bytes, value: bytes) -> None:
        pass

    def on_headers_complete(self) -> None:
        self.heads += 1

    def on_body(self, body: bytes) -> None:
        assert not self.messages[-1][2]
        self.messages[-1][1] += body

    def on_message_complete(self) -> None:
        assert not self.messages[-1][2]
        self.messages[-1][2] = True


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("rest", [LENGTH, CHUNKED])
@pytest.mark.parametrize("offer", OFFERS)
def test_a_body_is_read_whatever_is_offered_with_it(offer: str, rest: bytes, size: int) -> None:
    seen = Seen()
    parser = UpgradeIgnoringParser(seen)
    data = (b"POST /first HTTP/1.1\r\n" + OFFERS[offer] + rest) * 2 + NEXT
    for start in range(0, len(data), size):
        parser.feed_data(data[start : start + size])

    assert seen.messages == [[b"/first", b"hello", True]] * 2 + [[b"/next", b"", True]]
    assert seen.heads == 3
    assert parser.get_method() == b"GET"


@pytest.mark.parametrize("method", [b"GET", b"CONNECT"])
def test_a_request_without_a_body_ends_with_its_head(method: bytes) -> None:
    seen = Seen()
    UpgradeIgnoringParser(seen).feed_data(method + b" /first HTTP/1.1\r\n" + OFFERS["h2c"] + b"\r\n" + NEXT)

    assert seen.messages == [[b"/first", b"", True], [b"/next", b"", True]]


def test_two_framings_are_no_http_with_an_offer_either() -> None:
    with pytest.raises(httptools.HttpParserError):
        UpgradeIgnoringParser(Seen()).feed_data(
            b"POST / HTTP/1.1\r\n"
            + OFFERS["h2c"]
            + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
