"""The HTTP transport: `POST /generate`, whose answer is read line by line as it arrives.

It always streams, also if only the whole answer is wanted: a gateway that dies costs only the unread rest.
With several gateways the next one is used then, and also if one is not reachable or refuses work before the
answer begins. Only connecting has a time limit: an answer may be slow to start, and the server's limits end
it. The operating system's keep-alives detect a peer that disappeared.
"""

import asyncio
import socket
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any, Final

import httpx
import msgspec

from dalsegno.client.answer import Chunk, End
from dalsegno.client.bearer_token import bearer
from dalsegno.client.errors import BrokenError, BusyError, UnreachableError, error_of, error_of_body
from dalsegno.client.request import ClientRequest
from dalsegno.client.transport import Health
from shared.errors import ClientError, DalSegnoError
from shared.events import TokenLogprobs, Usage
from shared.ids import parse_request_id

_CONNECT_S: Final = 10.0
_ASK_S: Final = 30.0
"""Time limit of calls other than requests (health, models, cancel), in seconds."""
_LINGER_S: Final = 30.0
"""Seconds for which a gateway keeps a request after its client disconnected."""
_KEEP_ALIVE: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]


class _ChunkMetadata(msgspec.Struct):
    """The metadata fields that the client reads itself; others are for the reader of the data."""

    index: int | None = None
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    echo: bool = False
    advisory: bool = False
    finish_reason: str | None = None
    usage: Usage | None = None
    status: int = 500
    code: str = "internal_error"
    message: str = ""


class _AnswerLine(msgspec.Struct):
    modality: str
    data: str
    metadata: dict[str, Any]


_OURS: Final = frozenset(field.name for field in msgspec.structs.fields(_ChunkMetadata))
_LINES: Final = msgspec.json.Decoder(_AnswerLine)


class HttpTransport:
    """The gateways of one deployment, any of which can be used, or a proxy in front of them."""

    def __init__(self, *urls: str, api_key: str | None = None) -> None:
        key = {} if api_key is None else {"authorization": bearer(api_key)}
        self._urls: Final = [url.rstrip("/") for url in urls]
        self._url = self._urls[0]
        self._cancels: set[asyncio.Task[None]] = set()
        self._http = httpx.AsyncClient(
            headers=key,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None), socket_options=_KEEP_ALIVE
            ),
        )

    async def items(self, request: ClientRequest, after: int) -> AsyncGenerator[Chunk | End, None]:
        for others in reversed(range(len(self._urls))):
            url, has_begun = self._url, False
            try:
                async with aclosing(self._items(url, request, after)) as items:
                    async for item in items:
                        has_begun = True
                        yield item
                return
            except (BrokenError, BusyError, UnreachableError) as error:
                self._switch_gateway(url, error)
                if has_begun or not others or not _refused_unstarted(error):
                    raise

    async def _items(self, url: str, request: ClientRequest, after: int) -> AsyncGenerator[Chunk | End, None]:
        headers = {"last-event-id": str(after)} if after >= 0 else {}
        ended = False
        try:
            async with self._http.stream(
                "POST", f"{url}/generate", headers=headers, **body_of(request)
            ) as response:
                if response.status_code != HTTPStatus.OK:
                    raise _refusal(response, await response.aread())
                async for line in _lines(response):
                    item = item_of(line)
                    ended = isinstance(item, End)
                    yield item
                    if ended:
                        return
        except httpx.HTTPError as error:
            raise _error_of(url, error) from error
        except UnicodeEncodeError as error:
            message = "the request has text that is not valid Unicode (an unpaired surrogate)"
            raise ClientError(message, code="invalid_unicode") from error
        except (GeneratorExit, asyncio.CancelledError):
            if not ended and not self._http.is_closed:
                self._cancel_later(request.request_id)
            raise
        raise BrokenError(f"{url} closed the connection before the end of the answer")

    def _switch_gateway(self, url: str, error: DalSegnoError) -> None:
        """Use the next gateway from now on, unless this one only limits its rate."""
        if self._url == url and error.status != HTTPStatus.TOO_MANY_REQUESTS:
            self._url = self._urls[(self._urls.index(url) + 1) % len(self._urls)]

    async def cancel(self, request_id: str) -> None:
        response = await self._ask("DELETE", f"/v1/requests/{parse_request_id(request_id)}")
        if not response.is_success:
            refusal = _refusal(response, response.content)
            if refusal.code != "request_ended":  # a cancel may always be too late, by the log's order
                raise refusal

    async def health(self) -> Health:
        response = await self._ask("GET", "/health/ready")
        found = _json_object(response)
        missing = found.get("missing", ())
        return Health(
            is_ready=response.status_code == HTTPStatus.OK,
            status=str(found.get("state", "")),
            missing=tuple(str(one) for one in missing) if isinstance(missing, list) else (),
            details=found,
        )

    async def models(self) -> list[str]:
        response = await self._ask("GET", "/v1/models")
        if not response.is_success:
            raise _refusal(response, response.content)
        return [str(model["id"]) for model in _json_object(response)["data"]]

    async def close(self) -> None:
        if self._cancels:
            await asyncio.wait(self._cancels)
        await self._http.aclose()

    def _cancel_later(self, request_id: str) -> None:
        """Cancel an abandoned request in the background."""

        async def parting() -> None:
            with suppress(DalSegnoError):  # the server is gone, or never had the request
                await self.cancel(request_id)

        task = asyncio.create_task(parting(), name=f"cancel {request_id}")
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _ask(self, method: str, path: str) -> httpx.Response:
        for others in reversed(range(len(self._urls))):
            url = self._url
            try:
                return await self._http.request(method, f"{url}{path}", timeout=_ASK_S)
            except httpx.HTTPError as error:
                trouble = _error_of(url, error)
                self._switch_gateway(url, trouble)
                if not others:
                    raise trouble from error
        raise AssertionError("there is at least one gateway")


