"""The paths for monitoring and of the page, which need no key or no rate limit."""

from typing import Final

from starlette.types import Scope

from gateway.middleware.exchange import header

PAGE_FILES: Final = "/page/"
_HEALTH: Final = frozenset({"/health", "/health/live", "/health/ready"})
_METRICS: Final = frozenset({"/metrics", "/metrics.json"})


def is_open(path: str) -> bool:
    """True for a path that needs no API key: a process supervisor has none."""
    return path in _HEALTH


def is_page(scope: Scope) -> bool:
    """True for a request for the page for people, or for a file of it: a browser sends no key with these."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    path: str = scope["path"]
    return path.startswith(PAGE_FILES) or (path == "/" and wants_page(header(scope["headers"], b"accept")))


def wants_page(accept: str | None) -> bool:
    """True for the `Accept` of a browser that opens an address; programs send none, or `*/*`."""
    return "text/html" in (accept or "").lower()


def is_monitoring(path: str) -> bool:
    """True for a path that programs poll every few seconds: logged at `debug`, and not rate limited."""
    return path in _HEALTH or path in _METRICS
