"""How much room the log has, and what may begin while it has little. Pure.

A request writes until it ends. One that begins in the last of the room could end up unfinished, and so could
all others: so nothing new begins once a tenth of the room is left, and what is under way has that to end in.
Of a large log 1 GiB is enough, and of a small one it takes 64 MiB (but no more than half): some hundred
requests are under way, of a few hundred KiB each.

    |<----------- free ----------->|<-- nearly full -->| full
    0                  nothing new begins   what comes is refused, kept by its writer, and sent again
"""

from enum import StrEnum
from typing import Final

from shared.log.port import LogState

_RESERVED: Final = 0.1
_RESERVE_AT_MOST: Final = 1 << 30
_RESERVE_AT_LEAST: Final = 64 << 20
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


class Room(StrEnum):
    """What may be written."""

    FREE = "free"
    NEARLY_FULL = "nearly full"
    FULL = "full"


def room_in(state: LogState, *, refuses: bool) -> Room:
    """The room in a log; `refuses`: it has said itself that it takes no more (`Log.is_full`)."""
    if refuses:
        return Room.FULL
    if state.max_bytes is None or state.bytes < state.max_bytes - reserve(state.max_bytes):
        return Room.FREE
    return Room.NEARLY_FULL if state.bytes < state.max_bytes else Room.FULL


def reserve(max_bytes: int) -> int:
    """What is kept for requests under way, in bytes."""
    return min(max(round(max_bytes * _RESERVED), min(_RESERVE_AT_LEAST, max_bytes // 2)), _RESERVE_AT_MOST)


def told(room: Room, state: LogState) -> str:
    """The room in words: `the log is nearly full (912 MiB of 1 GiB)`."""
    held = _readable(state.bytes)
    of = f" of {_readable(state.max_bytes)}" if state.max_bytes is not None and state.max_bytes > 1 else ""
    return f"the log is {room} ({held}{of})"


def _readable(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if value >= 100 else f"{value:.3g} {_UNITS[unit]}"
