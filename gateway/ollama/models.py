"""The served model and its adapters in Ollama's form. Sizes are unknown to a gateway: 0."""

import hashlib
from datetime import UTC, datetime
from typing import Any, Final

from gateway.ollama.request import LATEST
from gateway.requests.service import Gateway
from models.base import EMBEDDING

_KEPT: Final = "2318-12-31T00:00:00Z"
"""When a model is unloaded: Ollama's clients expect a time."""


def known_name(gateway: Gateway, name: str) -> str:
    """Return the name of the model that a client means: Ollama's clients add a tag.

    Raises:
        ModelNotFoundError: it is not served here.
    """
    found = name.removesuffix(LATEST)
    gateway.served.check_model(found)
    return found


def listed(gateway: Gateway) -> list[dict[str, Any]]:
    """Return the model and its adapters, for `GET /api/tags`."""
    started = datetime.fromtimestamp(gateway.started_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    names = gateway.served.names
    return [
        {
            "name": name,
            "model": name,
            "modified_at": started,
            "size": 0,
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "details": _details(gateway),
        }
        for name in names
    ]


def running(gateway: Gateway) -> list[dict[str, Any]]:
    """Return what is loaded, for `GET /api/ps`: nothing until a worker was ready."""
    if not gateway.liveness.every_worker_was_ready:
        return []
    return [one | {"expires_at": _KEPT, "size_vram": 0} for one in listed(gateway)]


def described(gateway: Gateway) -> dict[str, Any]:
    """Return what the model can do, for `POST /api/show`."""
    served, family = gateway.served, gateway.served.family
    capabilities = ["completion"] if "text" in served.outputs else []
    capabilities += ["tools"] if gateway.tool_calls is not None else []
    capabilities += ["thinking"] if gateway.reasoning is not None else []
    capabilities += ["vision"] if "image" in served.modalities else []
    capabilities += ["embedding"] if EMBEDDING in served.outputs else []
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(gateway),
        "model_info": {"general.architecture": family, f"{family}.context_length": served.max_seq_len},
        "capabilities": capabilities,
    }


def _details(gateway: Gateway) -> dict[str, Any]:
    family = gateway.served.family
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }
