"""Cross-origin requests: what a web page of another origin can make a browser send.

A page cannot set `Origin` or `Host`, and can send only form-capable content types without a preflight. After
DNS rebinding its requests come with its own name in `Host`. Each of them has to be refused before it is
executed: its request id must be unknown afterwards. Requests of curl, of SDKs and of the gateway's own origin
are executed.
"""

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from tests.attack import target
from tests.attack.promises import Verdict
from tests.attack.target import MODEL

_ROUTES: Final[Mapping[str, Mapping[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    "/generate": {"text": "hi", "model_kwargs": {"max_tokens": 2}, "streaming": False},
    "/warm": {"text": "hi"},
}
_FORMS: Final = ("text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "TEXT/PLAIN")
_EVIL: Final = "http://evil.example"
_JSON: Final = "application/json"
_CURL: Final = {"user-agent": "curl/8.5.0"}
"""A page cannot set it without a preflight, which is refused."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request; `host` replaces the real `Host`."""

    name: str
    headers: Mapping[str, str]
    method: str = "POST"


def hostile(authority: str) -> Iterator[Call]:
    """Requests that a page of another origin can send; `authority` is the gateway's host and port."""
    port = authority.rpartition(":")[2]
    for kind in (*_FORMS, _JSON, "multipart/form-data; boundary=x"):
        yield Call(f"Origin of another site, {kind}", {"origin": _EVIL, "content-type": kind})
        yield Call(f"Origin null, {kind}", {"origin": "null", "content-type": kind})
        yield Call(
            f"rebound Host, {kind}",
            {"origin": f"http://evil.example:{port}", "host": f"evil.example:{port}", "content-type": kind},
        )
        yield Call(
            f"rebound Host without Origin, {kind}", {"host": f"evil.example:{port}", "content-type": kind}
        )
    for origin in (
        f"http://{authority}.evil.example",
        f"http://evil.example/{authority}",
        f"http://{authority}@evil.example",
        f"http://127.0.0.1:{int(port) + 1}",
        f"https://{authority}",
        "http://127.0.0.1",
        "file://",
        "chrome-extension://abc",
        "",
    ):
        yield Call(f"Origin {origin!r}", {"origin": origin, "content-type": "text/plain"})
    for host in (
        "evil.example",
        f"127.0.0.1.evil.example:{port}",
        f"localhost.evil.example:{port}",
        f"evil.example:{port}#@127.0.0.1:{port}",
        f"127.0.0.1:{port}.evil.example",
        f"127.0.0.1@evil.example:{port}",
    ):
        yield Call(f"Host {host!r}", {"host": host, "content-type": _JSON})
    for kind in _FORMS:
        yield Call(f"{kind} in a page's form", {"content-type": kind, "sec-fetch-site": "cross-site"})
        yield Call(f"{kind} with a Referer", {"content-type": kind, "referer": f"{_EVIL}/"})
        yield Call(f"{kind} by curl for another site", {"content-type": kind, "origin": _EVIL, **_CURL})
    yield Call("text by curl", {"content-type": "text/plain", **_CURL})


def friendly(authority: str) -> Iterator[Call]:
    """Requests of curl, the SDKs, and a page of the gateway's own origin."""
    port = authority.rpartition(":")[2]
    yield Call("an SDK", {"content-type": _JSON})
    yield Call("JSON with a charset", {"content-type": "application/json; charset=utf-8"})
    yield Call("JSON in other case", {"content-type": "Application/JSON"})
    yield Call("localhost", {"content-type": _JSON, "host": f"localhost:{port}"})
    yield Call("localhost in other case", {"content-type": _JSON, "host": f"LocalHost:{port}"})
    yield Call("IPv6 loopback", {"content-type": _JSON, "host": f"[::1]:{port}"})
    yield Call("its own origin", {"content-type": _JSON, "origin": f"http://{authority}"})
    yield Call("curl -d with the header", {"content-type": _JSON, **_CURL})
    yield Call("curl -d", {"content-type": "application/x-www-form-urlencoded", **_CURL})
    yield Call("no content type", {})


async def attack(out: Path) -> list[Verdict]:
    """Send every hostile and friendly request to every route that executes something."""
    refused = Verdict("a page of another origin executes nothing")
    silent = Verdict("no page of another origin may read an answer")
    served = Verdict("curl, SDKs and the own origin are served")
    with target.served(out / "deployment") as running:
        authority = urlsplit(running.url).netloc
        async with httpx.AsyncClient(base_url=running.url, timeout=target.ANSWER_S) as http:
            for route in _ROUTES:
                for call in hostile(authority):
                    await _hostile(http, route, call, refused, silent)
                for call in friendly(authority):
                    await _friendly(http, route, call, served)
            await _preflights(http, authority, silent)
            await _reading(http, authority, silent)
    return [refused, silent, served]


async def _hostile(
    http: httpx.AsyncClient, route: str, call: Call, refused: Verdict, silent: Verdict
) -> None:
    request_id = f"evil-{secrets.token_hex(6)}"
    answer = await _send(http, route, call, request_id)
    known = await http.get(f"/v1/requests/{request_id}")
    refused.tried()
    if known.status_code != 404 or answer.status_code < 400:
        refused.broken(
            f"POST {route}: {call.name}, {dict(call.headers)}",
            f"expected a refusal, found status {answer.status_code}, executed: {known.status_code != 404}",
        )
    if allowed := answer.headers.get("access-control-allow-origin"):
        silent.broken(f"POST {route}: {call.name}", f"the answer allows origin {allowed!r}")
    silent.tried()


async def _friendly(http: httpx.AsyncClient, route: str, call: Call, served: Verdict) -> None:
    answer = await _send(http, route, call, f"friend-{secrets.token_hex(6)}")
    served.tried()
    if answer.status_code != 200:
        served.broken(
            f"POST {route}: {call.name}, {dict(call.headers)}", f"{answer.status_code} {answer.text:.200}"
        )


async def _send(http: httpx.AsyncClient, route: str, call: Call, request_id: str) -> httpx.Response:
    body = json.dumps({"model": MODEL, **_ROUTES[route], "request_id": request_id}).encode()
    if "multipart" in call.headers.get("content-type", ""):
        fields = {"text": "hi", "streaming": "false", "request_id": request_id}
        parts = [
            f'--x\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in fields.items()
        ]
        body = ("".join(parts) + "--x--\r\n").encode()
    request = http.build_request(call.method, route, content=body, headers=dict(call.headers))
    return await http.send(request)


async def _preflights(http: httpx.AsyncClient, authority: str, silent: Verdict) -> None:
    for route in _ROUTES:
        asked = {
            "origin": _EVIL,
            "access-control-request-method": "POST",
            "access-control-request-headers": "*",
        }
        answer = await http.options(route, headers=asked)
        silent.expect(f"preflight of {route}", answer.headers.get("access-control-allow-origin"), None)


async def _reading(http: httpx.AsyncClient, authority: str, silent: Verdict) -> None:
    """Routes without a body: after DNS rebinding, a page could read them."""
    for path in ("/v1/models", "/metrics", "/v1/requests/x", "/openapi.json", "/health/ready"):
        answer = await http.get(path, headers={"host": "evil.example"})
        silent.tried()
        if answer.status_code < 400 and not path.startswith("/health"):
            silent.broken(f"GET {path} with Host evil.example", f"found status {answer.status_code}")
