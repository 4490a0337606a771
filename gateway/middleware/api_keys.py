"""Middleware that authenticates clients by API key.

    Authorization: Bearer <secret>
    x-api-key: <secret>                  as Anthropic's clients send it

A missing key and a wrong one are 401, before anything of the body is read. A secret is compared with all
configured keys in constant time. After that a client is known by the name of its key: log lines and rate
limits use the name, and nothing keeps the secret.

With keys configured, every path needs one except `/health`: a process supervisor has no key. Neither has a
browser that opens the page (`gateway.page`), which then asks its user for one. A CORS preflight is answered
before it reaches this middleware.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.secrets import ApiKey
from gateway import errors
from gateway.client_key import KEY_NAME
from gateway.errors import ErrorResponse
from gateway.middleware.exchange import Exchange, Middleware
from gateway.middleware.paths import is_open, is_page
from shared.errors import ClientError

ANTHROPICS: Final = "x-api-key"
"""The header in which Anthropic's clients send their key."""
CHALLENGE: Final = 'Bearer realm="dalsegno"'
INVALID: Final = f'{CHALLENGE}, error="invalid_token"'


class MissingKeyError(ClientError):
    """The request has no API key."""

    code = "missing_api_key"
    status = 401

    def __init__(self) -> None:
        super().__init__("an API key is needed here; send it as `Authorization: Bearer <key>`")


class WrongKeyError(ClientError):
    """The request's API key is not configured."""

    code = "invalid_api_key"
    status = 401

    def __init__(self) -> None:
        super().__init__("this API key is not known here; ask the operator of this deployment for one")


class ApiKeys(Middleware):
    """Passes requests with a configured key on, and notes its name for `gateway.client_key.key_name`."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[ApiKey], has_page: bool = False) -> None:
        super().__init__(app)
        self._has_page = has_page
        self._keys = [(key.name, _digest(key.secret)) for key in keys]

    def handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if is_open(scope["path"]) or (self._has_page and is_page(scope)):
            return self._next(exchange, scope, receive, send)
        secret = secret_of(Headers(scope=scope))
        if secret is None:
            return _refusal(MissingKeyError())(scope, receive, send)
        name = self._name_of(secret)
        if name is None:
            return _refusal(WrongKeyError())(scope, receive, send)
        scope.setdefault("state", {})[KEY_NAME] = name
        return self._next(exchange, scope, receive, send)

    def _name_of(self, secret: str) -> str | None:
        """The name of the key with this secret; the work does not depend on the result."""
        given = _digest(secret)
        found = [name for name, known in self._keys if hmac.compare_digest(known, given)]
        return found[0] if found else None


def _refusal(error: MissingKeyError | WrongKeyError) -> ErrorResponse:
    challenge = INVALID if isinstance(error, WrongKeyError) else CHALLENGE
    return ErrorResponse(errors.of_exception(error), {"www-authenticate": challenge})


def secret_of(headers: Headers) -> str | None:
    """The key that a request shows; None if there is none."""
    return bearer(headers.get("authorization")) or headers.get(ANTHROPICS, "").strip() or None


def bearer(header: str | None) -> str | None:
    """The secret in an `Authorization` header; None if there is none."""
    scheme, _, secret = (header or "").strip().partition(" ")
    return secret.strip() or None if scheme.lower() == "bearer" else None


def _digest(secret: str) -> bytes:
    """A digest of fixed length, so that comparing it does not show the secret's length."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
