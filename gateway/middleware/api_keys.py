"""Who may ask: `Authorization: Bearer <secret>`.

Without a key 401, with a wrong one 403; both before anything of the body is read. A secret is compared with
every key there is, in a time that tells nothing about either. From here on a client is the name of its key:
lines and limits have the name, and nothing has the secret.

Where there are keys they are asked for everywhere, but at `/health`: whoever restarts this process has none.
A browser's preflight (CORS) never has one either, and is answered before it comes here.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.deployment import ApiKey
from gateway import errors
from gateway.middleware.paths import is_open
from shared.errors import ClientError

CHALLENGE: Final = 'Bearer realm="dalsegno"'


class MissingKeyError(ClientError):
    """Nobody said who asks."""

    code = "missing_api_key"
    status = 401

    def __init__(self) -> None:
        super().__init__("an API key is needed here; send it as `Authorization: Bearer <key>`")


class WrongKeyError(ClientError):
    """Nobody has this key."""

    code = "invalid_api_key"
    status = 403

    def __init__(self) -> None:
        super().__init__("this API key is not known here; ask the operator of this deployment for one")


class ApiKeys:
    """ASGI middleware: only who has a key goes on; `scope["state"]["key"]` is its name then."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[ApiKey]) -> None:
        self._app = app
        self._known = [(key.name, _digest(key.secret)) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        secret = bearer(Headers(scope=scope).get("authorization"))
        if secret is None:
            await errors.send(send, errors.of_exception(MissingKeyError()), {"www-authenticate": CHALLENGE})
            return
        name = self._holder(secret)
        if name is None:
            await errors.send(send, errors.of_exception(WrongKeyError()))
            return
        scope.setdefault("state", {})["key"] = name
        await self._app(scope, receive, send)

    def _holder(self, secret: str) -> str | None:
        """Whose it is; the same work whichever it is, and whether it is one."""
        given = _digest(secret)
        found = [name for name, known in self._known if hmac.compare_digest(known, given)]
        return found[0] if found else None


def holder(scope: Scope) -> str | None:
    """The name of the key that a request came with; None where none is asked for."""
    name: str | None = scope.get("state", {}).get("key")
    return name


def bearer(header: str | None) -> str | None:
    """The secret in an `Authorization` header; None where it holds none."""
    scheme, _, secret = (header or "").strip().partition(" ")
    return secret.strip() or None if scheme.lower() == "bearer" else None


def _digest(secret: str) -> bytes:
    """Of one length, whatever the secret's is."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
