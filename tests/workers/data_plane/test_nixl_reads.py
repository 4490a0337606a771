"""What is read over NIXL and when, with an agent that moves bytes by hand: no network, no clock."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from shared.errors import TensorGone
from tests.workers.data_plane.sources import FreshMemory
from workers.data_plane.memory import backing
from workers.data_plane.memory.arena import Arena
from workers.data_plane.port import Bytes
from workers.data_plane.transport import Locator, TransportError
from workers.data_plane.transports.nixl_reads import HERE, LEAVING, NixlEndpoint, Reads


class Lost(Exception):  # noqa: N818 - NIXL's own are called otherwise, too
    """What this agent raises."""


@dataclass
class Moving:
    here: tuple[int, int]
    there: tuple[int, int]
    state: str = "PROC"


@dataclass
class HandAgent:
    """Its transfers go on when the test says so."""

    said: list[bytes] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    moving: list[Moving] = field(default_factory=list)
    released: list[Moving] = field(default_factory=list)
    is_lost: bool = False

    def finish(self, state: str = "DONE") -> None:
        """The transfer under way has come to its end."""
        moving = self.moving[-1]
        if state == "DONE":
            (to, nbytes), (source, _) = moving.here, moving.there
            ctypes.memmove(to, source, nbytes)
        moving.state = state

    def add_remote_agent(self, metadata: bytes) -> str | bytes:
        self.known.append(metadata.decode())
        return metadata

    def remove_remote_agent(self, agent: str) -> None:
        self.known.remove(agent)

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any:
        [(address, nbytes, _)] = descs
        return address, nbytes

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: str, notif_msg: bytes) -> Any:
        assert operation == "READ"
        assert agent in self.known
        return Moving(local, remote)

    def transfer(self, handle: Any) -> str:
        self.moving.append(handle)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: Any) -> str:
        if self.is_lost:
            handle.state = "ERR"
            raise Lost("the peer is gone")
        return str(handle.state)

    def release_xfer_handle(self, handle: Any) -> None:
        assert handle.state != "PROC", "NIXL does not let go of what is under way"
        self.released.append(handle)

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        self.said.append(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


class World:
    """An owner's arena, and somebody who reads it by hand."""

    def __init__(self) -> None:
        self.arena = Arena(1 << 20, backing.anonymous)
        layout = self.arena.layout
        base = np.frombuffer(self.arena.backing.memory, np.uint8).ctypes.data
        self.endpoint = NixlEndpoint(b"owner", base, layout.epoch, layout.length, layout.payload_at)
        self.agent = HandAgent()
        self.now = 0.0
        self.reads = Reads(self.agent, FreshMemory(), (Lost,), lambda: self.now)
        self.found: list[Bytes] = []

    def put(self, data: bytes) -> Locator:
        at = self.arena.allocate(len(data))
        self.arena.look(at, writable=True)[:] = np.frombuffer(data, np.uint8)
        return at

    def read(self, at: Locator) -> Any:
        return self.reads.read(self.endpoint, at, self.found)


@pytest.fixture
def world() -> World:
    return World()


def test_the_payload_is_read_and_then_its_generation(world: World) -> None:
    at = world.put(b"tensor")
    reading = world.read(at)
    next(reading)
    world.agent.finish()
    next(reading)
    assert world.found == []
    world.agent.finish()

    assert list(reading) == []
    assert world.found[0].tobytes() == b"tensor"
    assert not world.found[0].flags.writeable
    assert [nbytes for _, nbytes in (moving.there for moving in world.agent.moving)] == [6, 16]
    assert world.agent.said == [HERE, LEAVING]
    assert world.agent.released == world.agent.moving


def test_a_slot_that_was_freed_in_between_is_gone(world: World) -> None:
    at = world.put(b"tensor")
    reading = world.read(at)
    next(reading)
    world.agent.finish()
    next(reading)
    world.arena.free(at.generation)
    world.agent.finish()

    with pytest.raises(TensorGone, match="was freed"):
        next(reading)
    assert world.found == []


@pytest.mark.parametrize("wrong", [Locator(1, 8192, 6, 1), Locator(0, 1, 6, 1), Locator(0, 8192, 1 << 40, 1)])
def test_what_is_outside_is_not_asked_for(wrong: Locator, world: World) -> None:
    with pytest.raises(TensorGone, match="there is no slot"):
        next(world.read(wrong))
    assert world.agent.moving == []


def test_memory_of_a_transfer_that_does_not_end_is_kept_until_it_does(world: World) -> None:
    reading = world.read(world.put(b"tensor"))
    next(reading)
    world.now = 5.1

    with pytest.raises(TransportError, match="6 bytes did not come in 5 s"):
        next(reading)
    world.reads.reap()
    [(_, memory)] = world.reads.strays
    world.agent.finish()
    assert memory.tobytes() == b"tensor", "it came late, and into nobody else's memory"
    world.reads.reap()
    assert world.reads.strays == []
    assert world.agent.released == world.agent.moving


def test_a_read_that_is_given_up_keeps_its_memory_too(world: World) -> None:
    reading = world.read(world.put(b"tensor"))
    next(reading)
    reading.close()

    assert len(world.reads.strays) == 1


def test_a_lost_peer_is_told_and_met_anew(world: World) -> None:
    at = world.put(b"tensor")
    reading = world.read(at)
    next(reading)
    world.agent.is_lost = True
    with pytest.raises(TransportError, match="Lost: the peer is gone"):
        next(reading)

    assert world.agent.known == []
    world.agent.is_lost = False
    next(world.read(at))
    assert world.agent.known == ["owner"]


def test_a_transfer_that_ends_badly_is_told(world: World) -> None:
    reading = world.read(world.put(b"tensor"))
    next(reading)
    world.agent.finish("ERR")

    with pytest.raises(TransportError, match="ended a transfer of 6 bytes as ERR"):
        next(reading)


def test_a_reader_says_that_it_is_still_there_and_leaves_behind_its_last_read(world: World) -> None:
    first, second = world.read(world.put(b"first")), world.read(world.put(b"second"))
    next(first)
    world.agent.finish()
    next(first)
    next(second)
    assert world.agent.said == [HERE]
    world.now = 1.1
    next(second)
    assert world.agent.said == [HERE, HERE]
    world.agent.finish()  # of the second one's payload
    next(second)
    world.agent.finish()
    assert list(second) == []
    assert world.agent.said == [HERE, HERE]
    world.agent.moving[1].state = "DONE"

    with pytest.raises(TensorGone):  # its generation was never moved
        next(first)
    assert world.agent.said == [HERE, HERE, LEAVING]
