from collections.abc import Iterator

import pytest

from dalsegno.roles.signal_echo import SignalEcho


def heard(*times_s: float) -> list[bool]:
    clock: Iterator[float] = iter(times_s)
    echo = SignalEcho(now=lambda: next(clock))
    return [echo.is_echo() for _ in range(len(times_s) - 1)]


@pytest.mark.parametrize("then_s", [100.0, 100.3])
def test_what_comes_right_behind_the_first_is_its_echo(then_s: float) -> None:
    assert heard(100.0, then_s, then_s) == [False, True]


def test_what_comes_later_is_meant() -> None:
    assert heard(100.0, 100.6, 100.6) == [False, False]
