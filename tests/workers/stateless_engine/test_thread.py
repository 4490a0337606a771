"""The stateless engine's thread with scripted nodes; the test starts each batch."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from threading import Event, Semaphore, current_thread
from typing import Any

import numpy as np
import pytest

from models.base import ChunkOf
from models.encoder_cache import CacheCounters
from shared.errors import BugError, CapacityError, ClientError, DalSegnoError, WorkerError
from shared.meters import EncoderMeters
from workers.data_plane.port import Array
from workers.stateless_engine import thread as thread_module
from workers.stateless_engine.firing import FiringResult, StatelessFiring
from workers.stateless_engine.scheduler import BatchKey
from workers.stateless_engine.stepped_runs import Stepper
from workers.stateless_engine.thread import NodeRunner, StatelessThread


class ScriptedNodes:
    """Nodes that return the arguments of each firing; the test starts each batch."""

    max_batch: Mapping[str, int] = {"vocoder": 4, "encoder": 1}
    max_cost: Mapping[str, float] = {}
    steppers: Mapping[str, Stepper] = {}

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[Any]]] = []
        self.seen: list[StatelessFiring] = []
        self.threads: set[str] = set()
        self.begun = Semaphore(0)
        self.permits = Semaphore(0)
        self.broken: Exception | None = None

    def batch_key(self, firing: StatelessFiring) -> BatchKey:
        if firing.args.get("has_no_key"):
            raise WorkerError("no key")
        return BatchKey(firing.args.get("group"))

    def encoder_caches(self) -> list[CacheCounters]:
        return [CacheCounters(hits=1, misses=2), CacheCounters(hits=3, nbytes=8)]

    def run(self, node: str, firings: Sequence[StatelessFiring]) -> list[FiringResult | DalSegnoError]:
        self.threads.add(current_thread().name)
        self.batches.append((node, [firing.args["name"] for firing in firings]))
        self.seen += firings
        self.begun.release()
        self.permits.acquire()
        if self.broken is not None:
            raise self.broken
        return [
            WorkerError("no good")
            if firing.args.get("fails")
            else FiringResult(outputs={}, facts=firing.args)
            for firing in firings
        ]


@asynccontextmanager
async def running(nodes: ScriptedNodes) -> AsyncIterator[StatelessThread]:
    thread = StatelessThread(lambda: nodes)
    await thread.start()
    try:
        async with asyncio.timeout(20):
            yield thread
    finally:
        nodes.permits.release(1000)
        await thread.close()


async def begun(nodes: ScriptedNodes) -> None:
    await asyncio.to_thread(nodes.begun.acquire)


async def fire(thread: StatelessThread, name: str, node: str = "vocoder", **args: Any) -> Any:
    fired = await thread.fire(node, {}, {"name": name, **args}, seed=0)
    return fired.facts["name"]


async def turn() -> None:
    """Let the created tasks run until their first wait."""
    await asyncio.sleep(0)


async def test_waiting_firings_are_run_together_and_nodes_take_turns() -> None:
    nodes = ScriptedNodes()
    async with running(nodes) as thread, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(fire(thread, "first"))
        await begun(nodes)
        others = [tasks.create_task(fire(thread, str(i))) for i in range(6)]
        encoded = tasks.create_task(fire(thread, "e", "encoder"))
        await turn()
        nodes.permits.release(1000)

    assert nodes.batches == [
        ("vocoder", ["first"]),
        ("encoder", ["e"]),
        ("vocoder", ["0", "1", "2", "3"]),
        ("vocoder", ["4", "5"]),
    ]
    assert [task.result() for task in (first, *others, encoded)] == ["first", *"012345", "e"]
    assert nodes.threads == {"stateless"}
    stats = thread.stats()
    assert (stats.batches, stats.firings, stats.failed, stats.waiting) == (4, 8, 0, 0)
    assert stats.busy_s > 0


async def test_a_firing_is_passed_on_unchanged() -> None:
    nodes = ScriptedNodes()
    nodes.permits.release()
    array = Array(dtype="int32", shape=(1,), data=np.zeros(4, np.uint8))
    chunk = ChunkOf(number=3, fresh=7, last=True)
    async with running(nodes) as thread:
        await thread.fire("vocoder", {"codes": array}, {"name": "x"}, seed=5, path=(2, 1), chunk=chunk)

    assert nodes.seen == [
        StatelessFiring(
            node="vocoder", inputs={"codes": array}, args={"name": "x"}, seed=5, path=(2, 1), chunk=chunk
        )
    ]


async def test_a_failing_firing_fails_alone() -> None:
    nodes = ScriptedNodes()
    async with running(nodes) as thread, asyncio.TaskGroup() as tasks:
        tasks.create_task(fire(thread, "first"))
        await begun(nodes)
        good = tasks.create_task(fire(thread, "good"))
        bad = asyncio.ensure_future(fire(thread, "bad", fails=True))
        await turn()
        nodes.permits.release(1000)
        with pytest.raises(WorkerError, match="no good"):
            await bad

    assert good.result() == "good"
    assert nodes.batches[1] == ("vocoder", ["good", "bad"])
    assert thread.stats().failed == 1


async def test_a_firing_cancelled_while_it_waits_is_not_run() -> None:
    nodes = ScriptedNodes()
    async with running(nodes) as thread, asyncio.TaskGroup() as tasks:
        tasks.create_task(fire(thread, "first"))
        await begun(nodes)
        late = tasks.create_task(fire(thread, "late"))
        tasks.create_task(fire(thread, "other", "encoder"))
        await turn()
        late.cancel()
        await turn()
        nodes.permits.release(1000)

    assert [names for _, names in nodes.batches] == [["first"], ["other"]]


async def test_a_firing_cancelled_while_it_runs_affects_no_other() -> None:
    nodes = ScriptedNodes()
    async with running(nodes) as thread, asyncio.TaskGroup() as tasks:
        running_one = tasks.create_task(fire(thread, "running"))
        await begun(nodes)
        next_one = tasks.create_task(fire(thread, "next"))
        await turn()
        running_one.cancel()
        await turn()
        nodes.permits.release(1000)

    assert running_one.cancelled()
    assert next_one.result() == "next"


async def test_a_firing_above_the_capacity_waits_until_another_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_module, "CAPACITY", 2)
    nodes = ScriptedNodes()
    async with running(nodes) as thread, asyncio.TaskGroup() as tasks:
        tasks.create_task(fire(thread, "a"))
        await begun(nodes)
        tasks.create_task(fire(thread, "b"))
        third = tasks.create_task(fire(thread, "c"))
        await turn()
        nodes.permits.release()
        await begun(nodes)  # b runs, possibly with c, which was sent as soon as a ended
        nodes.permits.release(1000)

    assert third.result() == "c"
    assert nodes.batches[0][1] == ["a"]
    assert [name for _, names in nodes.batches for name in names] == ["a", "b", "c"]


async def test_an_unknown_node_is_a_bug_of_the_caller() -> None:
    async with running(ScriptedNodes()) as thread:
        with pytest.raises(BugError, match=r"'llm' is not a stateless node of this rank; it has \['encoder'"):
            await fire(thread, "x", "llm")


async def test_a_thread_that_dies_reports_its_error_and_fails_all_firings() -> None:
    nodes = ScriptedNodes()
    nodes.broken = ZeroDivisionError("a bug")
    nodes.permits.release()
    async with running(nodes) as thread:
        with pytest.raises(WorkerError, match="the stateless engine has died"):
            await fire(thread, "a")
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await thread.wait()
        with pytest.raises(CapacityError, match="is closed"):
            await fire(thread, "b")


async def test_closing_ends_the_thread_after_its_batch_and_fails_waiting_firings() -> None:
    nodes = ScriptedNodes()
    async with running(nodes) as thread, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(fire(thread, "first"))
        await begun(nodes)
        waits = asyncio.ensure_future(fire(thread, "waits"))
        await turn()
        closing = tasks.create_task(thread.close())
        await turn()
        nodes.permits.release(1000)
        await closing

        await thread.wait()
        with pytest.raises(WorkerError, match="is closed"):
            await waits
    assert first.result() == "first"
    assert nodes.batches == [("vocoder", ["first"])]


async def test_nodes_that_cannot_be_made_fail_the_start() -> None:
    def make() -> NodeRunner:
        raise ClientError("no such model")

    thread = StatelessThread(make)

    with pytest.raises(ClientError, match="no such model"):
        await thread.start()
    await thread.close()


async def test_closing_does_not_wait_for_nodes_that_load() -> None:
    may_end = Event()

    def make() -> NodeRunner:
        may_end.wait()
        return ScriptedNodes()

    thread = StatelessThread(make)
    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(thread.start())
        await turn()
        await thread.close()
        assert not starting.done()
        may_end.set()
    await thread.wait()


@pytest.mark.processes
async def test_firings_of_other_groups_run_apart_and_one_without_a_key_fails_alone() -> None:
    nodes = ScriptedNodes()
    async with running(nodes) as thread, asyncio.TaskGroup() as tasks:
        tasks.create_task(fire(thread, "first"))
        await begun(nodes)
        for name, group in (("a", "x"), ("b", "y"), ("c", "x")):
            tasks.create_task(fire(thread, name, group=group))
        await turn()
        nodes.permits.release()
        with pytest.raises(WorkerError, match="no key"):
            await fire(thread, "unkeyed", has_no_key=True)
        nodes.permits.release(2)

    assert nodes.batches == [("vocoder", ["first"]), ("vocoder", ["a", "c"]), ("vocoder", ["b"])]


async def test_the_counters_of_all_encoder_caches_are_summed() -> None:
    async with running(ScriptedNodes()) as thread:
        assert thread.encoder_caches() == EncoderMeters(hits=4, misses=2, nbytes=8)


def test_the_thread_is_imported_without_torch() -> None:
    script = "import sys, workers.stateless_engine.thread; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
