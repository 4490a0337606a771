"""Which paths are for those who watch this process, rather than ask it something."""

from typing import Final

_HEALTH: Final = frozenset({"/health", "/health/live", "/health/ready"})
_METRICS: Final = frozenset({"/metrics", "/metrics.json"})


def is_open(path: str) -> bool:
    """Whether everybody may ask for it, without a key: whoever restarts this process has none."""
    return path in _HEALTH


def is_watching(path: str) -> bool:
    """Whether it is asked every few seconds, by programs: no news, and nothing that a limit is for."""
    return path in _HEALTH or path in _METRICS
