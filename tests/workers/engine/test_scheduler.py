"""Scheduling as tables: who is in a step, with how many tokens."""

import numpy as np
import pytest

from shared.errors import ClientError
from workers.engine.blocks import BlockManager
from workers.engine.scheduler import Scheduler, Span
from workers.engine.sequence import Sequence, SequenceSpec


def sequence(key: str, prompt: int, max_tokens: int = 4) -> Sequence:
    return Sequence(SequenceSpec(key=key, prompt_ids=list(range(prompt)), max_tokens=max_tokens))


def scheduler(*, blocks: int = 100, rows: int = 4, budget: int = 10, positions: int = 1000) -> Scheduler:
    return Scheduler(BlockManager(blocks, 2), max_rows=rows, max_step_tokens=budget, max_positions=positions)


def shape(spans: list[Span]) -> list[tuple[str, int, int]]:
    return [(span.sequence.spec.key, span.start, span.count) for span in spans]


def run_step(of: Scheduler) -> list[tuple[str, int, int]]:
    """Schedule, and pretend to sample; sequences leave at their limit."""
    spans = of.schedule()
    of.advance(spans)
    for span in spans:
        if span.samples:
            span.sequence.ids.append(0)
            if span.sequence.generated == span.sequence.spec.max_tokens:
                of.remove(span.sequence)
    return shape(spans)


def test_a_long_prompt_is_cut_to_the_budget() -> None:
    one = scheduler(budget=10)
    one.add(sequence("a", 25))

    assert [run_step(one) for _ in range(4)] == [
        [("a", 0, 10)],
        [("a", 10, 10)],
        [("a", 20, 5)],
        [("a", 25, 1)],
    ]


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    mixed = scheduler(budget=10)
    mixed.add(sequence("a", 3, max_tokens=9))
    assert run_step(mixed) == [("a", 0, 3)]
    mixed.add(sequence("b", 7))
    mixed.add(sequence("c", 5))

    assert run_step(mixed) == [("a", 3, 1), ("b", 0, 7), ("c", 0, 2)]
    assert run_step(mixed) == [("a", 4, 1), ("b", 7, 1), ("c", 2, 3)]
    assert run_step(mixed) == [("a", 5, 1), ("b", 8, 1), ("c", 5, 1)]


def test_a_chunk_samples_only_at_the_end_of_its_sequence() -> None:
    one = scheduler(budget=4)
    one.add(sequence("a", 6))

    first = one.schedule()
    assert [span.samples for span in first] == [False]
    one.advance(first)
    assert [span.samples for span in one.schedule()] == [True]


def test_a_sequence_waits_until_prompt_and_answer_fit_in_free_blocks() -> None:
    small = scheduler(blocks=5)  # ten tokens
    small.add(sequence("a", 4, max_tokens=2))
    small.add(sequence("b", 4, max_tokens=2))

    assert run_step(small) == [("a", 0, 4)]
    assert run_step(small) == [("a", 4, 1)]
    assert run_step(small) == [("b", 0, 4)]


def test_nobody_overtakes_one_that_waits_for_blocks() -> None:
    small = scheduler(blocks=5)
    for key, prompt in (("a", 6), ("big", 8), ("tiny", 1)):
        small.add(sequence(key, prompt, max_tokens=1))

    assert [run_step(small) for _ in range(3)] == [[("a", 0, 6)], [("big", 0, 8)], [("tiny", 0, 1)]]


def test_no_more_sequences_run_than_there_are_rows() -> None:
    narrow = scheduler(rows=2)
    for key in "abc":
        narrow.add(sequence(key, 2, max_tokens=1))

    assert run_step(narrow) == [("a", 0, 2), ("b", 0, 2)]
    assert run_step(narrow) == [("c", 0, 2)]


@pytest.mark.parametrize(
    ("limits", "what"),
    [({"blocks": 5}, "the size of the KV cache is 10"), ({"positions": 9}, "context length is 9")],
)
def test_one_larger_than_pool_or_context_is_refused(limits: dict[str, int], what: str) -> None:
    small = scheduler(**limits)

    with pytest.raises(ClientError, match=f"{what} .*11 were requested .7 in the prompt, 4") as caught:
        small.add(sequence("a", 7))

    assert (caught.value.failure_code, caught.value.failure_status) == ("context_length_exceeded", 400)
    assert not small.has_work


def test_one_that_fits_exactly_is_taken() -> None:
    exact = scheduler(blocks=5, positions=10)
    exact.add(sequence("a", 6))

    assert run_step(exact) == [("a", 0, 6)]


