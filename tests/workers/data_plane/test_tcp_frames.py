"""The bytes between a reader and an owner."""

import pytest

from workers.data_plane.transport import Locator
from workers.data_plane.transports import tcp_frames as frames
from workers.data_plane.transports.tcp_frames import FrameError, Request, Status

TOKEN = bytes(range(32))
MOST = 2**64 - 1


@pytest.mark.parametrize("verb", [frames.READ, frames.CHECK])
def test_a_request_says_what_it_said(verb: bytes) -> None:
    request = Request(verb, Locator(3, 4096, MOST, MOST), TOKEN)
    packed = frames.pack_request(request)

    assert len(packed) == frames.REQUEST_BYTES == 64
    assert frames.unpack_request(packed) == request


@pytest.mark.parametrize("at", [Locator(0, -1, 1, 1), Locator(0, 1, MOST + 1, 1), Locator(2**32, 1, 1, 1)])
def test_what_has_no_place_in_a_request_is_not_asked(at: Locator) -> None:
    with pytest.raises(FrameError, match="cannot be asked for"):
        frames.pack_request(Request(frames.READ, at, TOKEN))


def test_another_protocols_bytes_are_no_request() -> None:
    with pytest.raises(FrameError, match="GET "):
        frames.unpack_request(b"GET / HTTP/1.1\r\n".ljust(64))


@pytest.mark.parametrize("status", Status)
def test_a_reply_says_what_it_said(status: Status) -> None:
    packed = frames.pack_reply(status, 7)

    assert len(packed) == frames.REPLY_BYTES == 16
    assert frames.unpack_reply(packed) == (status, 7)


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad", b"DSa1\xff\xff\xff\xff".ljust(16, b"\0")])
def test_other_bytes_are_no_reply(data: bytes) -> None:
    with pytest.raises(FrameError):
        frames.unpack_reply(data)
