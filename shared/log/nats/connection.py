"""A connection to NATS servers, with a direct path for the log's messages.

nats-py implements the protocol, TLS, credentials and reconnects (`shared.log.nats.nats_py_internals`). This
class adds the path of a message between the socket and the log's reader or writer: one plain call each way,
without a queue, task or object per message (nats-py: 9 us per message in, 35 us per acked message out;
2026-11).
"""

import asyncio
import logging
import random
import ssl
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from shared.errors import DalSegnoError
from shared.log.nats.api import (
    ConsumerInfo,
    ConsumerPage,
    MessageReply,
    PubAck,
    PurgeReply,
    StreamInfo,
)
from shared.log.nats.credentials import ANONYMOUS, Credentials
from shared.log.nats.nats_py_internals import Handler, HookedClient, PlaintextServerError
from shared.log.nats.servers import servers_in
from shared.log.port import LogDeniedError, LogUnavailableError

_LOGGER: Final = logging.getLogger(__name__)

_Reply = TypeVar("_Reply", StreamInfo, ConsumerInfo, ConsumerPage, MessageReply, PubAck, PurgeReply)

_REQUEST_TIMEOUT_S: Final = 2.0
_CONNECT_TIMEOUT_S: Final = 2
PING_EVERY_S: Final = 1.0
UNANSWERED_PINGS: Final = 2
"""After this many unanswered pings a server counts as hanging, 3 to 4 s after its last reply. With a lower
limit all clients at once would leave a server that is only busy."""
_REFUSED_WAIT_S: Final = 1.0
_MAX_RESETS: Final = 5
"""The number of connection resets during the handshake that are retried. A server that refuses a token
closes the connection right after its error line; in one case of sixty the reset (by nats-py's PING) arrives
before the line."""


