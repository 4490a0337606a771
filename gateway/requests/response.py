"""The ASGI response that submits a request and streams its answer; ends with the client, or a time limit.

The response begins with the first bytes of its `AnswerFormat`. Until then a failure is a proper HTTP status,
for a stream too. One TaskGroup runs the answer and a listener for the disconnect. So a disconnect is noticed
while the client waits for its first token, with either version of ASGI.

An answer that ends early releases its requests before the error is sent: nothing is held for a client that
does not read.

The log enforces a request's time limit: the request fails there, for all its readers. The gateway's own clock
covers what the log does not: no conductor is alive, or this client attached to a request that may run for
longer than this client waits.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, runtime_checkable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.errors import HttpError
from gateway.meters.answers import FINISHED
from gateway.requests.choices import MergedChoices
from gateway.requests.generation_span import GenerationSpan
from gateway.requests.parsed_request import ParsedRequest
from gateway.requests.relay import Answered, Failed
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord
from gateway.requests.usage import UsageTally
from shared import faults
from shared.events import Failure, OutputChunk, Usage

_LOGGER: Final = logging.getLogger(__name__)
DISCONNECTED: Final = "client_disconnected"
"""The outcome of an answer whose client left."""
_LEFT: Final = "the client disconnected"
_UNAVAILABLE: Final = 503
LIMIT_GRACE_S: Final = 5.0
"""The time after its limit in which a request must fail on the log: longer than a conductor's takeover."""
DURABILITY: Final = "x-dalsegno-durability"
"""The response header with the durability of the answer's events."""


Body: TypeAlias = bytes | Iterator[bytes]
"""Bytes of an answer: at once, or in pieces; each is made when the client has read the one before."""
SMALL_BYTES: Final = 256 * 1024
"""Pieces up to this size together are sent at once, with their length."""


class AnswerFormat(Protocol):
    """The body of one route's answer. Choices are counted from 0; b"" means that nothing is sent yet."""

    media_type: str

    def chunk(self, choice: int, chunk: OutputChunk) -> Body: ...
    def ended(self, choice: int, finish_reason: str) -> bytes:
        """The bytes for the end of one choice."""
        ...

    def complete(self, usage: Usage) -> Body:
        """The bytes for the end of all choices."""
        ...

    def failed(self, error: HttpError) -> bytes | None:
        """The bytes that end a response that failed after its start; None if the format has none."""
        ...


@runtime_checkable
class ShowsAdvice(Protocol):
    """A format that sends advisory chunks: progress and previews. Others leave them out."""

    def advice(self, choice: int, chunk: OutputChunk) -> bytes:
        """The bytes of an advisory chunk, whose index is that of the chunk before it."""
        ...


@runtime_checkable
class PreparesEnd(Protocol):
    """A format that has something to do before its end, such as storing files."""

    async def prepare(self) -> None:
        """Called after the last choice has ended, before `complete`. Its error is that of the answer."""
        ...


@runtime_checkable
class HoldsFiles(Protocol):
    """A format that holds files, which are closed when the response has ended."""

    def close(self) -> None: ...


@runtime_checkable
class NotesStop(Protocol):
    """A format that tells which stop string, or which token, ended a choice."""

    def stopped_by(self, choice: int, stop: str | int | None) -> None:
        """Called before `ended`; None for neither."""
        ...


class DocumentFormat:
    """The base of formats that send one JSON document at the end of the answer, and nothing before."""

    media_type = "application/json"

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        return b""

    def ended(self, choice: int, finish_reason: str) -> bytes:
        return b""

    def failed(self, error: HttpError) -> bytes:
        raise AssertionError("a document is sent when it is complete")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGroup:
    """The requests on the log that one HTTP request submits.

    Attributes:
        route: the path's template, for the meter.
        requests: one for each choice (`gateway.requests.choices.split`).
        n: the number of choices for each prompt.
        is_stream: the client asks for the answer in pieces, as they are made.
        media_places: the places of the requests' media in the body, for errors.
        text_places: for each request, those of its texts; `query_places` are those of their queries.
        option_fields: the fields of the body that became options of another name, by the option.
    """

    route: str
    requests: Sequence[ParsedRequest]
    n: int = 1
    is_stream: bool = False
    media_places: Sequence[str] = ()
    text_places: Sequence[Sequence[str]] = ()
    query_places: Sequence[str] = ()
    option_fields: Mapping[str, str] = field(default_factory=dict)

    def error(self, choice: int, failure: Failure) -> HttpError:
        """The error for the failure of one request, in the words of the body."""
        texts = self.text_places[choice] if choice < len(self.text_places) else ()
        places = {"files": self.media_places, "texts": texts, "queries": self.query_places}
        return errors.of_failure(failure, places, self.option_fields)

    @property
    def request_id(self) -> str:
        return self.requests[0].request_id

    @property
    def limit_s(self) -> float | None:
        """The time limit; None is unlimited."""
        return self.requests[0].timeout_s

    @property
    def is_resumed(self) -> bool:
        """True if the client has a part of the answer."""
        return any(request.is_resumed for request in self.requests)


class ClientGoneError(Exception):
    """The client closed its connection."""


