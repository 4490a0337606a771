"""The engine thread with a scripted engine; the test starts each step."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Event, Semaphore, current_thread
from typing import Any

import pytest

from models.decoder_lm.nodes import DecoderLM
from shared.errors import CapacityError, ClientError, DalSegnoError, TensorGone, WorkerError
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, run, tokens
from tests.workers.kv_engine.recorder import Again
from workers.data_plane.port import Array
from workers.kv_engine import thread as thread_module
from workers.kv_engine.counters import EngineStats
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.gpu.cuda_graphs import GraphCapture
from workers.kv_engine.outputs import Output, StepFailedError, TokenOutput
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.thread import Engine, EngineThread
from workers.threads.mailbox import Mailbox


class ScriptedEngine:
    """An engine that gives every sequence one token per step; the test starts each step."""

    def __init__(self) -> None:
        self.live: list[str] = []
        self.held: set[str] = set()
        self.fed: list[tuple[str, bool]] = []
        self.forwards = 0
        self.step_keys: tuple[str, ...] = ()
        self.threads: set[str] = set()
        self.begun = Semaphore(0)
        self.permits = Semaphore(0)
        self.broken: Exception | None = None
        self.to_prepare = 0
        self.prepared = 0
        self.preparing: Semaphore | None = None

    @property
    def has_work(self) -> bool:
        return any(key not in self.held for key in self.live)

    def add(self, spec: SequenceSpec) -> None:
        self.threads.add(current_thread().name)
        if spec.max_tokens > 100:
            raise ClientError("too long", code="context_length_exceeded")
        self.live.append(spec.key)

    def add_program(self, spec: ProgramSpec) -> None:
        raise AssertionError(spec)

    def continue_program(self, given: RunInputs) -> Output | None:
        raise AssertionError(given)

    def cancel(self, key: str) -> bool:
        if key not in self.live:
            return False
        self.live.remove(key)
        return True

    def hold(self, key: str) -> bool:
        if key in self.live:
            self.held.add(key)
        return key in self.live

    def resume(self, key: str) -> bool:
        self.held.discard(key)
        return key in self.live

    def feed(self, key: str, items: Array | None, *, ended: bool) -> bool:
        assert items is None
        if key == "torn":
            raise TensorGone("the items are gone")
        self.fed.append((key, ended))
        return key in self.live

    def prepare(self) -> bool:
        assert not self.has_work
        if self.preparing is not None:
            self.preparing.acquire()
        self.prepared += 1
        return self.prepared < self.to_prepare

    def step(self) -> list[Output]:
        self.step_keys = tuple(key for key in self.live if key not in self.held)
        self.begun.release()
        self.permits.acquire()
        self.forwards += 1
        if self.broken is not None:
            error, self.broken = self.broken, None
            raise error
        return [
            TokenOutput(key=key, token_id=1, index=0, finish=None, step=self.forwards)
            for key in self.live
            if key in self.step_keys
        ]

    def stats(self) -> EngineStats:
        return EngineStats(forwards=self.forwards, running=len(self.live), waiting=0, kv_used=0, kv_total=0)


class Reports:
    """The reports of the thread on the loop, in order."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()

    def outputs(self, outputs: list[Output]) -> None:
        self.queue.put_nowait(("tokens", *(o.key for o in outputs)))

    def error(self, keys: tuple[str, ...], error: DalSegnoError) -> None:
        self.queue.put_nowait(("error", keys, type(error), error.failure_code))

    def cancelled(self, key: str, steps_after: int) -> None:
        self.queue.put_nowait(("cancelled", key, steps_after))

    async def next(self) -> tuple[object, ...]:
        async with asyncio.timeout(20):
            return await self.queue.get()


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[tuple[EngineThread, Reports]]:
    reports = Reports()
    thread = EngineThread(lambda: engine, reports.outputs, reports.error, on_cancelled=reports.cancelled)
    await thread.start()
    try:
        yield thread, reports
    finally:
        if isinstance(engine, ScriptedEngine):
            engine.permits.release(1000)
        await thread.close()


