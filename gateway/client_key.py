"""The name of the API key with which a client authenticated, in the ASGI scope of its request."""

from typing import Final

from starlette.types import Scope

KEY_NAME: Final = "key"
"""The entry of `scope["state"]` that `gateway.middleware.api_keys` sets."""


def key_name(scope: Scope) -> str | None:
    """The name of the request's key; None in a deployment without keys."""
    name: str | None = scope.get("state", {}).get(KEY_NAME)
    return name
