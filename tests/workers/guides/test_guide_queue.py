"""Guides are checked once, in turn, within a budget, and nobody else waits for them."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher

from models.base import GuideToCheck
from models.text.guide_cost import CpuTime
from models.text.guides import CompiledGuide, InvalidGuideError
from shared.errors import BugError, CapacityError, ClientError
from shared.events import Guide
from tests.workers.harness import ToyProcessing
from workers.guides import guide_queue as module
from workers.guides.guide_queue import GuideQueue


def _no_matcher(_: str) -> LLMatcher:
    raise AssertionError("nothing follows these guides")


class Compiler:
    """A compiler that checks a guide when the test lets it (`go`), and notes what it has begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.kept: dict[str, Any] = {}
        self.go = threading.Semaphore(0)
        self.cpu_s = 1.0
        self.changed = threading.Condition()

    def known(self, guide: Guide) -> CompiledGuide | None:
        return self.kept.get(str(guide.regex))

    def check(self, guide: Guide, cpu_time: CpuTime) -> CompiledGuide:
        return self._run(guide, cpu_time, "")

    def compiled(self, guide: Guide) -> CompiledGuide:
        return self._run(guide, CpuTime(), "again ")

    def _run(self, guide: Guide, cpu_time: CpuTime, prefix: str) -> CompiledGuide:
        name = str(guide.regex)
        with self.changed:
            self.begun.append(prefix + name)
            self.changed.notify_all()
        self.go.acquire()
        cpu_time.seconds += self.cpu_s
        if name == "bad":
            raise InvalidGuideError("no text satisfies it", kind="regex")
        self.kept[name] = compiled = CompiledGuide(name, _no_matcher, marks=frozenset(), tokens=(), kind="")
        return compiled

    async def has_begun(self, count: int) -> None:
        def wait() -> None:
            with self.changed:
                assert self.changed.wait_for(lambda: len(self.begun) >= count, 60)

        await asyncio.to_thread(wait)


class GuidingProcessing(ToyProcessing):
    def __init__(self, compiler: Compiler | None) -> None:
        super().__init__()
        self.guides = compiler


class Rig:
    def __init__(self) -> None:
        self.compiler = Compiler()
        self.now_s = 0.0
        self.queue = GuideQueue(GuidingProcessing(self.compiler), clock=lambda: self.now_s)

    def check(self, name: str, tenant: str = "a", param: str = "") -> asyncio.Task[None]:
        asked = GuideToCheck(guide=Guide(regex=name), param=param)
        return asyncio.create_task(self.queue.check(asked, tenant))


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


async def test_equal_guides_of_a_tenant_are_checked_once_and_known_ones_never() -> None:
    rig = Rig()
    both = [rig.check("x", "a"), rig.check("x", "a")]
    await rig.compiler.has_begun(1)
    rig.compiler.go.release()
    await asyncio.wait(both)

    await rig.check("x")
    assert await rig.queue.compiled(Guide(regex="x"), "c") is rig.compiler.kept["x"]

    assert rig.compiler.begun == ["x"]
    assert rig.queue.meters().cpu_s.count == 1


async def test_a_flood_of_one_tenant_leaves_a_slot_and_the_next_turn_to_others() -> None:
    rig = Rig()
    flood = [rig.check(f"f{number}") for number in range(5)]
    await rig.compiler.has_begun(1)
    assert rig.queue.meters().waiting == 4

    other = rig.check("mine", "b")
    await rig.compiler.has_begun(2)
    assert rig.compiler.begun == ["f0", "mine"]

    rig.compiler.go.release(6)
    await asyncio.wait([*flood, other])
    assert rig.compiler.begun == ["f0", "mine", "f1", "f2", "f3", "f4"]


async def test_a_request_that_ends_leaves_the_queue_and_a_check_that_has_begun_continues() -> None:
    rig = Rig()
    begun, first, second = rig.check("begun"), rig.check("x"), rig.check("x")
    await rig.compiler.has_begun(1)
    begun.cancel()
    first.cancel()
    await until(lambda: begun.done() and first.done())
    assert rig.queue.meters().waiting == 1  # the other one still wants it
    second.cancel()
    await until(lambda: not rig.queue.meters().waiting)

    rig.compiler.go.release()
    await until(lambda: "begun" in rig.compiler.kept)

    await rig.check("begun")
    assert rig.compiler.begun == ["begun"]


