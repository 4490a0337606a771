"""The gateway that runs a batch: takeovers, claims, and what a crash leaves."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from configs.deployment import GatewaySettings
from configs.secrets import ApiKey
from gateway.app import create_app
from gateway.batches import runner
from gateway.batches.live import LiveBatches
from gateway.batches.store import StoredBatches
from gateway.requests.second_log import SecondLog
from gateway.requests.service import Gateway
from shared.events import (
    BatchChecked,
    BatchClaimed,
    BatchEnded,
    RequestSubmitted,
    SegmentStored,
    encode,
)
from shared.log.memory import MemoryLog
from tests.gateway.batches.running import (
    CHAT,
    created,
    ended,
    jsonl,
    line,
    results,
    running,
    said,
    states,
    until_ended,
    uploaded,
)
from tests.gateway.world import SERVED, Performance, World, deployment, echo


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats in hundredths of a second; small segments."""
    monkeypatch.setattr(runner, "_BEAT_S", 0.01)
    monkeypatch.setattr(runner, "_RECONNECT_S", 0.01)
    monkeypatch.setattr("gateway.batches.live.SILENT_S", 0.4)
    monkeypatch.setattr("gateway.batches.results.SEGMENT_LINES", 5)


class Other:
    """A second gateway on the same log."""

    def __init__(self, world: World, name: str) -> None:
        self.gateway = Gateway(SERVED, world.subjects, name, world.gateway.settings)
        batches, second = LiveBatches(), SecondLog()
        self.world = World(
            world.server, world.subjects, self.gateway, world.client, world.script,
            create_app(self.gateway, batches=batches, second=second), batches, second, world.media,
        )  # fmt: skip

    async def start(self, stack: AsyncExitStack) -> None:
        following = asyncio.create_task(self.world.follow())
        stack.callback(following.cancel)
        await self.gateway.follower.followed.wait()
        await stack.enter_async_context(running(self.world))


def submissions(world: World) -> list[str]:
    return sorted(str(one.request_id) for one in world.events("request"))


async def test_another_gateway_takes_a_batch_over_and_nothing_is_computed_twice() -> None:
    hold = asyncio.Event()

    async def script(performance: Performance) -> None:
        if int(performance.request_id.rpartition("-")[2]) > 7:
            await hold.wait()
        await echo(performance)

    lines = [line(f"c{number}", f"text {number}") for number in range(1, 21)]
    async with (
        deployment(script, settings=GatewaySettings(batch_lines=4)) as world,
        AsyncExitStack() as stack,
    ):
        async with running(world):
            batch = await created(world, lines)
            await world.performance(10)  # the lines from 8 on wait, and four run
            [state] = states(world).values()
            await world.until(lambda: bool(states(world)[state.id].segments))
        other = Other(world, "g-other")
        await other.start(stack)
        hold.set()
        done = await ended(world, batch["id"])
        found = await results(world, done["output_file_id"])
        [last] = states(world).values()

    assert last.owner == "g-other"
    assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert [said(one) for one in found] == [f"text {number}" for number in range(1, 21)]
    assert submissions(world) == sorted(f"{batch['id']}-{number}" for number in range(1, 21))
    assert len(world.performances) == 20
    assert not any(one.cancelled.is_set() for one in world.performances.values())


async def test_a_gateway_that_was_deposed_stops_and_leaves_its_requests() -> None:
    hold = asyncio.Event()

    async def script(performance: Performance) -> None:
        await hold.wait()
        await echo(performance)

    async with deployment(script) as world, running(world):
        batch = await created(world, [line("a"), line("b")])
        await world.performance(1)
        claim = BatchClaimed(id="claim", writer="g-other")
        world.server.append(world.subjects.batch(batch["id"]), encode(claim))
        await asyncio.sleep(0.05)  # its run ends; it is not silent yet by far
        hold.set()
        found = [type(one) for one in world.events("batch")]
        done = await ended(world, batch["id"])  # as the other is silent, it is claimed again
        output = await results(world, done["output_file_id"])

    assert SegmentStored not in found
    assert [one["custom_id"] for one in output] == ["a", "b"]
    assert len(world.performances) == 2
    assert not any(one.cancelled.is_set() for one in world.performances.values())


