"""httptools' HTTP parser, made to ignore offers of a protocol upgrade.

Java's HTTP client and `curl --http2` offer HTTP/2 with their first request (`Upgrade: h2c`), and expect an
HTTP/1.1 answer from a server without HTTP/2 (RFC 9110, 7.8). httptools stops at the end of such a head
instead, and takes the rest for another protocol: a body would be lost, and read as the next request.

So a second parser reads the rest. It is first given the framing headers, and so stands at the body's
beginning.

An offer of WebSocket is passed on where the gateway takes them.
"""

from typing import Final, Protocol

import httptools

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})


class ParserCallbacks(Protocol):
    """The receiver of the parser's callbacks."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class UpgradeIgnoringParser:
    """A parser with httptools' interface, which calls `callbacks`.

    With `takes_websockets`, it stops after a GET that offers a WebSocket, as httptools does.
    """

    def __init__(self, callbacks: ParserCallbacks, *, takes_websockets: bool = False) -> None:
        self._callbacks = callbacks
        self._takes_websockets = takes_websockets
        self._is_websocket = False
        self._framing: list[tuple[bytes, bytes]] = []
        self._is_after_head = False
        self._offers_upgrade = False
        self._parser = self._new()

    def feed_data(self, data: bytes) -> None:
        """Parse received bytes.

        Raises:
            httptools.HttpParserError: they are not HTTP.
        """
        rest = data
        while True:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as stopped:
                if self._is_websocket:
                    raise
                rest = rest[stopped.args[0] :]
                self._continue_after_head()
            else:
                return

    # ---- called by uvicorn, after the head of a request ---------------------------------------------
    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return self._is_websocket

    # ---- called by httptools ------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        if not self._is_after_head:
            self._framing = []
            self._callbacks.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_after_head:
            self._callbacks.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_after_head:
            if name.lower() in _FRAMING:
                self._framing.append((name, value))
            elif name.lower() == b"upgrade" and self._takes_websockets:
                self._is_websocket = value.strip().lower() == b"websocket"
            self._callbacks.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_after_head:
            self._is_after_head = True
            self._offers_upgrade = self._parser.should_upgrade()
            is_get = self._parser.get_method() == b"GET" and not self._framing
            self._is_websocket = self._is_websocket and self._offers_upgrade and is_get
            self._callbacks.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._callbacks.on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return  # httptools calls this after every head with an upgrade
        self._is_after_head = False
        self._callbacks.on_message_complete()

    def _continue_after_head(self) -> None:
        self._offers_upgrade = False
        self._parser = self._new()
        fields = b"".join(b"%s: %s\r\n" % field for field in self._framing)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + fields + b"\r\n")

    def _new(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
        return parser
