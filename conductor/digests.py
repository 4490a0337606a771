"""Digests of the code that decides: pinned by each request, and checked before a snapshot is used.

Both cover the definitions that are reachable from the roots below and nothing else (`shared.source_digest`).
Editing a function that no decision reaches changes neither.
"""

import hashlib
from functools import cache
from typing import Final

from conductor.core.schedule import Deployment
from models import registry
from shared.source_digest import Root, digest

CORE: Final = (Root("conductor.core.cluster", ("Cluster",)),)
"""The decision code: `Cluster` folds records and admits requests."""
FOLD: Final = (
    *CORE,
    Root("conductor.core.snapshot", ("load", "pieces")),
    Root("models.registry", ("graph",)),
)
"""The decision code, the snapshot format, and the lookup of the model's graph."""


@cache
def core_digest() -> str:
    """The digest of the decision code as first read in this process. Hex, 32 characters."""
    return digest(CORE)


def fold_digest(deployment: Deployment) -> str:
    """The digest of everything that a fold depends on besides the log: code, graph and plan. Hex."""
    parts = (digest(FOLD), deployment.family, deployment.graph_digest, deployment.plan_digest)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def read_sources(family: str) -> None:
    """Compute the digests that conductors of a family need, for this process and those that it forks.

    They are most of a small conductor's start (0.4 of 0.55 s of CPU). A template that has imported the code
    reads its sources at the same time, so a fork's digests are those of the code that it runs.
    """
    core_digest()
    digest(FOLD)
    registry.plan_digest(family)
