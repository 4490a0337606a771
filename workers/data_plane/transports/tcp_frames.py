"""Frames of the TCP transport: requests of 64 bytes; replies of 16 bytes, followed by the tensor.

    READ   the bytes at segment, offset           HELD and nbytes, then the bytes     or a refusal
    CHECK  is the generation still there?         HELD                                or a refusal

Each request carries the token, so a connection has no state. All fields are little-endian with fixed sizes.
No length has to be trusted: the reader knows the length of the tensor it requests.
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from workers.data_plane.transport import Locator

TOKEN_BYTES: Final = 32

_REQUEST: Final = struct.Struct(f"<4sIQQQ{TOKEN_BYTES}s")
_REPLY: Final = struct.Struct("<4sIQ")
REQUEST_BYTES: Final = _REQUEST.size
REPLY_BYTES: Final = _REPLY.size
READ: Final = b"DSr1"
CHECK: Final = b"DSc1"
_ANSWER: Final = b"DSa1"

WHOLE_BYTES: Final = 64 * 1024
"""The largest tensor that the server copies before it checks; the reader then needs no CHECK."""


class Status(IntEnum):
    """The result of a request; the connection is closed after any but HELD and STALE."""

    HELD = 0
    STALE = 1
    MALFORMED = 2
    WRONG_TOKEN = 3
    OUT_OF_RANGE = 4
    WRONG_LENGTH = 5
    BUSY = 6


class Request(NamedTuple):
    """One request of a reader."""

    verb: bytes
    locator: Locator
    token: bytes


class FrameError(ValueError):
    """The bytes are not a valid frame."""


def pack_request(request: Request) -> bytes:
    """Return the request's 64 bytes.

    Raises:
        FrameError: a number of the locator does not fit its place.
    """
    verb, at, token = request
    try:
        return _REQUEST.pack(verb, at.segment, at.offset, at.nbytes, at.generation, token)
    except struct.error as error:
        raise FrameError(f"{at} cannot be asked for: {error}") from error


def unpack_request(data: bytes | bytearray) -> Request:
    """Return the request in 64 bytes.

    Raises:
        FrameError: it begins with no verb.
    """
    verb, segment, offset, nbytes, generation, token = _REQUEST.unpack(data)
    if verb not in (READ, CHECK):
        raise FrameError(f"expected a request to begin with {READ!r} or {CHECK!r}, found {verb!r}")
    return Request(verb, Locator(segment, offset, nbytes, generation), token)


def pack_reply(status: Status, nbytes: int = 0) -> bytes:
    """Return the reply's 16 bytes; `nbytes` of the tensor follow."""
    return _REPLY.pack(_ANSWER, status, nbytes)


def unpack_reply(data: bytes | bytearray) -> tuple[Status, int]:
    """Return a reply's status, and the number of bytes that follow.

    Raises:
        FrameError: it is no reply of this protocol.
    """
    magic, status, nbytes = _REPLY.unpack(data)
    if magic != _ANSWER:
        raise FrameError(f"expected a reply to begin with {_ANSWER!r}, found {magic!r}")
    try:
        return Status(status), nbytes
    except ValueError as error:
        raise FrameError(f"status {status} is none of this protocol") from error
