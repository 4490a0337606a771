"""Scheduling as tables: the sequences of a step, with the number of tokens of each."""

from typing import Any

import numpy as np
import pytest

from models.sequence_request import PromptPart
from shared.errors import ClientError
from workers.kv_engine.cache.blocks import BlockManager
from workers.kv_engine.prefill_budget import PrefillBudget
from workers.kv_engine.prompt_parts import PromptParts
from workers.kv_engine.scheduler import MIN_BURST, Scheduler
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import SequenceSpec


def sequence(key: str, prompt: int, max_tokens: int = 4, **spec: Any) -> Sequence:
    """Return a sequence with a unique prompt."""
    ids = [int.from_bytes(key.encode()) % 100_003 * 1000 + place for place in range(prompt)]
    return Sequence(SequenceSpec(key=key, prompt_ids=ids, max_tokens=max_tokens, **spec))


def same(key: str, prompt: int, max_tokens: int = 4, **spec: Any) -> Sequence:
    """Return a sequence whose prompt has the prefix of all others made by this function."""
    return Sequence(SequenceSpec(key=key, prompt_ids=list(range(prompt)), max_tokens=max_tokens, **spec))


def scheduler(
    *, blocks: int = 100, rows: int = 4, budget: int = 10, positions: int = 1000, **changes: Any
) -> Scheduler:
    pool = BlockManager(blocks, 2)
    return Scheduler(pool, max_sequences=rows, max_step_tokens=budget, max_positions=positions, **changes)


def shape(spans: list[Span]) -> list[tuple[str, int, int]]:
    return [(span.sequence.spec.key, span.start, span.count) for span in spans]


def run_step(of: Scheduler) -> list[tuple[str, int, int]]:
    """Schedule a step and simulate its sampling; sequences leave at their limit."""
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


def test_decodes_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
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


def test_a_sequence_is_admitted_once_its_prompt_fits_with_one_block_per_running_sequence() -> None:
    small = scheduler(blocks=5)  # ten tokens
    small.add(sequence("a", 4, max_tokens=2))
    small.add(sequence("b", 6, max_tokens=1))

    assert run_step(small) == [("a", 0, 4)]
    assert run_step(small) == [("a", 4, 1)]
    assert run_step(small) == [("b", 0, 6)]


def test_no_sequence_overtakes_one_that_waits_for_blocks() -> None:
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
def test_a_sequence_larger_than_pool_or_context_is_refused(limits: dict[str, int], what: str) -> None:
    small = scheduler(**limits)

    with pytest.raises(ClientError, match=f"{what} .*11 were requested .7 in the prompt, 4") as caught:
        small.add(sequence("a", 7))

    assert (caught.value.failure_code, caught.value.failure_status) == ("context_length_exceeded", 400)
    assert not small.has_work


def test_a_sequence_that_fits_exactly_is_accepted() -> None:
    exact = scheduler(blocks=5, positions=10)
    exact.add(sequence("a", 6))

    assert run_step(exact) == [("a", 0, 6)]


def test_a_budget_below_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="max_step_tokens=3, max_sequences=4"):
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


def test_a_held_sequence_takes_part_in_no_step_and_keeps_its_row() -> None:
    one = scheduler(blocks=20, rows=2)
    first, second = sequence("a", 3), sequence("b", 15)
    one.add(first)
    one.add(second)
    assert run_step(one) == [("a", 0, 3), ("b", 0, 7)]
    admissions = (first.row, second.row)

    first.held = True
    assert run_step(one) == [("b", 7, 8)]
    first.held, second.held = False, True
    assert run_step(one) == [("a", 3, 1)]
    second.held = False

    assert run_step(one) == [("a", 4, 1), ("b", 15, 1)]
    assert (first.row, second.row) == admissions


def test_a_held_prompt_is_not_computed_further() -> None:
    one = scheduler()
    long = sequence("a", 25)
    one.add(long)
    assert run_step(one) == [("a", 0, 10)]

    long.held = True
    assert run_step(one) == []
    long.held = False

    assert run_step(one) == [("a", 10, 10)]


