"""The one module that imports nats-py, with every private name of nats-py that this project relies on.

`HookedClient` is nats-py's client with a public interface to the parts that nats-py keeps private. Nothing
outside this module uses those names. `PRIVATE_NAMES` lists each with its reason; a test checks that nats-py
still has them, and the log's contract suite checks their behaviour.
"""

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import ParseResult

from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Srv
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError
from nats.protocol import parser

from shared.log.nats.name_lookup import NameLookup
from shared.log.nats.servers import PORT
from shared.telemetry.log_fields import MAY_QUOTE

_LOGGER: Final = logging.getLogger(__name__)

Handler = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Called with the subject, reply subject, data and header block of one message."""

CHECKED_WITH: Final = "2.16.0"
"""The version of nats-py that these names were last checked with."""
PRIVATE_NAMES: Final[Mapping[str, str]] = {
    "parser.MSG_RE": "replaced: its white space includes bytes that are legal in a subject",
    "parser.HMSG_RE": "replaced, as MSG_RE",
    "Client._connect_to_server": "overridden: connects through our transport, which looks names up itself",
    "Client._connect_command": "overridden: the last point before credentials are sent, where TLS is checked",
    "Client._process_info": "overridden: removes servers that left the cluster",
    "Client._process_msg": "overridden: calls a handler without a queue or a task",
    "Client._process_err": "overridden: nats-py closes the connection on nearly every error line",
    "Client._process_op_err": "overridden: leaves a server without waiting for it; called to reconnect",
    "Client._public_nkey": "set: nats-py sets it only if it reads the seed from a file",
    "Client._server_info": "read: the server's name",
    "Client._server_pool": "read and reordered: the order in which servers are tried",
    "Client._current_server": "read: the server of this connection",
    "Client._transport": "set and written to: nats-py has no write without a buffer",
    "Client._sid": "incremented: subscriptions of ours and of nats-py share the numbers",
    "Client._subs": "changed: nats-py renews these subscriptions after a reconnect",
    "TcpTransport._io_writer": "read: the socket's state, its TLS, and its abort",
}

# A subject may contain characters that are white space to Python but not to the server, such as a vertical
# tab. With nats-py's patterns the parser waits for ever for the end of such a line, and so does every reader
# of a log with such a record.
parser.MSG_RE = re.compile(rb"\AMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)\r\n")
parser.HMSG_RE = re.compile(
    rb"\AHMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)[ \t]+(\d+)\r\n"
)
_CLOSE_S: Final = 1.0
"""The time that a server has to accept the last writes when the connection closes."""


class PlaintextServerError(NatsError):  # type: ignore[misc]  # nats-py has no types for mypy
    """The server does not use TLS although the configuration requires it."""


class _Transport(TcpTransport):  # type: ignore[misc]  # nats-py has no types for mypy
    """nats-py's TCP transport, with another name lookup and without waits for a dead server."""

    def __init__(self, names: NameLookup) -> None:
        super().__init__()
        self._names = names

    def write(self, payload: bytes) -> None:
        """Write, unless the connection is lost and nats-py's read loop has not noticed it yet."""
        if not self._io_writer.transport.is_closing():
            super().write(payload)

    def abort(self) -> None:
        """Close at once: a hanging server accepts no data, so a normal close would wait for it."""
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    @property
    def uses_tls(self) -> bool:
        return self._io_writer.get_extra_info("ssl_object") is not None

    async def wait_closed(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await super().wait_closed()
        except TimeoutError:
            self.abort()

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        first_error: OSError | None = None
        async with asyncio.timeout(connect_timeout):
            for address in await self._names.addresses(uri.hostname or "", uri.port or PORT):
                resolved = uri._replace(netloc=f"[{address}]:{uri.port or PORT}")
                try:
                    await super().connect(resolved, buffer_size, connect_timeout)
                except OSError as error:
                    first_error = first_error or error
                else:
                    return
        raise first_error or OSError(f"{uri.hostname} has no address")

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        # asyncio sets this only if a connection starts with TLS; without it, asyncio warns at the close.
        self._io_writer.transport.get_protocol()._over_ssl = True  # noqa: SLF001


class HookedClient(Client):  # type: ignore[misc]  # nats-py has no types for mypy
    """nats-py's client, with a direct path for messages and with control over its reconnects.

    Attributes:
        requires_tls: refuse a server without TLS before any credentials are sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requires_tls = False
        self._handlers: dict[int, Handler] = {}
        self._names = NameLookup()

    # ---- for subclasses ----------------------------------------------------------------------------
    @property
    def server_name(self) -> str:
        """The name of the server that this client is connected to."""
        return str(self._server_info.get("server_name", ""))

    @property
    def server_count(self) -> int:
        """The number of servers that are tried."""
        return len(self._server_pool)

    def show_nkey(self, public_key: str | None) -> None:
        """Authenticate with this nkey."""
        self._public_nkey = public_key

    def register(self, subject: str, handler: Handler) -> int:
        """Call `handler` for messages of a new subscription; return its number. The caller sends the SUB."""
        self._sid += 1
        self._handlers[self._sid] = handler
        self._subs[self._sid] = Subscription(self, self._sid, subject)  # nats-py renews it at a reconnect
        return int(self._sid)

    def unregister(self, sid: int) -> None:
        self._handlers.pop(sid, None)
        self._subs.pop(sid, None)

    def write_now(self, data: bytes) -> None:
        """Write to the socket; the data is dropped while there is no connection."""
        if self.is_connected and self._transport is not None:
            self._transport.write(data)

    async def leave_server(self, reason: str) -> None:
        """Drop the connection and connect to the next server."""
        await self._process_op_err(NatsError(reason))

    async def on_server_error(self, message: str) -> None:
        """Handle an error line of the server."""
        raise NotImplementedError

    # ---- overrides of nats-py ----------------------------------------------------------------------
    async def _connect_to_server(self, s: Srv) -> None:
        if not self._transport and s.uri.scheme in ("nats", "tls"):
            self._transport: _Transport | None = _Transport(self._names)
            s.last_attempt = time.monotonic()
            await self._transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])
        else:
            await super()._connect_to_server(s)

    def _connect_command(self) -> bytes:
        # nats-py continues in plain text if a server, or an attacker in its place, offers no TLS.
        transport = self._transport
        assert transport is not None
        if self.requires_tls and not transport.uses_tls:
            raise PlaintextServerError("it does not speak TLS")
        return bytes(super()._connect_command())

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        handler = self._handlers.get(sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            handler(subject, reply, data, headers)
        except Exception:  # it would end nats-py's read loop silently
            _LOGGER.exception("cannot process a message on %r", subject, extra=MAY_QUOTE)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Learn the cluster's servers, and remove discovered servers that have left it."""
        await super()._process_info(info, initial_connection)
        if known := info.get("connect_urls"):
            self._server_pool[:] = [
                server
                for server in self._server_pool
                if not server.discovered or server is self._current_server or server.uri.netloc in known
            ]

    async def _process_op_err(self, e: Exception) -> None:
        """Leave this server for the next one, without waiting for it."""
        if not self.is_closed and not self.is_reconnecting:
            if self._current_server in self._server_pool:
                self._server_pool.remove(self._current_server)
                self._server_pool.append(self._current_server)
            if isinstance(self._transport, _Transport):
                self._transport.abort()
        await super()._process_op_err(e)

    async def _process_err(self, err_msg: str) -> None:
        await self.on_server_error(err_msg)
