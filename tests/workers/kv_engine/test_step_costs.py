"""Costs of steps by their rows: averages of what was measured, and lines between them."""

import pytest

from workers.kv_engine.step_costs import StepCosts


def test_nothing_is_known_before_the_first_step() -> None:
    assert StepCosts().of(1) is None


def test_one_known_number_is_the_cost_of_all() -> None:
    costs = StepCosts()
    costs.observe(4, 0.02)
    assert costs.of(1) == costs.of(64) == 0.02


def test_others_are_on_a_line_through_the_two_nearest() -> None:
    costs = StepCosts()
    costs.observe(1, 0.010)
    costs.observe(9, 0.018)
    assert costs.of(5) == pytest.approx(0.014)
    assert costs.of(17) == pytest.approx(0.026)


def test_noise_does_not_make_more_rows_cheaper() -> None:
    costs = StepCosts()
    costs.observe(1, 0.020)
    costs.observe(8, 0.010)
    assert costs.of(8) == 0.020


def test_costs_of_more_rows_are_forgotten() -> None:
    costs = StepCosts()
    costs.observe(1, 0.010)
    costs.observe(9, 0.050)
    for _ in range(200):
        costs.forget_larger(1, 0.99)
    assert costs.of(1) == 0.010
    assert costs.of(9) == pytest.approx(0.010 + 0.99**200 * 0.040)
