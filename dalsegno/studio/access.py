"""Who may use the studio: the person who started it, from this machine, in pages of this server.

    link      http://127.0.0.1:PORT/enter?token=...; each token opens one session, once
    session   a cookie that scripts cannot read and other sites do not send
    Host      has to be this server's: another name that leads here is refused (DNS rebinding)
    Origin    has to be this server's, if the browser sends one; requests that change something need one

Every answer has a content security policy under which only files of this server run, and nothing of another
origin is loaded. Pure, but for the random tokens.
"""

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
MARK: Final = "x-dalsegno-studio"
"""The header of requests that change something: a page of another origin cannot send it unasked."""
_SAFE: Final = frozenset({"GET", "HEAD"})
_OWN_SITE: Final = frozenset({"same-origin", "none"})
"""Values of `sec-fetch-site`: from a page of this server, or typed by the user."""
_MAX_LINKS: Final = 16


@dataclass(slots=True)
class Door:
    """The tokens of links that were not used yet, and the sessions that they opened.

    Attributes:
        used: called when a link was used, with a new one for another browser.
    """

    port: int
    used: Callable[[str], None] = lambda link: None
    _tokens: list[str] = field(default_factory=list)
    _sessions: list[str] = field(default_factory=list)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of `Host` that are this server's."""
        return f"127.0.0.1:{self.port}", f"localhost:{self.port}"

    @property
    def cookie(self) -> str:
        """The cookie's name; cookies do not tell ports apart, so that two studios need two names."""
        return f"dalsegno_studio_{self.port}"

    def link(self) -> str:
        """Return a new link; it opens one session."""
        self._tokens = [*self._tokens[1 - _MAX_LINKS :], secrets.token_urlsafe(32)]
        return f"http://127.0.0.1:{self.port}/enter?token={self._tokens[-1]}"

    def enter(self, token: str) -> str | None:
        """Use up a token; return a new session, or None if the token opens none."""
        found = next((one for one in self._tokens if _same(one, token)), None)
        if found is None:
            return None
        self._tokens.remove(found)
        self._sessions.append(secrets.token_urlsafe(32))
        self.used(self.link())
        return self._sessions[-1]

    def admits(self, cookies: str) -> bool:
        """Tell whether a `Cookie` header has a session."""
        try:
            found = SimpleCookie(cookies).get(self.cookie)
        except CookieError:
            return False
        return found is not None and any(_same(one, found.value) for one in self._sessions)


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


@dataclass(slots=True)
class Access:
    """The door before an application."""

    app: ASGIApp
    door: Door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        if scope["type"] != "http":
            return  # there is no WebSocket here; the server closes the connection
        answer = self._refusal(scope) or self._entrance(scope)
        await (answer or self.app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0] not in self.door.hosts:
            expected = " or ".join(self.door.hosts)
            return _refused(f"expected the host {expected}: open the link that `dalsegno studio` printed")
        origin, is_change = headers.get("origin"), scope["method"] not in _SAFE
        if is_change and (origin is None or MARK not in headers):
            return _refused("only pages of this server may change something")
        if origin is not None and origin != f"http://{hosts[0]}":
            return _refused("pages of another origin may not use this server")
        if headers.get("sec-fetch-site", "none") not in _OWN_SITE:
            return _refused("pages of another site may not use this server")
        return None

    def _entrance(self, scope: Scope) -> Response | None:
        if scope["path"] == "/enter":
            return self._entered(scope)
        if self.door.admits(Headers(scope=scope).get("cookie", "")):
            return None
        return PlainTextResponse(
            "This page needs a session: open the link that `dalsegno studio` printed.", status_code=401
        )

    def _entered(self, scope: Scope) -> Response:
        session = self.door.enter(Request(scope).query_params.get("token", ""))
        if session is None:
            return _refused(
                "this link was used, or is of another run: `dalsegno studio` has printed a new one"
            )
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(self.door.cookie, session, httponly=True, samesite="strict", path="/")
        return answer


def _refused(reason: str) -> Response:
    return PlainTextResponse(f"Refused: {reason}.", status_code=403)
