"""The capacity of a log at its two thresholds."""

import pytest

from shared.log.capacity import Capacity, capacity_of, describe, reserve
from shared.log.port import LogState

GIB = 1 << 30


def _log(held: int, max_bytes: int | None) -> LogState:
    return LogState(
        first_seq=1, last_seq=1, created_ns=1, messages=1, bytes=held, max_bytes=max_bytes, replicas=1
    )


@pytest.mark.parametrize(
    ("held", "room"),
    [
        (0, Capacity.FREE),
        (9 * GIB - 1, Capacity.FREE),
        (9 * GIB, Capacity.NEARLY_FULL),
        (10 * GIB - 1, Capacity.NEARLY_FULL),
        (10 * GIB, Capacity.FULL),
        (10 * GIB + 1, Capacity.FULL),
    ],
)
def test_the_last_tenth_is_for_what_is_under_way(held: int, room: Capacity) -> None:
    assert capacity_of(_log(held, 10 * GIB), refuses=False) is room


def test_of_a_large_log_a_gibibyte_is_kept_and_of_a_small_one_what_it_takes_but_not_all() -> None:
    assert reserve(5 * GIB) == round(0.5 * GIB)
    assert reserve(1000 * GIB) == GIB
    assert reserve(128 << 20) == reserve(500 << 20) == 64 << 20
    assert reserve(1 << 20) == 1 << 19
    assert capacity_of(_log(998 * GIB, 1000 * GIB), refuses=False) is Capacity.FREE
    assert capacity_of(_log(999 * GIB, 1000 * GIB), refuses=False) is Capacity.NEARLY_FULL


def test_a_log_without_a_bound_has_room_until_it_says_otherwise() -> None:
    assert capacity_of(_log(10**15, None), refuses=False) is Capacity.FREE
    assert capacity_of(_log(10**15, None), refuses=True) is Capacity.FULL
    assert capacity_of(_log(0, 1000), refuses=True) is Capacity.FULL


@pytest.mark.parametrize(
    ("room", "state", "words"),
    [
        (Capacity.NEARLY_FULL, _log(912 << 20, GIB), "the log is nearly full (912 MiB of 1 GiB)"),
        (Capacity.FULL, _log(999, 1000), "the log is full (999 bytes of 1000 bytes)"),
        (Capacity.FULL, _log(3 << 29, None), "the log is full (1.5 GiB)"),
    ],
)
def test_it_is_said_in_words(room: Capacity, state: LogState, words: str) -> None:
    assert describe(room, state) == words