def test_there_is_no_work_if_all_sequences_are_held() -> None:
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


def test_a_waiting_sequence_is_admitted_next_to_held_ones() -> None:
    one = scheduler(rows=2)
    first = sequence("a", 3)
    one.add(first)
    run_step(one)
    first.held = True

    one.add(sequence("b", 2))

    assert one.has_work
    assert run_step(one) == [("b", 0, 2)]


def test_a_sequence_held_before_its_admission_is_admitted_in_its_turn() -> None:
    one = scheduler(rows=1)
    early = sequence("a", 3)
    early.held = True
    one.add(early)
    assert one.has_work

    assert run_step(one) == []

    assert (early.row, one.has_work) == (0, False)


# ---- order ---------------------------------------------------------------------------------------


def test_the_higher_priority_comes_first_then_the_earlier_deadline() -> None:
    one = scheduler(rows=1)
    for key, spec in (
        ("plain", {}),
        ("later", {"deadline_ns": 20}),
        ("soon", {"deadline_ns": 10}),
        ("urgent", {"priority": 1}),
    ):
        one.add(sequence(key, 2, max_tokens=1, **spec))

    assert [run_step(one)[0][0] for _ in range(4)] == ["urgent", "soon", "later", "plain"]


def test_a_tenant_with_many_requests_does_not_delay_another() -> None:
    one = scheduler(rows=1)
    for number in range(4):
        one.add(sequence(f"much-{number}", 8, max_tokens=1, tenant="much"))
    run_step(one)
    one.add(sequence("little", 2, max_tokens=1, tenant="little"))

    assert [run_step(one)[0][0] for _ in range(3)] == ["much-1", "little", "much-2"]


def test_an_absent_tenant_earns_no_precedence() -> None:
    one = scheduler(rows=1, budget=10)
    for number in range(3):
        one.add(sequence(f"a-{number}", 8, max_tokens=1, tenant="a"))
        run_step(one)
    for number in range(3):
        one.add(sequence(f"a-later-{number}", 8, max_tokens=1, tenant="a"))
        one.add(sequence(f"b-{number}", 8, max_tokens=1, tenant="b"))

    order = [run_step(one)[0][0][0] for _ in range(6)]

    assert sorted(order[:2]) == sorted(order[2:4]) == sorted(order[4:]) == ["a", "b"]


# ---- preemption ----------------------------------------------------------------------------------


def test_the_last_arrival_is_preempted_and_continues_with_its_tokens() -> None:
    small = scheduler(blocks=4, prefix_cache=False)  # eight tokens
    first, second = sequence("a", 2, max_tokens=6), sequence("b", 2, max_tokens=4)
    small.add(first)
    small.add(second)

    steps = [run_step(small) for _ in range(7)]

    assert steps[0] == [("a", 0, 2), ("b", 0, 2)]
    assert small.counters.preemptions == 1
    assert second.arrival == 2
    assert steps[3] == [("a", 4, 1)]  # it takes the block that b gave back
    assert ("b", 0, 5) in [span for step in steps for span in step]  # with the three tokens it had
    assert not small.running
    assert small.blocks.free == 4


def test_a_higher_priority_is_not_preempted_for_a_lower_one() -> None:
    small = scheduler(blocks=4, prefix_cache=False)
    small.add(sequence("a", 2, max_tokens=6))
    small.add(sequence("b", 2, max_tokens=6, priority=1))
    run_step(small)

    for _ in range(3):
        run_step(small)

    assert [s.spec.key for s in small.running] == ["b"]
    assert [s.spec.key for s in small.waiting] == ["a"]


