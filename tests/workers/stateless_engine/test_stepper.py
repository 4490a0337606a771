"""Runs of stepped nodes in the engine's thread, with tensors."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from models.base import Item, StatelessResult
from models.programs import Going
from models.stepped import Call
from shared.errors import ClientError, DalSegnoError, WorkerError
from workers.data_plane.arrays import to_array, to_tensor
from workers.data_plane.port import Array
from workers.machine.gpu_context import DeviceLostError
from workers.stateless_engine.firing import FiringReport, FiringResult
from workers.stateless_engine.nodes import StatelessNodes
from workers.stateless_engine.thread import StatelessThread

CPU = torch.device("cpu")


class Halving:
    """A run: so many steps, each of which halves a vector and adds noise of the request's seed."""

    def __init__(self, item: Item, state: Mapping[str, torch.Tensor], closed: list[int]) -> None:
        self._value = item.inputs["x"].clone()
        self._steps: int = item.args["steps"]
        self._fails: int = item.args.get("fails", -1)
        self._noise = torch.Generator().manual_seed(item.seed)
        self._slams: bool = item.args.get("slams", False)
        self._done = 0
        self._seed = item.seed
        self._closed = closed
        if state:
            if state["value"].shape != self._value.shape:
                raise ValueError("another shape")
            self._value, self._done = state["value"].clone(), int(state["done"])
            torch.randn(self._done, len(self._value), generator=self._noise)

    def begin(self) -> Call | StatelessResult:
        return self._next(None)

    def take(self, result: Any) -> Call | StatelessResult:
        assert torch.is_inference_mode_enabled()
        self._value.copy_(result).add_(torch.randn(len(result), generator=self._noise))
        self._done += 1
        if self._done == self._fails:
            raise ClientError("the run has enough")
        state = {"value": self._value, "done": torch.tensor(self._done)} if self._done % 2 == 0 else {}
        return self._next(Going(progress={"step": self._done, "steps": self._steps}, state=state))

    def _next(self, report: Going | None) -> Call | StatelessResult:
        if self._done == self._steps:
            return StatelessResult(outputs={"y": self._value}, facts={"steps": self._done})
        return Call(group=len(self._value), inputs=self._value, report=report)

    def close(self) -> None:
        self._closed.append(self._seed)
        if self._slams:
            raise RuntimeError("the door is loose")


class HalvingNode:
    """The node; `gate` holds each forward back, `bad` values fail in a forward."""

    max_batch = 4
    max_runs = 3

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.closed: list[int] = []
        self.permits: threading.Semaphore | None = None
        self.computing = threading.Semaphore(0)

    def start(self, item: Item, state: Mapping[str, torch.Tensor]) -> Halving:
        return Halving(item, state, self.closed)

    def compute(self, calls: Sequence[Call]) -> list[Any]:
        self.computing.release()
        if self.permits is not None:
            assert self.permits.acquire(timeout=20)
        rows = torch.stack([call.inputs for call in calls])
        if (rows > 1e6).any():
            raise RuntimeError("too large")
        self.batches.append(len(calls))
        return list(rows / 2)


class Doubling:
    """A node of one forward."""

    max_batch = 8

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        return [StatelessResult(outputs={"y": item.inputs["x"] * 2}) for item in items]


@asynccontextmanager
async def running(node: HalvingNode) -> AsyncIterator[StatelessThread]:
    thread = StatelessThread(lambda: StatelessNodes({"halve": node, "double": Doubling()}, CPU))
    await thread.start()
    try:
        async with asyncio.timeout(60):
            yield thread
    finally:
        if node.permits is not None:
            node.permits.release(1000)
        await thread.close()


async def fire(
    thread: StatelessThread,
    seed: int = 0,
    *,
    x: Sequence[float] = (8.0, 4.0),
    reports: list[FiringReport] | None = None,
    state: Mapping[str, Array] | None = None,
    **args: Any,
) -> FiringResult:
    found = reports if reports is not None else []
    inputs = {"x": to_array(torch.tensor(x))}
    return await thread.fire(
        "halve", inputs, {"steps": 6} | args, seed=seed, state=state, report=found.append
    )


