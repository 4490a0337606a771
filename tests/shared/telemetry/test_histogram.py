import msgspec

from shared.telemetry.histogram import SECONDS, Histogram


def test_a_value_counts_in_the_first_bucket_that_is_not_below_it() -> None:
    found = Histogram.over((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.1, 4.0, 5.0):
        found.observe(value)

    assert found.counts == [2, 1, 1, 1]
    assert (found.count, found.sum) == (5, 11.6)


def test_several_of_one_size_are_added_at_once() -> None:
    one_by_one, at_once = Histogram.over(SECONDS), Histogram.over(SECONDS)
    for _ in range(3):
        one_by_one.observe(0.5)
    at_once.observe(0.5, times=3)

    assert at_once == one_by_one


def test_it_rides_in_a_beat() -> None:
    found = Histogram.over(SECONDS)
    found.observe(0.2)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Histogram) == found


def test_the_bounds_rise() -> None:
    assert list(SECONDS) == sorted(set(SECONDS))
