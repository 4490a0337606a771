"""The tools for histories: step through one, shrink one, run many, and count what happened."""

import json
from typing import Any

import pytest

from tests.simulation import __main__ as command
from tests.simulation import shrink as shrinking
from tests.simulation import soak
from tests.simulation.invariants import BrokenInvariantError, check, run
from tests.simulation.plan import Plan
from tests.simulation.shrink import outcome, shrink
from tests.simulation.simulator import Simulation
from tests.simulation.stepping import HistoryStepper
from tests.simulation.test_invariants import nobody_looks_after_workers, tensors_for_ever

QUIET: dict[str, Any] = {
    "requests": 2,
    "services": 0,
    "poisons": 0,
    "limited": 0,
    "waiting": None,
    "rates": {},
}
ONE_DEATH = QUIET | {"layout": "decoder", "rates": {"worker dies": 0.02}}


def history(seed: int = 3, **changes: object) -> Simulation:
    return Simulation(seed, Plan.of(seed).changed(ONE_DEATH | changes)).run()


def said(sim: Simulation, *commands: str) -> list[str]:
    told: list[str] = []
    HistoryStepper(sim).run(commands, told.append, as_json=False)
    return told


def test_a_history_is_gone_through_in_both_directions() -> None:
    sim = history()
    told = said(sim, "next", "previous", "go 7")

    places = [line.split("]")[0] for line in told if line.startswith("[")]
    last = sim.log.last_seq
    assert places == [f"[1/{last}", f"[2/{last}", f"[1/{last}", f"[7/{last}"]


def test_the_state_of_a_request_is_shown_at_any_position() -> None:
    sim = history()

    assert '"phase": "waiting"' in "\n".join(said(sim, "go request.submitted", "state"))
    assert '"phase": "running"' in "\n".join(said(sim, "go request.admitted", "state"))


def test_accidents_stand_between_the_records_they_happened_between() -> None:
    sim = history()
    death = next(one for one in sim.story if "dies" in one.what)
    told = said(sim, f"go {death.seq + 1}")

    assert any(death.what in line for line in told)
    assert any(death.what in line for line in said(sim, "accidents all"))
    assert not any(death.what in line for line in said(sim, f"go {death.seq}")[1:])


def test_all_of_a_history_has_what_the_log_has_lost() -> None:
    sim = history(rates={"log loses its tail": 0.01})

    told = HistoryStepper(sim).all()

    assert sim.log.lost
    assert sum("(lost)" in line for line in told) == len(sim.log.lost)
    assert sum(line.startswith("[") for line in told) == sim.log.last_seq


@pytest.mark.processes
def test_a_history_that_breaks_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors_for_ever(monkeypatch)
    sim = Simulation(1, Plan.of(1).changed(QUIET | {"layout": "one", "requests": 1}))

    with pytest.raises(BrokenInvariantError) as broken:
        check(run(sim))

    assert broken.value.invariant == "no_tensor_is_orphaned"
    assert "--seed 1 " in str(broken.value)
    assert "--set 'layout=\"one\"'" in str(broken.value)


@pytest.mark.slow
def test_a_broken_history_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_looks_after_workers(monkeypatch)
    monkeypatch.setattr(shrinking, "SEEDS", 4)
    rates = {"worker dies": 0.02, "gateway dies": 0.01}
    plan = Plan.of(0).changed(ONE_DEATH | {"rates": rates, "conductors": 2, "rest_steps": 300})
    whole = outcome(Simulation(0, plan))
    assert whole is not None

    small = shrink(whole, lambda _: None)

    assert small.invariant == whole.invariant
    assert small.sim.plan.rates.keys() == {"worker dies"}
    assert small.sim.plan.requests == small.sim.plan.conductors == 1


@pytest.mark.processes
def test_many_histories_are_counted_and_the_broken_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = soak.batch(0, 3, ONE_DEATH)
    nobody_looks_after_workers(monkeypatch)
    broken = soak.batch(0, 3, ONE_DEATH | {"rest_steps": 2_000})

    assert (whole.histories, whole.broken) == (3, {})
    assert whole.happened["an end: finished"] >= 1
    assert whole.happened["invariant: every_accepted_request_ends_once"] == 6
    assert set(broken.broken) <= {0, 1, 2}
    assert broken.broken
    assert "accident: log is full" in whole.never
    assert any("never" in line and "log is full" in line for line in whole.table())


@pytest.mark.processes
def test_the_command_runs_one_history_and_goes_through_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [f"--set={name}={json.dumps(value)}" for name, value in ONE_DEATH.items()]
    monkeypatch.setattr("sys.argv", ["simulation", "--seed", "3", "--step", *changes])
    monkeypatch.setattr(command, "_commands", lambda: iter(["next", "quit"]))

    assert command.main() == 0

    out = capsys.readouterr().out
    assert "all invariants hold" in out
    assert "[2/" in out


@pytest.mark.processes
def test_the_command_says_what_breaks_by_its_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors_for_ever(monkeypatch)
    changes = [f"--set={name}={json.dumps(value)}" for name, value in (QUIET | {"layout": "one"}).items()]
    monkeypatch.setattr("sys.argv", ["simulation", "--seed", "1", *changes])

    assert command.main() == 1
    assert "no_tensor_is_orphaned" in capsys.readouterr().err


def test_a_plan_refuses_what_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="a plan has no 'weather'"):
        Plan().changed({"weather": 1})
    with pytest.raises(ValueError, match="there is no accident 'rain'; expected some of worker dies"):
        Plan().changed({"rates": {"rain": 1.0}})


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no processes: patches would not apply there."""
    monkeypatch.setattr(soak, "ProcessPoolExecutor", None)
