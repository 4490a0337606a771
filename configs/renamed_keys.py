"""Renamed keys of `model_kwargs`. The old names are accepted for one version, with a logged warning. Pure."""

from collections.abc import Collection, Mapping
from typing import Any, Final

RENAMED: Final[Mapping[str, str]] = {
    "stretch": "decode_slowdown_limit",
    "max_rows": "max_sequences",
    "speculate": "speculative_tokens",
    "draft": "draft_model",
    "warm": "warm_prefixes",
}
"""By old name, the current name."""


def with_current_names(
    kwargs: Mapping[str, Any], own: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return `kwargs` under the current names, and the old names found in it, each with its current name.

    `own` are the model family's own keys, which are never renamed.

    Raises:
        ValueError: a key is given by both names; the message names both.
    """
    found = {key: RENAMED[key] for key in kwargs if key in RENAMED and key not in own}
    for old, new in found.items():
        if new in kwargs:
            raise ValueError(f"expected {new} alone, found {old} too, its old name; remove {old}")
    return {found.get(key, key): value for key, value in kwargs.items()}, found


def warning(old: str, new: str) -> str:
    """The warning about an old name."""
    return f"model_kwargs.{old} is now called {new}; the old name is accepted in this version only"
