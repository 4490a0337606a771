"""The cost of a guide: the processor time of its check, and schemas that are refused before they are tried.

Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

_MOST_REMAINDERS: Final = 30_000
"""The most remainders of a schema's divisors together; so many take about 0.2 s."""


@dataclass(slots=True)
class CpuTime:
    """The processor time that checking a guide has taken, in seconds, whether it succeeded or not."""

    seconds: float = 0.0


def problem_of_multiples(schema: Any) -> str:
    """The reason to refuse a schema for its large divisors (`multipleOf`); empty if there is none.

    The grammar library makes a state per remainder of a division. Factors of two and five are cheap, because
    only the last digits decide them.
    """
    remainders = sum(map(_remainders, _divisors(schema)))
    if remainders <= _MOST_REMAINDERS:
        return ""
    return (
        "expected values of multipleOf that, without their factors 2 and 5, add up to at most "
        f"{_MOST_REMAINDERS}, found {remainders}; choose smaller ones, or leave them out and check the answer"
    )


def _divisors(schema: Any) -> Iterator[float]:
    inside: list[Any] = [schema]
    while inside:
        part = inside.pop()
        if isinstance(part, list):
            inside += part
        elif isinstance(part, dict):
            inside += part.values()
            divisor = part.get("multipleOf")
            if isinstance(divisor, int | float):
                yield divisor


def _remainders(divisor: float) -> int:
    """The divisor's digits as a number, without its factors 2 and 5."""
    digits = int("".join(map(str, Decimal(str(divisor)).as_tuple().digits)))
    for factor in (2, 5):
        while digits and digits % factor == 0:
            digits //= factor
    return digits
