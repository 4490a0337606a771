"""A connection to NATS: the one module that imports `nats`.

Protocol, TLS, credentials and reconnects are nats-py's. Our own is the way of a message between the socket
and whoever reads or writes the log: a plain call each way, with no queue, task or object per message
(nats-py's own: 9 us a message in, 35 us an acked message out; 2026-11).
"""

import asyncio
import logging
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar
from urllib.parse import ParseResult

import msgspec
import nats.errors
from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Srv
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol import parser

from shared.errors import DalSegnoError
from shared.log.nats.api import ConsumerInfo, MessageReply, StreamInfo
from shared.log.nats.credentials import NOBODY, Credentials
from shared.log.nats.name_lookup import Names
from shared.log.nats.servers import PORT, servers_in
from shared.log.port import LogDeniedError, LogUnavailableError
from shared.telemetry.log_fields import MAY_QUOTE

_LOGGER: Final = logging.getLogger(__name__)

Handler = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Called with subject, reply, data and header block of one message."""
_Reply = TypeVar("_Reply", StreamInfo, ConsumerInfo, MessageReply)

_REQUEST_TIMEOUT_S: Final = 2.0
_CONNECT_TIMEOUT_S: Final = 2
PING_EVERY_S: Final = 1.0
UNANSWERED_PINGS: Final = 2
"""After so many the server is given up for hung, 3 to 4 s after it last answered: sooner, one that is merely
busy would be left, by all its clients at once."""
_LAST_WORDS_S: Final = 1.0
"""How long a server may take what was written before the connection was closed."""
_REFUSED_WAIT_S: Final = 1.0
_RESETS: Final = 5
"""So often a greeting may end in a reset before that is believed: a server that refuses a token closes
right behind its word, and one time in sixty the reset (of nats-py's PING) overtakes it."""

# A subject may hold what Python calls white space and the server does not (a vertical tab). nats-py's own
# patterns wait for ever for the end of such a line, and with it every reader of a log that holds one.
parser.MSG_RE = re.compile(rb"\AMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)\r\n")
parser.HMSG_RE = re.compile(
    rb"\AHMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)[ \t]+(\d+)\r\n"
)


class _Transport(TcpTransport):  # type: ignore[misc]  # as of the client
    """nats-py's, but for how it finds the server."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        self._names = names

    def write(self, payload: bytes) -> None:
        """Write, unless the server has gone, of which its reader is only about to hear."""
        if not self._io_writer.transport.is_closing():
            super().write(payload)

    def abort(self) -> None:
        """Let go at once: a server that hangs takes nothing, and closing would wait for it."""
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    async def wait_closed(self) -> None:
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await super().wait_closed()
        except TimeoutError:
            self.abort()

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        trouble: OSError | None = None
        async with asyncio.timeout(connect_timeout):
            for address in await self._names.addresses(uri.hostname or "", uri.port or PORT):
                there = uri._replace(netloc=f"[{address}]:{uri.port or PORT}")
                try:
                    await super().connect(there, buffer_size, connect_timeout)
                except OSError as error:
                    trouble = trouble or error
                else:
                    return
        raise trouble or OSError(f"{uri.hostname} has no address")

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        # asyncio asks its protocol only of a connection that is TLS from its beginning, and warns at its end.
        self._io_writer.transport.get_protocol()._over_ssl = True  # noqa: SLF001


class _PlainLineError(nats.errors.Error):  # type: ignore[misc]  # as of the client
    """The server speaks no TLS, and we are told to."""


class Connection(Client):  # type: ignore[misc]  # nats-py's types are not read: it is not strict
    """nats-py's client, with a direct way in and out for the messages of the log.

    Of nats-py's insides it relies on its parser's patterns, `_connect_to_server`, `_connect_command`,
    `_process_info`, `_process_msg`, `_process_err`, `_process_op_err`, `_public_nkey`, `_server_info`,
    `_server_pool`, `_current_server`, `_transport` (and its `_io_writer`), `_sid` and `_subs`; the contract
    suite fails at once should a version change one of them.

    Of several servers any will do. One that dies is left for the next at once, and is itself tried last; each
    tells of the others of its cluster.
    """

    def __init__(
        self,
        url: str,
        *,
        connected: Callable[[], Awaitable[None]] | None = None,
        disconnected: Callable[[], Awaitable[None]] | None = None,
        denied: Callable[[LogDeniedError], None] | None = None,
    ) -> None:
        super().__init__()
        servers = servers_in(url)
        # Without the passwords they may hold: these are shown.
        self.address = ",".join(server.address for server in servers)
        self.where = f"NATS at {' or '.join(server.host_and_port for server in servers)}"
        self._urls = [server.url for server in servers]
        random.shuffle(self._urls)  # that not all clients go to the same one
        self._connected = connected
        self._disconnected = disconnected
        self._tell_denied = denied
        self._denied: LogDeniedError | None = None
        self._was_refused = False
        self._handlers: dict[int, Handler] = {}
        self._outgoing: list[bytes] = []
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._asked = 0
        self._reply_prefix = ""
        self._patient = False
        self._greeted = False
        self._trouble: Exception | None = None
        self._cancels = 0
        self._resets = 0
        self._failures = 0
        self._names = Names()
        self._credentials = NOBODY
        self._begun = False
        self._speaks_tls = any(server.scheme == "tls" for server in servers)

    @property
    def server_name(self) -> str:
        """What the server that it is connected to calls itself."""
        return str(self._server_info.get("server_name", ""))

    async def open(self, *, credentials: Credentials, name: str, timeout_s: float) -> None:
        """Connect; up to `timeout_s` again and again, later for ever.

        Raises:
            LogUnavailableError: nobody answers, or the server refuses the credentials, or is not the one
                that they are for.
            CredentialsError: they cannot be used.
        """
        tls = credentials.tls()
        self._begun = True
        self._credentials = credentials
        self._speaks_tls = self._speaks_tls or tls is not None
        self._public_nkey = credentials.public_key
        self._patient = timeout_s > 0
        self._cancels = _cancels()
        try:
            async with asyncio.timeout(timeout_s if self._patient else None):
                await self.connect(
                    self._urls,
                    token=credentials.token,
                    user=credentials.user,
                    password=credentials.password,
                    signature_cb=credentials.sign if credentials.seed is not None else None,
                    inbox_prefix=credentials.inbox_prefix,
                    tls=tls,
                    name=name,
                    error_cb=self._on_trouble,
                    reconnected_cb=self._on_connected,
                    disconnected_cb=self._on_disconnected,
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    reconnect_time_wait=0.05,
                    max_reconnect_attempts=-1,
                    dont_randomize=True,  # in turn: else the next one may be the one that died
                    ping_interval=PING_EVERY_S,
                    max_outstanding_pings=UNANSWERED_PINGS,
                    pending_size=0,  # nothing is buffered over a reconnect but by the outbox
                )
        except TimeoutError:
            raise self._unreachable(self._trouble) from None
        finally:
            self._obey()
        self._greeted = True
        self._reply_prefix = f"{self.new_inbox()}."
        self.attach(f"{self._reply_prefix}*", self._answered)

    async def close(self) -> None:
        self._flush_outgoing()
        self._drop_questions(self._unanswered("the connection was closed"))
        if self._begun:
            await super().close()

    async def _on_trouble(self, trouble: Exception) -> None:
        self._trouble = trouble
        is_refused = "authorization violation" in str(trouble).lower()
        if self._greeted:
            level = logging.WARNING if is_refused and not self._was_refused else logging.DEBUG
            _LOGGER.log(level, "%s: %s, having shown %s", self.where, trouble, self._credentials.said)
            self._was_refused = self._was_refused or is_refused
            if is_refused:  # nobody is faster let in again for knocking twenty times a second
                await asyncio.sleep(_REFUSED_WAIT_S)
            return
        self._obey()
        if is_refused:
            raise LogUnavailableError(
                f"{self.where} refused {self._credentials.said}: give what it was started with "
                "in DALSEGNO_NATS_TOKEN (or DALSEGNO_NATS_CREDENTIALS_FILE), or to a Client as token= (or "
                "credentials=)"
            ) from None
        if isinstance(trouble, _PlainLineError | ssl.SSLError):
            raise LogUnavailableError(
                f"{self.where} is not the server that is expected: {trouble}; is the address right, and is "
                "nats.ca_file (DALSEGNO_NATS_CA_FILE) of the authority that signed its certificate?"
            ) from None
        if isinstance(trouble, ConnectionResetError) and self._resets < _RESETS:
            self._resets += 1
            return
        self._failures += 1
        if not self._patient and self._failures >= len(self._server_pool):
            raise self._unreachable(trouble) from None

    def _obey(self) -> None:
        """End if told to: before Python 3.12 `asyncio.wait_for`, in which nats-py waits, may forget it."""
        if _cancels() > self._cancels:
            raise asyncio.CancelledError

    def _unreachable(self, trouble: Exception | None) -> LogUnavailableError:
        return LogUnavailableError(
            f"{self.where} cannot be reached ({trouble}): is it running, and is the address right?"
        )

    async def _on_connected(self) -> None:
        _LOGGER.info("%s: connected again", self.where)
        self._was_refused = False
        if self._connected is not None:
            await self._connected()

    async def _on_disconnected(self) -> None:
        self._drop_questions(self._unanswered("the connection was lost"))
        if self._disconnected is not None and self._greeted:
            await self._disconnected()

    def attach(self, subject: str, handler: Handler) -> int:
        """Subscribe; `handler` is called by the parser itself, so it must be quick. Survives reconnects.

        Not nats-py's `subscribe`: its SUB goes another way to the socket than our requests do, and
        can come after the request whose answer it is for.
        """
        if self.is_closed:
            raise LogUnavailableError(f"{self.where}: the connection is closed")
        self._sid += 1
        self._handlers[self._sid] = handler
        self._subs[self._sid] = Subscription(self, self._sid, subject)  # for nats-py to renew
        self._send(b"SUB %s %d\r\n" % (subject.encode(), self._sid))
        return int(self._sid)

    def detach(self, sid: int) -> None:
        self._handlers.pop(sid, None)
        self._subs.pop(sid, None)
        self._send(b"UNSUB %d\r\n" % sid)

    def send_publish(self, subject: str, reply: str, data: bytes, expected_last_seq: int | None) -> None:
        """Publish without waiting; dropped while there is no connection."""
        if expected_last_seq is None:
            self._send(b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), reply.encode(), len(data), data))
            return
        header = b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: %d\r\n\r\n" % expected_last_seq
        sizes = (len(header), len(header) + len(data))
        self._send(b"HPUB %s %s %d %d\r\n%s%s\r\n" % (subject.encode(), reply.encode(), *sizes, header, data))

    def send_empty(self, subject: str) -> None:
        self.send_publish(subject, "", b"", None)

    def _send(self, command: bytes) -> None:
        """All that is sent in one turn of the event loop is one write, and one system call."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush_outgoing)
        self._outgoing.append(command)

    def _flush_outgoing(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self.is_connected and self._transport is not None:
            self._transport.write(b"".join(outgoing))

    async def ask(
        self,
        subject: str,
        request: bytes,
        reply_type: type[_Reply],
        *,
        timeout_s: float = _REQUEST_TIMEOUT_S,
    ) -> _Reply:
        """One question to JetStream's API.

        Raises:
            LogUnavailableError: no JetStream there, no connection, or no answer in time.
            LogDeniedError: the server does not let us ask, or hear the answer.
        """
        if self._denied is not None:
            raise self._denied
        if not self.is_connected:
            raise LogUnavailableError(f"{self.where} is not connected")
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        self.send_publish(subject, f"{self._reply_prefix}{number}", request, None)
        try:
            async with asyncio.timeout(timeout_s):
                data = await answer
        except TimeoutError:
            raise LogUnavailableError(f"{self.where} did not answer {subject} in {timeout_s:g} s") from None
        finally:
            del self._questions[number]
        return msgspec.json.decode(data, type=reply_type)

    def _answered(self, subject: bytes, _reply: bytes, data: bytes, header: bytes | None) -> None:
        answer = self._questions.get(int(subject[len(self._reply_prefix) :]))
        if answer is None or answer.done():
            return
        if header is not None and not data:  # NATS' own answer: nobody serves that subject
            answer.set_exception(
                LogUnavailableError(
                    f"{self.where} has no JetStream: start it with `-js`, or a jetstream block in its config"
                )
            )
            return
        answer.set_result(data)

    def _unanswered(self, why: str) -> LogUnavailableError:
        return LogUnavailableError(f"{self.where} did not answer: {why}")

    def _drop_questions(self, error: DalSegnoError) -> None:
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(error)

    async def _connect_to_server(self, s: Srv) -> None:
        if not self._transport and s.uri.scheme in ("nats", "tls"):
            self._transport: _Transport | None = _Transport(self._names)
            s.last_attempt = time.monotonic()
            await self._transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])
        else:
            await super()._connect_to_server(s)

    def _connect_command(self) -> bytes:
        # Behind the server's greeting, and before anything of ours: nats-py goes on in the clear where a
        # server, or whoever stands in its place, greets without TLS.
        transport = self._transport
        assert transport is not None
        if self._speaks_tls and transport._io_writer.get_extra_info("ssl_object") is None:  # noqa: SLF001
            raise _PlainLineError("it does not speak TLS")
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
        except Exception:  # it would end nats-py's read loop without a word
            _LOGGER.exception("a message on %r was not understood", subject, extra=MAY_QUOTE)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Learn of the cluster's servers, and forget those that were learned of and are in it no more."""
        await super()._process_info(info, initial_connection)
        if told := info.get("connect_urls"):
            self._server_pool[:] = [
                one
                for one in self._server_pool
                if not one.discovered or one is self._current_server or one.uri.netloc in told
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
        """nats-py closes the connection for good on nearly every error line; we want it back."""
        if "permissions violation" in err_msg:
            self._deny(err_msg)
        else:
            _LOGGER.warning("%s says %s", self.where, err_msg)
            await self._process_op_err(nats.errors.Error(err_msg))

    def _deny(self, told: str) -> None:
        """The server took no notice of what we said, and will not: without this it would be said for ever."""
        what = told.strip("'")
        self._denied = LogDeniedError(
            f"{self.where} refuses {self._credentials.said}: {what}; give each role the credentials of its "
            "own, or grant it that subject"
        )
        self._drop_questions(self._denied)
        if self._tell_denied is not None:
            self._tell_denied(self._denied)


def _cancels() -> int:
    """How often the running task was told to end, and has not yet."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
