"""A tenant's processor time counts for one window."""

from workers.guides.budget import CpuBudget


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_tenant_above_its_budget_waits_until_the_window_has_passed() -> None:
    clock = Clock()
    budget = CpuBudget(10.0, 60.0, clock)
    budget.charge("a", 4.0)
    clock.now_s += 20
    budget.charge("a", 5.0)
    assert budget.wait_s("a") == 0.0
    budget.charge("a", 3.0)

    assert budget.spent_s("a") == 12.0
    assert budget.wait_s("a") == 40.0
    assert (budget.wait_s("b"), budget.spent_s("b")) == (0.0, 0.0)
    clock.now_s += 39
    assert budget.wait_s("a") > 0
    clock.now_s += 1
    assert budget.wait_s("a") == 0.0
    assert budget.spent_s("a") == 8.0


def test_tenants_without_recent_guides_are_forgotten() -> None:
    clock = Clock()
    budget = CpuBudget(10.0, 60.0, clock)
    for number in range(100):
        budget.charge(f"tenant {number}", 0.1)
    clock.now_s += 61

    budget.charge("another", 0.1)

    assert set(budget._spent) == {"another"}
