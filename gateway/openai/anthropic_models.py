"""The models in Anthropic's form: for requests to `GET /v1/models` with the header `anthropic-version`."""

from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request

from gateway.requests.service import Gateway

_HEADER: Final = "anthropic-version"
"""Anthropic's clients send it with each request."""


def are_asked(request: Request) -> bool:
    """Tell whether a client of Anthropic's asks."""
    return _HEADER in request.headers


def model_list(gateway: Gateway) -> dict[str, Any]:
    """Return the model, its aliases and its adapters, on one page."""
    names = gateway.served.names
    return {
        "data": [model_document(gateway, name) for name in names],
        "has_more": False,
        "first_id": names[0],
        "last_id": names[-1],
    }


def model_document(gateway: Gateway, name: str) -> dict[str, Any]:
    """Return the model, or one of its adapters; it was created when this gateway started."""
    started = datetime.fromtimestamp(gateway.started_s, UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
