"""`/health`: the whole state; `/health/live`: the process runs; `/health/ready`: requests can be answered."""

from typing import Any

import msgspec
from fastapi import APIRouter, Response

from gateway.errors import RETRY_AFTER_S
from gateway.requests.service import Gateway


def health_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["health"])

    @router.get("/health", summary="The whole state, always with 200")
    async def health() -> dict[str, Any]:
        return await gateway.health()

    @router.get("/health/live", summary="200 as soon as the process listens")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @router.get("/health/ready", summary="200 if a request can be answered now, else 503")
    async def ready() -> Response:
        state = await gateway.health()
        is_ready = not state["missing"]
        headers = {} if is_ready else {"retry-after": str(RETRY_AFTER_S[503])}
        return Response(
            msgspec.json.encode(state), 200 if is_ready else 503, headers, media_type="application/json"
        )

    return router
