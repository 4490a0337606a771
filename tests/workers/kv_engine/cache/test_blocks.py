"""Blocks of a pool: allocated, shared, released, kept as evictable, and evicted."""

import pytest

from shared.errors import BugError
from workers.kv_engine.cache.blocks import BlockManager


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_tokens_take_whole_blocks(tokens: int, blocks: int) -> None:
    assert BlockManager(10, 16).blocks_for(tokens) == blocks


def test_every_block_is_allocated_once() -> None:
    manager = BlockManager(4, 2)

    taken = manager.allocate(2) + manager.allocate(2)

    assert sorted(taken) == [0, 1, 2, 3]
    assert manager.free == 0


def test_released_blocks_are_free_again() -> None:
    manager = BlockManager(2, 2)
    manager.release(manager.allocate(2))

    assert manager.free == 2
    assert manager.evictable == 0


def test_allocating_more_than_is_free_is_a_bug() -> None:
    with pytest.raises(BugError, match="cannot allocate 3 blocks: only 2"):
        BlockManager(2, 2).allocate(3)


@pytest.mark.parametrize("blocks", [[0], [1, 1]])
def test_releasing_a_block_that_is_not_in_use_is_a_bug(blocks: list[int]) -> None:
    manager = BlockManager(2, 1)
    manager.allocate(2)
    manager.release([0])

    with pytest.raises(BugError, match="not all of them are in use"):
        manager.release(blocks)


def test_a_shared_block_is_free_after_its_last_release() -> None:
    manager = BlockManager(1, 2)
    taken = manager.allocate(1)
    manager.cache(taken[0])
    manager.share(taken)

    manager.release(taken)
    assert (manager.free, manager.evictable) == (0, 0)
    manager.release(taken)

    assert (manager.free, manager.evictable) == (1, 1)
    assert manager.is_evictable(taken[0])


def test_a_block_that_is_not_cached_cannot_be_shared() -> None:
    manager = BlockManager(1, 2)
    taken = manager.allocate(1)

    with pytest.raises(BugError, match="not all of them are cached"):
        manager.share(taken)


def test_an_unused_block_cannot_be_cached() -> None:
    with pytest.raises(BugError, match="it is not in use"):
        BlockManager(1, 2).cache(0)


def test_evictable_blocks_are_allocated_last_the_end_of_the_oldest_first() -> None:
    evicted: list[int] = []
    manager = BlockManager(5, 2)
    manager.on_evicted = evicted.append
    old, new = manager.allocate(2), manager.allocate(2)
    for block in (*old, *new):
        manager.cache(block)
    manager.release(old)
    manager.release(new)

    manager.allocate(1)
    assert evicted == []
    manager.allocate(3)

    assert evicted == [old[1], old[0], new[1]]
    assert (manager.free, manager.evictable) == (1, 1)


def test_a_block_that_is_shared_again_is_the_newest() -> None:
    evicted: list[int] = []
    manager = BlockManager(2, 2)
    manager.on_evicted = evicted.append
    first, second = manager.allocate(1), manager.allocate(1)
    for block in (*first, *second):
        manager.cache(block)
    manager.release(first)
    manager.release(second)

    manager.share(first)
    manager.release(first)
    manager.allocate(1)

    assert evicted == second