def test_a_prompt_that_was_scored_is_not_scored_again_after_a_preemption() -> None:
    small = scheduler(blocks=4)
    small.add(sequence("a", 2, max_tokens=6))
    scored = sequence("b", 2, max_tokens=4, scores_prompt=True, logprobs=0)
    small.add(scored)
    scored_spans: list[tuple[str, int, int]] = []
    while small.has_work:
        spans = small.schedule()
        scored_spans += [
            ("b", span.start, len(span.scored_positions)) for span in spans if span.sequence is scored
        ]
        small.advance(spans)
        for span in spans:
            span.sequence.ids.append(0)
            if span.sequence.generated == span.sequence.spec.max_tokens:
                small.remove(span.sequence)

    assert small.counters.preemptions == 1
    assert sum(scored_now for *_, scored_now in scored_spans) == 1


# ---- the prefix cache ----------------------------------------------------------------------------


def test_cached_blocks_of_another_sequence_are_not_computed_again() -> None:
    one = scheduler(budget=20)
    one.add(same("a", 9, max_tokens=1))
    assert run_step(one) == [("a", 0, 9)]
    one.add(same("b", 7))

    assert run_step(one) == [("b", 6, 1)]
    assert (one.counters.queries, one.counters.hits) == (16, 6)


def test_a_sequence_waits_for_a_block_that_another_computes_and_lets_others_pass() -> None:
    one = scheduler(budget=4)
    one.add(same("a", 9))
    one.add(same("b", 9))
    one.add(sequence("c", 2, max_tokens=1))

    assert run_step(one) == [("a", 0, 4)]
    assert [s.spec.key for s in one.running] == ["a", "c"]
    assert run_step(one) == [("a", 4, 4)]
    assert run_step(one) == [("a", 8, 1), ("b", 8, 1), ("c", 0, 2)]
    assert one.counters.hits == 8


def test_a_sequence_that_waits_for_another_continues_when_that_one_leaves_or_is_held() -> None:
    for leaves in (True, False):
        one = scheduler(budget=4)
        first = same("a", 9)
        one.add(first)
        one.add(same("b", 9))
        assert run_step(one) == [("a", 0, 4)]

        if leaves:
            one.remove(first)
        else:
            first.held = True

        assert run_step(one) == [("b", 4, 4)]


def test_a_prompt_that_is_to_be_scored_is_computed_whole() -> None:
    one = scheduler(budget=20)
    one.add(same("a", 9, max_tokens=1))
    run_step(one)
    one.add(same("b", 9, scores_prompt=True, logprobs=0))

    assert run_step(one) == [("b", 0, 9)]


def test_a_prompt_that_contains_an_earlier_answer_finds_its_blocks() -> None:
    one = scheduler(budget=20)
    one.add(same("a", 4, max_tokens=5))
    while one.has_work:
        run_step(one)  # each token is a 0
    follow_up = Sequence(SequenceSpec(key="b", prompt_ids=[0, 1, 2, 3, 0, 0, 0, 0, 9], max_tokens=1))
    one.add(follow_up)

    assert run_step(one) == [("b", 8, 1)]


def test_without_a_cache_everything_is_computed() -> None:
    one = scheduler(budget=20, prefix_cache=False)
    for key in "ab":
        one.add(same(key, 9, max_tokens=1))

    assert run_step(one) == [("a", 0, 9), ("b", 0, 9)]


def test_cached_blocks_are_evicted_for_running_sequences() -> None:
    small = scheduler(blocks=5, budget=10)
    small.add(same("a", 8, max_tokens=1))
    run_step(small)
    assert small.blocks.evictable == 4
    small.add(sequence("b", 8, max_tokens=1))

    assert run_step(small) == [("b", 0, 8)]


# ---- the prefill budget --------------------------------------------------------------------------


def test_next_to_decodes_a_prompt_gets_the_prefill_budget() -> None:
    budget = PrefillBudget(decode_slowdown_limit=2.0, min_tokens=2)
    one = scheduler(budget=100, prefill_budget=budget)
    one.add(sequence("a", 3, max_tokens=20))
    assert run_step(one) == [("a", 0, 3)]
    budget.observe(decodes=0, prefill_tokens=3, took_s=0.03)
    one.add(sequence("b", 30))
    assert run_step(one) == [("a", 3, 1), ("b", 0, 2)]
    budget.observe(decodes=1, prefill_tokens=0, took_s=0.05)

    assert run_step(one) == [("a", 4, 1), ("b", 2, 5)]


