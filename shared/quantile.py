"""The quantile by nearest rank. Pure."""

from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which `share` (0 to 1) of the values lie; None if there are no values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
