import pytest

from shared.errors import BugError
from workers.engine.blocks import BlockManager


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_tokens_take_whole_blocks(tokens: int, blocks: int) -> None:
    assert BlockManager(10, 16).blocks_for(tokens) == blocks


def test_every_block_is_handed_out_once() -> None:
    manager = BlockManager(4, 2)

    taken = manager.allocate(4) + manager.allocate(4)

    assert sorted(taken) == [0, 1, 2, 3]
    assert manager.free == 0
    assert not manager.can_allocate(1)


def test_released_blocks_are_free_again() -> None:
    manager = BlockManager(2, 2)
    manager.release(manager.allocate(4))

    assert manager.can_allocate(4)
    assert not manager.can_allocate(5)


def test_taking_more_than_there_is_is_a_bug() -> None:
    with pytest.raises(BugError, match="asked for 3 blocks, but only 2"):
        BlockManager(2, 2).allocate(5)


@pytest.mark.parametrize("blocks", [[0], [1, 1]])
def test_releasing_what_is_not_taken_is_a_bug(blocks: list[int]) -> None:
    manager = BlockManager(2, 1)
    manager.allocate(2)
    manager.release([0])

    with pytest.raises(BugError, match="given back"):
        manager.release(blocks)
