"""A failing history made smaller: fewer accidents, fewer requests, less time, and it fails all the same.

Greedy. What is left out changes everything behind it, so a smaller plan is tried with several seeds; it is
taken when one of them breaks the same invariant.
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
    """The smallest history found that breaks what this one breaks."""
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
    """What a history breaks, if anything."""
    try:
        check(run(sim))
    except BrokenInvariantError as error:
        return error
    return None


def simpler(plan: Plan) -> Iterator[Plan]:
    """Plans with a little less in them."""
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