async def outcomes(*calls: Coroutine[Any, Any, FiringResult]) -> list[FiringResult | DalSegnoError]:
    """The results of calls at once, or their errors."""

    async def outcome(call: Coroutine[Any, Any, FiringResult]) -> FiringResult | DalSegnoError:
        try:
            return await call
        except DalSegnoError as error:
            return error

    async with asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(outcome(call)) for call in calls]
    return [task.result() for task in made]


async def overlapping(
    node: HalvingNode, *calls: Coroutine[Any, Any, FiringResult]
) -> list[FiringResult | DalSegnoError]:
    """The results of calls of which none ends before all have arrived."""
    node.permits = threading.Semaphore(0)
    ended = asyncio.create_task(outcomes(*calls))
    await asyncio.to_thread(node.computing.acquire)
    node.permits.release(1000)
    return await ended


def halved(seed: int, *, x: Sequence[float] = (8.0, 4.0), steps: int = 6) -> torch.Tensor:
    """The result, restated."""
    value, noise = torch.tensor(x), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        value = value / 2 + torch.randn(len(value), generator=noise)
    return value


def value_of(result: FiringResult) -> torch.Tensor:
    output = result.outputs["y"]
    assert isinstance(output, Array)
    return to_tensor(output, CPU)


async def test_runs_of_several_requests_are_the_single_ones() -> None:
    node = HalvingNode()
    lengths = {1: 2, 2: 2, 3: 3, 4: 2, 5: 3, 6: 2}
    async with running(node) as thread:
        found = await overlapping(
            node,
            *(fire(thread, seed, x=[1.0 * seed] * many, steps=4 + seed) for seed, many in lengths.items()),
        )
    for (seed, length), result in zip(lengths.items(), found, strict=True):
        assert isinstance(result, FiringResult)
        assert torch.equal(value_of(result), halved(seed, x=[1.0 * seed] * length, steps=4 + seed))
        assert result.facts == {"steps": 4 + seed}
    assert max(node.batches) > 1
    assert sorted(node.closed) == list(lengths)
    assert (thread.stats().firings, thread.stats().failed) == (6, 0)
    [(name, meters)] = thread.stepped_nodes().items()
    assert (name, meters.runs) == ("halve", 0)
    assert (meters.calls.sum, meters.calls.count) == (sum(4 + seed for seed in lengths), len(node.batches))
    assert meters.step_s.count == len(node.batches)
    assert meters.gain >= 1


async def test_progress_is_reported_while_a_run_goes_on() -> None:
    reports: list[FiringReport] = []
    async with running(HalvingNode()) as thread:
        await fire(thread, reports=reports)
    assert [report.progress for report in reports] == [{"step": step, "steps": 6} for step in range(1, 6)]
    assert [bool(report.state) for report in reports] == [False, True, False, True, False]


async def test_an_interrupted_run_goes_on_after_its_checkpoint() -> None:
    reports: list[FiringReport] = []
    resumed: list[FiringReport] = []
    node = HalvingNode()
    async with running(node) as thread:
        whole = await fire(thread, 7, reports=reports)
        node.batches.clear()
        found = await fire(thread, 7, reports=resumed, state=reports[3].state)
    assert torch.equal(value_of(found), value_of(whole))
    assert [report.progress["step"] for report in resumed] == [5]
    assert len(node.batches) == 2


async def test_a_checkpoint_that_cannot_be_used_costs_only_steps(caplog: pytest.LogCaptureFixture) -> None:
    state = {"value": to_array(torch.zeros(5)), "done": to_array(torch.tensor(2))}
    async with running(HalvingNode()) as thread:
        found = await fire(thread, 7, state=state)
    assert torch.equal(value_of(found), halved(7))
    assert "its checkpoint cannot be used: another shape" in caplog.text