async def test_a_refusal_names_the_parameter_and_counts() -> None:
    rig = Rig()
    rig.compiler.go.release(2)

    with pytest.raises(ClientError, match=r"^tools: no text satisfies it$") as caught:
        await rig.check("bad", param="tools")
    with pytest.raises(InvalidGuideError, match=r"^regex: no text satisfies it$"):
        await rig.check("bad")

    assert (caught.value.code, caught.value.status) == ("invalid_guide", 400)
    meters = rig.queue.meters()
    assert (meters.invalid, meters.turned_away, meters.cpu_s.sum) == (2, 0, 2.0)


async def test_a_tenant_beyond_its_budget_is_turned_away_until_the_window_has_passed() -> None:
    rig = Rig()
    rig.compiler.cpu_s = module.BUDGET_S
    rig.compiler.go.release(4)
    await rig.check("x")

    with pytest.raises(
        CapacityError, match=r"expected the guides of this key to take at most 10 s"
    ) as caught:
        await rig.check("y")

    assert (caught.value.code, caught.value.status) == ("guide_budget_exceeded", 429)
    assert caught.value.retry_after_s == module.WINDOW_S
    await rig.check("x")  # known guides cost nothing
    await rig.check("y", "b")
    await rig.queue.compiled(Guide(regex="z"), "a")  # an accepted request is not refused
    rig.now_s += module.WINDOW_S
    await rig.check("w")
    assert rig.compiler.begun == ["x", "y", "again z", "w"]
    assert rig.queue.meters().turned_away == 1


async def test_guides_that_wait_while_the_budget_is_used_up_are_turned_away_at_their_turn() -> None:
    rig = Rig()
    rig.compiler.cpu_s = module.BUDGET_S
    first, second, third = rig.check("x"), rig.check("y"), rig.check("z")
    await rig.compiler.has_begun(1)
    rig.compiler.go.release(2)
    await first

    for waiting in (second, third):
        with pytest.raises(CapacityError, match=r"try again in 60 s"):
            await waiting
    await rig.check("y", "b")
    assert rig.compiler.begun == ["x", "y"]


async def test_a_tenant_does_not_share_the_budget_of_another_that_waits_for_the_same_guide() -> None:
    rig = Rig()
    rig.compiler.cpu_s = module.BUDGET_S
    first, theirs = rig.check("x"), rig.check("shared")
    await rig.compiler.has_begun(1)
    ours = rig.check("shared", "b")
    rig.compiler.go.release(2)

    await first
    with pytest.raises(CapacityError, match="the guides of this key"):
        await theirs
    await ours
    assert sorted(rig.compiler.begun) == ["shared", "x"]


async def test_guides_that_are_banned_while_they_are_followed_use_up_the_budget() -> None:
    rig = Rig()
    rig.compiler.go.release(3)
    for name in "xy":
        await rig.check(name)
        await asyncio.to_thread(rig.compiler.kept[name].ban)
    await until(lambda: rig.queue._budget.spent_s("a") > module.BUDGET_S)

    with pytest.raises(CapacityError, match=r"found 12\.0 s; try again in 60 s"):
        await rig.check("z")
    await rig.check("z", "b")


async def test_more_guides_than_may_wait_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_PER_TENANT", 1)
    rig = Rig()
    waiting = [rig.check("x"), rig.check("y")]
    await rig.compiler.has_begun(1)

    with pytest.raises(
        CapacityError, match=r"the guides that have to be compiled: 1 of this key are"
    ) as caught:
        await rig.check("z")

    assert (caught.value.code, caught.value.status) == ("guide_queue_full", 429)
    rig.compiler.go.release(2)
    await asyncio.wait(waiting)


async def test_a_check_that_hangs_does_not_keep_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.0)
    rig = Rig()
    with pytest.raises(CapacityError, match=r"could not be compiled within 0 s; try again later"):
        await rig.check("hangs")
    monkeypatch.setattr(module, "LIMIT_S", 60.0)
    rig.compiler.go.release(2)

    await rig.check("x")


async def test_a_model_without_guides_says_so() -> None:
    for processing in (ToyProcessing(), GuidingProcessing(None)):
        with pytest.raises(BugError, match=r"cannot compile guides"):
            await GuideQueue(processing).check(GuideToCheck(guide=Guide(regex="x")), "a")
