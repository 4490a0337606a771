"""Reduction of a failing history: fewer accidents, fewer requests and less time, with the same failure.

The search is greedy. Each omission changes everything after it, so a smaller plan is tried with several
seeds,
and is accepted when one of them violates the same invariant.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from tests.simulation.invariants import BrokenInvariantError, check, run
from tests.simulation.plan import Plan
from tests.simulation.simulator import Simulation

SEEDS: Final = 40
"""So many seeds are tried with each smaller plan."""


def shrink(broken: BrokenInvariantError, say: Callable[[str], None]) -> BrokenInvariantError:
    """The smallest history found that violates the same invariant."""
    while (smaller := _smaller(broken)) is not None:
        broken = smaller
        say(f"smaller: {broken.sim.command}")
    return broken


def _smaller(broken: BrokenInvariantError) -> BrokenInvariantError | None:
    seed = broken.sim.seed
    for plan in simpler(broken.sim.plan):
        for candidate in range(seed, seed + SEEDS):
            found = outcome(Simulation(candidate, plan))
            if found is not None and found.invariant == broken.invariant:
                return found
    return None


def outcome(sim: Simulation) -> BrokenInvariantError | None:
    """The invariant that a history violates, if any."""
    try:
        check(run(sim))
    except BrokenInvariantError as error:
        return error
    return None


def simpler(plan: Plan) -> Iterator[Plan]:
    """Slightly smaller plans."""
    for name in plan.rates:
        yield replace(plan, rates={other: rate for other, rate in plan.rates.items() if other != name})
    for name in ("p_lost", "p_ack_lost", "p_other", "limited", "poisons", "services"):
        if getattr(plan, name):
            yield plan.changed({name: 0})
    for name in ("requests", "gateways", "conductors", "poisons", "places"):
        if getattr(plan, name) > 1:
            yield plan.changed({name: getattr(plan, name) - 1})
    if plan.busy_steps > 20:
        yield replace(plan, busy_steps=plan.busy_steps * 2 // 3)