def spec(key: str, max_tokens: int = 5) -> SequenceSpec:
    return SequenceSpec(key=key, prompt_ids=[1], max_tokens=max_tokens)


async def begun(engine: ScriptedEngine) -> None:
    """Wait until the engine is within a step."""
    await asyncio.to_thread(engine.begun.acquire)


async def test_sequences_join_at_step_boundaries_and_a_step_is_delivered_at_once() -> None:
    engine = ScriptedEngine()
    async with running(engine) as (thread, reports):
        thread.submit(spec("a"))
        await begun(engine)
        thread.submit(spec("b"))
        thread.submit(spec("c"))
        engine.permits.release(2)

        assert await reports.next() == ("tokens", "a")
        assert await reports.next() == ("tokens", "a", "b", "c")
        assert engine.threads == {"engine"}


async def test_an_idle_engine_prepares_in_turns_and_computes_new_sequences_between_them() -> None:
    engine = ScriptedEngine()
    engine.to_prepare, engine.preparing = 3, Semaphore(0)
    async with running(engine) as (thread, reports):
        engine.preparing.release()
        thread.submit(spec("a"))
        engine.preparing.release()
        await begun(engine)
        prepared = engine.prepared
        engine.permits.release()

        assert await reports.next() == ("tokens", "a")
        assert 0 < prepared < 3
        engine.preparing.release(10)


async def test_a_cancel_in_the_middle_of_a_step_is_effective_at_its_end_and_counted() -> None:
    engine = ScriptedEngine()
    async with running(engine) as (thread, reports):
        thread.submit(spec("a"))
        await begun(engine)
        thread.cancel("a")
        engine.permits.release()

        assert await reports.next() == ("tokens", "a")
        assert await reports.next() == ("cancelled", "a", 1)
        assert engine.forwards == 1


async def test_a_hold_is_effective_at_the_end_of_the_step_and_lasts_until_it_is_resumed() -> None:
    engine = ScriptedEngine()
    async with running(engine) as (thread, reports):
        thread.submit(spec("a"))
        thread.submit(spec("b"))
        await begun(engine)
        thread.hold("a")
        engine.permits.release(2)

        assert await reports.next() == ("tokens", "a", "b")
        assert await reports.next() == ("tokens", "b")
        await begun(engine)  # the second step
        await begun(engine)  # the third, which begins without it
        thread.resume("a")
        engine.permits.release(2)
        assert await reports.next() == ("tokens", "b")
        assert await reports.next() == ("tokens", "a", "b")


async def test_an_engine_whose_sequences_are_all_held_is_idle_until_one_is_resumed() -> None:
    engine = ScriptedEngine()
    async with running(engine) as (thread, reports):
        thread.submit(spec("a"))
        await begun(engine)
        thread.hold("a")
        thread.hold("unknown")
        engine.permits.release(100)
        assert await reports.next() == ("tokens", "a")
        thread.cancel("unknown")  # reported after all earlier commands

        assert await reports.next() == ("cancelled", "unknown", 0)
        assert engine.forwards == 1
        thread.resume("a")
        assert await reports.next() == ("tokens", "a")


async def test_a_held_sequence_can_be_cancelled() -> None:
    engine = ScriptedEngine()
    async with running(engine) as (thread, reports):
        thread.submit(spec("a"))
        await begun(engine)
        thread.hold("a")
        engine.permits.release()
        assert await reports.next() == ("tokens", "a")
        thread.cancel("a")

        assert await reports.next() == ("cancelled", "a", 0)


async def test_the_count_is_of_steps_that_held_the_sequence() -> None:
    engine = ScriptedEngine()
    async with running(engine) as (thread, reports):
        thread.submit(spec("a"))
        await begun(engine)
        thread.submit(spec("b"))
        thread.cancel("b")
        engine.permits.release()

        assert await reports.next() == ("tokens", "a")
        assert await reports.next() == ("cancelled", "b", 0)


async def test_cancelling_an_unknown_sequence_is_reported_too() -> None:
    async with running(ScriptedEngine()) as (thread, reports):
        thread.cancel("unknown")

        assert await reports.next() == ("cancelled", "unknown", 0)