class NatsConnection(HookedClient):
    """A connection to one of several NATS servers, for one role.

    Any of the servers will do. If one dies, the connection moves to the next at once and tries the dead one
    last. Each server announces the others of its cluster.

    Attributes:
        address: the servers' URLs without passwords.
        label: the servers, for messages.
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
        self.address = ",".join(server.address for server in servers)
        self.label = f"NATS at {' or '.join(server.host_and_port for server in servers)}"
        self.requires_tls = any(server.scheme == "tls" for server in servers)
        self._urls = [server.url for server in servers]
        random.shuffle(self._urls)  # spreads the clients over the servers
        self._connected = connected
        self._disconnected = disconnected
        self._on_denied = denied
        self._denied: LogDeniedError | None = None
        self._was_refused = False
        self._outgoing: list[bytes] = []
        self._pending_replies: dict[int, asyncio.Future[bytes]] = {}
        self._request_count = 0
        self._reply_prefix = ""
        self._retries_at_open = False
        self._is_open = False
        self._last_error: Exception | None = None
        self._cancels = 0
        self._resets = 0
        self._failures = 0
        self._credentials = ANONYMOUS
        self._was_started = False

    async def open(self, *, credentials: Credentials, name: str, timeout_s: float) -> None:
        """Connect, with retries for up to `timeout_s`. A connection lost later is retried without end.

        Raises:
            LogUnavailableError: no server answers, or the server refuses the credentials, or its certificate
                is not the expected one.
            CredentialsError: the credentials cannot be used.
        """
        tls = credentials.tls()
        self._was_started = True
        self._credentials = credentials
        self.requires_tls = self.requires_tls or tls is not None
        self.show_nkey(credentials.public_key)
        self._retries_at_open = timeout_s > 0
        self._cancels = _cancel_count()
        try:
            async with asyncio.timeout(timeout_s if self._retries_at_open else None):
                await self.connect(
                    self._urls,
                    token=credentials.token,
                    user=credentials.user,
                    password=credentials.password,
                    signature_cb=credentials.sign if credentials.seed is not None else None,
                    inbox_prefix=credentials.inbox_prefix,
                    tls=tls,
                    name=name,
                    error_cb=self._on_error,
                    reconnected_cb=self._on_connected,
                    disconnected_cb=self._on_disconnected,
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    reconnect_time_wait=0.05,
                    max_reconnect_attempts=-1,
                    dont_randomize=True,  # in turn: a random choice may pick the server that just died
                    ping_interval=PING_EVERY_S,
                    max_outstanding_pings=UNANSWERED_PINGS,
                    pending_size=0,  # only the outbox keeps events across a reconnect
                )
        except TimeoutError:
            raise self._unreachable(self._last_error) from None
        finally:
            self._raise_if_cancelled()
        self._is_open = True
        self._reply_prefix = f"{self.new_inbox()}."
        self.attach(f"{self._reply_prefix}*", self._on_reply)

    async def close(self) -> None:
        self._flush_outgoing()
        self._fail_pending(self._no_reply("the connection was closed"))
        if self._was_started:
            await super().close()

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        is_refused = "authorization violation" in str(error).lower()
        if self._is_open:
            level = logging.WARNING if is_refused and not self._was_refused else logging.DEBUG
            _LOGGER.log(level, "%s: %s (shown: %s)", self.label, error, self._credentials.description)
            self._was_refused = self._was_refused or is_refused
            if is_refused:  # twenty attempts a second would not help
                await asyncio.sleep(_REFUSED_WAIT_S)
            return
        self._raise_if_cancelled()
        if is_refused:
            raise LogUnavailableError(
                f"{self.label} refused {self._credentials.description}: give the credentials that it was "
                "started with in DALSEGNO_NATS_TOKEN (or DALSEGNO_NATS_CREDENTIALS_FILE), or to a Client as "
                "token= (or credentials=)"
            ) from None
        if isinstance(error, PlaintextServerError | ssl.SSLError):
            raise LogUnavailableError(
                f"{self.label} is not the expected server: {error}; is the address right, and is "
                "nats.ca_file (DALSEGNO_NATS_CA_FILE) the authority that signed its certificate?"
            ) from None
        if isinstance(error, ConnectionResetError) and self._resets < _MAX_RESETS:
            self._resets += 1
            return
        self._failures += 1
        if not self._retries_at_open and self._failures >= self.server_count:
            raise self._unreachable(error) from None

    def _raise_if_cancelled(self) -> None:
        """Raise a cancellation that was lost: before Python 3.12 `asyncio.wait_for` may swallow it."""
        if _cancel_count() > self._cancels:
            raise asyncio.CancelledError

    def _unreachable(self, error: Exception | None) -> LogUnavailableError:
        return LogUnavailableError(
            f"{self.label} cannot be reached ({error}): is it running, and is the address right?"
        )

    async def _on_connected(self) -> None:
        _LOGGER.info("%s: connected again", self.label)
        self._was_refused = False
        if self._connected is not None:
            await self._connected()

    async def _on_disconnected(self) -> None:
        self._fail_pending(self._no_reply("the connection was lost"))
        if self._disconnected is not None and self._is_open:
            await self._disconnected()

    # ---- messages ----------------------------------------------------------------------------------
    def attach(self, subject: str, handler: Handler) -> int:
        """Subscribe, also across reconnects. The parser calls `handler`, so it must return quickly.

        nats-py's `subscribe` sends its SUB by another path than our requests, so the SUB may arrive after the
        request whose reply it is for.
        """
        if self.is_closed:
            raise LogUnavailableError(f"{self.label}: the connection is closed")
        sid = self.register(subject, handler)
        self._send(b"SUB %s %d\r\n" % (subject.encode(), sid))
        return sid

    def detach(self, sid: int) -> None:
        """End a subscription."""
        self.unregister(sid)
        self._send(b"UNSUB %d\r\n" % sid)

    def send_publish(self, subject: str, reply: str, data: bytes, expected_last_seq: int | None) -> None:
        """Publish without waiting. The message is dropped while there is no connection."""
        if expected_last_seq is None:
            self._send(b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), reply.encode(), len(data), data))
            return
        header = b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: %d\r\n\r\n" % expected_last_seq
        sizes = (len(header), len(header) + len(data))
        self._send(b"HPUB %s %s %d %d\r\n%s%s\r\n" % (subject.encode(), reply.encode(), *sizes, header, data))

    def send_empty(self, subject: str) -> None:
        self.send_publish(subject, "", b"", None)

    def _send(self, command: bytes) -> None:
        """Collect all commands of one turn of the event loop into one write and one system call."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush_outgoing)
        self._outgoing.append(command)

    def _flush_outgoing(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        self.write_now(b"".join(outgoing))

    async def call_api(
        self,
        subject: str,
        request: bytes,
        reply_type: type[_Reply],
        *,
        timeout_s: float = _REQUEST_TIMEOUT_S,
    ) -> _Reply:
        """Send a request to JetStream's API and return the reply.

        Raises:
            LogUnavailableError: the server has no JetStream, or is not connected, or does not reply in time.
            LogDeniedError: the credentials do not permit the request or its reply.
        """
        if self._denied is not None:
            raise self._denied
        if not self.is_connected:
            raise LogUnavailableError(f"{self.label} is not connected")
        self._request_count += 1
        number = self._request_count
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending_replies[number] = reply
        self.send_publish(subject, f"{self._reply_prefix}{number}", request, None)
        try:
            async with asyncio.timeout(timeout_s):
                data = await reply
        except TimeoutError:
            raise LogUnavailableError(f"{self.label} did not answer {subject} in {timeout_s:g} s") from None
        finally:
            del self._pending_replies[number]
        return msgspec.json.decode(data, type=reply_type)

    def _on_reply(self, subject: bytes, _reply: bytes, data: bytes, header: bytes | None) -> None:
        reply = self._pending_replies.get(int(subject[len(self._reply_prefix) :]))
        if reply is None or reply.done():
            return
        if header is not None and not data:  # NATS' own reply: the subject has no responder
            reply.set_exception(
                LogUnavailableError(
                    f"{self.label} has no JetStream: start it with `-js`, or a jetstream block in its config"
                )
            )
            return
        reply.set_result(data)

    def _no_reply(self, reason: str) -> LogUnavailableError:
        return LogUnavailableError(f"{self.label} did not answer: {reason}")

    def _fail_pending(self, error: DalSegnoError) -> None:
        for reply in self._pending_replies.values():
            if not reply.done():
                reply.set_exception(error)

    async def on_server_error(self, message: str) -> None:
        """Reconnect after an error line; nats-py would close the connection for good."""
        if "permissions violation" in message:
            self._deny(message)
        else:
            _LOGGER.warning("%s reports %s", self.label, message)
            await self.leave_server(message)

    def _deny(self, message: str) -> None:
        """Fail: the server ignores what it denies, so retries would never end."""
        self._denied = LogDeniedError(
            f"{self.label} denies {self._credentials.description}: {message.strip(chr(39))}; give each role "
            "its own credentials, or grant it that subject"
        )
        self._fail_pending(self._denied)
        if self._on_denied is not None:
            self._on_denied(self._denied)


def _cancel_count() -> int:
    """Return the number of pending cancellations of the running task."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
