"""What is learned of the cost of a step."""

import random

import pytest

from dalsegno.what_if import cost_model
from dalsegno.what_if.cost_model import Pace, Sample, StepCost

COST = StepCost(step_s=0.010, row_s=0.002, token_s=0.0005)


def samples(count: int = 60, pace: Pace = Pace(), seed: int = 1) -> list[Sample]:  # noqa: B008 - frozen
    """Sequences that were computed at these costs, one after the other."""
    draw, at_s, found = random.Random(seed), 100.0, list[Sample]()
    for _ in range(count):
        steps, rows, tokens = draw.randint(10, 60), draw.randint(1, 8), draw.randint(0, 300)
        usual_s = steps * COST.of(rows, 0) + tokens * COST.token_s
        took_s = usual_s * pace.at(at_s)
        found.append(
            Sample(
                took_s=took_s,
                steps=steps,
                rows=rows,
                prefill_tokens=tokens,
                begin_s=at_s,
                end_s=at_s + took_s,
            )
        )
        at_s += took_s
    return found


def test_exact_costs_are_found_again() -> None:
    found = cost_model.fitted(samples())
    assert found is not None
    for name in ("step_s", "row_s", "token_s"):
        assert getattr(found, name) == pytest.approx(getattr(COST, name), rel=1e-3)
    assert found.noise == pytest.approx(0, abs=1e-3)
    assert found.most_rows == 8


def test_a_known_cost_of_a_prompt_token_is_kept() -> None:
    found = cost_model.fitted(samples(), token_s=0.0005)
    assert found is not None
    assert found.token_s == 0.0005
    assert found.row_s == pytest.approx(COST.row_s, rel=1e-3)


def test_a_machine_that_was_slower_for_a_while_is_noticed() -> None:
    whole = samples()
    half = (whole[0].begin_s + whole[-1].end_s) / 2
    found = cost_model.fitted(samples(pace=Pace(bounds=[half, 1e9], factors=[3.0])))
    assert found is not None
    first, last = found.pace.factors[0], found.pace.factors[-1]
    assert last / first == pytest.approx(3, rel=0.15)
    assert found.pace.at(0) == 1
    assert found.pace.at(1e12) == 1


def test_no_cost_is_negative() -> None:
    wrong = [
        Sample(took_s=1 / one.rows, steps=one.steps, rows=one.rows, prefill_tokens=one.prefill_tokens)
        for one in samples()
    ]
    found = cost_model.fitted(wrong)
    assert found is not None
    assert min(found.step_s, found.row_s, found.token_s) == 0


def test_nothing_is_learned_from_a_few_sequences() -> None:
    assert cost_model.fitted(samples(3)) is None
    assert cost_model.fitted([]) is None


def test_rows_that_never_vary_do_not_invent_a_cost() -> None:
    same = [Sample(took_s=0.1 * steps, steps=steps, rows=4, prefill_tokens=0) for steps in range(10, 40)]
    found = cost_model.fitted(same)
    assert found is not None
    assert found.of(4, 0) == pytest.approx(0.1)


def test_a_resampled_log_has_as_many_samples_and_is_the_same_each_time() -> None:
    log = samples()
    drawn = cost_model.resampled(log, 3)
    assert len(drawn) == len(log)
    assert drawn == cost_model.resampled(log, 3)
    assert drawn != cost_model.resampled(log, 4)
    assert cost_model.resampled(log, 0) == log
