"""Progress reports of checkpoint loaders. No torch."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called during loading with bytes read, total bytes and the tensor's name; from several threads."""


def silent(done: int, total: int, name: str) -> None:
    """Ignore the report."""
