"""Slots in one piece of memory, and when their pages are another's."""

import gc
import os
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from shared.errors import BugError, CapacityError, TensorGone
from workers.data_plane.memory import arena as module
from workers.data_plane.memory import backing, prefault
from workers.data_plane.memory.arena import Arena
from workers.data_plane.memory.layout import PAGE
from workers.data_plane.port import Bytes
from workers.data_plane.transport import Locator

TOTAL = 4 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(TOTAL, backing.anonymous)
    yield made
    made.close()


def _put(arena: Arena, fill: int, nbytes: int = PAGE) -> Locator:
    locator = arena.allocate(nbytes)
    arena.look(locator, writable=True)[:] = fill
    return locator


def test_an_arena_that_is_not_used_takes_no_memory(arena: Arena) -> None:
    assert arena.stats().ready_bytes == 0
    assert os.fstat(arena.backing.fd).st_blocks * 512 <= PAGE


def test_memory_is_made_ready_as_it_is_used_and_some_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "AHEAD", 2)
    arena = Arena(64 << 20, backing.anonymous)
    arena.allocate(3 << 20)
    ahead = arena._chunks._ahead
    assert ahead is not None
    ahead.join()
    assert arena.stats().ready_bytes == 5 << 20
    assert 5 << 20 <= os.fstat(arena.backing.fd).st_blocks * 512 < 6 << 20
    arena.hold()
    assert arena.stats().ready_bytes == 64 << 20
    arena.close()


def test_the_slot_freed_last_is_the_next_one_used(arena: Arena) -> None:
    first = _put(arena, 1)
    assert arena.free(first.generation)
    second = _put(arena, 2)
    assert second.offset == first.offset
    assert second.generation != first.generation
    assert arena.slot(0, second.offset) == (second.generation, PAGE)


def test_two_arenas_have_no_generation_in_common(arena: Arena) -> None:
    other = Arena(TOTAL, backing.anonymous)
    assert abs(_put(arena, 1).generation - _put(other, 1).generation) > 1000
    other.close()


def test_a_slot_that_was_freed_twice_was_freed_once(arena: Arena) -> None:
    before = arena.stats().free_bytes
    locator = _put(arena, 1)
    assert arena.free(locator.generation)
    assert not arena.free(locator.generation)
    assert arena.stats().free_bytes == before
    assert arena.slot(0, locator.offset) is None


def _itself(view: Bytes) -> object:
    return view


def _part(view: Bytes) -> object:
    return view[100:200]


def _as_floats(view: Bytes) -> object:
    return view[:400].view(np.float32).reshape(10, 10)[2:, 1:]


def _buffer(view: Bytes) -> object:
    return memoryview(view.data)[1:]


@pytest.mark.parametrize("look", [_itself, _part, _as_floats, _buffer])
def test_pages_that_are_looked_at_are_not_handed_out_again(arena: Arena, look: object) -> None:
    assert callable(look)
    first = _put(arena, 1)
    seen: object = look(arena.look(first))
    arena.free(first.generation)
    before = arena.stats().free_bytes
    second = _put(arena, 2)
    assert second.offset != first.offset
    with pytest.raises(TensorGone):
        arena.check(first)
    assert np.asarray(seen).view(np.uint8).max() == 1
    arena.free(second.generation)
    del seen
    assert arena.stats().free_bytes == before + PAGE
    assert _put(arena, 3).offset == first.offset


def test_torch_keeps_a_view_too(arena: Arena) -> None:
    torch = pytest.importorskip("torch")
    locator = _put(arena, 1)
    tensor = torch.from_numpy(arena.look(locator, writable=True)).view(torch.bfloat16)[7:]
    arena.free(locator.generation)
    assert _put(arena, 2).offset != locator.offset
    assert (tensor.view(torch.uint8) == 1).all()
    del tensor
    assert _put(arena, 3).offset == locator.offset


