"""The paths for monitoring, which need no key or no rate limit."""

from typing import Final

_HEALTH: Final = frozenset({"/health", "/health/live", "/health/ready"})
_METRICS: Final = frozenset({"/metrics", "/metrics.json"})


def is_open(path: str) -> bool:
    """True for a path that needs no API key: a process supervisor has none."""
    return path in _HEALTH


def is_monitoring(path: str) -> bool:
    """True for a path that programs poll every few seconds: logged at `debug`, and not rate limited."""
    return path in _HEALTH or path in _METRICS