async def test_a_refused_sequence_is_its_own_error() -> None:
    engine = ScriptedEngine()
    async with running(engine) as (thread, reports):
        thread.submit(spec("long", max_tokens=101))
        thread.submit(spec("a"))
        engine.permits.release()

        assert await reports.next() == ("error", ("long",), ClientError, "context_length_exceeded")
        assert await reports.next() == ("tokens", "a")


async def test_a_failing_step_fails_its_sequences_and_the_engine_goes_on() -> None:
    engine = ScriptedEngine()
    survivor = TokenOutput(key="a", token_id=1, index=0, finish=None, step=1)
    engine.broken = StepFailedError("broken", keys=["b"], outputs=[survivor])
    async with running(engine) as (thread, reports):
        thread.submit(spec("a"))
        engine.permits.release(2)

        assert await reports.next() == ("tokens", "a")
        assert await reports.next() == ("error", ("b",), WorkerError, "step_failed")
        assert await reports.next() == ("tokens", "a")


async def test_each_sequence_gets_its_own_error() -> None:
    engine = ScriptedEngine()
    others = {"b": CapacityError("full"), "c": WorkerError("gone", code="tensor_gone")}
    engine.broken = StepFailedError("two failed", keys=[], others=others)
    async with running(engine) as (thread, reports):
        thread.submit(spec("a"))
        engine.permits.release(2)

        assert await reports.next() == ("error", ("b",), CapacityError, "overloaded")
        assert await reports.next() == ("error", ("c",), WorkerError, "tensor_gone")
        assert await reports.next() == ("tokens", "a")


async def test_a_wrong_request_is_one_log_line_and_a_fault_has_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = ClientError("the guide is too expensive", code="invalid_guide")
    others: dict[str, DalSegnoError] = {"b": wrong}
    engine = ScriptedEngine()
    engine.broken = StepFailedError("one failed", keys=[], others=others)
    async with running(engine) as (thread, reports):
        thread.submit(spec("a"))
        engine.permits.release()
        assert await reports.next() == ("error", ("b",), ClientError, "invalid_guide")
        [line] = caplog.records
        assert (line.levelname, line.exc_info, line.message) == (
            "WARNING",
            None,
            "sequence b failed: invalid_guide",
        )

        others["c"] = WorkerError("gone", code="tensor_gone")
        engine.broken = StepFailedError("two failed", keys=[], others=others)
        engine.permits.release()
        await reports.next()
        await reports.next()

    fault, line = (record for record in caplog.records[1:])
    assert fault.exc_info is not None
    assert line.exc_info is None


async def test_a_factory_that_fails_fails_the_start() -> None:
    def factory() -> Engine:
        raise ClientError("no such model")

    reports = Reports()
    thread = EngineThread(factory, reports.outputs, reports.error, on_cancelled=reports.cancelled)

    with pytest.raises(ClientError, match="no such model"):
        await thread.start()
    assert thread.stats() is None
    await thread.close()


async def test_a_thread_that_dies_reports_its_error_and_refuses_sequences() -> None:
    engine = ScriptedEngine()
    engine.broken = ZeroDivisionError("a bug")
    async with running(engine) as (thread, _):
        thread.submit(spec("a"))
        engine.permits.release()

        with pytest.raises(ZeroDivisionError, match="a bug"):
            await thread.wait()
        with pytest.raises(CapacityError, match="is closed"):
            thread.submit(spec("b"))


async def test_a_full_inbox_refuses_sequences_but_never_a_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "INBOX_CAPACITY", 2)
    engine = ScriptedEngine()
    async with running(engine) as (thread, reports):
        thread.submit(spec("a"))
        await begun(engine)
        thread.submit(spec("b"))
        thread.submit(spec("c"))

        with pytest.raises(CapacityError, match="has 2 requests queued"):
            thread.submit(spec("d"))
        thread.cancel("a")
        engine.permits.release()
        assert await reports.next() == ("tokens", "a")
        assert await reports.next() == ("cancelled", "a", 1)


