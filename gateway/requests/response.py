"""An answer becomes an HTTP response; a client that leaves cancels, and so does a limit that is over.

The response begins with the first bytes its `Format` has to say: until then a failure is a proper status,
also for a stream. One TaskGroup holds the answer and our own listener for the disconnect, so that a client
is missed while it waits for its first token, and whichever ASGI version the server speaks.

Whatever ends an answer early lets go of its requests before the client is told: nothing is kept for a
client that does not read.

A request's time limit is the log's to keep: it fails there, for all who read it. The gateway's own clock is
for what the log does not tell: nobody decides there, or this client takes up a request that may go on for
longer than this client waits.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.errors import HttpError
from gateway.meters.answers import FINISHED
from gateway.requests.choices import Choices, Tally
from gateway.requests.relay import Answered, Failed
from gateway.requests.service import Gateway
from gateway.requests.submission import Asked, Recorded
from shared import faults
from shared.events import OutputChunk, Usage

_LOGGER: Final = logging.getLogger(__name__)
DISCONNECTED: Final = "client_disconnected"
"""The outcome of an answer whose client left."""
_LEFT: Final = "the client disconnected"
_UNAVAILABLE: Final = 503
GRACE_S: Final = 5.0
"""How long after its time limit a request may take to fail on the log: longer than a succession there."""
DURABILITY: Final = "x-dalsegno-durability"
"""The header that says what the events of an answer survive."""


class Format(Protocol):
    """How one route writes one answer; b"" is nothing to say yet. Choices are counted from 0."""

    media_type: str

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes: ...
    def ended(self, choice: int, finish_reason: str) -> bytes:
        """A choice is complete."""
        ...

    def complete(self, usage: Usage) -> bytes:
        """All choices are."""
        ...

    def failed(self, error: HttpError) -> bytes | None:
        """The end of a response that has begun and cannot be completed; None: it cannot say so."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What an answer is to.

    Attributes:
        route: the path's template, for the meter.
        parts: the requests it is on the log, by choice (`gateway.requests.choices.split`).
        n: how many of them answer the same prompt.
    """

    route: str
    parts: Sequence[Asked]
    n: int = 1

    @property
    def request_id(self) -> str:
        return self.parts[0].request_id

    @property
    def limit_s(self) -> float | None:
        """How long it may take; None is for ever."""
        return self.parts[0].timeout_s

    @property
    def is_resumed(self) -> bool:
        """Whether the client has a part of the answer."""
        return any(part.is_resumed for part in self.parts)


class ClientGoneError(Exception):
    """The client closed its connection."""


class Answer(Response):
    """The response: it submits, relays, and lets go; `form` makes its format, once that is recorded."""

    def __init__(self, gateway: Gateway, question: Question, form: Callable[[Recorded], Format]) -> None:
        self.background = None  # FastAPI looks for it
        self.status_code = 200
        self._gateway = gateway
        self._question = question
        self._choices = Choices(gateway, question.parts)
        self._tally = Tally(question.n)
        self._observation = gateway.meter.begin(question.route, is_resumed=question.is_resumed)
        self._form = form
        self._made: Format | None = None
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
                    await self._answer(tasks)
                    listener.cancel()
            except* ClientGoneError:
                _LOGGER.info("request %s: the client left", self._question.request_id)
            finally:
                self._observation.end(DISCONNECTED)  # unless it has ended otherwise

    async def _listen(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] != "http.disconnect":
                continue
            if self._complete:
                return  # a server also says so once the response is complete
            self._gone = True
            raise ClientGoneError

    async def _answer(self, tasks: asyncio.TaskGroup) -> None:
        error: HttpError | None = None
        try:
            error = await self._relay(tasks)
        except ClientGoneError:
            raise
        except Exception as raised:  # noqa: BLE001 - the outermost loop of one request
            error = errors.of_exception(raised)
            if error.status != _UNAVAILABLE or not self._question.parts[0].id_is_chosen:
                self._choices.leave(f"its answer failed: {error.code}")
        finally:
            self._choices.leave(_LEFT if self._gone else "", linger_s=self._question.parts[0].linger_s)
        if error is not None:
            self._observation.end(error.code)
            await self._fail(error)

    async def _relay(self, tasks: asyncio.TaskGroup) -> HttpError | None:
        """Tell the answer; what it ended with, if it failed."""
        limit_s, now_s = self._question.limit_s, asyncio.get_running_loop().time
        begun_s = now_s()
        try:
            async with (
                asyncio.timeout(None if limit_s is None else limit_s + GRACE_S) as limit,
                aclosing(self._choices.items(tasks)) as items,
            ):
                if limit_s is not None:
                    self._choices.on_attached = lambda: limit.reschedule(begun_s + limit_s)
                async for choice, item in items:
                    if isinstance(item, Failed):
                        error = errors.of_failure(item.failure)
                        if error.status != _UNAVAILABLE:  # which is this gateway's end, and not theirs
                            self._choices.leave(f"another choice of the same answer failed: {error.code}")
                        return error
                    await self._write_item(choice, item)
        except TimeoutError:
            if not limit.expired():
                raise
            reason = f"it took longer than its {limit_s:g} s"
            self._choices.leave(reason)
            return HttpError(
                status=504, code="deadline_exceeded", message=f"the request was given up: {reason}"
            )
        await self._end()
        return None

    @property
    def _format(self) -> Format:
        """Made once there is something to write."""
        if self._made is None:
            assert self._choices.recorded is not None, "a request has its answer once it is recorded"
            self._made = self._form(self._choices.recorded)
        return self._made

    async def _write_item(self, choice: int, item: OutputChunk | Answered) -> None:
        if isinstance(item, OutputChunk):
            self._observation.chunk(len(item.token_ids), choice)
            await self._write(self._format.chunk(choice, item))
            faults.reach("gateway.chunk.relayed")
        else:
            self._tally.add(choice, item)
            await self._write(self._format.ended(choice, item.finish_reason))

    async def _end(self) -> None:
        usage = self._tally.usage
        self._observation.end(FINISHED, usage)
        faults.reach("gateway.end.relaying")
        await self._write(self._format.complete(usage), last=True)
        faults.reach("gateway.end.relayed")

    async def _fail(self, error: HttpError) -> None:
        if self._begun:
            last_words = self._format.failed(error)
            if last_words is not None:
                await self._write(last_words, last=True)
            # Else the server closes the connection: nobody takes what came for the whole.
            return
        await self._begin(
            error.status, "application/json", error.headers | {"content-length": str(len(error.json))}
        )
        await self._put(error.json, last=True)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        if not data and not last:
            return
        if not self._begun:
            length = {"content-length": str(len(data))} if last else {}
            await self._begin(200, self._format.media_type, length)
        await self._put(data, last=last)

    async def _begin(self, status: int, media_type: str, headers: dict[str, str]) -> None:
        self._begun = True
        if (recorded := self._choices.recorded) is not None:
            headers = {DURABILITY: recorded.durability, **headers}
        fields = {
            "content-type": media_type,
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            "x-request-id": self._question.request_id,
            **headers,
        }
        await self._to_server(
            {"type": "http.response.start", "status": status, "headers": errors.raw(fields)}
        )
        faults.reach("gateway.status.sent")

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
