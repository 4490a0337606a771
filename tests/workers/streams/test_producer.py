import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shared.errors import CapacityError, WorkerError
from shared.tensors import Handle
from shared.walks import Fixed
from tests.workers.harness import turns
from workers.data_plane.port import Array
from workers.streams.consumer import WINDOW_BYTES, Items
from workers.streams.producer import StreamProducer


@dataclass(slots=True)
class Bench:
    """What an outlet is connected to."""

    sent: list[tuple[int, list[int], bool]] = field(default_factory=list)
    freed: list[Handle] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    acks: list[Callable[[], None]] = field(default_factory=list)
    refuses: Exception | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, first: int, items: Items | None, end: bool, stored: Callable[[], None]) -> None:
        if self.refuses is not None:
            raise self.refuses
        ids = items.data.view("<i4").tolist() if isinstance(items, Array) else []
        self.sent.append((first, ids, end))
        self.acks.append(stored)
        self.arrived.set()

    def outlet(self, *, in_batches: bool = True) -> StreamProducer:
        return StreamProducer(
            Fixed(3),
            self.put,
            free=self.freed.append,
            hold=lambda row: self.rows.append(f"hold {row}"),
            resume=lambda row: self.rows.append(f"resume {row}"),
            in_batches=in_batches,
        )

    def ack(self) -> None:
        for stored in self.acks:
            stored()
        self.acks.clear()


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.streams.consumer.WINDOW_ITEMS", 12)


def stored(number: int) -> Handle:
    return Handle(key=f"k{number}", dtype="float32", shape=(1, 8), rank=0, incarnation=1, locator=b"x")


async def test_the_first_token_goes_at_once_and_later_ones_in_batches(bench: Bench) -> None:
    outlet = bench.outlet()
    for token in range(5):
        outlet.add_token(token, "row")
    assert bench.sent == [(0, [0], False)]
    bench.arrived.clear()
    await bench.arrived.wait()
    outlet.add_token(5, "row")
    outlet.end()

    assert bench.sent == [(0, [0], False), (1, [1, 2, 3, 4], False), (5, [5], False), (6, [], True)]
    outlet.close()


async def test_on_this_rank_each_token_goes_at_once(bench: Bench) -> None:
    outlet = bench.outlet(in_batches=False)
    for token in range(3):
        outlet.add_token(token, "row")

    assert bench.sent == [(0, [0], False), (1, [1], False), (2, [2], False)]


@pytest.mark.usefixtures("_small")
async def test_a_row_that_is_ahead_is_held_and_credit_lets_it_go_on(bench: Bench) -> None:
    outlet = bench.outlet(in_batches=False)
    for token in range(12):
        outlet.add_token(token, "row")
    assert not outlet.full
    assert not bench.rows
    for token in range(12, 15):  # what the engine had under way
        outlet.add_token(token, "row")
    assert bench.rows == ["hold row"]
    outlet.taken(2)
    assert bench.rows == ["hold row"]
    outlet.taken(3)

    assert bench.rows == ["hold row", "resume row"]
    assert not outlet.full


@pytest.mark.usefixtures("_small")
async def test_another_node_waits_for_room_and_its_tensors_are_freed_by_credits(bench: Bench) -> None:
    outlet = bench.outlet()
    for number in range(13):
        await outlet.room()
        outlet.add(stored(number))
    waiting = asyncio.create_task(outlet.room())
    await turns()
    assert not waiting.done()
    outlet.taken(2)
    await waiting

    assert [handle.key for handle in bench.freed] == ["k0", "k1"]
    outlet.taken(1)  # a late copy
    outlet.taken(1000)  # more than there are: as many as there are
    assert len(bench.freed) == 13


async def test_few_but_large_items_fill_it_too_but_never_fewer_than_two_chunks(bench: Bench) -> None:
    outlet = bench.outlet()
    large = Handle(key="k", dtype="float32", shape=(1, WINDOW_BYTES // 4), rank=0, locator=b"x")
    for _ in range(5):
        outlet.add(large)
        assert not outlet.full
    outlet.add(large)

    assert outlet.full


async def test_what_the_log_does_not_take_now_it_is_offered_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.streams.producer.RETRY_S", 0.001)
    outlet = bench.outlet()
    bench.refuses = CapacityError("full")
    outlet.add(stored(0))
    outlet.add_token(7, "row")
    outlet.end()
    assert not bench.sent
    bench.refuses = None
    waiting = asyncio.create_task(outlet.stored())
    await bench.arrived.wait()
    await turns()
    assert not waiting.done()
    bench.ack()
    await waiting

    assert [(first, end) for first, _, end in bench.sent] == [(0, False), (1, False), (2, True)]


@pytest.mark.usefixtures("_small")
async def test_what_nobody_takes_any_more_is_freed_and_holds_nobody(bench: Bench) -> None:
    outlet = bench.outlet()
    outlet.add(stored(0))
    for token in range(14):
        outlet.add_token(token, "row")
    assert bench.rows == ["hold row"]
    sent = len(bench.sent)
    outlet.leave()
    outlet.leave()
    for token in range(14):
        outlet.add_token(token, "row")
    outlet.add(stored(1))
    await outlet.room()
    outlet.end()
    outlet.taken(3)  # a late credit
    bench.ack()
    await outlet.stored()

    assert bench.rows == ["hold row", "resume row"]
    assert [handle.key for handle in bench.freed] == ["k0", "k1"]
    assert len(bench.sent) == sent
    outlet.close()


@pytest.mark.usefixtures("_small")
async def test_what_the_log_will_never_take_is_told_and_holds_nobody(bench: Bench) -> None:
    outlet = bench.outlet(in_batches=False)
    for token in range(14):
        outlet.add_token(token, "row")
    bench.refuses = WorkerError("too large")
    outlet.add_token(14, "row")

    assert bench.rows == ["hold row", "resume row"]
    with pytest.raises(WorkerError, match="too large"):
        await outlet.stored()
    with pytest.raises(WorkerError, match="too large"):
        await outlet.room()
