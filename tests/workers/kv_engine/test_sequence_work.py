"""What a sequence's record says about its waits in the engine, without a model."""

import pytest

from shared.events import MAX_NAMED
from tests.workers.kv_engine.test_scheduler import run_step, same, scheduler, sequence
from workers.execution.node_works import request_of
from workers.threads.engine_work import EngineWork


def test_a_sequence_without_a_place_names_those_that_have_one() -> None:
    narrow = scheduler(rows=1)
    for key in ("r1.1.1.llm", "r2.1.1.llm", "r3.1.1.llm"):
        narrow.add(sequence(key, 2, max_tokens=1))
    first, second, third = narrow.waiting
    run_step(narrow)

    assert (first.work.lacked, first.work.behind) == ("", ())
    assert (second.work.lacked, second.work.behind) == ("places", ("r1.1.1.llm",))
    assert third.work.behind == ("r1.1.1.llm", "r2.1.1.llm")
    assert first.work.admitted_s is not None
    assert second.work.admitted_s is None
    run_step(narrow)
    assert second.work.admitted_s is not None


def test_the_first_reason_for_a_wait_stays() -> None:
    narrow = scheduler(rows=1)
    narrow.add(sequence("a", 2, max_tokens=1))
    narrow.add(sequence("b", 2, max_tokens=9))
    narrow.add(sequence("c", 2, max_tokens=1))
    waiting = narrow.waiting[2]
    run_step(narrow)
    run_step(narrow)

    assert waiting.work.behind == ("a", "b")
    assert waiting.work.behind_count == 2


def test_a_sequence_that_lacks_blocks_says_so() -> None:
    small = scheduler(blocks=5)
    small.add(sequence("a", 4, max_tokens=2))
    small.add(sequence("b", 6, max_tokens=1))
    waiting = small.waiting[1]
    run_step(small)

    assert (waiting.work.lacked, waiting.work.behind) == ("kv_blocks", ("a",))


def test_a_sequence_waits_for_the_prefix_that_another_one_computes() -> None:
    shared = scheduler(budget=4)
    shared.add(same("a", 9))
    shared.add(same("b", 9))
    shared.add(sequence("other", 1, max_tokens=9, priority=1))
    waiting = shared.waiting[1]
    run_step(shared)

    assert (waiting.work.lacked, waiting.work.behind) == ("prefix", ("a",))


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    shared = scheduler()
    shared.add(same("a", 9, max_tokens=1))
    run_step(shared)
    shared.add(same("b", 9, max_tokens=1))
    second = shared.waiting[0]
    run_step(shared)

    assert second.work.cached_tokens == 8


def test_a_preemption_names_who_needed_the_block_and_what_was_computed_again() -> None:
    small = scheduler(blocks=5, prefix_cache=False)
    small.add(sequence("a", 3, max_tokens=7))
    small.add(sequence("b", 3, max_tokens=5))
    victim = small.waiting[1]
    while small.counters.preemptions == 0:
        run_step(small)
    computed = victim.generated + 3 - 1

    [eviction] = victim.work.evictions
    assert (eviction.by, eviction.recomputed, eviction.ended_s) == ("a", 0, None)
    while victim.row is None:
        run_step(small)
    [eviction] = victim.work.evictions
    assert eviction.recomputed == computed > 0
    assert eviction.ended_s is not None
    assert victim.work.eviction_count == 1
    assert victim.work.evicted_s == pytest.approx(eviction.ended_s - eviction.at_s)


def test_all_preemptions_are_counted_and_the_first_are_named() -> None:
    work = EngineWork()
    work.admit()
    for number in range(MAX_NAMED + 4):
        work.evict(f"r{number}", 10)
        work.admit(computed=8)

    assert [one.by for one in work.evictions] == [f"r{number}" for number in range(MAX_NAMED)]
    assert all(one.recomputed == 2 and one.ended_s is not None for one in work.evictions)
    assert work.eviction_count == MAX_NAMED + 4
    assert work.evicted_s >= sum((one.ended_s or 0) - one.at_s for one in work.evictions)


def test_what_a_preempted_sequence_finds_in_the_cache_is_not_computed_again() -> None:
    small = scheduler(blocks=5)
    small.add(sequence("a", 3, max_tokens=7))
    small.add(sequence("b", 3, max_tokens=5))
    victim = small.waiting[1]
    while small.counters.preemptions == 0:
        run_step(small)
    while victim.row is None:
        run_step(small)

    computed = victim.work.evictions[0].recomputed
    assert computed < 3 + victim.generated


def test_steps_and_rows_are_those_that_computed_it() -> None:
    both = scheduler()
    both.add(sequence("a", 2, max_tokens=3))
    first = both.waiting[0]
    run_step(both)
    both.add(sequence("b", 2, max_tokens=3))
    run_step(both)

    assert first.work.so_far == (2, 1 + 2), "it still has its place"
    run_step(both)
    assert first.row is None
    run_step(both)
    assert first.work.so_far == (3, 1 + 2 + 2)


def test_prompts_beside_a_sequence_count_from_its_first_token_to_its_end() -> None:
    mixed = scheduler(budget=10)
    mixed.add(sequence("early", 6, max_tokens=9))
    run_step(mixed)
    mixed.add(sequence("a", 4, max_tokens=3))
    mixed.add(sequence("together", 3, max_tokens=9))
    watched = mixed.waiting[0]
    mixed.advance(mixed.schedule(), took_s=0.5)  # both prompts: it does not decode yet
    watched.ids.append(0)
    mixed.add(sequence("long", 12, max_tokens=9))
    spans = mixed.schedule()
    mixed.advance(spans, took_s=0.25)
    mixed.remove(watched)
    mixed.add(sequence("late", 2))
    run_step(mixed)

    beside = sum(span.count for span in spans if span.sequence.spec.key == "long")
    assert dict(watched.work.beside) == {"long": beside}
    assert watched.work.beside_s == 0.25
    assert watched.work.ended_s is not None


def test_a_pause_is_counted_once_it_ends() -> None:
    one = scheduler()
    one.add(sequence("a", 2))
    work = one.waiting[0].work
    work.hold(held=True)
    work.hold(held=True)
    assert work.held_s == 0
    assert work.held_since_s is not None
    work.hold(held=False)
    paused_s = work.held_s
    work.hold(held=False)

    assert work.held_s == paused_s > 0
    assert work.held_since_s is None


def test_the_request_of_a_sequence_is_the_beginning_of_its_key() -> None:
    assert request_of("r-1_a.2.0.llm") == "r-1_a"
