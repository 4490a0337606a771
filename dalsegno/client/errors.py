"""What can go wrong between a client and its answer; all of them are `DalSegnoError`s.

    DalSegnoError                     code, status, message, param
    ├── ClientError                   the request is wrong; sending it again is of no use        4xx
    │   ├── AuthenticationError       no key, or one that may not do this                        401, 403
    │   ├── NotFoundError             no such model, request or route                            404
    │   ├── ConflictError             the request id belongs to another request                  409
    │   ├── RequestCancelledError     the request was cancelled                                  410
    │   └── RequestExpiredError       the server has forgotten the request, and its answer       410
    ├── CapacityError                 not now: `retry_after_s` says when, where the server did   429, 503
    │   ├── BusyError                 the server said so
    │   ├── UnreachableError          nobody answers at the address
    │   └── BrokenError               the answer broke off, and could not be taken up again
    └── ServerError                   the server's own fault                                     5xx
        └── DeadlineExceededError     the answer took longer than its time limit                 504

`code` is stable and for programs: docs/http.md and docs/nats.md list them. `param` names the field that
is wrong, where one is.
"""

from collections.abc import Mapping

import msgspec

from shared.errors import CapacityError, ClientError, DalSegnoError


class AuthenticationError(ClientError):
    """The server wants a key, or this key may not do this."""


class NotFoundError(ClientError):
    """There is no such model, request or route."""


class ConflictError(ClientError):
    """The request id belongs to another request."""


class RequestCancelledError(ClientError):
    """The request was cancelled: by `cancel`, or because its last reader left."""


class RequestExpiredError(ClientError):
    """The server keeps the request no more: its answer cannot be had, or had further."""


class BusyError(CapacityError):
    """The server cannot take the request now; `retry_after_s` is its advice, where it gave one."""

    retry_after_s: float | None = None


class UnreachableError(CapacityError):
    """Nobody answers at the address."""

    code = "no_server"


class BrokenError(CapacityError):
    """The answer broke off before its end. Asked again under its request id, it goes on."""

    code = "connection_lost"


class ServerError(DalSegnoError):
    """The server failed."""


class DeadlineExceededError(ServerError):
    """The answer was not complete within its `timeout_s`, or within what the server allows."""


_BY_STATUS: Mapping[int, type[DalSegnoError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    409: ConflictError,
    410: RequestCancelledError,
    429: BusyError,
    503: BusyError,
    504: DeadlineExceededError,
}
_BY_CODE: Mapping[str, type[DalSegnoError]] = {"request_expired": RequestExpiredError}
"""Where the status says less."""


def error_of(
    status: int,
    code: str,
    message: str,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> DalSegnoError:
    """The error behind what a server said."""
    fallback = ClientError if 400 <= status < 500 else ServerError
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, fallback)
    error = kind(message, code=code, status=status)
    error.param = param
    if isinstance(error, BusyError):
        error.retry_after_s = retry_after_s
    return error


class _ErrorFields(msgspec.Struct, frozen=True):
    """OpenAI's error schema, as every error of a gateway has it."""

    message: str
    code: str | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _ErrorFields


def error_of_body(status: int, body: bytes, retry_after: str | None = None) -> DalSegnoError:
    """The error behind an HTTP answer; a body without our schema is shown as it is."""
    seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    try:
        told = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.MsgspecError, UnicodeError):
        shown = body[:200].decode(errors="replace").strip() or "nothing"
        return error_of(status, f"http_{status}", f"the server answered {status}: {shown}", None, seconds)
    return error_of(status, told.code or f"http_{status}", told.message, told.param, seconds)
