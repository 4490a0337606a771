"""LoRA adapters of a deployment as events and processes name them. Pure.

Clients address one as `<model>:<adapter>`. What a request is admitted with is an `Adapter`, which has the
digest of the weights: a name may later stand for others.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

NAME_PATTERN: Final = r"^[A-Za-z0-9_-]{1,64}\Z"
"""A name is a token of a subject: it has no dot."""
SEPARATOR: Final = ":"


class Adapter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter's name, the digest of its two files (hex), and its folder on the workers' machines."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    digest: str
    folder: str


def adapter_name(model: str) -> str:
    """The name of the adapter that a model's name ends with; empty without one."""
    return model.rpartition(SEPARATOR)[2] if SEPARATOR in model else ""


def addressed(model: str, adapter: str) -> str:
    """The model name of an adapter."""
    return f"{model}{SEPARATOR}{adapter}"