def test_an_arena_is_full_and_then_it_is_not(arena: Arena) -> None:
    slots = [_put(arena, 1, TOTAL // 4) for _ in range(4)]
    with pytest.raises(CapacityError, match="4 tensors live"):
        arena.allocate(1)
    arena.free(slots[1].generation)
    arena.free(slots[3].generation)
    with pytest.raises(CapacityError, match=f"{TOTAL // 2} free of {TOTAL}, {TOTAL // 4} in one piece"):
        arena.allocate(TOTAL // 4 + 1)
    assert arena.allocate(TOTAL // 4).offset == slots[1].offset
    with pytest.raises(CapacityError):
        arena.allocate(TOTAL * 2)


@pytest.mark.slow
def test_a_full_arena_finds_what_dead_views_in_a_cycle_have_kept(arena: Arena) -> None:
    locator = _put(arena, 1, TOTAL)
    cycle: list[object] = [arena.look(locator)]
    cycle.append(cycle)
    arena.free(locator.generation)
    gc.disable()
    try:
        del cycle
        assert arena.allocate(TOTAL).offset == locator.offset
    finally:
        gc.enable()


def test_what_the_system_has_no_memory_for_is_a_lack_of_capacity(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_left(start: int, stop: int) -> None:
        raise OSError(12, "nothing left")

    monkeypatch.setattr(arena.backing, "make_ready", nothing_left)
    with pytest.raises(CapacityError, match="nothing left"):
        arena.allocate(PAGE)
    monkeypatch.undo()
    assert arena.stats().free_bytes == TOTAL
    _put(arena, 1, TOTAL)


def test_a_slot_of_unusual_size_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OVERSIZE_BYTES", 1 << 20)
    monkeypatch.setattr(prefault, "AHEAD", 0)
    arena = Arena(TOTAL, backing.anonymous)
    small, large = _put(arena, 1, 5 * PAGE), _put(arena, 2, 3 << 20)
    used = os.fstat(arena.backing.fd).st_blocks
    arena.free(large.generation)
    assert (used - os.fstat(arena.backing.fd).st_blocks) * 512 == 2 << 20
    assert (arena.look(small) == 1).all()
    again = _put(arena, 3, 3 << 20)
    assert again.offset == large.offset
    assert (arena.look(again) == 3).all()
    arena.close()


def test_memory_that_a_device_knows_is_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OVERSIZE_BYTES", 1 << 20)
    arena = Arena(TOTAL, backing.anonymous)
    arena.hold()
    arena.free(_put(arena, 2, 3 << 20).generation)
    assert arena.stats().ready_bytes == TOTAL
    arena.close()


def test_threads_that_allocate_and_free_at_once_get_pages_of_their_own(arena: Arena) -> None:
    before, wrong = arena.stats().free_bytes, []

    def churn(fill: int) -> None:
        for number in range(300):
            locator = _put(arena, fill, PAGE * (number % 5 + 1))
            if not (arena.look(locator) == fill).all():
                wrong.append(number)
            arena.free(locator.generation)

    threads = [threading.Thread(target=churn, args=(fill,)) for fill in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert (arena.stats().free_bytes, arena.stats().slots) == (before, 0)


def test_there_is_one_segment(arena: Arena) -> None:
    assert arena.length(0) == arena.layout.length
    assert os.pread(arena.descriptor(0), 8, 0) == b"dalsegn1"
    for ask in (arena.descriptor, arena.length):
        with pytest.raises(LookupError):
            ask(1)
    assert arena.slot(1, arena.layout.payload_at) is None


def test_of_a_closed_arena_views_stay_and_nothing_else(arena: Arena) -> None:
    locator = _put(arena, 5)
    view = arena.look(locator)
    arena.close()
    arena.close()
    assert (view == 5).all()
    with pytest.raises(TensorGone):
        arena.look(locator)
    with pytest.raises(CapacityError, match="closed"):
        arena.allocate(1)
    assert arena.stats().slots == 0


@pytest.mark.processes
def test_in_a_forked_child_an_arena_is_refused_and_the_parents_is_untouched(arena: Arena) -> None:
    locator = _put(arena, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            arena.allocate(1)
        except BugError:
            arena.free(locator.generation)
            arena.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    arena.check(locator)
    assert (arena.look(locator) == 5).all()
