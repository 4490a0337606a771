"""Batches pay only where a call takes less time in them."""

import pytest

from workers.stateless_engine.batch_gain import BatchGain


def settled(gain: BatchGain, waiting: int, seconds_of: dict[int, float], forwards: int = 20) -> int:
    """The size that is chosen after some forwards, where one of each size takes so long."""
    for _ in range(forwards):
        size = gain.size(waiting)
        gain.learn(size, seconds_of[size])
    return gain.size(waiting)


def test_calls_are_joined_where_a_forward_takes_the_same_time() -> None:
    gain = BatchGain()
    assert settled(gain, 4, {1: 1.0, 4: 1.1}) == 4
    assert gain.gain == pytest.approx(4 / 1.1)


@pytest.mark.parametrize("seconds", [4.4, 4.0, 3.9])
def test_calls_are_not_joined_for_nothing(seconds: float) -> None:
    assert settled(BatchGain(), 4, {1: 1.0, 4: seconds}) == 1


def test_each_size_is_measured_first() -> None:
    gain, sizes = BatchGain(), list[int]()
    for _ in range(6):
        sizes.append(gain.size(3))
        gain.learn(sizes[-1], 1.0)
    assert sizes == [1, 1, 1, 3, 3, 3]


def test_one_slow_forward_decides_nothing() -> None:
    gain = BatchGain()
    for seconds in (9.0, 1.0, 1.0):  # the first one compiles something
        gain.learn(1, seconds)
    for _ in range(3):
        gain.learn(2, 2.2)
    assert gain.size(2) == 1


def test_a_smaller_batch_may_pay_more() -> None:
    gain = BatchGain()
    for size, seconds in ((1, 1.0), (2, 1.2), (8, 8.0)):
        for _ in range(3):
            gain.learn(size, seconds)
    assert gain.size(8) == 2


def test_what_was_measured_long_ago_is_measured_again() -> None:
    gain = BatchGain()
    assert settled(gain, 2, {1: 1.0, 2: 2.0}) == 1
    for _ in range(200):
        gain.learn(1, 1.0)
    assert gain.size(2) == 2
    assert settled(gain, 2, {1: 1.0, 2: 1.0}) == 2


def test_a_call_alone_is_not_held_back() -> None:
    gain = BatchGain()
    assert settled(gain, 4, {1: 1.0, 4: 1.0}) == 4
    assert gain.size(1) == 1
