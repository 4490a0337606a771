"""The content types of request bodies.

A browser sends a form, or text, to any server without asking it first, from a page of any origin; only other
types make it send a preflight. So a body of such a type is not read as JSON.

`curl -d` declares its body as a form, and is what people type first. It is excepted: a page cannot send
curl's `User-Agent` without a preflight. `application/octet-stream` is what HTTP libraries declare for bytes
(aiohttp, and so LiteLLM's client of Ollama); a page cannot send it without a preflight either.
"""

from typing import Final

from starlette.requests import Request

from shared.errors import ClientError

URL_ENCODED: Final = "application/x-www-form-urlencoded"
MULTIPART: Final = "multipart/form-data"
FORMS: Final = (MULTIPART, URL_ENCODED)
_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
_CURL: Final = "curl/"
_OF_BROWSERS: Final = ("origin", "referer", "sec-")
"""Prefixes of the headers that browsers send, and curl does not."""


class ContentTypeError(ClientError):
    """The body has a content type that the route does not read."""

    code = "unsupported_media_type"
    status = 415


def content_type(request: Request) -> str:
    """The body's content type without parameters, in lower case; empty if there is none.

    Raises:
        ContentTypeError: it is given more than once, or the body is compressed.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ContentTypeError(f"content-encoding: expected none, found {encoding[:80]!r}")
    found = request.headers.getlist("content-type")
    if len(found) > 1:
        raise ContentTypeError("content-type: expected it once, found it more than once")
    return found[0].partition(";")[0].strip().lower() if found else ""


def check_json(request: Request) -> None:
    """Refuse a body that is not declared as JSON.

    One that is declared as bytes is read, and so is one without a type: that a browser sends too, but names
    the page's origin, which `gateway.middleware.origins` has checked.

    Raises:
        ContentTypeError: the body has another type.
    """
    found = content_type(request)
    if found == URL_ENCODED and _is_curl(request):
        return
    if found not in ("", _BYTES, _JSON) and not found.endswith("+json"):
        raise ContentTypeError(
            f"content-type: expected {_JSON}, found {found[:80]!r}; send the header "
            f"`content-type: {_JSON}` (curl: -H 'content-type: {_JSON}')"
        )


def _is_curl(request: Request) -> bool:
    """True for a request of curl itself, and of no web page."""
    agents = request.headers.getlist("user-agent")
    if len(agents) != 1 or not agents[0].startswith(_CURL):
        return False
    return not any(name.startswith(_OF_BROWSERS) for name in request.headers)
