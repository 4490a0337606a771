"""The log's remaining capacity, and the reserve at which no new request may start. Pure.

A request writes events until it ends. If requests could start until the log is full, none of the running
requests could end. So the last tenth of the log is reserved for running requests. The reserve is at most 1
GiB in a large log, and at least 64 MiB (but no more than half) in a small one: enough for some hundred
running requests of a few hundred KiB each.

    |<----------- free ----------->|<-- nearly full -->| full
    0                no new requests      events are refused, kept by their writers, and sent again
"""

from enum import StrEnum
from typing import Final

from shared.log.port import LogState

_RESERVED: Final = 0.1
_MAX_RESERVE: Final = 1 << 30
_MIN_RESERVE: Final = 64 << 20
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


class Capacity(StrEnum):
    """The remaining capacity of a log."""

    FREE = "free"
    NEARLY_FULL = "nearly full"
    FULL = "full"


def capacity_of(state: LogState, *, refuses: bool) -> Capacity:
    """Return the capacity of a log; `refuses` is True if it just refused an event (`Log.is_full`)."""
    if refuses:
        return Capacity.FULL
    if state.max_bytes is None or state.bytes < state.max_bytes - reserve(state.max_bytes):
        return Capacity.FREE
    return Capacity.NEARLY_FULL if state.bytes < state.max_bytes else Capacity.FULL


def reserve(max_bytes: int) -> int:
    """Return the number of bytes that are reserved for running requests."""
    return min(max(round(max_bytes * _RESERVED), min(_MIN_RESERVE, max_bytes // 2)), _MAX_RESERVE)


def describe(capacity: Capacity, state: LogState) -> str:
    """Return the capacity as text: `the log is nearly full (912 MiB of 1 GiB)`."""
    held = _readable(state.bytes)
    of = f" of {_readable(state.max_bytes)}" if state.max_bytes is not None and state.max_bytes > 1 else ""
    return f"the log is {capacity} ({held}{of})"


def _readable(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if value >= 100 else f"{value:.3g} {_UNITS[unit]}"
