"""`/`: the page for browsers, name and version for programs; `/page/*`: the files of the page.

The files are the same for everybody, and need no key. A browser may run and load this gateway's own files
and nothing else (`POLICY`). What a model writes cannot become a script: text is sanitised, and the browser
would refuse it as well.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse

from gateway.middleware.paths import PAGE_FILES, wants_page
from gateway.requests.service import Gateway

STATIC: Final = Path(__file__).with_name("static")
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; media-src 'self' blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)


def page_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway; without the page `/` is for programs only."""
    router = APIRouter()
    has_page = gateway.settings.page

    @router.get("/", summary="Name, version and links; for browsers a page", tags=["about"])
    async def about(request: Request) -> Response:
        if has_page and wants_page(request.headers.get("accept")):
            return _file(STATIC / "index.html")
        found: dict[str, Any] = {
            "name": "dalsegno",
            "version": version("dalsegno"),
            "model": gateway.served.name,
            "links": {"openapi": "/openapi.json", "health": "/health", "models": "/v1/models"},
        }
        return Response(msgspec.json.encode(found), media_type="application/json", headers={"vary": "accept"})

    for path in page_files() if has_page else ():
        name = path.relative_to(STATIC).as_posix()
        router.add_api_route(f"{PAGE_FILES}{name}", _sender(path), methods=["GET"], include_in_schema=False)
    return router


def page_files() -> list[Path]:
    """The files of the page, which are all that is served of any folder."""
    return sorted(path for path in STATIC.rglob("*") if path.suffix in _TYPES)


def _sender(path: Path) -> Any:
    async def send() -> Response:
        return _file(path)

    return send


def _file(path: Path) -> Response:
    headers = {"content-security-policy": POLICY, "vary": "accept"}
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=headers)
