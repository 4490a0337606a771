"""Where fetched tensors land: warm memory that comes home by itself, and is bounded."""

import gc

import numpy as np
import pytest

from workers.data_plane.transports.landing import Landing, LandingStats, block_size
from workers.data_plane.transports.port import TransportError

KB = 1024


def test_memory_comes_home_when_its_last_view_is_gone() -> None:
    landing = Landing(1024 * KB)
    view = landing.take(100 * KB)
    part = view[10:].view(np.int16)[::2]
    del view
    gc.collect()

    assert landing.stats().lent_bytes == block_size(100 * KB)
    del part
    assert landing.stats() == LandingStats(total_bytes=block_size(100 * KB), lent_bytes=0)


def test_what_came_home_is_lent_again_the_last_first() -> None:
    landing = Landing(1024 * KB)
    first, second = landing.take(65 * KB), landing.take(65 * KB)
    place = second.ctypes.data
    del first
    landing.stats()
    del second

    assert landing.take(66 * KB).ctypes.data == place


def test_a_view_of_torchs_holds_the_memory_too() -> None:
    torch = pytest.importorskip("torch")
    landing = Landing(1024 * KB)
    tensor = torch.from_numpy(landing.take(100))

    assert landing.stats().lent_bytes > 0
    del tensor
    assert landing.stats().lent_bytes == 0


def test_more_than_the_limit_is_not_lent_and_says_who_holds_it() -> None:
    landing = Landing(256 * KB)
    held = landing.take(192 * KB)

    with pytest.raises(TransportError, match="readers hold 196608 of 262144"):
        landing.take(128 * KB)
    assert held.nbytes == 192 * KB


def test_kept_memory_of_another_size_makes_room() -> None:
    landing = Landing(256 * KB)
    for _ in range(2):
        landing.take(192 * KB)
        landing.take(64 * KB)

    landing.take(256 * KB)

    assert landing.stats() == LandingStats(total_bytes=256 * KB, lent_bytes=0)


def test_each_block_is_told_once() -> None:
    told: list[int] = []
    landing = Landing(1024 * KB, on_new=lambda block: told.append(block.nbytes))
    for _ in range(3):
        landing.take(70 * KB)

    assert told == [block_size(70 * KB)]


@pytest.mark.parametrize(
    "nbytes", [0, 1, 64 * KB, 64 * KB + 1, 100 * KB, 128 * KB, 129 * KB, 3 << 20, 1 << 30]
)
def test_a_block_holds_what_is_asked_and_little_more(nbytes: int) -> None:
    size = block_size(nbytes)

    assert nbytes <= size <= max(64 * KB, nbytes * 5 // 4)
    assert block_size(size) == size


def test_no_bytes_are_memory_too() -> None:
    assert Landing(64 * KB).take(0).shape == (0,)
