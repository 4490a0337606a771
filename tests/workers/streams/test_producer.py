import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from shared.errors import BugError, CapacityError, WorkerError
from shared.tensors import Handle
from shared.walks import Fixed
from tests.workers.harness import turns
from workers.data_plane.port import Array
from workers.streams.consumer import WINDOW_BYTES, Items
from workers.streams.producer import StreamProducer


@dataclass(slots=True)
class Bench:
    """The callbacks of a producer."""

    sent: list[tuple[int, list[int], bool]] = field(default_factory=list)
    freed: list[Handle] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
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

    def producer(self, *, in_batches: bool = True) -> StreamProducer:
        return StreamProducer(
            Fixed(3),
            self.put,
            free=self.freed.append,
            hold=lambda key: self.held.append(f"hold {key}"),
            resume=lambda key: self.held.append(f"resume {key}"),
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
    producer = bench.producer()
    for token in range(5):
        producer.add_token(token, "seq")
    assert bench.sent == [(0, [0], False)]
    bench.arrived.clear()
    await bench.arrived.wait()
    producer.add_token(5, "seq")
    producer.end()

    assert bench.sent == [(0, [0], False), (1, [1, 2, 3, 4], False), (5, [5], False), (6, [], True)]
    producer.close()


async def test_on_this_rank_each_token_goes_at_once(bench: Bench) -> None:
    producer = bench.producer(in_batches=False)
    for token in range(3):
        producer.add_token(token, "seq")

    assert bench.sent == [(0, [0], False), (1, [1], False), (2, [2], False)]


@pytest.mark.usefixtures("_small")
async def test_a_row_that_is_ahead_is_held_and_credit_lets_it_go_on(bench: Bench) -> None:
    producer = bench.producer(in_batches=False)
    for token in range(12):
        producer.add_token(token, "seq")
    assert not producer.full
    assert not bench.held
    for token in range(12, 15):  # what the engine had under way
        producer.add_token(token, "seq")
    assert bench.held == ["hold seq"]
    producer.credit(2)
    assert bench.held == ["hold seq"]
    producer.credit(3)

    assert bench.held == ["hold seq", "resume seq"]
    assert not producer.full


@pytest.mark.usefixtures("_small")
async def test_another_node_waits_for_room_and_its_tensors_are_freed_by_credits(bench: Bench) -> None:
    producer = bench.producer()
    for number in range(13):
        await producer.wait_for_room()
        producer.add(stored(number))
    waiting = asyncio.create_task(producer.wait_for_room())
    await turns()
    assert not waiting.done()
    producer.credit(2)
    await waiting

    assert [handle.key for handle in bench.freed] == ["k0", "k1"]
    producer.credit(1)  # a late copy
    producer.credit(1000)  # more than there are: as many as there are
    assert len(bench.freed) == 13


async def test_few_but_large_items_fill_it_too_but_never_fewer_than_two_chunks(bench: Bench) -> None:
    producer = bench.producer()
    large = Handle(key="k", dtype="float32", shape=(1, WINDOW_BYTES // 4), rank=0, locator=b"x")
    for _ in range(5):
        producer.add(large)
        assert not producer.full
    producer.add(large)

    assert producer.full


async def test_what_the_log_does_not_take_now_it_is_offered_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.streams.producer.RETRY_S", 0.001)
    producer = bench.producer()
    bench.refuses = CapacityError("full")
    producer.add(stored(0))
    producer.add_token(7, "seq")
    producer.end()
    assert not bench.sent
    bench.refuses = None
    waiting = asyncio.create_task(producer.wait_stored())
    await bench.arrived.wait()
    await turns()
    assert not waiting.done()
    bench.ack()
    await waiting

    assert [(first, end) for first, _, end in bench.sent] == [(0, False), (1, False), (2, True)]


@pytest.mark.usefixtures("_small")
async def test_what_nobody_takes_any_more_is_freed_and_holds_nobody(bench: Bench) -> None:
    producer = bench.producer()
    producer.add(stored(0))
    for token in range(14):
        producer.add_token(token, "seq")
    assert bench.held == ["hold seq"]
    sent = len(bench.sent)
    producer.abandon()
    producer.abandon()
    for token in range(14):
        producer.add_token(token, "seq")
    producer.add(stored(1))
    await producer.wait_for_room()
    producer.end()
    producer.credit(3)  # a late credit
    bench.ack()
    await producer.wait_stored()

    assert bench.held == ["hold seq", "resume seq"]
    assert [handle.key for handle in bench.freed] == ["k0", "k1"]
    assert len(bench.sent) == sent
    producer.close()


@pytest.mark.usefixtures("_small")
async def test_what_the_log_will_never_take_is_told_and_holds_nobody(bench: Bench) -> None:
    producer = bench.producer(in_batches=False)
    for token in range(14):
        producer.add_token(token, "seq")
    bench.refuses = WorkerError("too large")
    producer.add_token(14, "seq")

    assert bench.held == ["hold seq", "resume seq"]
    with pytest.raises(WorkerError, match="too large"):
        await producer.wait_stored()
    with pytest.raises(WorkerError, match="too large"):
        await producer.wait_for_room()


# ---- tensors of sequences ------------------------------------------------------------------------


def tensors(*values: int) -> Array:
    data = np.array(values, "<i4")
    return Array(dtype="int32", shape=(len(values),), data=data.view(np.uint8))


@pytest.mark.usefixtures("_small")
async def test_a_prompts_tensors_go_in_pieces_as_far_as_the_consumer_takes_them(bench: Bench) -> None:
    producer = bench.producer(in_batches=False)
    producer.add_tensors(tensors(*range(30)), "seq")
    assert [(first, len(ids)) for first, ids, _ in bench.sent] == [(0, 12), (12, 12)]
    assert bench.held == ["hold seq"]

    producer.credit(8)
    assert [(first, ids) for first, ids, _ in bench.sent[2:]] == [(24, list(range(24, 30)))]
    assert producer.items == 30
    producer.credit(30)
    assert bench.held == ["hold seq", "resume seq"]
    producer.close()


async def test_tensors_of_unequal_shapes_fail_the_stream_and_hold_nobody(bench: Bench) -> None:
    producer = bench.producer()
    producer.add_tensors(tensors(1), "seq")
    producer.add_tensors(tensors(2), "seq")
    other = tensors(3, 4)
    producer.add_tensors(Array(dtype="int32", shape=(1, 2), data=other.data), "seq")
    with pytest.raises(BugError, match="one dtype and shape for the whole stream"):
        await producer.wait_stored()
    assert [ids for _, ids, _ in bench.sent] == [[1]]
    producer.close()
