from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.walks import (
    ChunkPolicy,
    Cutter,
    Fixed,
    LeftContext,
    SlidingWindow,
    StreamChunk,
    WalkError,
    chunks_of,
    policy_of,
    possible_policies,
    takes_arguments,
)

UNTYPED: Any = "2", True, None
"""What a caller without a type checker may pass."""

POLICIES = st.one_of(
    st.builds(Fixed, st.integers(1, 9)),
    st.integers(1, 9).flatmap(
        lambda window: st.builds(SlidingWindow, st.just(window), st.integers(1, window))
    ),
    st.builds(LeftContext, st.integers(1, 9), st.integers(0, 12)),
    st.builds(LeftContext, st.integers(4, 9), st.integers(0, 12), first=st.integers(1, 4)),
)


def cut(policy: ChunkPolicy, items: int) -> list[StreamChunk]:
    return Cutter(policy).cut(items, ended=True)


def spans(policy: ChunkPolicy, items: int) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.stop) for chunk in cut(policy, items)]


# ---- what is cut -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "items", "expected"),
    [
        (Fixed(30), 0, [(0, 0)]),
        (Fixed(30), 1, [(0, 1)]),
        (Fixed(30), 29, [(0, 29)]),
        (Fixed(30), 30, [(0, 30), (30, 30)]),
        (Fixed(30), 31, [(0, 30), (30, 31)]),
        (Fixed(30), 60, [(0, 30), (30, 60), (60, 60)]),
        (Fixed(30), 90, [(0, 30), (30, 60), (60, 90), (90, 90)]),
        (Fixed(30), 100, [(0, 30), (30, 60), (60, 90), (90, 100)]),
        (SlidingWindow(28, 7), 0, [(0, 0)]),
        (SlidingWindow(28, 7), 7, [(0, 7)]),
        (SlidingWindow(28, 7), 14, [(0, 14)]),
        (SlidingWindow(28, 7), 28, [(0, 28), (7, 28)]),
        (SlidingWindow(28, 7), 35, [(0, 28), (7, 35), (14, 35)]),
        (SlidingWindow(28, 7), 56, [(0, 28), (7, 35), (14, 42), (21, 49), (28, 56), (35, 56)]),
        (LeftContext(10, 2), 0, [(0, 0)]),
        (LeftContext(10, 2), 5, [(0, 5)]),
        (LeftContext(10, 2), 10, [(0, 10), (8, 10)]),
        (LeftContext(10, 2), 20, [(0, 10), (8, 20), (18, 20)]),
        (LeftContext(10, 2), 40, [(0, 10), (8, 20), (18, 30), (28, 40), (38, 40)]),
        (LeftContext(10, 2, first=4), 30, [(0, 4), (2, 12), (10, 22), (20, 30)]),
        (LeftContext(5, 1, first=1), 17, [(0, 1), (0, 3), (2, 7), (6, 12), (11, 17), (16, 17)]),
        (LeftContext(2, 5), 6, [(0, 2), (0, 4), (0, 6), (1, 6)]),  # not before the first item
    ],
)
def test_windows_come_as_soon_as_they_are_whole_and_what_is_left_comes_at_the_end(
    policy: ChunkPolicy, items: int, expected: list[tuple[int, int]]
) -> None:
    assert spans(policy, items) == expected


@given(POLICIES, st.integers(0, 100), st.lists(st.integers(0, 100)), st.booleans())
def test_a_cut_does_not_depend_on_how_the_items_came(
    policy: ChunkPolicy, items: int, seen: list[int], ended_with_the_last: bool
) -> None:
    cutter = Cutter(policy)
    chunks = [chunk for count in sorted(seen) if count <= items for chunk in cutter.cut(count, ended=False)]
    if not ended_with_the_last:
        chunks += cutter.cut(items, ended=False)
        assert cutter.cut(items, ended=False) == []  # told twice
    chunks += cutter.cut(items, ended=True)
    assert chunks == cut(policy, items)
    assert cutter.cut(items, ended=True) == []


@given(POLICIES, st.integers(0, 100))
def test_exactly_one_chunk_is_final_and_it_is_the_last(policy: ChunkPolicy, items: int) -> None:
    chunks = cut(policy, items)
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].stop == items
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    assert len(chunks) == chunks_of(policy, items)


@given(POLICIES, st.integers(0, 100))
def test_every_item_is_fresh_once_and_fresh_ones_are_the_last_of_their_chunk(
    policy: ChunkPolicy, items: int
) -> None:
    fresh = [item for chunk in cut(policy, items) for item in range(chunk.stop - chunk.fresh, chunk.stop)]
    assert all(chunk.stop - chunk.fresh >= chunk.start for chunk in cut(policy, items))
    assert fresh == list(range(items))


