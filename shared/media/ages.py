"""The ages of media, and of the log whose events name them. Pure."""

from typing import Final

AGE_FACTOR: Final = 1.25
"""The age limit of media, as a multiple of the log's."""
_RENEWED_AFTER: Final = 1 - 1 / AGE_FACTOR
"""The share of its age limit after which a medium is renewed when it is used: the rest is the log's limit."""


def is_aged(stored_ns: int, now_ns: int, limit_ns: int | None) -> bool:
    """Return whether a medium would expire before events that are stored now; `limit_ns` None: never."""
    return limit_ns is not None and now_ns - stored_ns > limit_ns * _RENEWED_AFTER
