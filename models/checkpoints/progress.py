"""How far a checkpoint is read: what loaders tell. No torch."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called while weights load with bytes read, bytes in all, and the tensor's name; from several threads."""


def silent(done: int, total: int, name: str) -> None:
    """Progress that nobody asked for."""
