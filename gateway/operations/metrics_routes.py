"""`/metrics` for Prometheus, and `/metrics.json` with a few numbers."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.operations import metrics as exposition
from gateway.operations.metrics import Snapshot
from gateway.requests.service import Gateway


def metrics_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["metrics"])

    @router.get(
        "/metrics",
        summary="Prometheus: this gateway, the log, and all processes by their heartbeats",
        responses={200: {"content": {kind: {} for kind in exposition.MEDIA_TYPES}}},
        response_class=Response,
    )
    async def metrics(request: Request) -> Response:
        snapshot = Snapshot(gateway, await gateway.log_state(), time.monotonic())
        content, media_type = await exposition.text(snapshot, request.headers.get("accept", ""))
        return Response(content, media_type=None, headers={"content-type": media_type})

    @router.get("/metrics.json", summary="Engines, sequences in flight, and averages over the last answers")
    async def metrics_json() -> dict[str, Any]:
        return exposition.as_json(gateway, Snapshot(gateway, None, time.monotonic()))

    return router
