"""A program in a loop is one run: it keeps its contexts between the calls, and reports while it goes on."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
import torch

from models.programs import Going, Pass, Turn
from shared.errors import BugError, ClientError
from tests.workers.cpu_kernels import models
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.programs.test_programs import texts
from workers.data_plane.arrays import to_array, to_tensor
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import Output, ProgramOutput, ProgramReport, StepFailedError
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs

SIZES: Final[dict[str, Any]] = {
    "num_blocks": 16, "block_size": 4, "max_step_tokens": 64, "max_sequences": 16,
}  # fmt: skip
PROMPT: Final = [5, 9, 2, 44, 17]


class Turns:
    """Commits a prompt once; each call computes the states of its token behind it.

    A negative token needs no pass, token 0 ends the run.
    """

    max_contexts = 1
    max_tokens = 8

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self.counts = {"forwards": 0}
        self._id = int(inputs["id"])
        self._begun = False

    def passes(self) -> list[Pass]:
        self.counts["forwards"] += 1
        if not self._begun:
            return [Pass(context="a", ids=PROMPT, commits=True)]
        return [Pass(context="a", ids=[self._id])]

    def take(self, results: Sequence[torch.Tensor]) -> Going | Turn | Mapping[str, torch.Tensor]:
        if not self._begun:
            self._begun = True
            return Going(progress={"step": 0}, previews={"image": torch.zeros(2)}, state={"x": torch.ones(3)})
        outputs = {"states": results[0].float()}
        return outputs if self._id == 0 else Turn(outputs=outputs)

    def more(self, inputs: Mapping[str, torch.Tensor]) -> Turn | None:
        self._id = int(inputs["id"])
        return Turn(outputs={"states": torch.zeros(1)}) if self._id < 0 else None


def engine() -> KVEngine:
    node: Any = models.node()
    node.programs = {"turns": lambda _, inputs, args, *, seed: Turns(inputs)}
    return make_engine(node, **SIZES)


def given(token: int) -> dict[str, Any]:
    return {"id": to_array(torch.tensor([token]))}


def begin(by: KVEngine, key: str, token: int) -> None:
    by.add_program(
        ProgramSpec(key=key, node=by.node.name, program="turns", inputs=given(token), args={}, seed=0)
    )


def steps(by: KVEngine) -> list[Output]:
    found: list[Output] = []
    while by.has_work:
        found += by.step()
    return found


def states(output: Output) -> torch.Tensor:
    assert isinstance(output, ProgramOutput)
    return to_tensor(output.values["states"], torch.device("cpu"))


@torch.inference_mode()
def expected(token: int) -> torch.Tensor:
    stock: Any = models.node()
    found: torch.Tensor = stock.model.model(torch.tensor([[*PROMPT, token]])).last_hidden_state[0, -1:]
    return found


def test_each_call_continues_the_run_of_the_one_before() -> None:
    by = engine()
    begin(by, "run", 7)
    report, first = steps(by)
    assert isinstance(report, ProgramReport)
    assert (report.progress, set(report.previews), set(report.state)) == ({"step": 0}, {"image"}, {"x"})
    torch.testing.assert_close(states(first), expected(7), atol=1e-3, rtol=1e-3)
    assert not by.has_work, "a parked run computes nothing"
    assert by.stats().kv_used == 8

    for text in texts(2):
        by.add(text)
    assert by.continue_program(RunInputs(key="run", node=by.node.name, inputs=given(8))) is None
    [second] = [one for one in steps(by) if one.key == "run"]
    skipped = by.continue_program(RunInputs(key="run", node=by.node.name, inputs=given(-1)))
    assert by.continue_program(RunInputs(key="run", node=by.node.name, inputs=given(0))) is None
    [last] = steps(by)

    torch.testing.assert_close(states(second), expected(8), atol=1e-3, rtol=1e-3)
    assert skipped is not None
    assert not states(skipped).any()
    assert isinstance(last, ProgramOutput)
    assert (last.finish is not None, last.counts) == (True, {"forwards": 4})
    assert by.stats().kv_used == 0


def test_a_parked_run_keeps_its_room_until_it_is_cancelled() -> None:
    by = engine()
    for number in range(8):
        begin(by, f"run {number}", 7)
    steps(by)
    begin(by, "late", 0)
    assert not steps(by), "there is no room"

    by.cancel("run 3")

    assert [one.key for one in steps(by) if isinstance(one, ProgramOutput)] == ["late"]


def test_inputs_for_a_run_that_does_not_wait_are_a_mistake() -> None:
    by = engine()

    with pytest.raises(BugError, match="no run 'other' waits"):
        by.continue_program(RunInputs(key="other", node=by.node.name, inputs=given(1)))


def test_a_run_that_fails_in_a_later_call_gives_its_room_back() -> None:
    by = engine()
    begin(by, "run", 7)
    steps(by)
    assert by.stats().kv_used == 8

    with pytest.raises(BugError, match="token ids from 1000000"):
        by.continue_program(RunInputs(key="run", node=by.node.name, inputs=given(10**6)))

    assert by.stats().kv_used == 0
    with pytest.raises(BugError, match="no run 'run' waits"):
        by.continue_program(RunInputs(key="run", node=by.node.name, inputs=given(8)))


class Seldom(Turns):
    """Has no pass, not even the first one, in the calls of negative tokens."""

    is_endless = False

    def passes(self) -> list[Pass]:
        return [] if self._id < 0 else super().passes()

    def take(self, results: Sequence[torch.Tensor]) -> Going | Turn | Mapping[str, torch.Tensor]:
        if results:
            return super().take(results)
        return Going() if self.is_endless else Turn(outputs={"states": torch.zeros(0)})

    def more(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self._id = int(inputs["id"])


def seldom(**changes: Any) -> KVEngine:
    by = engine()
    kind: Any = type("Changed", (Seldom,), changes)
    node: Any = by.node
    node.programs["turns"] = lambda _, inputs, args, *, seed: kind(inputs)
    return by


def test_a_call_without_passes_has_its_turn_at_once() -> None:
    by = seldom()
    by.add(texts(1)[0])
    begin(by, "run", -1)
    found: dict[int, list[Output]] = {}

    for token in (-1, 8, -2, 0):
        if found:
            by.continue_program(RunInputs(key="run", node=by.node.name, inputs=given(token)))
        found[token] = [one for one in steps(by) if isinstance(one, ProgramOutput)]

    assert [len(states(found[token][0])) for token in found] == [0, 1, 0, 1]
    torch.testing.assert_close(states(found[8][0]), expected(8), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(states(found[0][0]), expected(0), atol=1e-3, rtol=1e-3)
    assert by.stats().kv_used == 0


def test_a_round_without_passes_cannot_go_on_for_ever() -> None:
    by = seldom(is_endless=True)
    begin(by, "run", -1)

    with pytest.raises(StepFailedError) as failed:
        by.step()

    assert "asked for no pass" in str(failed.value.others["run"])
    assert (by.has_work, by.stats().kv_used) == (False, 0)


def test_a_run_with_a_too_long_pass_is_refused_before_anything_is_computed() -> None:
    by = seldom(longest_pass=20_000)

    with pytest.raises(ClientError, match="20000 tokens") as refused:
        begin(by, "run", 7)

    assert (refused.value.code, by.has_work, by.forwards) == ("pass_too_long", False, 0)