def paced(decoding: int, **sizes: Any) -> Scheduler:
    """Return a scheduler with a prefill budget of two tokens next to a decode, and so many decodes."""
    budget = PrefillBudget(decode_slowdown_limit=2.0, min_tokens=2)
    one = scheduler(blocks=500, rows=40, budget=100, prefill_budget=budget, **sizes)
    for number in range(decoding):
        one.add(sequence(f"d{number}", 2, max_tokens=50))
    run_step(one)
    budget.observe(decodes=0, prefill_tokens=100, took_s=1.0)
    budget.observe(decodes=decoding, prefill_tokens=0, took_s=0.02)
    return one


def test_a_burst_of_prompts_comes_first() -> None:
    one = paced(decoding=2)
    for number in range(MIN_BURST):
        one.add(sequence(f"p{number}", 20))

    assert [count for _, _, count in run_step(one)] == [1] * 2 + [20] * MIN_BURST


@pytest.mark.parametrize(
    ("decoding", "prompts"),
    [
        (1, [20] * (MIN_BURST - 1)),  # too few
        (MIN_BURST // 2 + 1, [20] * MIN_BURST),  # fewer than twice as many as would have to pause
        (1, [90] * 5),  # many, but one step brings one of them to its end
        (1, [500]),
    ],
)
def test_prompts_that_are_no_burst_keep_to_the_prefill_budget(decoding: int, prompts: list[int]) -> None:
    one = paced(decoding, positions=2000)
    for number, length in enumerate(prompts):
        one.add(sequence(f"p{number}", length))

    assert [count for _, _, count in run_step(one)] == [1] * decoding + [2]


@pytest.mark.parametrize("seed", range(40))
def test_under_random_load_budget_and_blocks_hold_and_all_end(seed: int) -> None:
    random = np.random.default_rng(seed)
    has_cache = bool(seed % 2)
    pool = BlockManager(int(random.integers(8, 40)), 2)
    one = Scheduler(
        pool,
        max_sequences=4,
        max_step_tokens=int(random.integers(4, 12)),
        max_positions=1000,
        prefix_cache=has_cache,
    )
    total = pool.capacity_tokens
    arrivals = [
        (same if random.random() < 0.5 else sequence)(
            str(i),
            int(random.integers(1, total - 8)),
            int(random.integers(1, 9)),
            priority=int(random.integers(2)),
            tenant="ab"[int(random.integers(2))],
        )
        for i in range(30)
    ]
    ended: list[str] = []
    computed: dict[str, int] = {}

    while arrivals or one.has_work:
        if arrivals and random.random() < 0.5:
            one.add(arrivals.pop(0))
        spans = one.schedule()
        assert sum(span.count for span in spans) <= one.max_step_tokens
        assert len({block for s in one.running for block in s.blocks}) == pool.num_blocks - pool.free
        for s in one.running:
            assert len(set(s.blocks)) == len(s.blocks) >= pool.blocks_for(s.computed)
            # Blocks that this step writes belong to no other sequence.
            own = s.blocks[len(s.cached_path) :]
            assert not any(set(own) & set(other.blocks) for other in one.running if other is not s)
        for span in spans:
            assert len(span.sequence.blocks) * 2 >= span.start + span.count
            assert span.start >= len(span.sequence.cached_path) * 2
        assert len({s.row for s in one.running}) == len(one.running) <= 4
        assert not one.running or spans
        one.advance(spans)
        for span in spans:
            computed[span.sequence.spec.key] = computed.get(span.sequence.spec.key, 0) + span.count
            if span.samples:
                span.sequence.ids.append(0)
                if span.sequence.generated == span.sequence.spec.max_tokens:
                    one.remove(span.sequence)
                    ended.append(span.sequence.spec.key)

    assert sorted(ended, key=int) == [str(i) for i in range(30)]
    assert pool.free == pool.num_blocks
    assert (one.counters.hits > 0) == has_cache


# ---- prompts with media --------------------------------------------------------------------------------
def with_image(key: str, prompt: int, start: int, count: int, *, full: bool = True) -> Sequence:
    """Return a sequence whose prompt has an image of `count` tokens from `start` on."""
    found = sequence(key, prompt)
    ids = found.spec.prompt_ids
    found.parts = PromptParts(
        ids,
        [PromptPart(start=start, count=count, digest=key, full=full)],
        positions=np.arange(prompt, dtype=np.int32)[None],
        next_position=prompt,
        rows=np.zeros((count, 1)),
    )
    return found


def test_a_full_part_is_computed_in_one_step_even_above_the_budget() -> None:
    """Of 10 tokens a step, 12 are needed at once: what comes before them is computed first."""
    one = scheduler(budget=10, max_part_tokens=8)
    one.add(with_image("a", 20, start=3, count=12))

    assert [run_step(one) for _ in range(3)] == [[("a", 0, 3)], [("a", 3, 12)], [("a", 15, 5)]]


def test_an_image_that_sees_only_earlier_tokens_may_be_cut() -> None:
    one = scheduler(budget=10)
    one.add(with_image("a", 20, start=3, count=12, full=False))

    assert [run_step(one) for _ in range(2)] == [[("a", 0, 10)], [("a", 10, 10)]]


def test_a_full_part_waits_for_a_step_with_room_and_lets_others_go_first() -> None:
    one = scheduler(budget=10, max_part_tokens=4)
    one.add(sequence("b", 8))
    one.add(with_image("a", 12, start=0, count=10))

    assert run_step(one) == [("b", 0, 8)]
    assert run_step(one) == [("b", 8, 1), ("a", 0, 10)]


def test_a_full_part_that_no_step_can_compute_is_refused() -> None:
    one = scheduler(budget=10, rows=4, max_part_tokens=2)
    one.add(with_image("a", 20, start=0, count=8))

    with pytest.raises(ClientError, match=r"9 tokens of the prompt see one another.*max_pass_tokens"):
        one.add(with_image("b", 20, start=0, count=9))


# ---- rotary factors that depend on the length -------------------------------------------------------


def with_change(key: str, prompt: int, change: int, max_tokens: int = 9, **spec: Any) -> Sequence:
    return Sequence(same(key, prompt, max_tokens, **spec).spec, rotary_change=change)


def test_a_sequence_that_outgrows_its_factors_is_computed_again_beside_others() -> None:
    both = scheduler(rotary_change=6)
    for key, prompt in (("a", 5), ("far", 9)):
        both.add(Sequence(sequence(key, prompt, max_tokens=9).spec, rotary_change=6))

    assert run_step(both) == [("a", 0, 5), ("far", 0, 5)]
    assert run_step(both) == [("a", 5, 1), ("far", 5, 4)]
    assert run_step(both) == [("far", 9, 1), ("a", 0, 7)]  # seven tokens: one too many for short factors
    assert run_step(both) == [("far", 10, 1), ("a", 7, 1)]
    assert both.counters.changed_factors == 1


def test_blocks_of_other_factors_are_no_beginning_of_a_sequence() -> None:
    both = scheduler(rotary_change=6)
    for key, prompt, found in (("a", 6, 0), ("far", 9, 0), ("b", 6, 4), ("farther", 9, 8)):
        sequence = with_change(key, prompt, 6, max_tokens=1)
        both.add(sequence)
        [span] = both.schedule()
        assert (key, span.start) == (key, found)
        both.advance([span])
        both.remove(sequence)


def test_a_held_sequence_changes_its_factors_when_it_goes_on() -> None:
    one = scheduler(rotary_change=6)
    sequence = with_change("a", 6, 6)
    one.add(sequence)
    run_step(one)
    sequence.held = True

    assert run_step(one) == []
    assert not sequence.long_factors
    sequence.held = False
    assert run_step(one) == [("a", 0, 7)]
