"""What goes over a connection: requests of 64 bytes, replies of 16 bytes and the tensor behind them.

    READ   the bytes at segment, offset           HELD and nbytes, then the bytes     or a refusal
    CHECK  whether the generation is still there  HELD                                or a refusal

Each request carries the token, so a connection has no state. Little-endian, fixed sizes, no lengths to trust:
a reader knows how long the tensor is that it asks for.
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
"""Up to so many bytes are copied by the server before it checks, and need no CHECK of the reader's."""


class Status(IntEnum):
    """What a request came to; with each but HELD and STALE the connection is closed."""

    HELD = 0
    STALE = 1
    MALFORMED = 2
    WRONG_TOKEN = 3
    OUT_OF_RANGE = 4
    WRONG_LENGTH = 5
    BUSY = 6


class Request(NamedTuple):
    """One question of a reader's."""

    verb: bytes
    locator: Locator
    token: bytes


class FrameError(ValueError):
    """Bytes that are no frame of ours."""


def pack_request(request: Request) -> bytes:
    """The request's 64 bytes.

    Raises:
        FrameError: a number of the locator does not fit its place.
    """
    verb, at, token = request
    try:
        return _REQUEST.pack(verb, at.segment, at.offset, at.nbytes, at.generation, token)
    except struct.error as error:
        raise FrameError(f"{at} cannot be asked for: {error}") from error


def unpack_request(data: bytes | bytearray) -> Request:
    """The request in 64 bytes.

    Raises:
        FrameError: it begins with no verb.
    """
    verb, segment, offset, nbytes, generation, token = _REQUEST.unpack(data)
    if verb not in (READ, CHECK):
        raise FrameError(f"expected a request to begin with {READ!r} or {CHECK!r}, found {verb!r}")
    return Request(verb, Locator(segment, offset, nbytes, generation), token)


def pack_reply(status: Status, nbytes: int = 0) -> bytes:
    """The reply's 16 bytes; `nbytes` of the tensor follow."""
    return _REPLY.pack(_ANSWER, status, nbytes)


def unpack_reply(data: bytes | bytearray) -> tuple[Status, int]:
    """A reply's status, and how many bytes follow.

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
