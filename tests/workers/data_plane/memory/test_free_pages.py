"""Which pages are free: `FreePages` against a plain list of booleans."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.data_plane.memory.free_pages import FreePages

TOTAL = 40


def test_pages_are_taken_from_the_bottom_and_taken_again_when_they_are_free() -> None:
    blocks = FreePages(10)
    assert [blocks.take(3), blocks.take(3), blocks.take(3)] == [0, 3, 6]
    assert blocks.take(3) is None
    blocks.give(3, 3)
    assert blocks.take(2) == 3
    assert blocks.take(1) == 5
    assert blocks.take(1) == 9


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_free_neighbours_are_one_piece_in_whatever_order_they_came_free(order: tuple[int, ...]) -> None:
    blocks = FreePages(9)
    starts = [blocks.take(3) for _ in range(3)]
    for number in order:
        start = starts[number]
        assert start is not None
        blocks.give(start, 3)
    assert (blocks.free, blocks.largest) == (9, 9)
    assert blocks.take(9) == 0
    assert (blocks.free, blocks.largest) == (0, 0)


def test_more_than_there_ever_is_is_never_taken() -> None:
    assert FreePages(8).take(9) is None
    assert FreePages(8).take(1 << 40) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
@settings(max_examples=100)
def test_what_is_taken_is_the_lowest_piece_that_is_long_enough(steps: list[tuple[bool, int]]) -> None:
    blocks = FreePages(TOTAL)
    free = [True] * TOTAL
    held: list[tuple[int, int]] = []
    for is_taking, number in steps:
        if is_taking:
            fits = [at for at in range(TOTAL - number + 1) if all(free[at : at + number])]
            start = blocks.take(number)
            assert start == (fits[0] if fits else None)
            if start is not None:
                held.append((start, number))
                free[start : start + number] = [False] * number
        elif held:
            start, length = held.pop(number % len(held))
            blocks.give(start, length)
            free[start : start + length] = [True] * length
        assert blocks.free == sum(free)
        runs = "".join(".x"[not one] for one in free).split("x")
        assert blocks.largest == max(map(len, runs))
