"""The runs of programs of one step: one run for all calls in a loop, ended with its walk, on each rank."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from models.programs import PROGRAM
from shared.checkpoints import State
from shared.errors import BugError, WorkerError
from shared.events import NodeReady
from shared.events.orders import WalkCall
from shared.walks import Firing
from workers.data_plane.arrays import to_array, to_tensor
from workers.data_plane.port import Array
from workers.execution.node_works import NodeWorks
from workers.execution.program_runs import CallResult, ProgramRuns
from workers.execution.run_checkpoints import RunCheckpoints
from workers.generation.engine_client import EngineClient
from workers.kv_engine.outputs import ProgramOutput, ProgramReport
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs
from workers.kv_engine.sequence_spec import FinishReason
from workers.orders.inbox import StepKey


class Rank:
    """The runs of one rank over an engine that notes its commands."""

    def __init__(self, node: str) -> None:
        self.commands: list[tuple[str, str]] = []
        self.client = EngineClient()
        engine: Any = self
        self.client.engine = engine
        self.stored: list[State] = []
        checkpoints = RunCheckpoints(0, ready().walks, {}, self)
        self.runs = ProgramRuns(
            StepKey("r", 1, 0), ready(), self.client, self.advise, checkpoints, NodeWorks()
        )
        self._node = node

    def submit(self, spec: ProgramSpec | RunInputs) -> None:
        self.commands.append(("more" if isinstance(spec, RunInputs) else "begin", spec.key))

    def cancel(self, key: str) -> None:
        self.commands.append(("cancel", key))
        self.client.on_cancelled(key, 0)

    def advise(self, node: str, progress: Mapping[str, Any], previews: Mapping[str, Array]) -> None:
        assert node == self._node

    def checkpoint(self, place: str, state: State) -> None:
        self.stored.append(state)

    def call(self, iteration: int, *, walk: int = 0) -> "asyncio.Task[CallResult]":
        firing = Firing(self._node, {}, (iteration,))
        return asyncio.create_task(self.runs.run(walk, firing, {}))

    def give(self, key: str, value: int, *, ends: bool = False) -> None:
        finish = FinishReason.STOP if ends else None
        self.client.on_outputs(
            [
                ProgramOutput(
                    key=key, values={"v": array(value)}, step=0, finish=finish, counts={"forwards": 1}
                )
            ]
        )


def array(value: int) -> Array:
    return to_array(torch.tensor([value]))


def ready() -> NodeReady:
    calls = [WalkCall(name="draw", args={PROGRAM: "branch"}), WalkCall(name="draw", args={PROGRAM: "branch"})]
    changed: Any = {"rank": 0, "model": "m", "walks": calls, "placement": {}, "origin": "", "seed": 3}
    return NodeReady(request_id="r", attempt=1, incarnation=1, index=0, reason="", history=b"", **changed)


async def turn(rank: Rank, iteration: int, key: str, *, walk: int = 0) -> CallResult:
    call = rank.call(iteration, walk=walk)
    await asyncio.sleep(0)
    rank.give(key, iteration)
    return await call


def test_two_ranks_have_a_run_each_for_all_iterations() -> None:
    async def run() -> None:
        main, text = Rank("LLM"), Rank("LLM_cfg_text")
        for iteration in range(3):
            for rank, key in ((main, "r.1.0.LLM.0.0"), (text, "r.1.0.LLM_cfg_text.0.0")):
                result = await turn(rank, iteration, key)
                assert result.facts == {"counts": {"forwards": 1}}
                assert to_tensor(result.outputs["v"], torch.device("cpu")).item() == iteration

        for rank in (main, text):
            [key] = rank.runs.keys
            await rank.runs.end_walk(0)
            assert rank.commands == [("begin", key), ("more", key), ("more", key), ("cancel", key)]
            assert not rank.runs.keys

    asyncio.run(run())


def test_an_output_for_a_cancelled_call_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        rank = Rank("LLM")
        call = rank.call(0)
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        rank.give("r.1.0.LLM.0.0", 0, ends=True)

    asyncio.run(run())
    assert not caplog.records


def test_the_loop_of_the_next_walk_begins_a_run_of_its_own() -> None:
    async def run() -> None:
        rank = Rank("LLM")
        await turn(rank, 0, "r.1.0.LLM.0.0")
        await rank.runs.end_walk(0)

        await turn(rank, 0, "r.1.0.LLM.1.0", walk=1)
        await rank.runs.end_walk(0)

        assert [what for what, _ in rank.commands] == ["begin", "cancel", "begin"]
        assert rank.runs.keys == {"r.1.0.LLM.1.0"}

    asyncio.run(run())


def test_a_run_that_ends_in_its_loop_is_not_cancelled() -> None:
    async def run() -> None:
        rank = Rank("LLM")
        await turn(rank, 0, "r.1.0.LLM.0.0")
        call = rank.call(1)
        await asyncio.sleep(0)
        rank.give("r.1.0.LLM.0.0", 1, ends=True)
        await call

        await rank.runs.end_walk(0)

        assert [what for what, _ in rank.commands] == ["begin", "more"]
        assert not rank.runs.keys

    asyncio.run(run())


def test_a_run_that_failed_between_two_calls_fails_the_next_one() -> None:
    async def run() -> None:
        rank = Rank("LLM")
        await turn(rank, 0, "r.1.0.LLM.0.0")
        rank.client.on_error(["r.1.0.LLM.0.0"], WorkerError("the device is gone"))

        with pytest.raises(WorkerError, match="the device is gone"):
            await rank.call(1)

    asyncio.run(run())


def test_a_call_outside_of_loops_cannot_wait_for_another_one() -> None:
    async def run() -> None:
        rank = Rank("LLM")
        call = asyncio.create_task(rank.runs.run(0, Firing("LLM", {}, ()), {}))
        await asyncio.sleep(0)
        rank.give("r.1.0.LLM.0", 1)

        with pytest.raises(BugError, match="is in no loop"):
            await call
        assert rank.runs.keys, "the step drops what is left"

    asyncio.run(run())


def test_states_are_stored_only_of_the_first_call_where_a_later_attempt_begins() -> None:
    def report(value: int) -> ProgramReport:
        return ProgramReport(key="r.1.0.LLM.0.0", progress={}, previews={}, state={"v": array(value)}, step=0)

    async def run() -> None:
        rank = Rank("LLM")
        for iteration in range(3):
            call = rank.call(iteration)
            await asyncio.sleep(0)
            rank.client.on_outputs([report(iteration)])
            rank.give("r.1.0.LLM.0.0", iteration)
            await call

        [state] = rank.stored
        assert state["v"].data == array(0).data.tobytes()

    asyncio.run(run())
