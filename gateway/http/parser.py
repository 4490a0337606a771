"""httptools' parser, for a server that grants no upgrades.

Java's own HTTP client and `curl --http2` offer HTTP/2 with their first request (`Upgrade: h2c`), whatever it
is, and expect to be answered in HTTP/1.1 by who does not speak it (RFC 9110, 7.8). httptools stops at the end
of such a head instead: the request is over for it, and what comes is another protocol. A body would be lost,
and read as the next request.

So the rest is read by another parser, which was told how the body is framed, and so stands at its beginning.
"""

from typing import Final, Protocol

import httptools

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})


class Events(Protocol):
    """Who is told what was read."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class Parser:
    """Tells `events` what it reads, as httptools does."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._framing: list[tuple[bytes, bytes]] = []
        self._is_behind_head = False
        self._offers_upgrade = False
        self._parser = self._new()

    def feed_data(self, data: bytes) -> None:
        """Take what came.

        Raises:
            httptools.HttpParserError: it is no HTTP.
        """
        rest = data
        while True:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as stopped:
                rest = rest[stopped.args[0] :]
                self._go_on_behind_head()
            else:
                return

    # ---- what uvicorn asks of the request whose head was read ---------------------------------------
    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return False

    # ---- called by httptools ------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        if not self._is_behind_head:
            self._framing = []
            self._events.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_behind_head:
            self._events.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_behind_head:
            if name.lower() in _FRAMING:
                self._framing.append((name, value))
            self._events.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_behind_head:
            self._is_behind_head = True
            self._offers_upgrade = self._parser.should_upgrade()
            self._events.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._events.on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return  # httptools says so of every head with an upgrade
        self._is_behind_head = False
        self._events.on_message_complete()

    def _go_on_behind_head(self) -> None:
        self._offers_upgrade = False
        self._parser = self._new()
        fields = b"".join(b"%s: %s\r\n" % field for field in self._framing)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + fields + b"\r\n")

    def _new(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        return parser
