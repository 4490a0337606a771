"""JSON on one line, for streams that a client reads line by line: server-sent events and NDJSON."""

from typing import Final

import msgspec

_SEPARATORS: Final = (
    (b"\xe2\x80\xa8", rb"\u2028"),
    (b"\xe2\x80\xa9", rb"\u2029"),
    (b"\xc2\x85", rb"\u0085"),
)
"""Unicode's line separators, at which some clients split (`str.splitlines`). JSON need not escape them."""


def json_line(body: object) -> bytes:
    """The JSON of `body` without any character that ends a line."""
    line = msgspec.json.encode(body)
    if line.isascii():
        return line
    for separator, escaped in _SEPARATORS:
        line = line.replace(separator, escaped)
    return line


def server_sent_event(body: object, position: object | None = None) -> bytes:
    """A server-sent event; `position` is its id."""
    head = b"" if position is None else b"id: %s\n" % str(position).encode()
    return head + b"data: " + json_line(body) + b"\n\n"
