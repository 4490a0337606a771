"""What every way from store to store promises.

A test class says the `kind` (`kinds.py`) and inherits `TransportContract`, two stores in this process; where
the way leads out of the process also `ProcessContract`, with an owner or a reader that is another process.
"""

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Final

import msgspec
import numpy as np
import pytest

from benchmarks.machine import resident_bytes
from shared.errors import TensorGone
from shared.tensors import ITEM_BYTES, Handle, nbytes_of
from tests.workers.data_plane.kinds import KINDS
from tests.workers.data_plane.other import Other, filled, other
from workers.data_plane.store import ArenaStore
from workers.data_plane.transport import Locator

ARENA_BYTES: Final = 8 << 20
BIG: Final = 1 << 20
OWNER: Final = (0, 11)
READER: Final = (1, 12)
SHAPES: Final[tuple[tuple[int, ...], ...]] = ((3, 7, 101), (), (0, 5))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place in shared memory for arenas that have a name."""
    with TemporaryDirectory(prefix="dalsegno-test-", dir="/dev/shm") as name:
        yield Path(name)


@dataclass(frozen=True)
class Pair:
    """Two stores that have met."""

    owner: ArenaStore
    reader: ArenaStore

    def put(self, fill: int, nbytes: int = BIG, scope: str = "r") -> Handle:
        return self.owner.put("key", "uint8", (nbytes,), filled(fill, nbytes), scope=scope)


class TransportContract:
    """With two stores in this process."""

    kind: ClassVar[str]
    rounds: ClassVar[int] = 1_000

    @pytest.fixture
    async def pair(self, folder: Path) -> AsyncIterator[Pair]:
        owner, reader = (KINDS[self.kind](ARENA_BYTES, folder) for _ in range(2))
        owner.begin_incarnation(*OWNER)
        reader.begin_incarnation(*READER)
        reader.add_peer(*OWNER, owner.endpoints)
        owner.add_peer(*READER, reader.endpoints)
        yield Pair(owner, reader)
        await reader.close()
        await owner.close()

    async def test_what_was_put_is_what_is_got(self, pair: Pair) -> None:
        random = np.random.default_rng(1)
        for dtype, shape in itertools.product(ITEM_BYTES, SHAPES):
            given = random.integers(0, 256, nbytes_of(dtype, shape), np.uint8)
            handle = pair.owner.put("key", dtype, shape, given, scope="r")
            assert (handle.dtype, handle.shape) == (dtype, shape)
            assert np.array_equal(await pair.reader.get(handle), given)
            pair.reader.check(handle)

    async def test_what_was_computed_in_place_is_what_is_got(self, pair: Pair) -> None:
        for shape in SHAPES:
            handle, slot = pair.owner.allocate("key", "float32", shape, scope="r")
            assert handle.data is None
            slot.view(np.float32)[:] = np.arange(slot.size // 4)
            found = await pair.reader.get(handle)
            assert found.view(np.float32).tolist() == list(range(slot.size // 4))
            pair.reader.check(handle)

    async def test_what_is_got_is_not_to_be_written(self, pair: Pair) -> None:
        found = await pair.reader.get(pair.put(1))
        with pytest.raises(ValueError, match="read-only"):
            found[0] = 7

    async def test_a_freed_tensor_is_gone_also_when_another_is_in_its_place(self, pair: Pair) -> None:
        first = pair.put(1)
        pair.owner.release(first)
        with pytest.raises(TensorGone, match="key"):
            await pair.reader.get(first)
        second = pair.put(2)
        assert _locator(first).offset == _locator(second).offset
        with pytest.raises(TensorGone):
            await pair.reader.get(first)
        assert (await pair.reader.get(second))[0] == 2
        assert pair.reader.stats().gone == 2

    async def test_a_view_that_was_overwritten_does_not_pass_its_check(self, pair: Pair) -> None:
        handle = pair.put(1)
        found = await pair.reader.get(handle)
        half = found[: BIG // 2].copy()
        pair.owner.end("r")
        pair.put(2, scope="q")
        whole = np.concatenate([half, found[BIG // 2 :]])
        if (whole != 1).any():  # a copy, or a slot that is kept for its views, is still the first tensor
            with pytest.raises(TensorGone):
                pair.reader.check(handle)

    async def test_nothing_is_ever_read_of_two_tensors(self, pair: Pair) -> None:
        """The owner frees and refills in a thread, as fast as it can; now and then it lets one be read."""
        now = [(0, pair.put(0, scope="s0"))]
        stop, was_read = threading.Event(), threading.Event()

        def churn() -> None:
            for number in itertools.count(1):
                pair.owner.end(f"s{number - 1}")
                now[0] = number % 256, pair.put(number % 256, scope=f"s{number}")
                if number % 8 == 0:
                    was_read.clear()
                    if not stop.is_set():  # otherwise the last `set` came before `clear`
                        was_read.wait()
                if stop.is_set():
                    return

        thread = threading.Thread(target=churn)
        thread.start()
        good = gone = 0
        try:
            while min(good, gone) < 10:
                fill, handle = now[0]
                try:
                    found = (await pair.reader.get(handle)).copy()
                    pair.reader.check(handle)
                except TensorGone:
                    gone += 1
                else:
                    assert (found == fill).all()
                    good += 1
                    was_read.set()
        finally:
            stop.set()
            was_read.set()
            thread.join()

    async def test_handles_of_an_earlier_life_are_gone_by_comparison(self, pair: Pair) -> None:
        old = pair.put(1)
        await pair.reader.get(old)
        pair.owner.begin_incarnation(0, 21)
        assert pair.owner.stats().slots == 0
        pair.reader.add_peer(0, 21, pair.owner.endpoints)
        new = pair.put(2)
        for read in (pair.reader.get, pair.owner.get):
            with pytest.raises(TensorGone, match="incarnation 11"):
                await read(old)
        with pytest.raises(TensorGone, match="incarnation 11"):
            pair.reader.check(old)
        assert (await pair.reader.get(new))[0] == 2

    async def test_a_life_that_is_over_or_unknown_has_no_tensors(self, pair: Pair) -> None:
        handle = pair.put(1)
        pair.reader.remove_peer(*OWNER)
        with pytest.raises(TensorGone, match="rank 0's incarnation 11"):
            await pair.reader.get(handle)
        with pytest.raises(TensorGone, match="rank 7's incarnation 3"):
            await pair.reader.get(msgspec.structs.replace(handle, rank=7, incarnation=3))

    async def test_a_view_outlives_the_way_it_came(self, pair: Pair) -> None:
        found = await pair.reader.get(pair.put(3))
        pair.reader.remove_peer(*OWNER)
        await pair.reader.close()
        assert (found == 3).all()

    async def test_a_locator_that_leads_nowhere_is_a_tensor_that_is_gone(self, pair: Pair) -> None:
        handle = pair.put(1)
        for change in (
            {"offset": 1 << 40},
            {"offset": 0},
            {"offset": -4096},
            {"offset": _locator(handle).offset + 1},
            {"offset": _locator(handle).offset + 4096},
            {"segment": 9},
            {"generation": 1},
            {"generation": 0},
        ):
            with pytest.raises(TensorGone):
                await pair.reader.get(_pointing(handle, **change))
        assert (await pair.reader.get(handle))[0] == 1

    async def test_more_bytes_than_the_slot_has_are_not_given_and_fewer_neither(self, pair: Pair) -> None:
        handle, kept = pair.put(1), []
        for nbytes in (ARENA_BYTES, BIG + 1, BIG - 1, 0):
            with pytest.raises(TensorGone) as caught:
                await pair.reader.get(
                    msgspec.structs.replace(_pointing(handle, nbytes=nbytes), shape=(nbytes,))
                )
            kept.append(caught.value)
        assert (await pair.reader.get(handle))[0] == 1, "an error keeps no room"
        assert len(kept) == 4

    async def test_a_handle_whose_words_do_not_fit_is_refused_counted_and_logged(
        self, pair: Pair, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = pair.put(1)
        wrong = [
            msgspec.structs.replace(handle, dtype="float32"),
            msgspec.structs.replace(handle, dtype="complex1"),
            msgspec.structs.replace(handle, shape=(BIG + 1,)),
            msgspec.structs.replace(handle, shape=(-1, -BIG)),
            msgspec.structs.replace(handle, locator=b"\xc1"),
            msgspec.structs.replace(handle, locator=None),
            msgspec.structs.replace(handle, data=b"too short"),
        ]
        with caplog.at_level(logging.WARNING):
            for one in wrong:
                with pytest.raises(TensorGone, match="no tensor has this handle"):
                    await pair.reader.get(one)
        assert pair.reader.stats().refused == len(wrong)
        assert "refused (4 so far): tensor key, uint8" in caplog.text

    async def test_any_number_of_rounds_leaves_everything_as_it_was(self, pair: Pair) -> None:
        async def rounds(first: int, last: int) -> None:
            for number in range(first, last):
                handle = pair.put(number % 256, 2048 + number % 64 * 1024, scope=f"r{number}/0/1")
                assert (await pair.reader.get(handle))[-1] == number % 256
                pair.reader.check(handle)
                pair.owner.release(handle)
                pair.owner.end(f"r{number}")

        before, names = pair.owner.stats(), _names_in_shared_memory()
        await rounds(0, 256)
        resident = resident_bytes(os.getpid())
        await rounds(256, self.rounds)
        after = pair.owner.stats()
        assert (after.free_bytes, after.slots, after.scopes) == (before.free_bytes, 0, 0)
        assert pair.reader.stats().free_bytes == before.free_bytes
        assert _names_in_shared_memory() == names
        assert resident_bytes(os.getpid()) - resident < 8 << 20


class ProcessContract:
    """With a process that is killed."""

    kind: ClassVar[str]

    @pytest.fixture
    def owner(self, folder: Path) -> Iterator[Other]:
        with other(self.kind, ARENA_BYTES, folder) as process:
            process.begin_incarnation(*OWNER)
            yield process

    @pytest.fixture
    async def reader(self, owner: Other, folder: Path) -> AsyncIterator[ArenaStore]:
        """Has met the owner, and the owner it."""
        store = KINDS[self.kind](ARENA_BYTES, folder)
        store.begin_incarnation(*READER)
        store.add_peer(*OWNER, owner.endpoints)
        owner.add_peer(*READER, store.endpoints)
        yield store
        await store.close()

    async def test_a_tensor_of_another_process_is_read(self, owner: Other, reader: ArenaStore) -> None:
        handle = owner.put(7, BIG)
        assert (await reader.get(handle) == 7).all()
        reader.check(handle)
        owner.end("r")
        with pytest.raises(TensorGone):
            await reader.get(handle)

    async def test_of_an_owner_that_was_killed_nothing_is_read(
        self, owner: Other, reader: ArenaStore
    ) -> None:
        handle = owner.put(7, BIG)
        owner.kill()
        with pytest.raises(TensorGone):
            await reader.get(handle)

    async def test_an_owner_that_is_killed_while_it_is_asked_gives_the_right_bytes_or_none(
        self, owner: Other, reader: ArenaStore
    ) -> None:
        handle = owner.put(7, 4 * BIG)
        owner.pause()
        asking = asyncio.ensure_future(reader.get(handle))
        await asyncio.wait([asking], timeout=0.05)
        owner.kill()
        try:
            found = await asking
        except TensorGone:
            return
        assert (found == 7).all()

    async def test_what_was_got_before_the_owner_was_killed_stays_what_it_is(
        self, owner: Other, reader: ArenaStore
    ) -> None:
        handle = owner.put(7, BIG)
        found = await reader.get(handle)
        owner.kill()
        reader.check(handle)
        reader.remove_peer(*OWNER)
        assert (found == 7).all()
        with pytest.raises(TensorGone):
            reader.check(handle)

    async def test_a_rank_that_was_started_again_has_nothing_of_its_earlier_life(
        self, owner: Other, reader: ArenaStore, folder: Path
    ) -> None:
        old = owner.put(7, BIG)
        await reader.get(old)
        owner.kill()
        with other(self.kind, ARENA_BYTES, folder) as again:
            again.begin_incarnation(0, 21)
            again.add_peer(*READER, reader.endpoints)
            reader.add_peer(0, 21, again.endpoints)
            new = again.put(8, BIG)
            with pytest.raises(TensorGone, match="incarnation 11; the current one is 21"):
                await reader.get(old)
            with pytest.raises(TensorGone):
                await reader.get(msgspec.structs.replace(old, incarnation=21))
            assert (await reader.get(new) == 8).all()

    async def test_a_reader_that_was_killed_with_a_view_keeps_nothing(
        self, owner: Other, reader: ArenaStore
    ) -> None:
        """The other way about: it is the other process that reads here, and is killed."""
        before = reader.stats().free_bytes
        handle = reader.put("key", "uint8", (BIG,), filled(9, BIG), scope="r/0/1")
        assert owner.look(handle) == 9 * BIG
        owner.kill()
        assert reader.end("r") == 1
        assert reader.stats().free_bytes == before

    def test_a_killed_process_leaves_nothing_in_shared_memory(self, owner: Other, folder: Path) -> None:
        """At the latest when another store is opened on the machine."""
        names = _names_in_shared_memory()
        owner.put(7, BIG)
        owner.kill()
        store = KINDS[self.kind](ARENA_BYTES, folder)
        asyncio.run(store.close())
        assert list(folder.iterdir()) == []
        assert _names_in_shared_memory() == names


def _locator(handle: Handle) -> Locator:
    assert handle.locator is not None
    return msgspec.msgpack.decode(handle.locator, type=Locator)


def _pointing(handle: Handle, **change: int) -> Handle:
    wrong = msgspec.structs.replace(_locator(handle), **change)
    return msgspec.structs.replace(handle, locator=msgspec.msgpack.encode(wrong))


def _names_in_shared_memory() -> list[str]:
    """Ours, without those of tests, which have folders of their own there."""
    return sorted(path.name for path in Path("/dev/shm").glob("dalsegno-arena-*"))
