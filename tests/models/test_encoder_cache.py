"""The cache of encoders: hits, bounds, and what it keeps of a batch."""

from collections.abc import Sequence

import torch

from models.encoder_cache import EncoderCache


def rows(value: float, count: int = 4) -> torch.Tensor:
    return torch.full((count, 2), value)


def test_rows_are_found_by_their_key() -> None:
    cache = EncoderCache()

    assert cache.get(("a", 1)) is None
    kept = cache.put(("a", 1), rows(1.0))

    assert cache.get(("a", 1)) is kept
    assert cache.get(("a", 2)) is None
    assert (cache.counters.hits, cache.counters.misses, cache.counters.entries) == (1, 2, 1)
    assert cache.counters.nbytes == 32


def test_the_least_recently_used_rows_are_dropped_first() -> None:
    cache = EncoderCache(max_bytes=64)
    cache.put("a", rows(1.0))
    cache.put("b", rows(2.0))
    cache.get("a")

    cache.put("c", rows(3.0))

    assert [cache.get(key) is not None for key in "abc"] == [True, False, True]
    assert (cache.counters.evicted, cache.counters.entries, cache.counters.nbytes) == (1, 2, 64)


def test_rows_larger_than_the_cache_are_not_kept() -> None:
    cache = EncoderCache(max_bytes=16)

    assert cache.put("a", rows(1.0)).shape == (4, 2)

    assert cache.get("a") is None
    assert cache.counters.nbytes == 0


def test_a_view_of_a_batch_does_not_keep_the_batch() -> None:
    batch = torch.zeros(100, 4, 2)

    kept = EncoderCache().put("a", batch[0])

    assert kept.untyped_storage().nbytes() == 32


def test_missing_rows_are_computed_together_and_once() -> None:
    cache = EncoderCache()
    cache.put("a", rows(0.0))
    asked: list[list[int]] = []

    def compute(new: Sequence[int]) -> list[torch.Tensor]:
        asked.append([*new])
        return [rows(float(index)) for index in new]

    found = cache.fill(["b", "a", "b", "c"], compute)

    assert asked == [[0, 3]]
    assert [float(one[0, 0]) for one in found] == [0.0, 0.0, 0.0, 3.0]
    assert cache.fill(["c", "a"], compute)[0] is found[3]
    assert asked == [[0, 3]]
