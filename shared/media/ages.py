"""The ages of media, and of the log whose events name them. Pure."""

from typing import Final

from shared.log.nats.durability import MEDIA_AGE_FACTOR

_RENEWED_AFTER: Final = 1 - 1 / MEDIA_AGE_FACTOR
"""The share of its age limit after which a medium is renewed when it is used: the rest is the log's limit."""


def is_aged(stored_ns: int, now_ns: int, limit_ns: int | None) -> bool:
    """Return whether a medium would expire before events that are stored now; `limit_ns` None: never."""
    return limit_ns is not None and now_ns - stored_ns > limit_ns * _RENEWED_AFTER
