import ctypes
import math
import sys
from pathlib import Path

import pytest
import torch

from models.decoder_lm.nodes import DecoderLM
from tests.workers.kv_engine.engines import make_engine
from workers.kv_engine.cache import pages
from workers.kv_engine.cache.pages import AHEAD, Pages
from workers.machine import memory

CELL = (4, 64)  # 1 KiB of float32 a cell

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere pages are taken when they are used"
)


def cells_of(slots: int, layers: int) -> list[torch.Tensor]:
    shape = (layers, slots, *CELL)
    return list(
        torch.frombuffer(memory.zeros(math.prod(shape) * 4), dtype=torch.float32).view(shape).unbind()
    )


def resident_pages(cells: torch.Tensor) -> int:
    """How many of the pages that lie wholly in it are there (`/proc/self/pagemap`, bit 63)."""
    size = 4096
    begin, end = -(-cells.data_ptr() // size), (cells.data_ptr() + cells.nbytes) // size
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(begin * 8)
        found = file.read((end - begin) * 8)
    return sum(found[at + 7] >> 7 for at in range(0, len(found), 8))


def pages_of(cells: torch.Tensor) -> int:
    return (cells.data_ptr() + cells.nbytes) // 4096 - -(-cells.data_ptr() // 4096)


def take_all(asked: Pages) -> None:
    while asked.take(10):
        pass


def test_the_first_tokens_pages_are_there_before_anybody_wants_them_in_every_layer() -> None:
    layers = cells_of(3 * AHEAD, layers=3)
    take_all(Pages(layers))
    for layer in layers:
        assert resident_pages(layer[:AHEAD]) == pages_of(layer[:AHEAD])
        # A large page at the end may reach some tokens further.
        assert resident_pages(layer[2 * AHEAD :]) == 0
        assert not layer.any()


def test_as_many_more_are_taken_as_were_used_and_none_beyond_the_pool() -> None:
    [layer] = cells_of(2 * AHEAD, layers=1)
    asked = Pages([layer])
    take_all(asked)
    assert asked.taken == AHEAD
    asked.reach(100)
    take_all(asked)
    assert asked.taken == AHEAD + 100
    asked.reach(2 * AHEAD)
    take_all(asked)
    assert asked.taken == AHEAD + 100, "steps have taken the others"
    asked = Pages([layer])
    asked.reach(2 * AHEAD - 5)
    take_all(asked)
    assert asked.taken == 2 * AHEAD


def test_what_steps_have_used_is_not_taken_again() -> None:
    [layer] = cells_of(3 * AHEAD, layers=1)
    asked = Pages([layer])
    asked.reach(AHEAD)
    take_all(asked)
    assert asked.taken == 2 * AHEAD
    assert resident_pages(layer[: AHEAD // 2]) == 0


def test_a_turn_ends_when_its_time_is_over_and_the_next_goes_on_behind_it() -> None:
    layers = cells_of(AHEAD, layers=2)
    asked = Pages(layers)
    turns = 1
    while asked.take(0):
        turns += 1
    assert turns == 1 + 2 * AHEAD // 1024
    assert asked.taken == AHEAD
    assert all(resident_pages(layer) == pages_of(layer) for layer in layers)


def test_tokens_that_take_much_are_fewer_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a model of 1 MB a token would take 8 GB of who has not answered anything yet."""
    monkeypatch.setattr(pages, "MOST_BYTES", 3000 * 1024)
    layers = cells_of(2 * AHEAD, layers=3)
    asked = Pages(layers)
    take_all(asked)
    assert asked.taken == asked.ahead == 1000
    asked.reach(501)
    take_all(asked)
    assert asked.taken == 1501
    for layer in layers:
        assert resident_pages(layer[:1501]) == pages_of(layer[:1501])
        assert resident_pages(layer[AHEAD:]) == 0


def test_a_token_that_takes_more_than_all_that_is_taken_ahead_is_still_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "MOST_BYTES", 1)
    [layer] = cells_of(16, layers=1)
    asked = Pages([layer])
    asked.reach(4)
    take_all(asked)
    assert asked.taken == 5


def test_a_kernel_that_cannot_give_them_early_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 4711)
    layers = cells_of(AHEAD, layers=2)
    asked = Pages(layers)
    assert not asked.take(10)
    monkeypatch.undo()
    asked.reach(5)
    assert not asked.take(10)
    assert resident_pages(layers[0]) == 0
    layers[0].fill_(1)
    assert ctypes.c_float.from_address(layers[0].data_ptr()).value == 1


def test_an_engine_takes_them_while_nobody_asks(qwen3: DecoderLM) -> None:
    made = make_engine(qwen3, num_blocks=4096, block_size=8, max_step_tokens=24, max_sequences=8)
    while made.prepare():
        pass

    for layer in made._pool.keys:
        assert resident_pages(layer[:AHEAD]) == pages_of(layer[:AHEAD])
