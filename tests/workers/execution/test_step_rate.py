"""The speed of runs that report their steps."""

from workers.execution.step_rate import StepRates


def test_the_speed_is_that_since_the_first_report() -> None:
    rates = StepRates()
    assert rates.timed("dit", {"step": 1, "steps": 11}, 10.0) == {"step": 1, "steps": 11}
    assert rates.timed("dit", {"step": 6, "steps": 11, "cost": 0.5}, 12.5) == {
        "step": 6,
        "steps": 11,
        "cost": 0.5,
        "steps_per_s": 2.0,
        "remaining_s": 2.5,
    }


def test_a_resumed_run_has_the_speed_of_its_own_steps() -> None:
    rates = StepRates()
    rates.timed("dit", {"step": 46, "steps": 50}, 0.0)
    assert rates.timed("dit", {"step": 48, "steps": 50}, 4.0)["steps_per_s"] == 0.5


def test_each_node_has_its_own_speed() -> None:
    rates = StepRates()
    rates.timed("a", {"step": 1, "steps": 3}, 0.0)
    assert "steps_per_s" not in rates.timed("b", {"step": 2, "steps": 3}, 1.0)
    assert rates.timed("a", {"step": 2, "steps": 3}, 2.0)["steps_per_s"] == 0.5


def test_a_second_run_of_a_node_begins_anew() -> None:
    rates = StepRates()
    rates.timed("a", {"step": 1, "steps": 3}, 0.0)
    rates.timed("a", {"step": 3, "steps": 3}, 2.0)
    assert "steps_per_s" not in rates.timed("a", {"step": 1, "steps": 3}, 9.0)
    assert rates.timed("a", {"step": 2, "steps": 3}, 10.0)["steps_per_s"] == 1.0


def test_other_progress_is_left_alone() -> None:
    assert StepRates().timed("a", {"cost": 0.5, "step": "first"}, 0.0) == {"cost": 0.5, "step": "first"}
