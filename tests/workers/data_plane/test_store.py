"""What a store promises whatever the way to others is: scopes, lives, limits, and ways that fail."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.errors import BugError, CapacityError, TensorGone
from shared.tensors import Handle
from tests.workers.data_plane.other import filled
from workers.data_plane.assembly import ListenAddress, make_transports
from workers.data_plane.memory.arena import Arena
from workers.data_plane.port import INLINE_BYTES, Bytes
from workers.data_plane.store import ArenaStore, MakeTransport, open_store
from workers.data_plane.transport import Locator, Peer, TransportError
from workers.data_plane.transports.endpoints import boot, own_network
from workers.data_plane.transports.shm import ShmTransport

TOTAL = 4 << 20
BIG = 1 << 20


@pytest.fixture
async def store() -> AsyncIterator[ArenaStore]:
    made = open_store(total_bytes=TOTAL)
    made.begin_incarnation(0, 11)
    yield made
    await made.close()


def _put(store: ArenaStore, fill: int = 1, nbytes: int = BIG, scope: str = "r/0/1") -> Handle:
    return store.put("key", "uint8", (nbytes,), filled(fill, nbytes), scope=scope)


async def test_the_end_of_a_scope_frees_all_below_it(store: ArenaStore) -> None:
    kept, first, second = _put(store, scope="r2/0/1"), _put(store, scope="r/0/1"), _put(store, scope="r/1/1")
    assert store.stats().scopes == 3
    assert store.end("r") == 2
    assert store.end("r") == 0
    for gone in (first, second):
        with pytest.raises(TensorGone):
            await store.get(gone)
    assert (await store.get(kept) == 1).all()


async def test_what_is_kept_outlives_its_step(store: ArenaStore) -> None:
    handle = _put(store, scope="r/0/1")
    store.keep(handle, scope="r")
    assert store.end("r/0") == 0
    store.check(handle)
    assert store.end("r") == 1
    with pytest.raises(TensorGone):
        store.keep(handle, scope="r2")


async def test_what_is_inline_or_anothers_needs_no_keeping(store: ArenaStore) -> None:
    store.keep(_put(store, nbytes=4), scope="r")
    store.keep(Handle(key="key", dtype="uint8", shape=(1,), rank=5, incarnation=1, locator=b"?"), scope="r")
    assert store.stats().scopes == 0


async def test_what_a_straggler_puts_into_a_scope_that_has_ended_is_gone_at_once(store: ArenaStore) -> None:
    store.end("r")
    handle, slot = store.allocate("key", "uint8", (BIG,), scope="r/0/1")
    slot[:] = 1  # nobody else's memory
    with pytest.raises(TensorGone):
        await store.get(handle)
    other = _put(store, 2, scope="r2")
    slot[:] = 3
    assert (await store.get(other) == 2).all()
    del slot
    kept = _put(store, 2, scope="q")
    store.keep(kept, scope="r")
    with pytest.raises(TensorGone):
        store.check(kept)
    store.end("r2")
    assert store.stats().free_bytes == TOTAL


async def test_a_slot_that_is_released_again_and_again_is_free_once(store: ArenaStore) -> None:
    handle = _put(store)
    other = _put(store, 2)
    for _ in range(3):
        store.release(handle)
    assert store.stats().free_bytes == TOTAL - BIG
    assert (await store.get(other) == 2).all()
    assert store.end("r") == 1


async def test_a_full_arena_says_so_and_goes_on_when_there_is_room(store: ArenaStore) -> None:
    handles = [_put(store, scope=f"r{number}") for number in range(4)]
    with pytest.raises(CapacityError, match="the arena is full"):
        _put(store)
    assert _put(store, nbytes=INLINE_BYTES).data is not None
    store.end("r2")
    assert (await store.get(_put(store, 9)) == 9).all()
    assert (await store.get(handles[0]) == 1).all()


async def test_small_tensors_ride_inline(store: ArenaStore) -> None:
    assert _put(store, nbytes=INLINE_BYTES).data == b"\1" * INLINE_BYTES
    assert _put(store, nbytes=INLINE_BYTES + 1).data is None
    assert store.stats().slots == 1


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("float32", (4,), filled(1, 15)),
        ("float32", (BIG,), filled(1, BIG)),
        ("float32", (-1, -4), filled(1, 16)),
        ("complex64", (2,), filled(1, 16)),
        ("uint8", (2, 2), filled(1, 4).reshape(2, 2)),
        ("float32", (4,), np.zeros(4, np.float32)),
    ],
)
async def test_bytes_that_do_not_fit_their_words_do_not_go_in(
    store: ArenaStore, dtype: str, shape: tuple[int, ...], data: Bytes
) -> None:
    with pytest.raises(ValueError, match=r"found|unknown dtype"):
        store.put("key", dtype, shape, data, scope="r")
    assert store.stats().free_bytes == TOTAL


async def test_a_store_without_a_life_puts_nothing() -> None:
    store = open_store(total_bytes=TOTAL)
    with pytest.raises(BugError, match="begin_incarnation"):
        _put(store)
    await store.close()


async def test_a_new_life_begins_empty_and_may_use_the_same_scopes(store: ArenaStore) -> None:
    old = _put(store)
    store.end("r")
    store.begin_incarnation(0, 11)
    store.begin_incarnation(0, 12)
    with pytest.raises(TensorGone, match="incarnation 11"):
        await store.get(old)
    new = _put(store, 2)
    assert new.incarnation == 12
    assert (await store.get(new) == 2).all()


async def test_a_slot_whose_incarnation_ends_while_it_is_allocated_is_freed(
    store: ArenaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.begin_incarnation(0, 11)
    free, allocate = store.stats().free_bytes, store._arena.allocate

    def allocate_late(nbytes: int) -> Locator:
        locator = allocate(nbytes)
        store.begin_incarnation(0, 12)
        return locator

    monkeypatch.setattr(store._arena, "allocate", allocate_late)
    late = _put(store)
    assert late.incarnation == 11
    assert store.stats().free_bytes == free


async def test_an_earlier_life_does_not_come_back(store: ArenaStore) -> None:
    peer = open_store(total_bytes=TOTAL)
    peer.begin_incarnation(1, 20)
    store.add_peer(1, 20, peer.endpoints)
    store.add_peer(1, 15, {})
    store.remove_peer(1, 15)
    assert (await store.get(_put(peer, 4)) == 4).all()
    await peer.close()


class _Broken:
    """A way that never works; `tried` counts how often it was gone."""

    name = "broken"
    refused = 3

    def __init__(self, arena: Arena) -> None:
        self.tried = 0

    def endpoint(self) -> bytes:
        return b"broken"

    def reaches(self, peer: Peer) -> bool:
        return True

    async def fetch(self, peer: Peer, locator: Locator) -> Bytes:
        self.tried += 1
        raise TransportError("the cable is cut")

    def check(self, peer: Peer, locator: Locator) -> None:
        pass

    def forget(self, peer: Peer) -> None:
        pass

    async def close(self) -> None:
        pass


class _Unwilling(_Broken):
    async def fetch(self, peer: Peer, locator: Locator) -> Bytes:
        self.tried += 1
        raise TensorGone("it was freed")


async def test_a_way_that_fails_gives_way_to_the_next_for_good(caplog: pytest.LogCaptureFixture) -> None:
    ways: list[MakeTransport] = [_Broken, ShmTransport]
    owner, reader = (open_store(total_bytes=TOTAL, transports=ways) for _ in range(2))
    owner.begin_incarnation(0, 11)
    reader.begin_incarnation(1, 12)
    reader.add_peer(0, 11, owner.endpoints)
    broken = reader._transports[0]
    assert isinstance(broken, _Broken)
    with caplog.at_level(logging.WARNING):
        for fill in (1, 2, 3):
            assert (await reader.get(_put(owner, fill, scope=f"r{fill}")) == fill).all()
    assert broken.tried == 1
    assert caplog.text.count("rank 0 is not reached by broken: the cable is cut") == 1
    assert reader.stats().refused == 3
    await reader.close()
    await owner.close()


async def test_where_no_way_is_left_a_tensor_is_gone_with_every_reason() -> None:
    owner, reader = (open_store(total_bytes=TOTAL, transports=[_Broken]) for _ in range(2))
    owner.begin_incarnation(0, 11)
    reader.begin_incarnation(1, 12)
    reader.add_peer(0, 11, owner.endpoints)
    with pytest.raises(TensorGone, match="broken: the cable is cut"):
        await reader.get(_put(owner))
    reader.add_peer(2, 13, {})
    with pytest.raises(TensorGone, match="there is no transport to it"):
        await reader.get(
            Handle(key="k", dtype="uint8", shape=(0,), rank=2, incarnation=13, locator=b"\x94\0\0\0\1")
        )
    await reader.close()
    await owner.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "endpoint"),
    [
        ("shm", b"\x96\xa2\xff\xfe" + b"\1" * 5),
        ("shm", msgspec.msgpack.encode(["boot", *range(5)]).replace(b"\x96", b"\x97") + b"\x91" * 100_000),
        ("shm_named", msgspec.msgpack.encode([boot(), Path("/dev/shm").stat().st_dev, "/dev/shm/\0", 1])),
        ("tcp", msgspec.msgpack.encode(["127.0.0.1", 1 << 63, b"", own_network()])),
        ("tcp", msgspec.msgpack.encode([f"fe80::1%{'x' * 300}", 1, b"", ""])),
        ("tcp", b"\x91\xa1\xff"),
    ],
)
async def test_a_card_of_nonsense_is_a_rank_whose_tensors_are_gone(name: str, endpoint: bytes) -> None:
    store = open_store(
        total_bytes=TOTAL, transports=make_transports(["local", "shm", "tcp"], ListenAddress())
    )
    store.begin_incarnation(0, 11)
    store.add_peer(2, 13, {name: endpoint})
    locator = msgspec.msgpack.encode(Locator(0, 8192, 5000, 7))
    with pytest.raises(TensorGone, match="its owner is not reached"):
        await store.get(
            Handle(key="k", dtype="uint8", shape=(5000,), rank=2, incarnation=13, locator=locator)
        )
    await store.close()


async def test_a_locator_of_nonsense_is_refused(store: ArenaStore) -> None:
    deep = b"\x96" + b"\0" * 5 + b"\x91" * 100_000
    for locator in (None, b"", b"\xc1", deep):
        with pytest.raises(TensorGone, match="its locator cannot be read"):
            await store.get(
                Handle(key="k", dtype="uint8", shape=(5000,), rank=0, incarnation=11, locator=locator)
            )
    assert store.stats().refused == 4


async def test_that_a_tensor_is_gone_is_final() -> None:
    owner, reader = (open_store(total_bytes=TOTAL, transports=[_Unwilling]) for _ in range(2))
    reader._transports = [*reader._transports, second := _Broken(owner._arena)]
    owner.begin_incarnation(0, 11)
    reader.begin_incarnation(1, 12)
    reader.add_peer(0, 11, {"broken": b"broken"})
    with pytest.raises(TensorGone, match="it was freed"):
        await reader.get(_put(owner))
    assert second.tried == 0
    await reader.close()
    await owner.close()
