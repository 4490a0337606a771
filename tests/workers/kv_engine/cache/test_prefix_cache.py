"""The radix tree: the cached blocks that a sequence finds are always those of its own prefix."""

from collections.abc import Sequence

import numpy as np
import pytest

from shared.errors import BugError
from workers.kv_engine.cache.blocks import BlockManager
from workers.kv_engine.cache.prefix_cache import Bound, PrefixCache

SIZE = 2


def cache_of(blocks: int = 16) -> tuple[PrefixCache, BlockManager]:
    pool = BlockManager(blocks, SIZE)
    return PrefixCache(pool), pool


def put(cache: PrefixCache, pool: BlockManager, ids: Sequence[int], root: object = None) -> list[int]:
    """Compute a sequence with its cached blocks shared, and return the blocks, which the caller then uses."""
    path = cache.match([*ids, -1], root)  # with one token more, its last full block counts, too
    shared = [node.block for node in path]
    pool.share(shared)
    own = pool.allocate(pool.blocks_for(len(ids)) - len(path))
    end = path[-1] if path else cache.root(root)
    for number, block in enumerate(own, start=len(path)):
        if (number + 1) * SIZE <= len(ids):
            node = cache.insert(end, cache.content(ids, number), block)
            assert node is not None
            end = node
    return shared + own


def found(cache: PrefixCache, ids: Sequence[int], root: object = None) -> list[int]:
    return [node.block for node in cache.match(ids, root)]


def test_a_match_is_the_full_blocks_of_the_common_prefix() -> None:
    cache, pool = cache_of()
    blocks = put(cache, pool, [1, 2, 3, 4, 5])

    assert found(cache, [1, 2, 3, 4, 5, 6]) == blocks[:2]
    assert found(cache, [1, 2, 3, 9, 9]) == blocks[:1]
    assert found(cache, [1, 9, 3, 4, 5]) == []
    assert found(cache, [3, 4, 5]) == []


def test_a_bound_block_and_those_after_it_match_only_what_they_are_bound_to() -> None:
    cache, pool = cache_of()
    ids, end, blocks = [1, 2, 3, 4, 5, 6, 7], cache.root(), pool.allocate(5)
    for number, block, bound in ((0, 0, ()), (1, 1, (Bound(7),)), (2, 2, (Bound(7),))):
        node = cache.insert(end, (*cache.content(ids, number), *bound), blocks[block])
        assert node is not None
        assert node.is_bound == bool(bound)
        end = node
    other = cache.insert(
        cache.match(ids[:3])[0], (*cache.content(ids, 1), Bound(9)), blocks[3]
    )  # the same tokens in another prompt

    assert found(cache, ids) == blocks[:1]
    assert [node.block for node in cache.match(ids, bound=Bound(7))] == blocks[:3]
    assert other is not None
    assert [node.block for node in cache.match(ids, bound=Bound(9))] == [blocks[0], other.block]
    assert [node.block for node in cache.match(ids, bound=Bound(8))] == blocks[:1]


def test_at_least_one_token_of_an_equal_sequence_is_left_to_compute() -> None:
    cache, pool = cache_of()
    blocks = put(cache, pool, [1, 2, 3, 4])

    assert found(cache, [1, 2, 3, 4]) == blocks[:1]


def test_the_same_tokens_after_others_are_another_prefix() -> None:
    """The keys and values of a block depend on all tokens before it."""
    cache, pool = cache_of()
    put(cache, pool, [1, 2, 7, 8])
    put(cache, pool, [3, 4])

    assert len(found(cache, [1, 2, 7, 8, 0])) == 2
    assert len(found(cache, [3, 4, 7, 8, 0])) == 1


def test_sequences_with_another_root_share_nothing() -> None:
    cache, pool = cache_of()
    put(cache, pool, [1, 2, 3], root="one")

    assert found(cache, [1, 2, 3], root="two") == []
    assert len(found(cache, [1, 2, 3], root="one")) == 1


def test_a_second_copy_of_a_block_is_not_cached() -> None:
    cache, pool = cache_of()
    first, second = pool.allocate(2)

    assert cache.insert(cache.root(), (1, 2), first) is not None
    assert cache.insert(cache.root(), (1, 2), second) is None
    assert cache.size == 1


def test_hidden_blocks_are_not_found_and_can_be_cached_anew() -> None:
    cache, pool = cache_of(blocks=8)
    old = put(cache, pool, [1, 2, 3, 4])
    [first, _] = cache.match([1, 2, 3, 4, 5])
    cache.hide(first)
    assert found(cache, [1, 2, 3, 4, 5]) == []

    new = put(cache, pool, [1, 2, 3, 4])
    cache.hide(first)
    assert found(cache, [1, 2, 3, 4, 5]) == new
    assert not set(old) & set(new)

    pool.release(old)
    pool.allocate(4)  # what was not used yet
    assert pool.allocate(2), "hidden blocks are evicted as all others are"
    assert found(cache, [1, 2, 3, 4, 5]) == new


def test_nothing_can_be_cached_after_an_evicted_block() -> None:
    cache, pool = cache_of(blocks=2)
    blocks = put(cache, pool, [1, 2])
    (node,) = cache.match([1, 2, 3])
    pool.release(blocks)
    taken = pool.allocate(2)

    with pytest.raises(BugError, match="the block before it is not cached"):
        cache.insert(node, (3, 4), taken[0])


@pytest.mark.parametrize("seed", range(30))
def test_every_hit_agrees_with_a_naive_model(seed: int) -> None:
    """Each block is labelled with the prefix it was written for; a hit must have the same label."""
    random = np.random.default_rng(seed)
    cache, pool = cache_of(blocks=int(random.integers(6, 30)))
    written: dict[int, tuple[object, tuple[int, ...]]] = {}
    having: list[list[int]] = []
    hits = 0
    for _ in range(300):
        root = ("a", "b")[int(random.integers(2))]
        # Only three tokens, and short: many sequences have common prefixes.
        ids = random.integers(0, 3, int(random.integers(1, 11))).tolist()
        path = cache.match(ids, root)
        for number, node in enumerate(path):
            assert written[node.block] == (root, tuple(ids[: (number + 1) * SIZE]))
        hits += len(path)
        kept = sum(pool.is_evictable(node.block) for node in path)
        if pool.blocks_for(len(ids)) - len(path) > pool.free - kept:
            if having:
                pool.release(having.pop(int(random.integers(len(having)))))
            continue
        blocks = put(cache, pool, ids, root)
        for number, block in enumerate(blocks):
            if (number + 1) * SIZE <= len(ids):
                written[block] = (root, tuple(ids[: (number + 1) * SIZE]))
        having.append(blocks)
        if random.random() < 0.4:
            pool.release(having.pop(int(random.integers(len(having)))))
        used = {block for blocks in having for block in blocks}
        assert len(used) + pool.free == pool.num_blocks
    for blocks in having:
        pool.release(blocks)
    assert pool.free == pool.num_blocks
    assert hits > 20
