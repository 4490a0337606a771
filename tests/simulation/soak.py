"""Thousands of histories on all cores: the first failure, and the coverage of all of them."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from tests.simulation import coverage
from tests.simulation.invariants import BrokenInvariantError, check, run
from tests.simulation.plan import Plan
from tests.simulation.simulator import Simulation

BATCH: Final = 25
MANY: Final = 3000
"""In so many histories everything is to happen that can."""
RARE: Final = frozenset(
    {
        "a client is told that its request is gone",
        "a client is told: output_changed",
        "a limit is said to be over too early",
        "a medium comes out otherwise than before",
        "a tensor is gone for no reason",
        "accident: deadline is early",
        "an answer is let go of, for its client is slow",
        "an end: replay_divergence",
        "an end: tensor_gone",
        "an innocent is unlucky",
    }
)
"""What is in so few histories that some hundred need not have it."""


@dataclass(slots=True)
class Soaked:
    """The result of many histories."""

    histories: int = 0
    records: int = 0
    broken: dict[int, str] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)
    histories_with: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Soaked") -> None:
        self.histories += other.histories
        self.records += other.records
        self.broken |= other.broken
        self.happened += other.happened
        self.histories_with += other.histories_with

    @property
    def never(self) -> list[str]:
        """The things that never happened."""
        return [row for row in coverage.rows() if not self.happened[row]]

    def table(self) -> Iterator[str]:
        """The number of occurrences of each thing, and of histories with it."""
        width = max(map(len, coverage.rows()))
        for row in coverage.rows():
            mark = "" if self.happened[row] else "   <-- never"
            yield f"{row:<{width}}  {self.happened[row]:>9}  in {self.histories_with[row]:>6} histories{mark}"


def one(sim: Simulation) -> Counter[str]:
    """Run and check one history; return its counts.

    Raises:
        BrokenInvariantError: an invariant does not hold.
    """
    past = run(sim)
    return coverage.of(past, check(past))


def batch(first: int, count: int, changes: dict[str, object]) -> Soaked:
    """Run a number of histories from a seed on."""
    soaked = Soaked()
    for seed in range(first, first + count):
        sim = Simulation(seed, Plan.of(seed).changed(changes))
        soaked.histories += 1
        try:
            found = one(sim)
        except BrokenInvariantError as error:
            soaked.broken[seed] = str(error)
            continue
        soaked.records += sim.log.last_seq
        soaked.happened += found
        soaked.histories_with.update({row: 1 for row, count in found.items() if count})
    return soaked


def soak(
    first: int,
    count: int,
    changes: dict[str, object],
    *,
    jobs: int,
    say: Callable[[str], None],
    goes_on: bool = False,
) -> Soaked:
    """Run histories on `jobs` cores, up to the first failure."""
    began_s, told_s = time.monotonic(), time.monotonic()
    soaked = Soaked()
    starts = iter(range(first, first + count, BATCH))
    with ProcessPoolExecutor(jobs) as pool:

        def begin() -> Iterator[Future[Soaked]]:
            for start in starts:
                yield pool.submit(batch, start, min(BATCH, first + count - start), changes)

        batches = begin()
        running = set(islice(batches, 2 * jobs))
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                part = future.result()
                soaked.add(part)
                for broken in part.broken.values():
                    say(broken)
            if soaked.broken and not goes_on:
                pool.shutdown(cancel_futures=True)
                break
            running |= set(islice(batches, len(done)))
            if time.monotonic() - told_s > 10:
                told_s = time.monotonic()
                say(f"{soaked.histories} of {count}: {soaked.histories / (told_s - began_s):.0f} a second")
    spent_s = time.monotonic() - began_s
    say(
        f"{soaked.histories} histories ({soaked.records} records) from seed {first} in {spent_s:.0f} s, "
        f"{soaked.histories / spent_s:.0f} a second on {jobs} cores: {len(soaked.broken)} broken"
    )
    return soaked