class Watched(Mailbox[Any]):
    """A mailbox that records its largest size."""

    most = 0

    def put(self, item: Any) -> bool:
        is_in = super().put(item)
        self.most = max(self.most, len(self._items))
        return is_in


async def test_the_engine_waits_for_a_loop_that_does_not_read() -> None:
    engine = ScriptedEngine()
    async with running(engine) as (thread, reports):
        thread._outbox = box = Watched(2)
        thread.submit(spec("a"))
        engine.permits.release(50)
        for _ in range(3):
            engine.begun.acquire()  # the loop stands still here while three steps begin

        assert [await reports.next() for _ in range(50)] == [("tokens", "a")] * 50
        assert box.most <= 2


async def test_closing_does_not_wait_for_a_model_that_loads() -> None:
    may_end = Event()

    def factory() -> Engine:
        may_end.wait()
        return ScriptedEngine()

    reports = Reports()
    thread = EngineThread(factory, reports.outputs, reports.error, on_cancelled=reports.cancelled)
    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(thread.start())
        await asyncio.sleep(0)  # one turn of the loop: the thread is started
        await thread.close()
        assert not starting.done()
        may_end.set()
    await thread.wait()


async def test_closing_ends_the_thread_in_order() -> None:
    engine = ScriptedEngine()
    async with running(engine) as (thread, _):
        thread.submit(spec("a"))
        await begun(engine)
        engine.permits.release()
        engine.permits.release(1000)
        await thread.close()

        await thread.wait()
        assert not thread._thread.is_alive()


async def test_closing_does_not_wait_for_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.threads.owner_thread.CLOSE_S", 0.01)
    engine = ScriptedEngine()
    async with running(engine) as (thread, _):
        thread.submit(spec("a"))
        await begun(engine)
        await thread.close()

        assert thread._thread.is_alive()
        engine.permits.release(1000)
        await thread.wait()


@pytest.mark.slow
@pytest.mark.parametrize("capture", [None, Again()], ids=["plain", "ahead"])
async def test_a_real_engine_answers_through_the_thread_as_without_it(
    qwen3: DecoderLM, capture: GraphCapture | None
) -> None:
    def factory() -> KVEngine:
        return make_engine(
            qwen3, num_blocks=32, block_size=8, max_step_tokens=16, max_sequences=4, capture=capture
        )

    requests = [SequenceSpec(key=str(i), prompt_ids=[i + 1] * (i + 3), max_tokens=8) for i in range(6)]
    expected = {key: ids(outputs) for key, outputs in run(factory(), requests).items()}
    found: dict[str, list[int]] = {request.key: [] for request in requests}
    everyone = asyncio.Event()

    def on_outputs(outputs: list[Output]) -> None:
        for output in tokens(outputs):
            found[output.key].append(output.token_id)
        if all(len(answer) == 8 for answer in found.values()):
            everyone.set()

    def unexpected(*what: object) -> None:
        raise AssertionError(what)

    thread = EngineThread(factory, on_outputs, unexpected, on_cancelled=unexpected)
    await thread.start()
    for request in requests:
        thread.submit(request)
    async with asyncio.timeout(30):
        await everyone.wait()
    await thread.close()

    assert found == expected
    stats = thread.stats()
    assert stats is not None
    assert stats.forwards > 0
    assert (stats.work.ahead > 0) is (capture is not None)


@pytest.mark.processes
def test_the_thread_is_imported_without_torch() -> None:
    script = "import sys, workers.kv_engine.thread; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


async def test_items_go_to_the_engine_and_those_that_are_gone_fail_their_sequence() -> None:
    engine = ScriptedEngine()
    async with running(engine) as (thread, reports):
        for key in ("whole", "torn"):
            thread.submit(spec(key))
            thread.hold(key)
            thread.feed(key, None, ended=True)
        assert await reports.next() == ("error", ("torn",), TensorGone, "tensor_gone")
        assert engine.fed == [("whole", True)]
        assert engine.live == ["whole"]
