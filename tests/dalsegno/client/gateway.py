"""A gateway that speaks `/generate` as docs/http.md has it, and answers by script: also by breaking off."""

import asyncio
import json
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dalsegno import AsyncClient

Line: TypeAlias = "bytes | type[Break | Hang]"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


class Break:
    """In a script: the connection is reset here."""


class Hang:
    """In a script: nothing comes any more until the client leaves."""


def line(modality: str, data: bytes, **metadata: Any) -> bytes:
    told = {"modality": modality, "data": b64encode(data).decode(), "metadata": metadata}
    return json.dumps(told).encode() + b"\n"


def text(index: int, piece: str, **metadata: Any) -> bytes:
    return line("text", piece.encode(), index=index, token_ids=[index], **metadata)


def end(reason: str = "stop") -> bytes:
    return line("text", b"", finish_reason=reason, usage=USAGE)


def error(status: int, code: str, message: str = "no", param: str | None = None, **headers: str) -> Response:
    told = {"message": message, "type": "some_error", "param": param, "code": code}
    return JSONResponse({"error": told}, status, headers)


@dataclass
class Asked:
    """One request as it came in."""

    fields: dict[str, Any]
    files: list[tuple[str, bytes]]
    headers: dict[str, str]


@dataclass
class FakeGateway:
    """The requests that a client has sent, and their answers: of the first `scripts[0]`, ...

    Attributes:
        left: set when a client leaves an answer that hangs.
    """

    url: str = ""
    scripts: list[Iterable[Line] | Response] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    cancelling: Response = field(default_factory=lambda: JSONResponse({"status": "cancelled"}))
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: Request) -> Response:
        self.asked.append(await _parsed(request))
        script = self.scripts[len(self.asked) - 1]
        return script if isinstance(script, Response) else _Scripted(self, script)

    async def cancel(self, request: Request) -> Response:
        self.cancelled.append(request.path_params["request_id"])
        return self.cancelling

    async def ready(self, request: Request) -> Response:
        return JSONResponse(
            {"status": "degraded", "state": "loading", "missing": ["no conductor leads"]}, 503
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "demo"}, {"id": "other"}]})


class _Scripted(Response):
    def __init__(self, gateway: FakeGateway, script: Iterable[Line]) -> None:
        super().__init__()
        self._gateway = gateway
        self._script = script

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for one in self._script:
            if isinstance(one, bytes):
                await send({"type": "http.response.body", "body": one, "more_body": True})
            elif one is Hang:
                while (await receive())["type"] != "http.disconnect":
                    pass
                self._gateway.left.set()
                return
            else:
                return  # a response without its end: the server resets the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _parsed(request: Request) -> Asked:
    headers = dict(request.headers)
    if headers["content-type"] == "application/json":
        return Asked(await request.json(), [], headers)
    fields: dict[str, Any] = {}
    files: list[tuple[str, bytes]] = []
    async with request.form() as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                assert name == "files"
                files.append((value.filename or "", await value.read()))
            else:
                fields[name] = value
    return Asked(fields, files, headers)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def answering(*scripts: Iterable[Line] | Response) -> AsyncIterator[FakeGateway]:
    """The gateway on a real socket."""
    fake = FakeGateway(scripts=list(scripts))
    app = Starlette(
        routes=[
            Route("/generate", fake.generate, methods=["POST"]),
            Route("/health/ready", fake.ready),
            Route("/v1/models", fake.models),
            Route("/v1/requests/{request_id}", fake.cancel, methods=["DELETE"]),
        ]
    )
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    server = _Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([listener]))
            yield fake
            server.should_exit = True


@asynccontextmanager
async def talking(
    *scripts: Iterable[Line] | Response, **options: Any
) -> AsyncIterator[tuple[FakeGateway, AsyncClient]]:
    """The gateway, and a client of it."""
    async with answering(*scripts) as fake, AsyncClient(fake.url, **options) as client:
        yield fake, client
