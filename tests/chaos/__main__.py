"""`python -m tests.chaos`: the kill matrix and the scenarios, or a part of them.

    --role worker --point chunk.acked --action kill      one cell
    --role gateway                                       a role's
    --scenario nats-killed                               one scenario
    --scenario all                                       the scenarios, without the matrix
    --role worker --point chunk.acked --nth 9            at another time
    --random 50                                          fifty cells, each at some time
    --rounds 20                                          each so often
    --workers 1                                          the matrix without a replica
    --cluster                                            the matrix on a cluster of three nats-servers

Status 0: everything was survived. The table, and what belongs to failures, are in the folder `--out`.
"""

import argparse
import asyncio
import logging
import shutil
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.chaos.deployment import Deployment, Nats, Shape, deployed
from tests.chaos.disturbances import ACTIONS
from tests.chaos.matrix import Cell, at_random, cells
from tests.chaos.report import Report, Result, keep
from tests.chaos.rounds import Outcome, Rounds, Undisturbed
from tests.chaos.scenarios import OTHERS, SCENARIOS, Scenario, Three
from tests.tiny import tiny_checkpoint

OUT: Final = Path("build/chaos")
ALL: Final = "all"
_REPLICAS: Final = 2
_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Wanted:
    """The selected rounds: on the deployment of the matrix, and on others."""

    cells: Sequence[Cell]
    scenarios: Sequence[Scenario]
    others: Sequence[str]
    workers: int
    is_cluster: bool
    out: Path

    @property
    def flags(self) -> list[str]:
        """The shape of the deployment, if it is not the default."""
        workers = ["--workers", str(self.workers)] if self.workers != _REPLICAS else []
        return workers + (["--cluster"] if self.is_cluster else [])


def main() -> int:
    """Run the selected rounds; return the exit status."""
    wanted = parse()
    shutil.rmtree(wanted.out, ignore_errors=True)
    wanted.out.mkdir(parents=True)
    logging.basicConfig(filename=wanted.out / "clients.log", level=logging.INFO)
    report = asyncio.run(_all(wanted))
    report.write(wanted.out)
    print(f"\n{report.markdown()}\nAlso in {wanted.out}/chaos.md, and for programs in chaos.json.")
    return 1 if report.failed else 0


def parse(args: Sequence[str] | None = None) -> Wanted:
    """Parse the arguments; those of the process by default."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [*(one.name for one in SCENARIOS), *OTHERS]
    parser.add_argument("--role", choices=("gateway", "conductor", "worker", "nats"))
    parser.add_argument("--point", help="points with this in their name")
    parser.add_argument("--action", choices=ACTIONS)
    parser.add_argument("--nth", type=int, default=0, help="the time the point is passed; else a usual one")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N cells, each at some time")
    parser.add_argument(
        "--scenario", choices=(*names, ALL), metavar="NAME", help=f"{', '.join(names)}, {ALL}"
    )
    parser.add_argument("--rounds", type=int, default=1, help="so often each")
    parser.add_argument(
        "--workers", type=int, default=_REPLICAS, help="replicas, on the deployment of the matrix"
    )
    parser.add_argument("--cluster", action="store_true", help="three nats-servers for the matrix")
    parser.add_argument("--out", type=Path, default=OUT)
    told = parser.parse_args(args)
    is_cell = any((told.role, told.point, told.action, told.random))
    which = told.scenario or ("" if is_cell else ALL)
    found = [] if told.scenario else list(cells(told.role, told.point, told.action, told.nth))
    if told.random:
        found = [at_random(seed) for seed in range(told.random)]
    if told.cluster:  # whose servers have scenarios of their own
        which, found = "", [one for one in found if one.role != "nats"]
    wanted = Wanted(
        found * told.rounds,
        [one for one in SCENARIOS if which in {ALL, one.name}] * told.rounds,
        [name for name in OTHERS if which in {ALL, name}] * told.rounds,
        told.workers,
        told.cluster,
        told.out.absolute(),
    )
    if not (wanted.cells or wanted.scenarios or wanted.others):
        parser.error("there is no such point; they are listed in shared/faults.py")
    return wanted


async def _all(wanted: Wanted) -> Report:
    report, out = Report(), wanted.out
    if wanted.cells or wanted.scenarios:
        settings: dict[str, Any] = {"nats": {"durability": "cluster"}} if wanted.is_cluster else {}
        shape = Shape(checkpoint=tiny_checkpoint("qwen3"), workers=wanted.workers, settings=settings)
        bus = Three if wanted.is_cluster else Nats
        async with deployed(out / "deployment", shape, bus) as deployment:
            rounds = Rounds(deployment)
            undisturbed = await rounds.undisturbed()
            for cell in wanted.cells:
                result = await of_cell(deployment, rounds, undisturbed, cell, *wanted.flags)
                await _say(report, result, out)
            for scenario in wanted.scenarios:
                outcome = await _tried(scenario.name, scenario.run(deployment, rounds, undisturbed))
                await _say(report, _of_scenario(outcome), out)
    for name in wanted.others:
        outcome = await _tried(name, OTHERS[name](out / name))
        await _say(report, _of_scenario(outcome), out)
    return report


async def of_cell(
    deployment: Deployment, rounds: Rounds, undisturbed: Undisturbed, cell: Cell, *flags: str
) -> Result:
    """Run a cell's round on a healthy deployment; repeat it if its point was not reached.

    On a busy machine, the gateway that should reach the point may refuse a client.
    """

    async def once() -> Outcome:
        for role in deployment.roles.values():
            role.disarm()
        await deployment.wait_until_ready()
        return await rounds.round(
            cell.name,
            cell.questions(undisturbed.questions),
            expected=undisturbed.expected,
            disturb=cell.disturbance(deployment),
            patience_s=cell.patience_s,
        )

    for _ in range(_ROUNDS):
        outcome = await _tried(cell.name, once())
        if outcome.reached or outcome.findings:
            break
    return Result(cell=cell, outcome=outcome, command=cell.command(*flags))


async def _tried(name: str, running: Awaitable[Outcome]) -> Outcome:
    """The outcome of a round; a deployment that does not recover is a finding."""
    try:
        return await running
    except AssertionError as error:
        note = str(error)
    except ExceptionGroup as group:
        failed, rest = group.split(AssertionError)
        if rest is not None or failed is None:
            raise
        note = str(failed.exceptions)
    return Outcome(name=name, reached=False, note=note)


def _of_scenario(outcome: Outcome) -> Result:
    return Result(cell=None, outcome=outcome, command=f'make chaos ARGS="--scenario {outcome.name}"')


async def _say(report: Report, result: Result, out: Path) -> None:
    report.results.append(result)
    outcome = result.outcome
    said = "survived" if outcome.survived else "not reached" if not outcome.reached else "FAILED"
    print(
        f"{time.strftime('%H:%M:%S')} {said:11} {outcome.name}: {outcome.longer_s:.2f} s longer, "
        f"{outcome.attempts} attempts again, {outcome.resumed} resumed, in {outcome.took_s:.1f} s"
        + (f"; {outcome.note}" if outcome.note else ""),
        flush=True,
    )
    if not outcome.survived:
        place = await asyncio.to_thread(keep, result, out)
        for finding in outcome.findings[:6]:
            print(f"    {finding}")
        print(f"    again: {result.command}\n    see {place}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
