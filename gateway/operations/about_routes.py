"""`/` and `/version`: the name, version and entry points of this gateway."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter

from gateway.requests.service import Gateway


def about_routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter(tags=["about"])

    @router.get("/", summary="Name, version and links")
    async def about() -> dict[str, Any]:
        return {
            "name": "dalsegno",
            "version": version("dalsegno"),
            "model": gateway.served.name,
            "links": {"openapi": "/openapi.json", "health": "/health", "models": "/v1/models"},
        }

    @router.get("/version", summary="The version alone")
    async def its_version() -> dict[str, str]:
        return {"version": version("dalsegno")}

    return router
