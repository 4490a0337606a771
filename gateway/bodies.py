"""Request bodies: how large they may be, what JSON is, and the parameters both APIs share."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from shared.errors import ClientError
from shared.events import Params
from shared.misfit import described, misfit

MAX_BODY_BYTES: Final = 32 * 1024 * 1024


class BodyTooLargeError(ClientError):
    """The body is larger than this gateway reads."""

    code = "body_too_large"
    status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request body is larger than the {limit_bytes} bytes this gateway reads")


class MalformedBodyError(ClientError):
    """The body is not JSON, or not an object."""

    code = "invalid_json"


class BodyLimit:
    """ASGI middleware: a body is refused by its Content-Length, or when it has become too long."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._limit_bytes:
            await self._refuse(send)
            return
        received_bytes = 0

        async def receive_limited() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > self._limit_bytes:
                raise BodyTooLargeError(self._limit_bytes)
            return message

        await self._app(scope, receive_limited, send)

    async def _refuse(self, send: Send) -> None:
        error = errors.of_exception(BodyTooLargeError(self._limit_bytes))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(error.json))]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": error.json})


async def read_object(request: Request) -> dict[str, Any]:
    """The request's body as a JSON object, whatever its content type says.

    Raises:
        MalformedBodyError: it is something else.
    """
    return parse_object(await request.body())


def parse_object(data: bytes | str, what: str = "the body") -> dict[str, Any]:
    """The JSON object in `data`.

    Raises:
        MalformedBodyError: `data` is something else.
    """
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedBodyError(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise MalformedBodyError(f"{what}: expected a JSON object, found {described(found)}")
    return found


def params_of(given: Mapping[str, object], where: str = "") -> Params:
    """Parameters from plain values; None is absent. `where` stands before the name of one that is wrong.

    Raises:
        InvalidParamError: a value is of the wrong type or out of its range.
    """
    present = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(present, Params)
    except msgspec.ValidationError as error:
        raise errors.of_misfit(misfit(error, present, Params), where) from error
