"""Dal Segno's command line, launcher, replay tools and client.

    from dalsegno import AsyncClient, Client

The client is imported at its first use: the command line starts without it.
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dalsegno.client import Answer, AsyncClient, Audio, Chunk, Client, Credentials
    from shared.errors import CapacityError, ClientError, DalSegnoError

__all__ = [
    "Answer",
    "AsyncClient",
    "Audio",
    "CapacityError",
    "Chunk",
    "Client",
    "ClientError",
    "Credentials",
    "DalSegnoError",
]
_ERRORS: Final = frozenset({"CapacityError", "ClientError", "DalSegnoError"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("shared.errors" if name in _ERRORS else "dalsegno.client"), name)
