"""An answer becomes an HTTP response; a client that leaves cancels.

The response begins with the first bytes its `Format` has to say: until then a failure is a proper status,
also for a stream. One TaskGroup holds the answer and our own listener for the disconnect, so that a client
is missed while it waits for its first token, and whichever ASGI version the server speaks.
"""

import asyncio
import logging
from contextlib import aclosing
from typing import Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.errors import HttpError
from gateway.relay import Answered, Failed, Item
from gateway.service import Gateway
from gateway.submission import Asked, Claim
from shared.events import OutputChunk

_LOGGER: Final = logging.getLogger(__name__)


class Format(Protocol):
    """How one route writes one answer; b"" is nothing to say yet."""

    @property
    def media_type(self) -> str: ...
    def chunk(self, chunk: OutputChunk) -> bytes: ...
    def answered(self, end: Answered) -> bytes: ...
    def failed(self, error: HttpError) -> bytes:
        """The end of a response that has begun and cannot be completed."""
        ...


class ClientGoneError(Exception):
    """The client closed its connection."""


class Answer(Response):
    """The response: it submits, relays, and lets go."""

    def __init__(self, gateway: Gateway, asked: Asked, form: Format) -> None:
        self.background = None  # FastAPI looks for it
        self.status_code = 200
        self._gateway = gateway
        self._asked = asked
        self._format = form
        self._send: Send | None = None
        self._begun = False
        self._complete = False
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        with self._gateway.answering():
            try:
                async with asyncio.TaskGroup() as tasks:
                    listener = tasks.create_task(self._listen(receive), name="disconnect")
                    await self._answer()
                    listener.cancel()
            except* ClientGoneError:
                _LOGGER.info("request %s: the client left", self._asked.request_id)

    async def _listen(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] != "http.disconnect":
                continue
            if self._complete:
                return  # a server also says so once the response is complete
            self._gone = True
            raise ClientGoneError

    async def _answer(self) -> None:
        claim: Claim | None = None
        try:
            claim = await self._gateway.submit(self._asked)
            async with aclosing(claim.items()) as items:
                async for item in items:
                    await self._write_item(item)
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - the outermost loop of one request
            await self._fail(errors.of_exception(error))
        finally:
            if claim is not None:
                claim.leave(cancel=self._gone)

    async def _write_item(self, item: Item) -> None:
        match item:
            case OutputChunk():
                await self._write(self._format.chunk(item), last=False)
            case Answered():
                await self._write(self._format.answered(item), last=True)
            case Failed():
                await self._fail(errors.of_failure(item.failure))

    async def _fail(self, error: HttpError) -> None:
        if self._begun:
            await self._write(self._format.failed(error), last=True)
            return
        await self._begin(
            error.status, "application/json", error.headers | {"content-length": str(len(error.json))}
        )
        await self._put(error.json, last=True)

    async def _write(self, data: bytes, *, last: bool) -> None:
        if not data and not last:
            return
        if not self._begun:
            length = {"content-length": str(len(data))} if last else {}
            await self._begin(200, self._format.media_type, length)
        await self._put(data, last=last)

    async def _begin(self, status: int, media_type: str, headers: dict[str, str]) -> None:
        self._begun = True
        fields = {
            "content-type": media_type,
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            "x-request-id": self._asked.request_id,
            **headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        await self._to_server({"type": "http.response.start", "status": status, "headers": raw})

    async def _put(self, data: bytes, *, last: bool) -> None:
        self._complete = last
        await self._to_server({"type": "http.response.body", "body": data, "more_body": not last})

    async def _to_server(self, message: dict[str, object]) -> None:
        assert self._send is not None
        try:
            await self._send(message)
        except OSError as error:  # what servers of ASGI 2.4 raise instead of telling the listener
            self._gone = True
            raise ClientGoneError from error
