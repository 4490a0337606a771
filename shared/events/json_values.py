"""Check that values which clients write can be stored as JSON."""

import math
from typing import Any


def check_json_values(values: list[Any], max_depth: int) -> None:
    """Check that all values are JSON, with numbers of at most 64 bits, and not nested too deeply.

    The values are encoded again, also by other programs, so they must be portable.

    Raises:
        ValueError: a value is not JSON, is a number beyond 64 bits, or is nested deeper than `max_depth`.
    """
    level = values
    for _ in range(max_depth):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return
    raise ValueError(f"nested deeper than {max_depth} levels")


def _children(value: object) -> list[Any]:
    match value:
        case dict() if all(isinstance(name, str) for name in value):
            return list(value.values())
        case list():
            return value
        case None | str() | bool():
            return []
        case int() if -(2**63) <= value < 2**64:
            return []
        case float() if math.isfinite(value):
            return []
    found = "a map with keys that are not strings" if isinstance(value, dict) else f"{value!r:.80}"
    raise ValueError(f"expected a JSON value with numbers of at most 64 bits, found {found}")
