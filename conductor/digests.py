"""The digest of the core itself: what a request pins, and a replay names first when it differs."""

import hashlib
from functools import cache
from importlib.resources import files


@cache
def core_digest() -> str:
    """The digest of the sources that decide, as they were when first asked for. Hex, 32 characters."""
    total = hashlib.blake2b(digest_size=16)
    sources = (entry for entry in files("conductor.core").iterdir() if entry.name.endswith(".py"))
    for source in sorted(sources, key=lambda entry: entry.name):
        total.update(source.read_bytes())
    return total.hexdigest()
