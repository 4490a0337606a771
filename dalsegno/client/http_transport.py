"""Over HTTP: `POST /generate`, its answer read line by line as it comes.

Always as a stream, also where only the whole is wanted: a gateway that dies costs what was not read yet, and
no more. Of several gateways the next one is asked then; before anything came, also where one is not there or
takes nothing now. The connection has no deadline but for connecting: an answer may be long in coming, and the
server says when it gives up. The operating system's keep-alives notice a peer that is gone without a word.
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
"""RequestOptions long a question that is no request (health, models, cancel) may take."""
_LINGER_S: Final = 30.0
"""RequestOptions long a gateway is to keep a request whose client it lost; one that has enough says so."""
_KEEP_ALIVE: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]


class _ChunkMetadata(msgspec.Struct):
    """What the client itself reads of a chunk's metadata; the rest is for whoever reads the data."""

    index: int | None = None
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    echo: bool = False
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
    """The gateways of one deployment, of which any will do, or whatever stands before them."""

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

    async def items(self, question: ClientRequest, after: int) -> AsyncGenerator[Chunk | End, None]:
        for others in reversed(range(len(self._urls))):
            url, has_begun = self._url, False
            try:
                async with aclosing(self._items(url, question, after)) as items:
                    async for item in items:
                        has_begun = True
                        yield item
                return
            except (BrokenError, BusyError, UnreachableError) as error:
                self._switch_gateway(url, error)
                if has_begun or not others or not _refused_unstarted(error):
                    raise

    async def _items(
        self, url: str, question: ClientRequest, after: int
    ) -> AsyncGenerator[Chunk | End, None]:
        headers = {"last-event-id": str(after)} if after >= 0 else {}
        ended = False
        try:
            async with self._http.stream(
                "POST", f"{url}/generate", headers=headers, **body_of(question)
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
            message = "the request has text that is no Unicode (an unpaired surrogate)"
            raise ClientError(message, code="invalid_unicode") from error
        except (GeneratorExit, asyncio.CancelledError):
            if not ended and not self._http.is_closed:
                self._cancel_later(question.request_id)
            raise
        raise BrokenError(f"{url} closed the connection before the end of the answer")

    def _switch_gateway(self, url: str, error: DalSegnoError) -> None:
        """Ask the next gateway from now on, unless this one only minds how much it is asked."""
        if self._url == url and error.status != HTTPStatus.TOO_MANY_REQUESTS:
            self._url = self._urls[(self._urls.index(url) + 1) % len(self._urls)]

    async def cancel(self, request_id: str) -> None:
        response = await self._ask("DELETE", f"/v1/requests/{parse_request_id(request_id)}")
        if not response.is_success:
            refusal = _refusal(response, response.content)
            if refusal.code != "request_ended":  # too late is no error: by the log's order it always may be
                raise refusal

    async def health(self) -> Health:
        response = await self._ask("GET", "/health/ready")
        told = _json_object(response)
        missing = told.get("missing", ())
        return Health(
            is_ready=response.status_code == HTTPStatus.OK,
            status=str(told.get("state", "")),
            missing=tuple(str(one) for one in missing) if isinstance(missing, list) else (),
            details=told,
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
        """Cancel a request that its client has enough of; whoever had enough does not wait for it."""

        async def parting() -> None:
            with suppress(DalSegnoError):  # the server is gone, or has never had it
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
        raise AssertionError("there is a gateway to ask")


def _refused_unstarted(error: DalSegnoError) -> bool:
    """Whether a gateway has not taken what it was asked, and another may.

    One whose connection broke may have taken it: that is for the stream to know, whoever is asked next.
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


def body_of(question: ClientRequest) -> dict[str, Any]:
    """The request's body, as httpx takes it: JSON, or with files a form of the same fields."""
    inputs = question.inputs
    fields: dict[str, Any] = {
        "text": inputs.text,
        "messages": inputs.messages,
        "token_ids": inputs.token_ids,
        "chat": None if inputs.chat else False,
        "input_modalities": ",".join(inputs.input_modalities),
        "output_modalities": ",".join(inputs.output_modalities) if question.chooses_outputs else None,
        "model_kwargs": question.model_kwargs or None,
        "model": question.model,
        "request_id": question.request_id,
        "timeout_s": question.timeout_s,
        "linger_s": _LINGER_S,
    }
    said = {name: value for name, value in fields.items() if value is not None}
    if not inputs.files:
        return {"json": said}
    form = {name: _plain(value) for name, value in said.items()}
    return {"data": form, "files": [("files", (file.name, file.data)) for file in inputs.files]}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a body; not httpx's, which end at anything Unicode calls the end of a line."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
    # What is left has no end: the connection broke in its middle.


def item_of(line: bytes) -> Chunk | End:
    """What one line of the answer says.

    Raises:
        DalSegnoError: that the answer failed.
    """
    try:
        told = _LINES.decode(line)
        known = msgspec.convert(told.metadata, _ChunkMetadata)
        data = b64decode(told.data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ClientError(f"no Dal Segno server: a line of the answer is {line[:200]!r} ({error})") from error
    if told.modality == "error":
        raise error_of(known.status, known.code, known.message)
    if known.finish_reason is not None and known.usage is not None:
        return End(finish_reason=known.finish_reason, usage=known.usage)
    is_text = told.modality == "text"
    return Chunk(
        index=known.index or 0,
        modality=told.modality,
        text=data.decode() if is_text else "",
        data=b"" if is_text else data,
        token_ids=known.token_ids,
        logprobs=known.logprobs,
        is_echo=known.echo,
        metadata={name: value for name, value in told.metadata.items() if name not in _OURS},
    )


def _refusal(response: httpx.Response, body: bytes) -> DalSegnoError:
    return error_of_body(response.status_code, body, response.headers.get("retry-after"))


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise _refusal(response, response.content) from error
