"""Places for anchors: a file, a subject of another NATS server, an HTTP address."""

import asyncio
import base64
import http.client
import os
import re
import urllib.request
from pathlib import Path
from typing import IO, Final
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from conductor.sealing.anchoring import AnchorError
from configs.deployment import ConfigError
from shared.errors import DalSegnoError
from shared.log.nats import api
from shared.log.nats.connection import NatsConnection
from shared.log.nats.credentials import ANONYMOUS
from shared.log.nats.servers import servers_in
from shared.sealing import anchors
from shared.sealing.anchors import Anchor, AnchorFormatError

_TIMEOUT_S: Final = 5.0
_SUBJECT: Final = re.compile(r"/[^\s.*>]+(\.[^\s.*>]+)*")
_TAIL_BYTES: Final = 4096
"""More than the last two lines of a file of anchors have."""


class FilePlace:
    """A file that is only appended to, and synced."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        return str(self._path)

    async def put(self, anchor: Anchor) -> None:
        try:
            await asyncio.to_thread(self._append, anchors.encode(anchor))
        except OSError as error:
            raise AnchorError(error.strerror or str(error)) from error

    def last(self, stream: str, created_ns: int) -> Anchor | None:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                lines = file.read().splitlines(keepends=True)
            # The first line may have been cut by the seek.
            found = anchors.read(lines if size <= _TAIL_BYTES else lines[1:])
        except (OSError, AnchorFormatError):
            return None
        own = [one for one in found if (one.stream, one.created_ns) == (stream, created_ns)]
        return own[-1] if own else None

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line  # a crash cut the last line off
            os.write(handle, line)
            os.fsync(handle)
        finally:
            os.close(handle)


class NatsPlace:
    """A subject of a stream on another NATS server; `url` ends with the subject."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._subject = parts.path.strip("/")
        self._server = urlunsplit((parts.scheme, parts.netloc, "", "", ""))
        self._connection: NatsConnection | None = None

    @property
    def name(self) -> str:
        return f"{NatsConnection(self._server).address}/{self._subject}"

    async def put(self, anchor: Anchor) -> None:
        try:
            connection = await self._opened()
            ack = await connection.call_api(self._subject, anchors.encode(anchor), api.PubAck)
        except DalSegnoError as error:
            raise AnchorError(error.message) from error
        except msgspec.MsgspecError as error:
            raise AnchorError("expected the reply of a stream, found another one") from error
        if ack.error is not None or not ack.seq:
            raise AnchorError(ack.error.description if ack.error is not None else "no stream stores it")

    def last(self, stream: str, created_ns: int) -> Anchor | None:
        return None

    async def _opened(self) -> NatsConnection:
        if self._connection is None:
            connection = NatsConnection(self._server)
            try:
                await connection.open(credentials=ANONYMOUS, name="dalsegno-anchors", timeout_s=_TIMEOUT_S)
            except BaseException:
                await connection.close()
                raise
            self._connection = connection
        return self._connection


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would follow them with a GET, and the anchor would be lost."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:
        return None


class UrlPlace:
    """An HTTP address that accepts a POST with an anchor as JSON; user and password are sent in a header."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        account, _, host = parts.netloc.rpartition("@")
        self._url = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        self._head = {"Content-Type": "application/json"}
        if account:
            self._head["Authorization"] = f"Basic {base64.b64encode(unquote(account).encode()).decode()}"
        self._opener = urllib.request.build_opener(_NoRedirects)

    @property
    def name(self) -> str:
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.hostname}{parts.path}"

    async def put(self, anchor: Anchor) -> None:
        try:
            await asyncio.to_thread(self._post, anchors.encode(anchor))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AnchorError(str(error)) from error

    def last(self, stream: str, created_ns: int) -> Anchor | None:
        return None

    def _post(self, line: bytes) -> None:
        request = urllib.request.Request(  # noqa: S310 - http or https by its pattern
            self._url, data=line, headers=self._head, method="POST"
        )
        with self._opener.open(request, timeout=_TIMEOUT_S):
            pass


def place_of(url: str) -> NatsPlace | UrlPlace:
    """Return the place of a configured address.

    Raises:
        ConfigError: it is no address; the message does not quote it, because it may have a password.
    """
    try:
        parts = urlsplit(url)
        servers_in(urlunsplit((parts.scheme, parts.netloc, "", "", "")))
    except ValueError:
        raise ConfigError("sealing.anchors: expected an address with a host and a number as port") from None
    if parts.scheme in {"http", "https"}:
        return UrlPlace(url)
    if _SUBJECT.fullmatch(parts.path) is None:
        raise ConfigError(
            "sealing.anchors: expected one subject at the end of a NATS address, as in host/subject"
        )
    return NatsPlace(url)
