"""Digests of what decides: of the core, which requests pin, and of all that a fold depends on."""

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from conductor.core.schedule import Deployment


@cache
def core_digest() -> str:
    """The digest of the sources that decide, as they were when first asked for. Hex, 32 characters."""
    return _digest_of(files("conductor.core").iterdir())


def fold_digest(deployment: Deployment) -> str:
    """The digest of all that a fold depends on beside the log: these sources, and the model's graph and plan.

    Of the vocabulary all sources are taken, which is more than there need be: what is kept is only a cache.
    """
    words = _digest_of([*files("shared").iterdir(), *files("shared.walks").iterdir()])
    parts = (core_digest(), words, deployment.family, deployment.graph_digest, deployment.plan_digest)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _digest_of(entries: Iterable[Traversable]) -> str:
    total = hashlib.blake2b(digest_size=16)
    sources = (entry for entry in entries if entry.name.endswith(".py"))
    for source in sorted(sources, key=lambda entry: entry.name):
        total.update(source.read_bytes())
    return total.hexdigest()