class AnswerResponse(Response):
    """The response to a request group; `make_format` makes its format once the group is recorded."""

    def __init__(
        self, gateway: Gateway, group: RequestGroup, make_format: Callable[[SubmissionRecord], AnswerFormat]
    ) -> None:
        self.background = None  # FastAPI reads it
        self.status_code = 200
        self._gateway = gateway
        self._group = group
        self._span = GenerationSpan.begin(group.route, group.requests, group.n, is_stream=group.is_stream)
        self._choices = MergedChoices(gateway, group.requests if self._span is None else self._span.requests)
        self._choices.milestones = None if self._span is None else self._span.milestones
        self._tally = UsageTally(group.n)
        self._observation = gateway.meter.begin(
            group.route, group.requests[0].model, is_resumed=group.is_resumed
        )
        self._make_format = make_format
        self._made_format: AnswerFormat | None = None
        self._scope: Scope = {}
        self._send: Send | None = None
        self._begun = False
        self._complete = False
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._send = scope, send
        with self._gateway.in_flight.answering():
            try:
                async with asyncio.TaskGroup() as tasks:
                    listener = tasks.create_task(self._listen(receive), name="disconnect")
                    await self._answer(tasks)
                    listener.cancel()
            except* ClientGoneError:
                _LOGGER.info("request %s: the client left", self._group.request_id)
            finally:
                self._close_format()
                self._note_end(DISCONNECTED)  # does nothing if the end is noted

    def _note_end(self, outcome: str, usage: Usage | None = None) -> None:
        """Note the end of the answer for metrics and traces: `finished`, or the code of its error."""
        self._observation.end(outcome, usage)
        if self._span is not None:
            error = None if outcome == FINISHED else outcome
            self._span.end(error, usage, self._observation.first_chunk_s)

    def _close_format(self) -> None:
        made: object = self._made_format
        if isinstance(made, HoldsFiles):
            made.close()

    async def _listen(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] != "http.disconnect":
                continue
            if self._complete:
                return  # servers send it after a complete response, too
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
            if error.status != _UNAVAILABLE or not self._group.requests[0].id_is_chosen:
                self._choices.release(f"its answer failed: {error.code}")
        finally:
            grace_s = self._group.requests[0].disconnect_grace_s
            self._choices.release(_LEFT if self._gone else "", grace_s=grace_s)
        if error is not None:
            self._note_end(error.code)
            if self._choices.recorded is not None:
                errors.note_published(self._scope)
            errors.note_error(self._scope, error)
            await self._fail(error)

    async def _relay(self, tasks: asyncio.TaskGroup) -> HttpError | None:
        """Send the answer; return the error that ended it, if any."""
        limit_s, now_s = self._group.limit_s, asyncio.get_running_loop().time
        begun_s = now_s()
        try:
            async with (
                asyncio.timeout(None if limit_s is None else limit_s + LIMIT_GRACE_S) as limit,
                aclosing(self._choices.items(tasks)) as items,
            ):
                if limit_s is not None:
                    self._choices.on_attached = lambda: limit.reschedule(begun_s + limit_s)
                async for choice, item in items:
                    if isinstance(item, Failed):
                        error = self._group.error(choice, item.failure)
                        if error.status != _UNAVAILABLE:  # which ends this gateway's answer alone
                            self._choices.release(f"another choice of the same answer failed: {error.code}")
                        return error
                    await self._write_item(choice, item)
        except TimeoutError:
            if not limit.expired():
                raise
            reason = f"it took longer than its {limit_s:g} s"
            self._choices.release(reason)
            return HttpError(
                status=504, code="deadline_exceeded", message=f"the request was given up: {reason}"
            )
        await self._end()
        return None

    @property
    def _format(self) -> AnswerFormat:
        """The format, made when the first item arrives."""
        if self._made_format is None:
            assert self._choices.recorded is not None, "a request has its answer once it is recorded"
            self._made_format = self._make_format(self._choices.recorded)
        return self._made_format

    async def _write_item(self, choice: int, item: OutputChunk | Answered) -> None:
        if isinstance(item, OutputChunk) and item.advisory:
            if isinstance(self._format, ShowsAdvice):
                await self._write(self._format.advice(choice, item))
        elif isinstance(item, OutputChunk):
            self._observation.chunk(len(item.token_ids), choice)
            if self._span is not None:
                self._span.chunk(choice, item)
            await self._write(self._format.chunk(choice, item))
            faults.reach("gateway.chunk.relayed")
        else:
            self._tally.add(choice, item.usage)
            if self._span is not None:
                self._span.choice_ended(choice, item.finish_reason)
            if isinstance(self._format, NotesStop):
                self._format.stopped_by(choice, item.stop)
            await self._write(self._format.ended(choice, item.finish_reason))

    async def _end(self) -> None:
        if isinstance(self._format, PreparesEnd):
            await self._format.prepare()
        usage = self._tally.usage
        self._note_end(FINISHED, usage)
        faults.reach("gateway.end.relaying")
        await self._write(self._format.complete(usage), last=True)
        faults.reach("gateway.end.relayed")

    async def _fail(self, error: HttpError) -> None:
        if self._begun:
            ending = self._format.failed(error)
            if ending is not None:
                await self._write(ending, last=True)
            # Otherwise the server closes the connection, so that no client takes a part for the whole.
            return
        body = error.json(self._scope["path"])
        headers = error.headers | {"content-length": str(len(body))}
        await self._begin(error.status, "application/json", headers)
        await self._put(body, last=True)

    async def _write(self, body: Body, *, last: bool = False) -> None:
        """Send a part of the answer; its pieces leave in larger blocks, each when there is room.

        Between two pieces the other answers go on: a piece may take a millisecond to make.
        """
        if isinstance(body, bytes):
            await self._write_bytes(body, last=last)
            return
        block = bytearray()
        for piece in body:
            block += piece
            if len(block) > SMALL_BYTES:
                await self._write_bytes(bytes(block))
                block.clear()
            else:
                await asyncio.sleep(0)
        await self._write_bytes(bytes(block), last=last)

    async def _write_bytes(self, data: bytes, *, last: bool = False) -> None:
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
            "x-request-id": self._group.request_id,
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
        except OSError as error:  # servers of ASGI 2.4 raise it in addition to `http.disconnect`
            self._gone = True
            raise ClientGoneError from error
