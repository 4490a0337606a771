"""Where fetched tensors land: pages of the own arena that come home by themselves."""

from collections.abc import Iterator

import numpy as np
import pytest

from workers.data_plane.memory import backing
from workers.data_plane.memory.arena import Arena
from workers.data_plane.transport import TransportError
from workers.data_plane.transports.fetch_buffers import ArenaFetchBuffers

PAGES = 16


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(PAGES * 4096, backing.anonymous)
    yield arena
    arena.close()


def free_pages(arena: Arena) -> int:
    return arena.stats().free_bytes // 4096


def test_pages_come_home_when_their_last_view_is_gone(arena: Arena) -> None:
    view = ArenaFetchBuffers(arena).take(2 * 4096)
    view[:] = 1
    part = view[10:].view(np.int16)[::2]
    del view

    assert free_pages(arena) == PAGES - 2
    del part
    assert free_pages(arena) == PAGES


def test_what_is_landed_is_no_tensor_of_this_worker(arena: Arena) -> None:
    landed = ArenaFetchBuffers(arena).take(100)

    assert landed.flags.writeable
    assert arena.stats().slots == 0


def test_memory_that_is_lent_is_lent_to_one(arena: Arena) -> None:
    buffers = ArenaFetchBuffers(arena)
    taken = [buffers.take(4096) for _ in range(PAGES)]
    for number, view in enumerate(taken):
        view[:] = number

    assert all((view == number).all() for number, view in enumerate(taken))


@pytest.mark.slow
def test_where_there_is_no_room_another_way_may_be_asked(arena: Arena) -> None:
    buffers = ArenaFetchBuffers(arena)
    held = buffers.take(PAGES * 4096)

    with pytest.raises(TransportError, match=r"no room to fetch into: the arena is full"):
        buffers.take(1)
    assert held.nbytes == PAGES * 4096
