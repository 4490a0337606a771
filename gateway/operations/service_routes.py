"""Routes about the gateway itself: name and version, health, and metrics.

/version                  the version; `gateway.page` has `/`
/health                   the whole state
/health/live              the process runs
/health/ready             requests can be answered
/metrics, /metrics.json   for Prometheus, and a few numbers
"""

import time
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from gateway.errors import RETRY_AFTER_S
from gateway.operations import metrics as exposition
from gateway.operations.metrics import Snapshot
from gateway.requests.service import Gateway


def service_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter()

    @router.get("/version", summary="The version alone", tags=["about"])
    async def its_version() -> dict[str, str]:
        return {"version": version("dalsegno")}

    @router.get("/health", summary="The whole state, always with 200", tags=["health"])
    async def health() -> dict[str, Any]:
        return await gateway.health()

    @router.get("/health/live", summary="200 as soon as the process listens", tags=["health"])
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @router.get(
        "/health/ready",
        summary="200 if a request can be answered now, else 503",
        tags=["health"],
        responses={503: {"description": "Not ready: the same document", "content": {"application/json": {}}}},
    )
    async def ready() -> Response:
        state = await gateway.health()
        is_ready = not state["missing"]
        headers = {} if is_ready else {"retry-after": str(RETRY_AFTER_S[503])}
        return Response(
            msgspec.json.encode(state), 200 if is_ready else 503, headers, media_type="application/json"
        )

    @router.get(
        "/metrics",
        summary="Prometheus: this gateway, the log, and all processes by their heartbeats",
        tags=["metrics"],
        responses={200: {"content": {kind: {} for kind in exposition.MEDIA_TYPES}}},
        response_class=Response,
    )
    async def metrics(request: Request) -> Response:
        snapshot = Snapshot(gateway, await gateway.log_state(), time.monotonic())
        content, media_type = await exposition.text(snapshot, request.headers.get("accept", ""))
        return Response(content, media_type=None, headers={"content-type": media_type})

    @router.get(
        "/metrics.json",
        summary="Engines, sequences in flight, and averages over the last answers",
        tags=["metrics"],
    )
    async def metrics_json() -> dict[str, Any]:
        return exposition.as_json(gateway, Snapshot(gateway, None, time.monotonic()))

    return router
