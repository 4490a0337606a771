"""`/openapi.json`: the framework's document, completed with our errors, stream types and API keys.

An error has OpenAI's schema, or that of the API whose route it is. The framework adds a 422 to each path with
a parameter, which never occurs here; it is removed.
"""

from http import HTTPStatus
from typing import Any, Final

import fastapi
from fastapi.openapi.utils import get_openapi

from gateway.errors import OLLAMA, is_anthropics
from gateway.middleware.paths import is_open

_METHODS: Final = frozenset({"get", "post", "put", "delete"})
ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS: Final[dict[str, dict[str, Any]]] = {
    "Error": ERROR,
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "additionalProperties": False,
        "properties": {"type": {"const": "error"}, "error": ERROR["properties"]["error"]},
    },
    "OllamaError": {
        "type": "object",
        "required": ["error"],
        "additionalProperties": False,
        "properties": {"error": {"type": "string"}},
    },
}
_STREAMS: Final = {
    "/api/chat": "application/x-ndjson",
    "/api/generate": "application/x-ndjson",
    "/generate": "application/x-ndjson",
    "/v1/chat/completions": "text/event-stream",
    "/v1/completions": "text/event-stream",
    "/v1/images/edits": "text/event-stream",
    "/v1/images/generations": "text/event-stream",
    "/v1/messages": "text/event-stream",
}
_POST_ERRORS: Final = (400, 403, 404, 408, 409, 410, 413, 415, 422, 429, 431, 500, 503, 504)
_OTHER_ERRORS: Final = (400, 403, 404, 408, 409, 410, 413, 429, 431, 500, 503)
_KEY_ERRORS: Final = (401,)


def complete(app: fastapi.FastAPI, *, needs_key: bool) -> None:
    """Make `app` serve the completed document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(app, needs_key=needs_key)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # as FastAPI has it extended


def _completed(app: fastapi.FastAPI, *, needs_key: bool) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    parts = found.setdefault("components", {})
    parts["schemas"] = dict(_ERRORS)
    if needs_key:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            if method in _METHODS:
                _complete_operation(path, method, operation, needs_key=needs_key and not is_open(path))
    return found


def _error_of(path: str) -> str:
    if is_anthropics(path):
        return "AnthropicError"
    return "OllamaError" if path.startswith(OLLAMA) else "Error"


def _complete_operation(path: str, method: str, operation: dict[str, Any], *, needs_key: bool) -> None:
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    if path in _STREAMS and method == "post":
        responses["200"]["content"][_STREAMS[path]] = {}
    errors = (_POST_ERRORS if method in {"post", "put"} else _OTHER_ERRORS) + (
        _KEY_ERRORS if needs_key else ()
    )
    schema = {"$ref": f"#/components/schemas/{_error_of(path)}"}
    for status in errors:
        responses.setdefault(
            str(status),
            {
                "description": HTTPStatus(status).phrase,
                "content": {"application/json": {"schema": schema}},
            },
        )
    if needs_key:
        operation["security"] = [{"key": []}]
