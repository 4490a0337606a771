"""Errors of a client's request; all are `DalSegnoError`s.

    DalSegnoError                     code, status, message, param
    ├── ClientError                   the request is wrong; repeating it is of no use            4xx
    │   ├── AuthenticationError       no key, or a key without this permission                   401, 403
    │   ├── NotFoundError             no such model, request or route                            404
    │   ├── ConflictError             the request id belongs to another request                  409
    │   ├── RequestCancelledError     the request was cancelled                                  410
    │   └── RequestExpiredError       the server no longer has the request and its answer        410
    ├── CapacityError                 not now; `retry_after_s` if the server gave a time         429, 503
    │   ├── BusyError                 reported by the server
    │   ├── UnreachableError          no server answers at the address
    │   └── BrokenError               the answer broke off, and could not be resumed
    └── ServerError                   the server's own fault                                     5xx
        └── DeadlineExceededError     the answer took longer than its time limit                 504

`code` is stable and meant for programs: docs/http.md and docs/nats.md list the codes. `param` names the field
that is wrong, if there is one.
"""

from collections.abc import Mapping

import msgspec

from shared.errors import CapacityError, ClientError, DalSegnoError


class AuthenticationError(ClientError):
    """The server requires a key, or the key lacks the permission."""


class NotFoundError(ClientError):
    """The model, request or route does not exist."""


class ConflictError(ClientError):
    """The request id belongs to another request."""


class RequestCancelledError(ClientError):
    """The request was cancelled: by `cancel`, or because its last reader left."""


class RequestExpiredError(ClientError):
    """The server no longer keeps the request: its answer, or the rest of it, is gone."""


class BusyError(CapacityError):
    """The server cannot accept the request now; `retry_after_s` is its advice, if it gave any."""

    retry_after_s: float | None = None


class UnreachableError(CapacityError):
    """No server answers at the address."""

    code = "no_server"


class BrokenError(CapacityError):
    """The answer broke off before its end. A repetition under the same request id resumes it."""

    code = "connection_lost"


class ServerError(DalSegnoError):
    """The server failed."""


class DeadlineExceededError(ServerError):
    """The answer was not complete within its `timeout_s`, or within the server's limit."""


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
"""Codes that are more specific than their status."""


def error_of(
    status: int,
    code: str,
    message: str,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> DalSegnoError:
    """Return the error for a server's status and code."""
    fallback = ClientError if 400 <= status < 500 else ServerError
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, fallback)
    error = kind(message, code=code, status=status)
    error.param = param
    if isinstance(error, BusyError):
        error.retry_after_s = retry_after_s
    return error


class _ErrorFields(msgspec.Struct, frozen=True):
    """OpenAI's error schema, used for every error of a gateway."""

    message: str
    code: str | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _ErrorFields


def error_of_body(status: int, body: bytes, retry_after: str | None = None) -> DalSegnoError:
    """Return the error for an HTTP response; a body without our schema is quoted."""
    seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    try:
        fields = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.MsgspecError, UnicodeError):
        shown = body[:200].decode(errors="replace").strip() or "nothing"
        return error_of(status, f"http_{status}", f"the server answered {status}: {shown}", None, seconds)
    return error_of(status, fields.code or f"http_{status}", fields.message, fields.param, seconds)
