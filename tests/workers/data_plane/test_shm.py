import os
from collections.abc import AsyncIterator

import msgspec
import pytest

from shared.errors import TensorGone
from shared.tensors import Handle
from tests.workers.data_plane.contract import OWNER, READER, ProcessContract, TransportContract, folder
from tests.workers.data_plane.other import filled
from workers.data_plane.store import ArenaStore, open_store
from workers.data_plane.transports.shm import ShmEndpoint, ShmTransport

__all__ = ["folder"]


class TestShm(TransportContract, ProcessContract):
    kind = "shm"
    rounds = 10_000


@pytest.fixture
async def owner() -> AsyncIterator[ArenaStore]:
    store = open_store(total_bytes=1 << 20, transports=[ShmTransport])
    store.begin_incarnation(*OWNER)
    yield store
    await store.close()


@pytest.fixture
async def reader() -> AsyncIterator[ArenaStore]:
    store = open_store(total_bytes=1 << 20, transports=[ShmTransport])
    store.begin_incarnation(*READER)
    yield store
    await store.close()


def _put(store: ArenaStore) -> Handle:
    return store.put("key", "uint8", (5000,), filled(7, 5000), scope="r")


def _endpoint(store: ArenaStore, **change: int | str) -> dict[str, bytes]:
    endpoint = msgspec.msgpack.decode(store.endpoints["shm"], type=ShmEndpoint)
    return {"shm": msgspec.msgpack.encode(msgspec.structs.replace(endpoint, **change))}


@pytest.mark.parametrize("change", [{"boot": "another"}, {"namespace": 1}, {"user": 1 << 20}])
async def test_who_is_on_another_machine_or_out_of_sight_or_somebody_else_is_not_reached(
    owner: ArenaStore, reader: ArenaStore, change: dict[str, int | str]
) -> None:
    reader.add_peer(*OWNER, _endpoint(owner, **change))
    with pytest.raises(TensorGone, match="there is no transport to it"):
        await reader.get(_put(owner))


async def test_a_card_that_cannot_be_read_reaches_nobody(owner: ArenaStore, reader: ArenaStore) -> None:
    reader.add_peer(*OWNER, {"shm": b"\xc1"})
    with pytest.raises(TensorGone, match="there is no transport to it"):
        await reader.get(_put(owner))


async def test_a_process_that_has_got_the_id_of_a_dead_one_is_not_touched(
    owner: ArenaStore, reader: ArenaStore
) -> None:
    into, out = os.pipe()
    reader.add_peer(*OWNER, _endpoint(owner, descriptor=into))
    with pytest.raises(TensorGone, match="not an arena"):
        await reader.get(_put(owner))
    os.close(into)
    os.close(out)


async def test_an_arena_in_the_place_of_another_has_none_of_its_tensors(
    owner: ArenaStore, reader: ArenaStore
) -> None:
    own = msgspec.msgpack.decode(reader.endpoints["shm"], type=ShmEndpoint).descriptor
    reader.add_peer(*OWNER, _endpoint(owner, descriptor=own))
    with pytest.raises(TensorGone, match="another arena stands in the place"):
        await reader.get(_put(owner))


async def test_what_only_looks_like_an_arena_is_none(owner: ArenaStore, reader: ArenaStore) -> None:
    descriptor = os.memfd_create("dalsegno-arena")
    os.write(descriptor, b"dalsegn1" + b"\xff" * 5000)
    reader.add_peer(*OWNER, _endpoint(owner, descriptor=descriptor))
    with pytest.raises(TensorGone, match="no arena, or not one of this version"):
        await reader.get(_put(owner))
    os.close(descriptor)
