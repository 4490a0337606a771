"""Hundreds of histories: the invariants hold, whatever is lost, duplicated, late or killed.

`SIMULATION_SEEDS` sets their number; `make soak` runs thousands (`tests.simulation.soak`).
`tests.simulation.test_invariants` shows that each invariant can fail.
"""

import hashlib
import os
import subprocess
import sys

import pytest

from tests.simulation import soak
from tests.simulation.invariants import check, run
from tests.simulation.plan import Plan
from tests.simulation.simulator import Simulation

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "240"))
BATCHES = 8
COMMON = 0.01
"""What happens in so many histories, or more, has to happen in some of these."""


@pytest.fixture(scope="module")
def soaked() -> soak.Soaked:
    """All histories of these tests, one batch after the other."""
    return soak.Soaked()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_invariants_hold_in_every_history(batch: int, soaked: soak.Soaked) -> None:
    count = SEEDS // BATCHES
    found = soak.batch(batch * count, count, {})
    soaked.add(found)

    assert not found.broken, "\n".join(found.broken.values())


def test_nearly_everything_that_can_happen_happens_in_some_of_them(soaked: soak.Soaked) -> None:
    if soaked.histories < SEEDS // BATCHES * BATCHES:
        pytest.skip("only a part of the histories was run")

    assert set(soaked.never) <= soak.RARE


@pytest.mark.processes
def test_the_same_seed_is_the_same_history_in_every_process() -> None:
    program = "from tests.simulation.test_simulation import digest; print(digest(7))"
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }

    assert told == {digest(7)}


def digest(seed: int) -> str:
    """A short digest of a history's whole log."""
    return hashlib.blake2b(repr(Simulation(seed).run().log.records).encode(), digest_size=8).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 60, 4))
def test_from_any_prefix_of_the_log_a_right_end_is_reached(seed: int) -> None:
    whole = Simulation(seed).run()
    quiet = Plan.of(seed).changed({"rates": {}, "p_lost": 0.0, "p_ack_lost": 0.0, "p_other": 0.0})
    records = whole.log.records
    for cut in range(0, len(records), max(1, len(records) // 4)):
        again = Simulation(seed, quiet, records[:cut])
        check(run(again))
