"""Keys of published configurations that have no counterpart here: left out, with a logged warning. Pure."""

from collections.abc import Mapping
from typing import Any, Final

KV_CACHE: Final = "kv_cache"
_LEFT_OUT: Final = {
    "cpu_offload_pages": "keys and values stay on their device; what has no room is computed again later"
}
"""By key in `kv_cache`, the reason."""


def without_offloading(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a configuration without what M* says of the places of keys and values, and why by key.

    A key that is not known stays, and is refused with all others that are unknown.
    """
    given = raw.get(KV_CACHE)
    if not isinstance(given, dict) or not given.keys() <= _LEFT_OUT.keys():
        return dict(raw), {}
    kept = {key: value for key, value in raw.items() if key != KV_CACHE}
    return kept, {f"{KV_CACHE}.{key}": _LEFT_OUT[key] for key in given}
