"""The mapping from errors to HTTP responses. Bodies have the schema of the API that was called.

    OpenAI, ours    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
    Anthropic       {"type": "error", "error": {"type": ..., "message": ..., "param": ..., "code": ...}}
    Ollama          {"error": message}

`code` is our own stable code, `type` follows from the status. An exception that is no `DalSegnoError` is a
bug: its traceback is logged, and the client gets a general message.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.context_overflow import in_openais_words
from shared.errors import ClientError, DalSegnoError
from shared.events import Failure
from shared.log.port import LogRegressedError
from shared.telemetry.log_fields import MAY_QUOTE
from shared.validation_errors import ValidationProblem, described

_LOGGER: Final = logging.getLogger(__name__)

TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    410: "gone_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    416: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    501: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    505: "server_error",
}
ANTHROPIC: Final = "/v1/messages"
"""The routes whose errors have Anthropic's schema."""
OLLAMA: Final = "/api/"
"""The routes whose errors have Ollama's schema."""
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STATUSES: Final[Mapping[str, int]] = {
    LogRegressedError.code: 503,  # the log was replaced: a retry goes to the new one
}
"""Statuses that differ from the error's own."""
_NAMED: Final = re.compile(r"(files|texts|queries)\[(\d{1,6})\]", re.ASCII)
ERROR_CODE: Final = "error_code"
"""The entry of `scope["state"]` with the code of the error that answered a request, for the access log."""
REFUSAL: Final = "refusal"
"""The entry of `scope["state"]` with the `HttpError` of a request of which nothing is on the log."""
CHOSEN_ID: Final = "chosen_id"
"""The entry of `scope["state"]` with the id that the body chose for its request, for such errors."""
_PUBLISHED: Final = "is_published"
RETRY_AFTER_S: Final[Mapping[int, int]] = {429: 1, 503: 2}
"""The header `retry-after` of temporary errors, in seconds."""
_NO_RETRY: Final = frozenset({409, 504})
"""Statuses that OpenAI's clients would retry without success."""


class InvalidParamError(ClientError):
    """A parameter of the request is wrong; `param` is its name."""

    def __init__(self, param: str, message: str, *, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message, code=code, status=status)
        self.param = param


class NotSupportedError(InvalidParamError):
    """A known parameter that would change the answer and is not supported yet."""

    def __init__(self, param: str, found: object, neutral: str) -> None:
        super().__init__(
            param,
            f"{param}: {described(found)} is not supported yet; leave it out, or send {neutral}",
            code="not_supported",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    """An error as a client sees it.

    `is_logged`: it is the failure of a request on the log.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int = 0
    is_logged: bool = False

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

    def json(self, path: str) -> bytes:
        """The body for a request to a path."""
        if is_anthropics(path):
            return msgspec.json.encode(anthropic_body(self))
        return msgspec.json.encode(ollama_body(self) if path.startswith(OLLAMA) else self.body)

    @property
    def headers(self) -> dict[str, str]:
        if self.status in _NO_RETRY:
            return {"x-should-retry": "false"}
        seconds = self.retry_after_s or RETRY_AFTER_S.get(self.status)
        return {} if seconds is None else {"retry-after": str(seconds)}


def is_anthropics(path: str) -> bool:
    """True for a route whose errors have Anthropic's schema."""
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def anthropic_body(error: HttpError) -> dict[str, Any]:
    """The body of an error in Anthropic's schema; `param` and `code` are ours."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    return {
        "type": "error",
        "error": {
            "type": _ANTHROPIC_TYPES.get(error.status, fallback),
            "message": error.message,
            "param": error.param,
            "code": error.code,
        },
    }


def ollama_body(error: HttpError) -> dict[str, Any]:
    """The body of an error in Ollama's schema, which has its message only."""
    return {"error": error.message}


def of_exception(error: Exception) -> HttpError:
    """The response for an exception."""
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
        message="internal error of the gateway; its log has the details",
    )


class ErrorResponse(Response):
    """The response for an error, of a route or of middleware."""

    def __init__(self, error: HttpError, headers: Mapping[str, str] | None = None) -> None:
        self._fields = {"cache-control": "no-store", **error.headers, **(headers or {})}
        super().__init__(None, error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._error)
        body = self._error.json(scope["path"])
        found = Response(body, self.status_code, self._fields, media_type="application/json")
        await found(scope, receive, send)


def note_error(scope: Scope, error: HttpError) -> None:
    """Note that an error answers the request, for the access log and the record of refused requests."""
    state = scope.setdefault("state", {})
    state[ERROR_CODE] = error.code
    if not (error.is_logged or state.get(_PUBLISHED, False)):
        state[REFUSAL] = error


def note_chosen_id(scope: Scope, request_id: str) -> None:
    """Note the valid id that the body chose for its request, before anything else of the body is checked."""
    scope.setdefault("state", {})[CHOSEN_ID] = request_id


def note_published(scope: Scope) -> None:
    """Note that a request is on the log: an error from here on is no refusal."""
    scope.setdefault("state", {})[_PUBLISHED] = True


def raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers in ASGI's form."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def of_failure(
    failure: Failure,
    places: Mapping[str, Sequence[str]] = MappingProxyType({}),
    option_fields: Mapping[str, str] = MappingProxyType({}),
) -> HttpError:
    """The response for a failure on the log.

    A failure names a medium or a text by its index, `files[1]` or `texts[3]`; `places` are their places in
    the body. It names an option of the family; `option_fields` are the fields that became options.
    """
    status = _STATUSES.get(failure.code, _http_status(failure.status))
    message, param = in_openais_words(failure.code, failure.message), failure.param
    named = _NAMED.search(message)
    known = places.get(named[1], ()) if named is not None else ()
    if named is not None and int(named[2]) < len(known):
        param = known[int(named[2])]
        message = f"{message[: named.start()]}{param}{message[named.end() :]}"
    elif param is not None and (field := option_fields.get(param)) is not None:
        message, param = f"{field} ({param}): {message.removeprefix(f'{param}: ')}", field
    return HttpError(
        status=status,
        code=failure.code,
        message=message,
        param=param,
        retry_after_s=failure.retry_after_s,
        is_logged=True,
    )


def of_validation_problem(problem: ValidationProblem, where: str = "") -> InvalidParamError:
    """The error for a value of the wrong type or out of its range; `where` is prefixed to its name."""
    code = "missing_required_parameter" if problem.is_missing else "invalid_value"
    return InvalidParamError(f"{where}{problem.place}", f"{where}{problem.message}", code=code)


def _type_of(status: int) -> str:
    fallback = "invalid_request_error" if status < 500 else "server_error"
    return TYPES.get(status, fallback)


def _http_status(status: int) -> int:
    """A failure's status from the log; one that is no error status becomes 500."""
    return status if 400 <= status <= 599 else 500
