"""Command line of the simulator: run one history to inspect it, or many.

    python -m tests.simulation --seed 7 --story          the whole history: the log, and events outside of it
    python -m tests.simulation --seed 7 --step           step through it: next, previous, go, state, diff, ...
    python -m tests.simulation --seed 7 --shrink         find a smaller plan that fails in the same way
    python -m tests.simulation --seeds 10000             run as many seeds, from `--seed` on, on all cores
    python -m tests.simulation --seed 7 --set requests=1 --set 'rates={"worker dies": 0.05}'

Exit status 1: an invariant is violated. 3: something never happened, although there were enough histories.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from tests.simulation import soak
from tests.simulation.invariants import BrokenInvariantError, check, run
from tests.simulation.plan import Plan
from tests.simulation.shrink import outcome, shrink
from tests.simulation.simulator import Simulation
from tests.simulation.stepping import HistoryStepper


def main() -> int:
    """Run the command line; return the exit status."""
    parser = _parser()
    told = parser.parse_args()
    try:
        changes = dict(map(_change, told.set))
        plan = Plan.of(told.seed).changed(changes)
    except ValueError as error:
        parser.error(str(error))
    if told.seeds > 1:
        return _soak(told, changes)
    sim = Simulation(told.seed, plan)
    status = 0
    if told.until is not None:
        for _ in range(told.until):
            sim.step()
    else:
        status = _check(sim)
    if told.shrink:
        return _shrink(Simulation(told.seed, sim.plan))
    if told.story:
        print(*HistoryStepper(sim).all(), sep="\n")
    if told.step:
        HistoryStepper(sim).run(_commands(), print, as_json=False)
    return status


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="on how many cores")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first that breaks")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="change the plan")
    parser.add_argument("--story", action="store_true", help="tell all that happened")
    parser.add_argument("--step", action="store_true", help="go through what happened")
    parser.add_argument("--until", type=int, metavar="STEP", help="stop at this step of the simulation")
    parser.add_argument("--shrink", action="store_true", help="look for a smaller history that breaks")
    return parser


def _change(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def _check(sim: Simulation) -> int:
    try:
        check(run(sim))
    except BrokenInvariantError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"seed {sim.seed}: {sim.log.last_seq} records, {sim.steps} steps: all invariants hold")
    return 0


def _shrink(sim: Simulation) -> int:
    broken = outcome(sim)
    if broken is None:
        print(f"seed {sim.seed} breaks nothing")
        return 0
    print(shrink(broken, print))
    return 1


def _soak(told: argparse.Namespace, changes: dict[str, Any]) -> int:
    soaked = soak.soak(told.seed, told.seeds, changes, jobs=told.jobs, say=print, goes_on=told.keep_going)
    print(*soaked.table(), sep="\n")
    if soaked.broken:
        return 1
    return 3 if soaked.never and soaked.histories >= soak.MANY and not changes else 0


def _commands() -> Iterator[str]:
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


if __name__ == "__main__":
    sys.exit(main())
