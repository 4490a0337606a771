"""A line of a batch as an HTTP request within this process.

The application answers it as it answers a client: a batch adds nothing to any route. The middleware is left
out. Its limits are those of clients, and the tenant is known.
"""

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from gateway.client_key import KEY_NAME
from gateway.errors import HttpError
from gateway.middleware.request_id import valid_name
from gateway.requests.parsed_request import DELIVERY, Delivery
from shared.telemetry import log_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRequest:
    """One request.

    Attributes:
        app: the application inside its middleware.
        path: the route.
        body: JSON.
        name: the client's name for it, recorded as its `correlation` if it can be.
    """

    app: ASGIApp
    path: str
    body: bytes
    name: str
    tenant: str | None
    delivery: Delivery


async def answer_of(request: LineRequest, gone: asyncio.Event) -> tuple[int, bytes] | None:
    """Return the status and the body of the answer; None if `gone` was set before, which cancels it.

    A call that is cancelled leaves the request as it is: another gateway may attach to it.
    """
    status = 0
    body: list[bytes] = []
    is_read = is_complete = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await gone.wait()
            return {"type": "http.disconnect"}
        is_read = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, is_complete
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            body.append(message.get("body", b""))
            is_complete = not message.get("more_body", False)

    name = valid_name(request.name)
    with log_fields.correlated(name or request.delivery.request_id, is_clients=name is not None):
        try:
            await request.app(_scope(request), receive, send)
        except Exception:
            if not is_complete:  # Starlette answers 500, and raises the exception for the server's log
                raise
    if is_complete:
        return status, b"".join(body)
    if gone.is_set():
        return None
    broken = HttpError(
        status=500, code="internal_error", message="the answer broke off; the gateway's log has the details"
    )
    return broken.status, broken.json(request.path)


def _scope(request: LineRequest) -> Scope:
    state: dict[str, object] = {DELIVERY: request.delivery}
    if request.tenant is not None:
        state[KEY_NAME] = request.tenant
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"127.0.0.1"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(request.body)).encode()),
        ],
        "client": None,
        "server": None,
        "state": state,
    }