@given(POLICIES, st.lists(st.integers(0, 5)))
def test_what_is_not_needed_any_more_is_in_no_later_chunk(policy: ChunkPolicy, steps: list[int]) -> None:
    cutter, items, freed = Cutter(policy), 0, [0]
    for step in [*steps, 0]:
        items += step
        for chunk in cutter.cut(items, ended=False):
            assert chunk.start >= freed[-1]
        freed.append(cutter.needed)
        assert cutter.needed <= items
    (final,) = cutter.cut(items, ended=True)
    assert final.start == freed[-1]
    assert cutter.needed == items
    assert all(earlier <= later for earlier, later in pairwise(freed))


def test_no_chunk_waits_for_an_item_behind_it() -> None:
    cutter = Cutter(SlidingWindow(28, 7))
    assert cutter.cut(27, ended=False) == []
    (first,) = cutter.cut(28, ended=False)
    assert first == StreamChunk(number=0, start=0, stop=28, fresh=28, last=False)
    assert cutter.cut(34, ended=False) == []
    (second,) = cutter.cut(35, ended=False)
    assert second == StreamChunk(number=1, start=7, stop=35, fresh=7, last=False)


# ---- behind the end --------------------------------------------------------------------------------


def test_a_stream_that_gives_empty_chunks_has_no_last_one() -> None:
    cutter = Cutter(Fixed(30), "empty")
    chunks = cutter.cut(90, ended=True)
    chunks += [cutter.empty() for _ in range(3)]
    assert [(chunk.start, chunk.stop) for chunk in chunks[3:]] == [(90, 90)] * 4
    assert [chunk.number for chunk in chunks] == list(range(7))
    assert not any(chunk.last for chunk in chunks)
    assert cutter.chunks == 7 >= chunks_of(Fixed(30), 90)
    assert (cutter.ended, cutter.needed) == (True, 90)


@pytest.mark.parametrize(("after_end", "ended"), [("stop", True), ("empty", False)])
def test_an_empty_chunk_is_only_there_behind_the_end_of_a_stream_that_gives_them(
    after_end: Any, ended: bool
) -> None:
    cutter = Cutter(Fixed(3), after_end)
    cutter.cut(4, ended=ended)
    with pytest.raises(WalkError, match='only a stream with after_end="empty" has empty chunks'):
        cutter.empty()
    assert cutter.chunks == 1 + ended


# ---- what is wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((5, False), (4, False), "had 5 items already, found 4"),
        ((5, True), (6, True), "ended with 5 items, found 6"),
        ((5, True), (4, False), "ended with 5 items, found 4"),
    ],
)
def test_a_stream_only_grows_and_only_up_to_its_end(
    first: tuple[int, bool], second: tuple[int, bool], message: str
) -> None:
    cutter = Cutter(Fixed(3))
    before = cutter.cut(first[0], ended=first[1])
    with pytest.raises(WalkError, match=message):
        cutter.cut(second[0], ended=second[1])
    assert cutter.chunks == len(before)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Fixed(0), "Fixed: count must be an integer of at least 1, not 0"),
        (lambda: Fixed(UNTYPED[0]), "Fixed: count must be an integer of at least 1, not '2'"),
        (lambda: Fixed(UNTYPED[1]), "Fixed: count must be an integer of at least 1, not True"),
        (lambda: SlidingWindow(0, 1), "SlidingWindow: window must be an integer of at least 1, not 0"),
        (
            lambda: SlidingWindow(7, UNTYPED[2]),
            "SlidingWindow: stride must be an integer of at least 1, not No",
        ),
        (lambda: SlidingWindow(7, 28), "the stride must not exceed the window, or some items would be in no"),
        (lambda: LeftContext(0, 0), "LeftContext: count must be an integer of at least 1, not 0"),
        (lambda: LeftContext(10, -1), "LeftContext: context must be an integer of at least 0, not -1"),
        (lambda: LeftContext(10, 2, first=11), "a first chunk of at most 10 items"),
    ],
)
def test_wrong_numbers_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(WalkError, match=message):
        build()


def test_a_first_chunk_may_be_an_argument_of_the_consuming_walk() -> None:
    policy = LeftContext(10, 2, first="frames")
    assert takes_arguments(policy)
    assert not takes_arguments(LeftContext(10, 2, first=3))
    assert policy_of(policy, {"frames": 4}) == LeftContext(10, 2, first=4)
    assert policy_of(Fixed(3), {}) == Fixed(3)
    assert {chunks_of(one, 12) for one in possible_policies(policy)} >= {
        chunks_of(LeftContext(10, 2, first), 12) for first in (1, 4, 10)
    }
    with pytest.raises(WalkError, match="expected the argument 'frames'"):
        policy_of(policy, {})
    with pytest.raises(WalkError, match="at most 10 items"):
        policy_of(policy, {"frames": 11})
