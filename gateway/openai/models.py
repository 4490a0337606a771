"""The document of `GET /v1/models/{id}`: what a client may send to the model, and within which limits."""

from typing import Any

from gateway.requests.service import Gateway
from models import options
from models.base import EMBEDDING, SCORE


def model_documents(gateway: Gateway) -> list[dict[str, Any]]:
    """Return the documents of the model, its aliases and its adapters."""
    return [model_document(gateway, name) for name in gateway.served.names]


def model_document(gateway: Gateway, name: str) -> dict[str, Any]:
    """Return OpenAI's fields of the model, or of one of its adapters, and ours.

    `options` is the JSON schema of the parameters that only this model's family has. `remarks` are sentences
    about the checkpoint, such as that its safety checker is on. `limits` are those of one request; sizes are
    in bytes. Of an adapter, `parent` is its model, and `root` its folder; of an alias, `root` is the model.
    """
    served, settings, media = gateway.served, gateway.settings, gateway.media_settings
    limits: dict[str, Any] = {
        "max_tokens": min(settings.max_tokens, served.max_seq_len),
        "max_choices": settings.max_choices,
        "max_body_bytes": settings.max_body_bytes,
    }
    if EMBEDDING in served.outputs:
        limits["max_embeddings"] = settings.max_embeddings
    if SCORE in served.outputs or served.takes_texts:
        limits["max_documents"] = settings.max_documents
    if served.takes_media:
        limits |= {
            "max_files": media.max_files,
            "max_file_bytes": media.max_bytes,
            "max_request_bytes": media.max_request_bytes,
            "max_pixels": media.max_pixels,
            "max_frames": media.max_frames,
            "max_seconds": media.max_seconds,
        }
    adapter = served.adapter_models.get(name)
    of_adapter = (
        {"parent": served.name, "root": adapter.folder, "digest": adapter.digest}
        if adapter is not None
        else {}
    )
    return {
        "id": name,
        "object": "model",
        "created": gateway.started_s,
        "owned_by": "dalsegno",
        **({"root": served.name} if name in served.aliases else of_adapter),
        "max_model_len": served.max_seq_len,
        "tool_calls": gateway.tool_calls.name if gateway.tool_calls is not None else None,
        "reasoning": gateway.reasoning.name if gateway.reasoning is not None else None,
        "family": served.family,
        "input_modalities": list(served.modalities),
        "output_modalities": list(served.outputs),
        "media": {name: dict(facts) for name, facts in served.media.items()},
        "voices": list(served.voices),
        "remarks": list(served.remarks),
        "limits": limits,
        "options": options.schema(served.options),
    }
