"""What was unusual about a request, compared with the other requests of the same hour. Pure."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import msgspec

from dalsegno.history.summary import Summary

HOUR_NS: Final = 3600 * 1_000_000_000
_FEWEST: Final = 5
"""With fewer other requests, nothing is called unusual."""
_TIMES_MEDIAN: Final = 2.0
_SHARE_BELOW: Final = 0.9
"""A value is unusual above this share of the others', and above a multiple of their median."""


class Unusual(msgspec.Struct, frozen=True, kw_only=True):
    """A value of a request that is higher than most others'.

    Attributes:
        what: the name of the value.
        value, median, highest: its own, and those of the others; in seconds, tokens or a number of attempts.
        others: the number of the other requests.
    """

    what: str
    unit: str
    value: float
    median: float
    highest: float
    others: int

    @property
    def text(self) -> str:
        """The finding in words."""
        of = f"median of {self.others} others {_amount(self.median, self.unit)}"
        return (
            f"{self.what} {_amount(self.value, self.unit)}: {of}, highest {_amount(self.highest, self.unit)}"
        )


def around(request: Summary) -> tuple[int, int]:
    """Return the hour around a request's submission; Unix nanoseconds."""
    return request.start_ns - HOUR_NS // 2, request.start_ns + HOUR_NS // 2


def unusual(request: Summary, others: Sequence[Summary]) -> list[Unusual]:
    """Return what was unusually high, the most unusual first."""
    found = []
    same = [one for one in others if one.model == request.model and one.request_id != request.request_id]
    for what, unit, least, value_of in _VALUES:
        value = value_of(request)
        values = sorted(found_value for one in same if (found_value := value_of(one)) is not None)
        if value is None or len(values) < _FEWEST or value < least:
            continue
        middle = median(values)
        below = sum(one < value for one in values) / len(values)
        if below >= _SHARE_BELOW and value >= _TIMES_MEDIAN * middle:
            found.append(
                Unusual(
                    what=what, unit=unit, value=value, median=middle, highest=values[-1], others=len(values)
                )
            )
    return sorted(found, key=lambda one: one.median / one.value)


def _decode_s_per_token(one: Summary) -> float | None:
    if one.end_ns is None or one.first_ns is None or not one.completion_tokens or one.completion_tokens < 2:
        return None
    return (one.end_ns - one.first_ns) / 1e9 / one.completion_tokens


def _number(value: int | None) -> float | None:
    return None if value is None else float(value)


_VALUES: Final[Sequence[tuple[str, str, float, Callable[[Summary], float | None]]]] = (
    ("wait for admission", "s", 0.01, lambda one: one.queue_s),
    ("first output after", "s", 0.01, lambda one: one.first_chunk_s),
    ("time for each token", "s", 0.001, _decode_s_per_token),
    ("prompt", "tokens", 16, lambda one: _number(one.prompt_tokens)),
    ("answer", "tokens", 16, lambda one: _number(one.completion_tokens)),
    ("attempts", "", 2, lambda one: _number(one.attempts)),
)
"""By value: its name, its unit, the least amount that is worth a mention, and its function."""


def _amount(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.3f} s" if value >= 0.001 else f"{value * 1e6:.0f} us"
    return f"{value:,.0f} {unit}".rstrip()
