from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BugError
from shared.tensors import Handle, inline_ids
from shared.walks import ChunkPolicy, Cutter, Fixed, LeftContext, SlidingWindow
from workers.streams.consumer import WINDOW_BYTES, WINDOW_ITEMS, StreamConsumer, size_of, span_of, window_of

POLICIES: list[ChunkPolicy] = [Fixed(3), SlidingWindow(5, 2), LeftContext(3, 2)]


def consumer_of(policy: ChunkPolicy) -> StreamConsumer:
    return StreamConsumer(policy, Cutter(policy))


def items(first: int, count: int) -> Handle:
    return inline_ids(f"k{first}", list(range(first, first + count)))


def take(stream: StreamConsumer) -> tuple[list[int], bool]:
    """Take the next chunk; return the numbers of its items, and True if it is the last."""
    chunk, parts = stream.take()
    found = [batch.start + at for batch, start, stop in parts for at in range(start, stop)]
    stream.release_used()
    return found, chunk.last


@pytest.mark.slow
@given(
    policy=st.sampled_from(POLICIES),
    counts=st.lists(st.integers(1, 5), max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_however_items_come_chunks_are_those_of_the_policy(
    policy: ChunkPolicy,
    counts: list[int],
    order: Random,
) -> None:
    total = sum(counts)
    sent = [(sum(counts[:place]), count) for place, count in enumerate(counts)]
    events: list[tuple[int, int]] = [*sent, *sent, (total, 0)]
    order.shuffle(events)
    stream = consumer_of(policy)
    found = []
    for first, count in events:
        stream.push(1, first, items(first, count) if count else None, end=not count)
        while stream.ready:
            found.append(take(stream))

    expected = [
        (list(range(chunk.start, chunk.stop)), chunk.last) for chunk in Cutter(policy).cut(total, ended=True)
    ]
    assert found == expected
    assert (stream.items, stream.chunks, stream.ended) == (total, len(expected), True)
    assert not stream.drop()  # what no chunk needs is forgotten


def test_ranks_that_feed_one_after_the_other_are_taken_as_they_come() -> None:
    stream = consumer_of(Fixed(4))
    stream.push(0, 0, items(0, 3))
    stream.push(2, 0, items(0, 2))
    stream.push(2, 2, None, end=True)

    assert take(stream) == ([0, 1, 2, 3], False)
    assert take(stream) == ([4], True)


def test_items_after_the_end_are_a_bug() -> None:
    stream = consumer_of(Fixed(4))
    stream.push(0, 0, None, end=True)

    with pytest.raises(BugError, match="after the end"):
        stream.push(1, 0, items(0, 1))


@pytest.mark.parametrize("pushed", [[(0, 3), (2, 2)], [(2, 2), (0, 3)], [(1, 2), (0, 2)]])
def test_items_that_came_in_other_batches_before_are_a_bug_and_not_waited_for(
    pushed: list[tuple[int, int]],
) -> None:
    stream = consumer_of(Fixed(4))
    [first, crossing] = pushed
    stream.push(1, first[0], items(*first))

    with pytest.raises(BugError, match="in other batches"):
        stream.push(1, crossing[0], items(*crossing))


def test_items_far_ahead_of_any_credit_are_not_kept() -> None:
    with pytest.raises(BugError, match="without credit"):
        consumer_of(Fixed(3)).push(1, 2**60, items(0, 1))


def test_a_producer_without_any_credit_is_refused_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.streams.consumer.WINDOW_ITEMS", 16)
    stream = consumer_of(Fixed(3))
    stream.push(1, 0, items(0, 32))

    with pytest.raises(BugError, match="without credit"):
        stream.push(1, 32, items(32, 1))


def test_a_credit_is_given_from_half_a_window_on_and_says_how_many_are_used_in_all() -> None:
    stream = consumer_of(Fixed(3))
    half = WINDOW_ITEMS // 2
    stream.push(1, 0, items(0, half - 1))
    while stream.ready:
        take(stream)
    assert list(stream.credits()) == []
    stream.push(1, half - 1, items(half - 1, 1))
    assert list(stream.credits()) == [(1, (half - 1) // 3 * 3)]
    assert list(stream.credits()) == []


def test_large_items_are_credited_by_their_bytes() -> None:
    stream = consumer_of(Fixed(1))
    large = Handle(key="k", dtype="float32", shape=(1, WINDOW_BYTES // 8))
    assert size_of(large) == WINDOW_BYTES // 2
    stream.push(1, 0, large)
    stream.take()
    assert [batch.items for batch in stream.release_used()] == [large]
    assert list(stream.credits()) == [(1, 1)]


def test_a_rank_that_is_told_for_nothing_is_told_of_each() -> None:
    stream = consumer_of(Fixed(2))
    stream.push(7, 0, items(0, 3))
    take(stream)

    assert list(stream.credits(all_of=7)) == [(7, 2)]


@pytest.mark.parametrize("policy", [Fixed(10_000), SlidingWindow(9000, 10), LeftContext(10, 8000)])
def test_a_window_holds_enough_for_a_chunk(policy: ChunkPolicy) -> None:
    assert window_of(policy) >= 2 * span_of(policy) > WINDOW_ITEMS


def test_items_that_come_before_the_walk_wait_for_its_arguments() -> None:
    policy = LeftContext(4, 1, first="frames")
    stream = StreamConsumer(policy, None)
    stream.push(0, 0, items(0, 7))
    assert not stream.ready
    assert stream.release_used() == []
    stream.begin(Cutter(LeftContext(4, 1, first=2)))
    stream.begin(Cutter(LeftContext(4, 1, first=1)))  # of a step that is begun again
    assert take(stream) == ([0, 1], False)
    assert take(stream) == ([1, 2, 3, 4, 5], False)
    assert not stream.ready
    stream.push(0, 7, None, end=True)
    assert take(stream) == ([5, 6], True)
    stopped = StreamConsumer(policy, None)
    stopped.push(0, 0, items(0, 7))
    assert len(stopped.stop()) == 1
    assert stopped.abandoned
