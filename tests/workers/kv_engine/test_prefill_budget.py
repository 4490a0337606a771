"""The prompt tokens per step next to decodes, as learned from past steps."""

import pytest

from workers.kv_engine.prefill_budget import INITIAL_TOKENS, MAX_PREFILL_STEP_S, PrefillBudget


def observe(
    budget: PrefillBudget, *, decodes: int, prefill_tokens: int, alone_s: float, token_s: float
) -> float:
    """Observe one step of a machine with these costs, and return its duration."""
    took_s = (alone_s if decodes else 0.0) + prefill_tokens * token_s
    budget.observe(decodes=decodes, prefill_tokens=prefill_tokens, took_s=took_s)
    return took_s


def test_the_budget_is_the_minimum_before_anything_is_learned() -> None:
    assert PrefillBudget(decode_slowdown_limit=1.8, min_tokens=16).tokens_with_decodes(4, 1) == 16


def test_a_step_is_as_many_times_as_long_as_its_decodes_as_configured() -> None:
    budget = PrefillBudget(decode_slowdown_limit=1.5, min_tokens=1)
    observe(budget, decodes=0, prefill_tokens=100, alone_s=0, token_s=0.001)
    for _ in range(5):
        observe(budget, decodes=4, prefill_tokens=0, alone_s=0.040, token_s=0.001)

    assert budget.tokens_with_decodes(4, 1) == pytest.approx(20, abs=1)


def test_a_step_of_prompts_alone_is_bounded_in_time_once_it_is_known_what_they_cost() -> None:
    budget = PrefillBudget(decode_slowdown_limit=1.5, min_tokens=16)

    assert budget.max_tokens() == INITIAL_TOKENS
    observe(budget, decodes=0, prefill_tokens=100, alone_s=0, token_s=0.01)
    assert budget.max_tokens() == pytest.approx(MAX_PREFILL_STEP_S / 0.01, abs=1)


def test_prompts_that_cost_next_to_nothing_are_not_bounded() -> None:
    budget = PrefillBudget(decode_slowdown_limit=1.5, min_tokens=16)

    observe(budget, decodes=0, prefill_tokens=100, alone_s=0, token_s=0)

    assert budget.max_tokens() > 10**6


def test_costs_are_learned_while_prompts_never_pause() -> None:
    budget = PrefillBudget(decode_slowdown_limit=1.8, min_tokens=8)
    observe(budget, decodes=8, prefill_tokens=0, alone_s=0.1, token_s=0)
    for _ in range(60):
        took_s = observe(
            budget, decodes=8, prefill_tokens=budget.tokens_with_decodes(8, 1), alone_s=0.1, token_s=0.002
        )

    assert took_s == pytest.approx(0.18, rel=0.05)


def test_the_cost_of_an_unseen_number_of_decodes_is_interpolated_linearly() -> None:
    budget = PrefillBudget(decode_slowdown_limit=2.0, min_tokens=1)
    observe(budget, decodes=0, prefill_tokens=10, alone_s=0, token_s=0.001)
    observe(budget, decodes=1, prefill_tokens=0, alone_s=0.010, token_s=0)
    assert budget.tokens_with_decodes(30, 0) == 10, "only one number was observed"
    observe(budget, decodes=11, prefill_tokens=0, alone_s=0.030, token_s=0)
    observe(budget, decodes=21, prefill_tokens=0, alone_s=0.080, token_s=0)

    assert budget.tokens_with_decodes(6, 0) == pytest.approx(20, abs=1)
    assert budget.tokens_with_decodes(16, 0) == pytest.approx(55, abs=1)
    assert budget.tokens_with_decodes(31, 0) == pytest.approx(130, abs=1)


def test_waiting_prompts_count_as_decodes() -> None:
    budget = PrefillBudget(decode_slowdown_limit=2.0, min_tokens=1)
    observe(budget, decodes=0, prefill_tokens=10, alone_s=0, token_s=0.001)
    observe(budget, decodes=1, prefill_tokens=0, alone_s=0.010, token_s=0)
    observe(budget, decodes=32, prefill_tokens=0, alone_s=0.080, token_s=0)

    assert budget.tokens_with_decodes(1, 0) == 10
    assert budget.tokens_with_decodes(1, 31) == 150, "twice 80 ms, of which its own decode takes 10"


def test_more_decodes_never_cost_less() -> None:
    budget = PrefillBudget(decode_slowdown_limit=2.0, min_tokens=1)
    observe(budget, decodes=0, prefill_tokens=10, alone_s=0, token_s=0.001)
    observe(budget, decodes=1, prefill_tokens=0, alone_s=0.030, token_s=0)
    observe(budget, decodes=2, prefill_tokens=0, alone_s=0.010, token_s=0)

    assert budget.tokens_with_decodes(1, 1) == 30


def test_prompts_without_a_measurable_cost_get_the_minimum() -> None:
    budget = PrefillBudget(decode_slowdown_limit=2.0, min_tokens=4)
    budget.observe(decodes=1, prefill_tokens=0, took_s=0.01)
    budget.observe(decodes=1, prefill_tokens=10, took_s=0.005)

    assert budget.tokens_with_decodes(1, 1) == 4
