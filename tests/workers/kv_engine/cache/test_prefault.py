import ctypes
import math
import sys
from pathlib import Path

import pytest
import torch

from models.decoder_lm.nodes import DecoderLM
from tests.workers.kv_engine.engines import make_engine
from workers.kv_engine.cache import prefault
from workers.kv_engine.cache.prefault import AHEAD, PagePrefault
from workers.machine import memory

CELL = (4, 64)  # 1 KiB of float32 a cell

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages are committed on first use")


def cells_of(slots: int, layers: int) -> list[torch.Tensor]:
    shape = (layers, slots, *CELL)
    return list(
        torch.frombuffer(memory.zeros(math.prod(shape) * 4), dtype=torch.float32).view(shape).unbind()
    )


def resident_pages(cells: torch.Tensor) -> int:
    """Return how many of the pages wholly inside a tensor are committed (`/proc/self/pagemap`, bit 63)."""
    size = 4096
    begin, end = -(-cells.data_ptr() // size), (cells.data_ptr() + cells.nbytes) // size
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(begin * 8)
        found = file.read((end - begin) * 8)
    return sum(found[at + 7] >> 7 for at in range(0, len(found), 8))


def pages_of(cells: torch.Tensor) -> int:
    return (cells.data_ptr() + cells.nbytes) // 4096 - -(-cells.data_ptr() // 4096)


def commit_all(one: PagePrefault) -> None:
    while one.commit(10):
        pass


def test_the_pages_of_the_first_tokens_are_committed_ahead_in_every_layer() -> None:
    layers = cells_of(3 * AHEAD, layers=3)
    commit_all(PagePrefault(layers))
    for layer in layers:
        assert resident_pages(layer[:AHEAD]) == pages_of(layer[:AHEAD])
        # A large page at the end may contain some more tokens.
        assert resident_pages(layer[2 * AHEAD :]) == 0
        assert not layer.any()


def test_as_many_more_are_committed_as_are_used_and_none_beyond_the_pool() -> None:
    [layer] = cells_of(2 * AHEAD, layers=1)
    one = PagePrefault([layer])
    commit_all(one)
    assert one.taken == AHEAD
    one.mark_used(100)
    commit_all(one)
    assert one.taken == AHEAD + 100
    one.mark_used(2 * AHEAD)
    commit_all(one)
    assert one.taken == AHEAD + 100, "the others are in use"
    one = PagePrefault([layer])
    one.mark_used(2 * AHEAD - 5)
    commit_all(one)
    assert one.taken == 2 * AHEAD


def test_cells_in_use_are_not_committed_again() -> None:
    [layer] = cells_of(3 * AHEAD, layers=1)
    one = PagePrefault([layer])
    one.mark_used(AHEAD)
    commit_all(one)
    assert one.taken == 2 * AHEAD
    assert resident_pages(layer[: AHEAD // 2]) == 0


def test_a_turn_ends_when_its_time_is_over_and_the_next_continues_after_it() -> None:
    layers = cells_of(AHEAD, layers=2)
    one = PagePrefault(layers)
    turns = 1
    while one.commit(0):
        turns += 1
    assert turns == 1 + 2 * AHEAD // 1024
    assert one.taken == AHEAD
    assert all(resident_pages(layer) == pages_of(layer) for layer in layers)


def test_fewer_large_tokens_are_committed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a model of 1 MB per token would commit 8 GB before its first answer."""
    monkeypatch.setattr(prefault, "MAX_AHEAD_BYTES", 3000 * 1024)
    layers = cells_of(2 * AHEAD, layers=3)
    one = PagePrefault(layers)
    commit_all(one)
    assert one.taken == one.ahead == 1000
    one.mark_used(501)
    commit_all(one)
    assert one.taken == 1501
    for layer in layers:
        assert resident_pages(layer[:1501]) == pages_of(layer[:1501])
        assert resident_pages(layer[AHEAD:]) == 0


def test_a_token_larger_than_the_limit_is_still_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefault, "MAX_AHEAD_BYTES", 1)
    [layer] = cells_of(16, layers=1)
    one = PagePrefault([layer])
    one.mark_used(4)
    commit_all(one)
    assert one.taken == 5


def test_an_operating_system_without_prefault_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "_MADV_POPULATE_WRITE", 4711)
    layers = cells_of(AHEAD, layers=2)
    one = PagePrefault(layers)
    assert not one.commit(10)
    monkeypatch.undo()
    one.mark_used(5)
    assert not one.commit(10)
    assert resident_pages(layers[0]) == 0
    layers[0].fill_(1)
    assert ctypes.c_float.from_address(layers[0].data_ptr()).value == 1


def test_an_idle_engine_commits_pages(qwen3: DecoderLM) -> None:
    made = make_engine(qwen3, num_blocks=4096, block_size=8, max_step_tokens=24, max_sequences=8)
    while made.prepare():
        pass

    for layer in made._pool.keys:
        assert resident_pages(layer[:AHEAD]) == pages_of(layer[:AHEAD])