def _refused_unstarted(error: DalSegnoError) -> bool:
    """True if a gateway did not start the request, so that another may.

    A gateway whose connection broke may have started it: the stream repeats the request under its id.
    """
    if isinstance(error, BrokenError):
        return False
    return isinstance(error, UnreachableError) or error.status == HTTPStatus.SERVICE_UNAVAILABLE


def _error_of(url: str, error: httpx.HTTPError) -> DalSegnoError:
    why = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return UnreachableError(f"no server answers at {url} ({why}): is it running?")
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        return ClientError(f"{url}: {why}")
    return BrokenError(f"the connection to {url} was lost ({why})")


def body_of(request: ClientRequest) -> dict[str, Any]:
    """Return httpx's arguments for the request's body: JSON, or a form of the same fields if it has files."""
    inputs = request.inputs
    fields: dict[str, Any] = {
        "text": inputs.text,
        "messages": inputs.messages,
        "token_ids": inputs.token_ids,
        "texts": inputs.texts,
        "queries": inputs.queries or None,
        "chat": None if inputs.chat else False,
        "input_modalities": ",".join(inputs.input_modalities),
        "output_modalities": ",".join(inputs.output_modalities) if request.chooses_outputs else None,
        "tensor_format": "raw",  # every chunk with its index, so that a hole is noticed
        "model_kwargs": request.model_kwargs or None,
        "model": request.model,
        "request_id": request.request_id,
        "timeout_s": request.timeout_s,
        "linger_s": _LINGER_S,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if not request.files:
        return {"json": given}
    form = {name: _plain(value) for name, value in given.items()}
    return {"data": form, "files": [("files", (file.name, file.data)) for file in request.files]}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield a body's lines; unlike httpx's, they end at newlines only."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
    # `rest` is an incomplete line: the connection broke within it.


def item_of(line: bytes) -> Chunk | End:
    """Decode one line of the answer.

    Raises:
        DalSegnoError: the line reports an error.
    """
    try:
        found = _LINES.decode(line)
        known = msgspec.convert(found.metadata, _ChunkMetadata)
        data = b64decode(found.data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ClientError(
            f"not a Dal Segno server: a line of the answer is {line[:200]!r} ({error})"
        ) from error
    if found.modality == "error":
        raise error_of(known.status, known.code, known.message)
    if known.finish_reason is not None and known.usage is not None:
        return End(finish_reason=known.finish_reason, usage=known.usage)
    is_text = found.modality == "text"
    return Chunk(
        index=known.index or 0,
        modality=found.modality,
        text=data.decode() if is_text else "",
        data=b"" if is_text else data,
        token_ids=known.token_ids,
        logprobs=known.logprobs,
        is_echo=known.echo,
        advisory=known.advisory,
        metadata={name: value for name, value in found.metadata.items() if name not in _OURS},
    )


def _refusal(response: httpx.Response, body: bytes) -> DalSegnoError:
    return error_of_body(response.status_code, body, response.headers.get("retry-after"))


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise _refusal(response, response.content) from error
