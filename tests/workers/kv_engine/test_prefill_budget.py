"""How much of a prompt is computed beside decodes, as learned from steps."""

import pytest

from workers.kv_engine.prefill_budget import INITIAL_TOKENS, MAX_PREFILL_STEP_S, PrefillBudget


def told(
    budget: PrefillBudget, *, decodes: int, prefill_tokens: int, alone_s: float, token_s: float
) -> float:
    """One step on a machine with these costs; what it took."""
    took_s = (alone_s if decodes else 0.0) + prefill_tokens * token_s
    budget.observe(decodes=decodes, prefill_tokens=prefill_tokens, took_s=took_s)
    return took_s


def test_before_anything_is_known_it_is_the_least() -> None:
    assert PrefillBudget(decode_slowdown_limit=1.8, min_tokens=16).tokens_with_decodes(4, 1) == 16


def test_a_step_takes_as_many_times_as_long_as_its_decodes_as_was_said() -> None:
    budget = PrefillBudget(decode_slowdown_limit=1.5, min_tokens=1)
    told(budget, decodes=0, prefill_tokens=100, alone_s=0, token_s=0.001)
    for _ in range(5):
        told(budget, decodes=4, prefill_tokens=0, alone_s=0.040, token_s=0.001)

    assert budget.tokens_with_decodes(4, 1) == pytest.approx(20, abs=1)


def test_a_step_of_prompts_alone_is_bounded_in_time_once_it_is_known_what_they_cost() -> None:
    budget = PrefillBudget(decode_slowdown_limit=1.5, min_tokens=16)

    assert budget.max_tokens() == INITIAL_TOKENS
    told(budget, decodes=0, prefill_tokens=100, alone_s=0, token_s=0.01)
    assert budget.max_tokens() == pytest.approx(MAX_PREFILL_STEP_S / 0.01, abs=1)


def test_prompts_that_cost_next_to_nothing_are_not_bounded() -> None:
    budget = PrefillBudget(decode_slowdown_limit=1.5, min_tokens=16)

    told(budget, decodes=0, prefill_tokens=100, alone_s=0, token_s=0)

    assert budget.max_tokens() > 10**6


def test_it_learns_while_prompts_are_always_there() -> None:
    budget = PrefillBudget(decode_slowdown_limit=1.8, min_tokens=8)
    told(budget, decodes=8, prefill_tokens=0, alone_s=0.1, token_s=0)
    for _ in range(60):
        took_s = told(
            budget, decodes=8, prefill_tokens=budget.tokens_with_decodes(8, 1), alone_s=0.1, token_s=0.002
        )

    assert took_s == pytest.approx(0.18, rel=0.05)


def test_what_decodes_cost_whose_number_was_never_seen_lies_on_the_line_through_the_nearest() -> None:
    budget = PrefillBudget(decode_slowdown_limit=2.0, min_tokens=1)
    told(budget, decodes=0, prefill_tokens=10, alone_s=0, token_s=0.001)
    told(budget, decodes=1, prefill_tokens=0, alone_s=0.010, token_s=0)
    assert budget.tokens_with_decodes(30, 0) == 10, "nothing else was seen"
    told(budget, decodes=11, prefill_tokens=0, alone_s=0.030, token_s=0)
    told(budget, decodes=21, prefill_tokens=0, alone_s=0.080, token_s=0)

    assert budget.tokens_with_decodes(6, 0) == pytest.approx(20, abs=1)
    assert budget.tokens_with_decodes(16, 0) == pytest.approx(55, abs=1)
    assert budget.tokens_with_decodes(31, 0) == pytest.approx(130, abs=1)


def test_a_step_may_take_as_long_as_those_who_wait_will_make_it_soon_anyway() -> None:
    budget = PrefillBudget(decode_slowdown_limit=2.0, min_tokens=1)
    told(budget, decodes=0, prefill_tokens=10, alone_s=0, token_s=0.001)
    told(budget, decodes=1, prefill_tokens=0, alone_s=0.010, token_s=0)
    told(budget, decodes=32, prefill_tokens=0, alone_s=0.080, token_s=0)

    assert budget.tokens_with_decodes(1, 0) == 10
    assert budget.tokens_with_decodes(1, 31) == 150, "twice 80 ms, of which its own decode takes 10"


def test_more_who_decode_are_never_taken_to_cost_less() -> None:
    budget = PrefillBudget(decode_slowdown_limit=2.0, min_tokens=1)
    told(budget, decodes=0, prefill_tokens=10, alone_s=0, token_s=0.001)
    told(budget, decodes=1, prefill_tokens=0, alone_s=0.030, token_s=0)
    told(budget, decodes=2, prefill_tokens=0, alone_s=0.010, token_s=0)

    assert budget.tokens_with_decodes(1, 1) == 30


def test_prompts_that_cost_nothing_beside_are_let_in_by_the_least() -> None:
    budget = PrefillBudget(decode_slowdown_limit=2.0, min_tokens=4)
    budget.observe(decodes=1, prefill_tokens=0, took_s=0.01)
    budget.observe(decodes=1, prefill_tokens=10, took_s=0.005)

    assert budget.tokens_with_decodes(1, 1) == 4