async def test_a_cancelled_run_ends_before_its_next_forward() -> None:
    node = HalvingNode()
    node.permits = threading.Semaphore(0)
    async with running(node) as thread:
        first = asyncio.create_task(fire(thread, 1, steps=50))
        await asyncio.to_thread(node.computing.acquire)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        node.permits.release(1000)
        await fire(thread, 2)
    assert node.closed == [1, 2]
    assert len(node.batches) == 1 + 6


async def test_a_run_fails_alone() -> None:
    node = HalvingNode()
    async with running(node) as thread:
        first, second, third, fourth = await outcomes(
            fire(thread, 1), fire(thread, 2, fails=3), fire(thread, 3, x=(1e9, 1.0)), fire(thread, 4)
        )
    assert isinstance(first, FiringResult)
    assert isinstance(fourth, FiringResult)
    assert torch.equal(value_of(first), halved(1))
    assert torch.equal(value_of(fourth), halved(4))
    assert isinstance(second, ClientError)
    assert isinstance(third, WorkerError)
    assert third.code == "node_failed"
    assert "too large" in str(third)
    assert sorted(node.closed) == [1, 2, 3, 4]
    assert thread.stats().failed == 2


async def test_a_forward_that_loses_the_gpu_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_context(device: torch.device) -> None:
        raise DeviceLostError(f"{device} is lost")

    monkeypatch.setattr("workers.stateless_engine.stepper.check_context", check_context)
    node = HalvingNode()
    thread = StatelessThread(lambda: StatelessNodes({"halve": node}, CPU))
    await thread.start()
    [failed] = await outcomes(fire(thread, 3, x=(1e9, 1.0)))
    with pytest.raises(DeviceLostError, match="cpu is lost"):
        await thread.wait()
    assert isinstance(failed, WorkerError)


async def test_a_failed_forward_holds_no_memory_while_its_calls_are_computed_alone() -> None:
    class Hidden:
        """The memory of a forward."""

    class Crowded(HalvingNode):
        failed: weakref.ref[Hidden] | None = None

        def compute(self, calls: Sequence[Call]) -> list[Any]:
            if len(calls) > 1:
                hidden = Hidden()
                self.failed = weakref.ref(hidden)
                raise RuntimeError(f"no memory for two of {hidden}")
            assert self.failed is None or self.failed() is None
            return super().compute(calls)

    node = Crowded()
    async with running(node) as thread:
        found = await overlapping(node, *(fire(thread, seed, steps=9) for seed in (1, 2)))
    assert node.failed is not None
    for seed, result in zip((1, 2), found, strict=True):
        assert isinstance(result, FiringResult)
        assert torch.equal(value_of(result), halved(seed, steps=9))


async def test_a_run_that_fails_while_it_is_closed_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with running(HalvingNode()) as thread:
        first, second = await outcomes(fire(thread, 1, slams=True), fire(thread, 2))
    assert isinstance(first, FiringResult)
    assert isinstance(second, FiringResult)
    assert torch.equal(value_of(second), halved(2))
    assert "node halve: a run failed while it was closed" in caplog.text


async def test_other_nodes_are_served_between_two_steps() -> None:
    node = HalvingNode()
    node.permits = threading.Semaphore(0)
    async with running(node) as thread:
        long = asyncio.create_task(fire(thread, 1, steps=50))
        await asyncio.to_thread(node.computing.acquire)
        other = asyncio.create_task(thread.fire("double", {"x": to_array(torch.ones(1))}, {}, seed=0))
        await asyncio.sleep(0)
        node.permits.release(2)
        await other
        assert not long.done()
        node.permits.release(1000)
        await long


async def test_closing_ends_all_runs() -> None:
    node = HalvingNode()
    node.permits = threading.Semaphore(0)
    async with running(node) as thread, asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(outcomes(*(fire(thread, seed, steps=50) for seed in range(5))))
        await asyncio.to_thread(node.computing.acquire)
        node.permits.release()
        await asyncio.to_thread(node.computing.acquire)
        closing = tasks.create_task(thread.close())
        await asyncio.sleep(0)
        node.permits.release(1000)
        await closing
        results = await ended
    assert all(isinstance(result, DalSegnoError) for result in results)
    assert sorted(node.closed) == [0, 1], "those that had begun"
