"""A GPU's arena and the way to another's, with a driver that pretends, and with CUDA where it is."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from shared.errors import CapacityError, TensorGone
from tests.workers.data_plane.cuda import Gpus, PretendedCuda
from tests.workers.data_plane.sources import FreshMemory
from workers.data_plane.memory import backing
from workers.data_plane.memory.arena import Arena
from workers.data_plane.memory.cuda_driver import Driver, find_driver
from workers.data_plane.memory.device_arena import EVENTS, DeviceArena, DeviceBytes
from workers.data_plane.transport import DEVICE_SEGMENT, Locator, Peer, TransportError
from workers.data_plane.transports.cuda_ipc import CudaEndpoint, CudaIpcTransport

MB = 1 << 20
WRITER, READER = 1001, 1002
"""Streams."""


@dataclass
class Side:
    """One process: its driver, its arenas, its transport."""

    cuda: PretendedCuda
    arena: Arena
    own: DeviceArena
    transport: CudaIpcTransport

    @classmethod
    def of(cls, gpus: Gpus, device: int) -> "Side":
        cuda = PretendedCuda(gpus, device=device)
        arena = Arena(MB, backing.anonymous)
        own = DeviceArena(arena, cuda, device=device, total_bytes=MB)
        cuda.log.clear()
        return cls(cuda, arena, own, CudaIpcTransport(own, FreshMemory()))

    @property
    def peer(self) -> Peer:
        return Peer(0, 7, self.transport.endpoint())

    def put(self, data: bytes) -> Locator:
        at, slot = self.own.allocate(len(data))
        ctypes.memmove(slot.pointer, data, len(data))
        self.own.written(at, WRITER)
        return at


@pytest.fixture
def gpus() -> Gpus:
    return Gpus()


@pytest.fixture
def owner(gpus: Gpus) -> Iterator[Side]:
    side = Side.of(gpus, 0)
    yield side
    side.own.close()
    side.arena.close()


@pytest.fixture
def reader(gpus: Gpus) -> Side:
    return Side.of(gpus, 1)


def shown(view: DeviceBytes) -> bytes:
    return ctypes.string_at(view.pointer, view.nbytes)


# ---- the GPU's arena -----------------------------------------------------------------------------------


def test_a_readers_stream_waits_for_the_writers_event_and_no_thread_for_either(
    owner: Side, reader: Side
) -> None:
    at = owner.put(b"tensor")
    view = reader.transport.borrow(owner.peer, at, stream=READER)

    assert shown(view) == b"tensor"
    [(_, event, _)] = owner.cuda.log
    assert owner.cuda.log == [("record", event, WRITER)]
    assert reader.cuda.log == [("open", 1), ("wait", READER, event)], "opened with the reader's own device"


def test_memory_is_opened_once_for_all_tensors(owner: Side, reader: Side) -> None:
    for number in range(5):
        reader.transport.borrow(owner.peer, owner.put(bytes([number])), stream=READER)

    assert [entry for entry in reader.cuda.log if entry[0] == "open"] == [("open", 1)]


def test_views_are_what_torch_and_cupy_take(owner: Side, reader: Side) -> None:
    at = owner.put(b"tensor")
    interface = reader.transport.borrow(owner.peer, at, stream=READER).__cuda_array_interface__

    assert interface["shape"] == (6,)
    assert interface["typestr"] == "|u1"
    assert interface["version"] == 3
    assert interface["stream"] is None, "nothing more is to be waited for"


def test_a_slot_that_was_freed_is_gone_before_and_after_it_was_borrowed(owner: Side, reader: Side) -> None:
    at = owner.put(b"tensor")
    reader.transport.borrow(owner.peer, at, stream=READER)
    reader.transport.check(owner.peer, at)
    assert owner.own.free(at.generation)
    assert not owner.own.free(at.generation)
    owner.put(b"others")

    with pytest.raises(TensorGone, match="was freed"):
        reader.transport.check(owner.peer, at)
    with pytest.raises(TensorGone, match="was freed"):
        reader.transport.borrow(owner.peer, at, stream=READER)
    with pytest.raises(TensorGone, match="was freed"):
        owner.own.look(at, READER)


@pytest.mark.parametrize(
    "change",
    [{"offset": 1}, {"offset": -4096}, {"offset": 1 << 40}, {"nbytes": 7}, {"nbytes": 5}, {"event": EVENTS}],
)
def test_a_locator_that_leads_nowhere_is_a_tensor_that_is_gone(
    change: dict[str, int], owner: Side, reader: Side
) -> None:
    at = owner.put(b"tensor")

    with pytest.raises(TensorGone):
        reader.transport.borrow(owner.peer, msgspec.structs.replace(at, **change), stream=READER)


def test_the_own_gpus_tensors_are_looked_at_behind_their_event(owner: Side) -> None:
    at = owner.put(b"tensor")

    assert shown(owner.own.look(at, READER)) == b"tensor"
    assert owner.cuda.log[-1][:2] == ("wait", READER)


def test_room_comes_back_and_a_full_arena_says_so(owner: Side) -> None:
    free = owner.own.free_bytes
    slots = [owner.own.allocate(MB // 4)[0] for _ in range(4)]
    with pytest.raises(CapacityError, match="1 bytes do not fit among 0 free"):
        owner.own.allocate(1)
    for at in slots:
        owner.own.free(at.generation)

    assert owner.own.free_bytes == free


def test_each_event_has_its_turn(owner: Side) -> None:
    events = [owner.own.allocate(1)[0].event for _ in range(2 * EVENTS)]

    assert sorted(events) == sorted([*range(EVENTS), *range(EVENTS)])


def test_a_gpu_without_that_much_memory_is_told_and_leaves_nothing(gpus: Gpus) -> None:
    arena = Arena(8 * MB, backing.anonymous)
    free = arena.stats().free_bytes
    with pytest.raises(CapacityError, match="GPU 0 has no"):
        DeviceArena(arena, PretendedCuda(gpus), device=0, total_bytes=1 << 30)

    assert arena.stats().free_bytes == free


def test_where_cuda_gives_no_handles_nothing_is_kept(gpus: Gpus) -> None:
    gpus.is_ipc_refused = True
    arena = Arena(MB, backing.anonymous)
    with pytest.raises(OSError, match="no handles for other processes"):
        DeviceArena(arena, PretendedCuda(gpus), device=0, total_bytes=MB)

    assert gpus.memory == {}


def test_the_arena_in_main_memory_is_pinned_for_as_long_as_the_gpus_lives(gpus: Gpus) -> None:
    side = Side.of(gpus, 0)
    assert side.cuda.pinned == [np.frombuffer(side.arena.backing.memory, np.uint8).ctypes.data]
    side.own.close()

    assert side.cuda.pinned == []
    assert side.cuda.events == set()
    assert gpus.memory == {}


# ---- the way there -------------------------------------------------------------------------------------


async def test_bytes_are_staged_through_main_memory_for_those_who_want_them(
    owner: Side, reader: Side
) -> None:
    at = owner.put(b"tensor")
    found = await reader.transport.fetch(owner.peer, at)

    assert found.tobytes() == b"tensor"
    assert not found.flags.writeable
    _, wait, copy, synchronize = reader.cuda.log
    assert (wait[0], copy[0], synchronize[0]) == ("wait", "copy", "synchronize")
    assert wait[1] == copy[1] == synchronize[1]
    await reader.transport.close()
    assert reader.cuda.streams == set()
    assert reader.cuda.events == set()


async def test_what_is_freed_while_it_is_staged_is_gone(
    owner: Side, reader: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = owner.put(b"tensor")

    def free_meanwhile(stream: int) -> None:
        owner.own.free(at.generation)

    monkeypatch.setattr(reader.cuda, "streamSynchronize", free_meanwhile)

    with pytest.raises(TensorGone, match="was freed"):
        await reader.transport.fetch(owner.peer, at)


async def test_what_a_peer_has_in_main_memory_is_read_there(owner: Side, reader: Side) -> None:
    at = owner.arena.allocate(5)
    owner.arena.look(at, writable=True)[:] = 9

    assert (await reader.transport.fetch(owner.peer, at)).tolist() == [9] * 5
    assert reader.cuda.log == []
    owner.arena.free(at.generation)
    with pytest.raises(TensorGone):
        reader.transport.check(owner.peer, at)


async def test_where_cuda_refuses_another_way_may_be_asked(owner: Side, reader: Side) -> None:
    at = owner.put(b"tensor")
    owner.cuda.gpus.is_ipc_refused = True

    with pytest.raises(TransportError, match="memory cannot be opened"):
        reader.transport.borrow(owner.peer, at, stream=READER)
    with pytest.raises(TransportError, match="memory cannot be opened"):
        await reader.transport.fetch(owner.peer, at)


def test_a_mapping_is_closed_with_its_last_view(owner: Side, reader: Side) -> None:
    view = reader.transport.borrow(owner.peer, owner.put(b"tensor"), stream=READER)
    reader.transport.forget(owner.peer)
    assert len(reader.cuda.opened) == 1
    reader.cuda.device = 0
    del view

    assert reader.cuda.opened == []
    assert reader.cuda.device == 0, "as it was before"


def test_a_card_says_whether_it_is_worth_trying(owner: Side, reader: Side) -> None:
    endpoint = msgspec.msgpack.decode(owner.peer.endpoint, type=CudaEndpoint)

    def with_card(**fields: object) -> Peer:
        return Peer(0, 7, msgspec.msgpack.encode(msgspec.structs.replace(endpoint, **fields)))

    assert reader.transport.reaches(owner.peer)
    assert not reader.transport.reaches(with_card(host=b""))
    assert not reader.transport.reaches(with_card(bus_id="0000:63:00.0")), "a GPU that is not seen here"
    assert not reader.transport.reaches(Peer(0, 7, b"\xc1"))
    owner.cuda.gpus.sees_peers = False
    assert not reader.transport.reaches(owner.peer)
    assert owner.transport.reaches(owner.peer), "the same GPU is always reached"


# ---- CUDA itself ---------------------------------------------------------------------------------------


DRIVER: Driver | None = find_driver()
needs_gpu = pytest.mark.skipif(
    DRIVER is None, reason="no GPU, or no cupy (`dalsegno[gpu]`): not tried on hardware"
)


@needs_gpu
def test_cuda_gives_memory_events_and_handles() -> None:
    assert DRIVER is not None
    arena = Arena(MB, backing.anonymous)
    own = DeviceArena(arena, DRIVER, device=DRIVER.getDevice(), total_bytes=MB)
    stream = DRIVER.streamCreateWithFlags(1)
    at, slot = own.allocate(6)
    there, back = np.frombuffer(b"tensor", np.uint8).copy(), np.zeros(6, np.uint8)
    DRIVER.memcpyAsync(slot.pointer, there.ctypes.data, 6, 1, stream)
    own.written(at, stream)
    DRIVER.memcpyAsync(back.ctypes.data, own.look(at, stream).pointer, 6, 2, stream)
    DRIVER.streamSynchronize(stream)

    assert back.tobytes() == b"tensor"
    assert at.segment == DEVICE_SEGMENT
    assert len(own.handle) == 64
    own.close()
    arena.close()