def test_a_budget_below_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="max_step_tokens=3, max_rows=4"):
        scheduler(budget=3, rows=4)


def test_a_removed_sequence_frees_blocks_and_row() -> None:
    one = scheduler(blocks=5, rows=1)
    first, second = sequence("a", 6), sequence("b", 6)
    one.add(first)
    one.add(second)
    assert run_step(one) == [("a", 0, 6)]

    one.remove(first)

    assert run_step(one) == [("b", 0, 6)]


def test_a_waiting_sequence_can_be_removed() -> None:
    one = scheduler(rows=1)
    first, second = sequence("a", 6), sequence("b", 6)
    one.add(first)
    one.add(second)
    run_step(one)

    one.remove(second)

    assert not one.waiting
    assert one.running == [first]


def test_one_that_is_held_takes_part_in_no_step_and_keeps_its_place() -> None:
    one = scheduler(blocks=20, rows=2)
    first, second = sequence("a", 3), sequence("b", 15)
    one.add(first)
    one.add(second)
    assert run_step(one) == [("a", 0, 3), ("b", 0, 7)]
    seats = (first.row, list(first.blocks), second.row, list(second.blocks))

    first.held = True
    assert run_step(one) == [("b", 7, 8)]
    first.held, second.held = False, True
    assert run_step(one) == [("a", 3, 1)]
    second.held = False

    assert run_step(one) == [("a", 4, 1), ("b", 15, 1)]
    assert (first.row, first.blocks, second.row, second.blocks) == seats


def test_a_prompt_that_is_held_is_computed_no_further() -> None:
    one = scheduler()
    long = sequence("a", 25)
    one.add(long)
    assert run_step(one) == [("a", 0, 10)]

    long.held = True
    assert run_step(one) == []
    long.held = False

    assert run_step(one) == [("a", 10, 10)]


def test_where_all_are_held_there_is_no_work() -> None:
    one = scheduler(blocks=10, rows=4)
    first, waits = sequence("a", 10), sequence("b", 10)
    one.add(first)
    run_step(one)
    first.held = True
    assert not one.has_work

    one.add(waits)  # there are not enough blocks for it
    assert not one.has_work
    first.held = False

    assert one.has_work


def test_one_that_waits_is_admitted_beside_those_that_are_held() -> None:
    one = scheduler(rows=2)
    first = sequence("a", 3)
    one.add(first)
    run_step(one)
    first.held = True

    one.add(sequence("b", 2))

    assert one.has_work
    assert run_step(one) == [("b", 0, 2)]


def test_one_that_is_held_before_it_is_admitted_gets_its_place_in_its_turn() -> None:
    one = scheduler(rows=1)
    early = sequence("a", 3)
    early.held = True
    one.add(early)
    assert one.has_work

    assert run_step(one) == []

    assert (early.row, one.has_work) == (0, False)


@pytest.mark.parametrize("seed", range(20))
def test_under_random_load_budget_and_blocks_hold_and_all_end(seed: int) -> None:
    random = np.random.default_rng(seed)
    pool = BlockManager(int(random.integers(8, 40)), 2)
    one = Scheduler(pool, max_rows=4, max_step_tokens=int(random.integers(4, 12)), max_positions=1000)
    total = pool.capacity_tokens
    arrivals = [
        sequence(str(i), int(random.integers(1, total - 4)), int(random.integers(1, 5))) for i in range(30)
    ]
    ended: list[str] = []
    admitted: list[str] = []

    while arrivals or one.has_work:
        if arrivals and random.random() < 0.5:
            one.add(arrivals.pop(0))
        spans = one.schedule()
        admitted += [s.spec.key for s in one.running if s.spec.key not in admitted]
        assert sum(span.count for span in spans) <= one.max_step_tokens
        blocks = [block for s in one.running for block in s.blocks]
        assert len(blocks) == len(set(blocks)) == pool.num_blocks - pool.free
        assert len({s.row for s in one.running}) == len(one.running) <= 4
        assert not one.running or spans
        one.advance(spans)
        for span in spans:
            if span.samples:
                span.sequence.ids.append(0)
                if span.sequence.generated == span.sequence.spec.max_tokens:
                    one.remove(span.sequence)
                    ended.append(span.sequence.spec.key)

    assert sorted(ended, key=int) == [str(i) for i in range(30)]
    assert admitted == [str(i) for i in range(30)]
    assert pool.free == pool.num_blocks
