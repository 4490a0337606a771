"""The one table from errors to HTTP; every body has OpenAI's error schema.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`code` is our own stable code, `type` follows from the status. An error that is none of ours is a bug:
it is logged with its traceback, and the client learns only that it happened.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.types import Send

from shared.errors import ClientError, DalSegnoError
from shared.events import Failure
from shared.log.port import LogRegressedError
from shared.telemetry.log_fields import MAY_QUOTE
from shared.validation_errors import Misfit, described

_LOGGER: Final = logging.getLogger(__name__)

TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    410: "gone_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_STATUSES: Final[Mapping[str, int]] = {
    LogRegressedError.code: 503,  # the log was made anew: asked again, the request goes on the new one
}
"""Where HTTP sees it otherwise than the error itself."""
RETRY_AFTER_S: Final[Mapping[int, int]] = {429: 1, 503: 2}
"""For what is not wrong but not now: when to try again."""
_NOT_AGAIN: Final = frozenset({409, 504})
"""What OpenAI's clients would try again, though the same comes of it."""


class InvalidParamError(ClientError):
    """One named parameter of the request is wrong."""

    def __init__(self, param: str, message: str, *, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message, code=code, status=status)
        self.param = param


class NotSupportedError(InvalidParamError):
    """A parameter that is known, would change the answer, and is not supported yet."""

    def __init__(self, param: str, found: object, neutral: str) -> None:
        super().__init__(
            param,
            f"{param}: {described(found)} is not supported yet; leave it out, or send {neutral}",
            code="not_supported",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    """An error as a client sees it."""

    status: int
    code: str
    message: str
    param: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _type_of(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def json(self) -> bytes:
        return msgspec.json.encode(self.body)

    @property
    def headers(self) -> dict[str, str]:
        if self.status in _NOT_AGAIN:
            return {"x-should-retry": "false"}
        seconds = RETRY_AFTER_S.get(self.status)
        return {} if seconds is None else {"retry-after": str(seconds)}


def of_exception(error: Exception) -> HttpError:
    """The error a client sees for `error`."""
    if isinstance(error, DalSegnoError):
        return HttpError(
            status=_STATUSES.get(error.failure_code, _http_status(error.failure_status)),
            code=error.failure_code,
            message=error.message,
            param=getattr(error, "param", None),
        )
    _LOGGER.error("a bug while answering a request", exc_info=error, extra=MAY_QUOTE)
    return HttpError(
        status=500,
        code="internal_error",
        message="the gateway met an error of its own; its log has the details",
    )


async def send(send: Send, error: HttpError, headers: Mapping[str, str] | None = None) -> None:
    """Answer with `error`, where no framework does."""
    body = error.json
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "cache-control": "no-store",
    }
    told = {**fields, **error.headers, **(headers or {})}
    await send({"type": "http.response.start", "status": error.status, "headers": raw(told)})
    await send({"type": "http.response.body", "body": body})


def raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI has them."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def of_failure(failure: Failure) -> HttpError:
    """The error a client sees for a failure on the log."""
    status = _STATUSES.get(failure.code, _http_status(failure.status))
    return HttpError(status=status, code=failure.code, message=failure.message)


def of_misfit(misfit: Misfit, where: str = "") -> InvalidParamError:
    """The error for a value that is of the wrong type or out of its range; `where` stands before its name."""
    code = "missing_required_parameter" if misfit.is_missing else "invalid_value"
    return InvalidParamError(f"{where}{misfit.place}", f"{where}{misfit.message}", code=code)


def _type_of(status: int) -> str:
    fallback = "invalid_request_error" if status < 500 else "server_error"
    return TYPES.get(status, fallback)


def _http_status(status: int) -> int:
    """A failure's status comes from the log: what is no error status is our own error."""
    return status if 400 <= status <= 599 else 500