async def test_of_two_gateways_that_claim_a_batch_one_runs_it() -> None:
    lines = [line(f"c{number}") for number in range(30)]
    hold = asyncio.Event()

    async def script(performance: Performance) -> None:
        await hold.wait()
        await echo(performance)

    async with deployment(script) as world, AsyncExitStack() as stack:
        async with running(world):
            batch = await created(world, lines)
            await world.performance(3)
        for name in ("g-2", "g-3"):
            await Other(world, name).start(stack)
        hold.set()
        done = await ended(world, batch["id"])
        events = world.events("batch")

    assert done["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert sum(isinstance(one, BatchClaimed) for one in events) == 1
    assert sum(isinstance(one, BatchEnded) for one in events) == 1
    segments = [one.segment for one in events if isinstance(one, SegmentStored)]
    assert sorted(segments) == list(range(6))
    assert len(world.performances) == 30


async def test_a_batch_that_is_cancelled_while_no_gateway_runs_it_is_cancelled() -> None:
    async def script(performance: Performance) -> None:
        await performance.cancelled.wait()

    async with deployment(script) as world, AsyncExitStack() as stack:
        async with running(world):
            batch = await created(world, [line("a"), line("b")])
            await world.performance(1)
        other = Other(world, "g-other")
        await other.start(stack)
        batches = StoredBatches(other.gateway, other.world.second, None)
        cancelled = await batches.cancel(batch["id"])
        done = await ended(world, batch["id"])
        bad = await results(world, done["error_file_id"])

    assert all(one.cancelled.is_set() for one in world.performances.values())
    assert cancelled.status == "cancelling"
    assert done["status"] == "cancelled"
    assert [one["error"]["code"] for one in bad] == ["batch_cancelled"] * 2


async def test_answers_that_exist_are_kept_when_a_batch_is_cancelled_without_its_gateway() -> None:
    async def script(performance: Performance) -> None:
        if performance.request_id.endswith(("-1", "-2")):
            await echo(performance)
        else:
            await performance.cancelled.wait()

    async with (
        deployment(script, settings=GatewaySettings(batch_lines=4)) as world,
        AsyncExitStack() as stack,
    ):
        async with running(world):
            batch = await created(world, [line(f"c{number}") for number in range(1, 6)])
            await world.performance(4)
            await world.until(lambda: world.performances[f"{batch['id']}-2"].has_ended)
        other = Other(world, "g-other")
        await other.start(stack)
        await StoredBatches(other.gateway, other.world.second, None).cancel(batch["id"])
        done = await ended(world, batch["id"])
        good = await results(world, done["output_file_id"])
        bad = await results(world, done["error_file_id"])

    assert [one["custom_id"] for one in good] == ["c1", "c2"]
    assert [one["custom_id"] for one in bad] == ["c3", "c4", "c5"]
    assert sum(one.cancelled.is_set() for one in world.performances.values()) == 3


async def test_a_batch_goes_on_in_a_busy_deployment_after_a_takeover() -> None:
    async def busy(performance: Performance) -> None:
        """Serve requests of the usual priority alone."""
        if performance.event.priority >= 0 and "free" in gate:
            await echo(performance)
        else:
            await performance.cancelled.wait()

    gate: set[str] = set()
    async with deployment(busy, settings=GatewaySettings(batch_lines=4)) as world, AsyncExitStack() as stack:
        async with running(world):
            batch = await created(world, [line(f"c{number}") for number in range(1, 13)])
            await world.performance(3)
        gate.add("free")
        other = Other(world, "g-other")
        await other.start(stack)
        async with asyncio.timeout(20):
            await world.performance(11)  # every line had its turn, although some are stuck
        await StoredBatches(other.gateway, other.world.second, None).cancel(batch["id"])
        done = await ended(world, batch["id"])

    assert done["request_counts"]["completed"] >= 4


async def test_no_line_is_asked_for_while_the_log_is_nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.batches.run._ROOM_S", 0.01)
    async with deployment() as world, running(world):
        room = world.gateway.connection.room
        share = monkeypatch.setattr(type(room), "share", property(lambda _: 0.8))
        batch = await created(world, [line("a")])
        await asyncio.sleep(0.05)  # some rounds of waiting
        before = len(world.performances)
        monkeypatch.setattr(type(room), "share", property(lambda _: 0.5))
        done = await ended(world, batch["id"])

    assert (share, before) == (None, 0)
    assert done["request_counts"]["completed"] == 1


async def test_the_counts_of_a_running_batch_include_lines_of_open_segments() -> None:
    hold = asyncio.Event()

    async def script(performance: Performance) -> None:
        if performance.request_id.endswith("-4"):
            await hold.wait()
        await echo(performance)

    async with deployment(script) as world, running(world):
        batch = await created(world, [line(f"c{number}") for number in range(4)])
        async with asyncio.timeout(10):
            while True:
                shown = (await world.client.get(f"/v1/batches/{batch['id']}")).json()
                if shown["request_counts"]["completed"] == 3:
                    break
                await asyncio.sleep(0.01)
        assert states(world)[batch["id"]].segments == {}
        hold.set()
        await ended(world, batch["id"])

    assert shown["status"] == "in_progress"


async def test_two_batches_run_beside_each_other() -> None:
    async with deployment(settings=GatewaySettings(batch_lines=2)) as world, running(world):
        first = await created(world, [line(f"c{number}") for number in range(200)])
        second = await created(world, [line("x")])
        await ended(world, second["id"])
        is_first_done = states(world)[first["id"]].ended is not None
        done = await ended(world, first["id"])

    assert not is_first_done
    assert done["request_counts"]["completed"] == 200


async def test_a_batch_that_lost_its_file_midway_ends_although_the_file_is_back() -> None:
    """Its gateway died between the last segment, which lacks lines, and the end."""
    async with deployment() as world, AsyncExitStack() as stack:
        batch = await created(world, [line(f"c{number}") for number in range(8)])
        subject = world.subjects.batch(batch["id"])
        owner = states(world)[batch["id"]].owner
        for event in (
            BatchChecked(id="1", writer=owner, lines=8),
            SegmentStored(id="2", writer=owner, segment=0, completed=3, failed=1),
        ):
            world.server.append(subject, encode(event))
        await stack.enter_async_context(running(world))
        done = await ended(world, batch["id"])

    assert done["status"] == "failed"
    assert [one["code"] for one in done["errors"]["data"]] == ["media_gone"]
    assert done["request_counts"] == {"total": 8, "completed": 3, "failed": 1}
    assert done["usage"] is None
    assert not world.performances


async def test_a_key_with_many_batches_does_not_slow_down_another_one() -> None:
    hold = asyncio.Event()

    async def script(performance: Performance) -> None:
        await hold.wait()
        await echo(performance)

    keys = [ApiKey(name="many", secret="a" * 20), ApiKey(name="few", secret="b" * 20)]
    async with (
        deployment(script, settings=GatewaySettings(batch_lines=1), keys=keys) as world,
        running(world),
    ):
        batches = []
        for key in (*[keys[0]] * 3, keys[1]):
            header = {"authorization": f"Bearer {key.secret}"}
            file_id = await uploaded(world, jsonl([line(f"c{number}") for number in range(4)]), **header)
            body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            answer = await world.client.post("/v1/batches", json=body, headers=header)
            batches.append(answer.json()["id"])
        await world.until(lambda: all(one.lines for one in states(world).values()))
        await world.performance(0)
        hold.set()
        for batch in batches:
            await until_ended(world, batch)
        order = [one.tenant for one in world.events("request") if isinstance(one, RequestSubmitted)]

    assert order.count("few") == 4
    assert order[:10].count("few") == 4  # line by line, three batches would have three turns of four


async def test_a_log_that_is_lost_interrupts_a_batch_and_no_more() -> None:
    async with deployment() as world, running(world):
        log = world.second.log
        assert isinstance(log, MemoryLog)
        batch = await created(world, [line(f"c{number}") for number in range(30)])
        await log.close()
        done = await ended(world, batch["id"])

    assert done["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert len(world.performances) == 30
