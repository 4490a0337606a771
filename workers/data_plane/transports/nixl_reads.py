"""Reads by NIXL, one after the other or many at once, on the one thread that owns the agent.

    READ the payload ──> READ the slot's generation ──> it matches: the tensor; otherwise TensorGone

The two reads are separate transfers, because NIXL guarantees no order within one. A generation that matches
after the payload has arrived was valid throughout.

A read is a generator that yields while it waits, so nothing here sleeps, and tests need no network. Memory
that a transfer may still write to is not reused: a transfer that exceeds its time limit is kept, together
with its destination, until NIXL reports its end.

Without a network card that reads by itself (UCX over TCP), the peer's processor serves the read whenever the
peer polls. So a reader announces itself, and signs off.
"""

import contextlib
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from shared.errors import TensorGone
from workers.data_plane.memory.layout import PAIR, PAIR_BYTES, Layout
from workers.data_plane.port import Bytes
from workers.data_plane.transport import SEGMENT, Locator, TransportError
from workers.data_plane.transports.fetch_buffers import FetchBuffers

HERE: Final = b"+"
LEAVING: Final = b"-"
_ANNOUNCE_S: Final = 1.0
_STALLED_S: Final = 5.0
_SLOWEST_BYTES_S: Final = 50_000_000
"""The assumed minimum speed: the time limit of a read is its bytes at this speed, plus `_STALLED_S`."""

Reading: TypeAlias = Generator[None, None, None]


class Agent(Protocol):
    """The used part of `nixl_agent`; it raises the `errors` of `Reads`."""

    def add_remote_agent(self, metadata: bytes) -> str | bytes: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any: ...
    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str, notif_msg: bytes
    ) -> Any: ...
    def transfer(self, handle: Any) -> str: ...
    def check_xfer_state(self, handle: Any) -> str: ...
    def release_xfer_handle(self, handle: Any) -> None: ...
    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...


class NixlEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """The endpoint of an arena that a network card reads.

    Attributes:
        metadata: the agent's, in NIXL's format.
        base: the address of the arena in its owner's process.
        epoch, length, payload_at: its layout (`layout.Layout`).
        network: the identity of the loopback it is reached by; empty for a real network.
    """

    metadata: bytes
    base: int
    epoch: int
    length: int
    payload_at: int
    network: str = ""

    @property
    def layout(self) -> Layout:
        return Layout(self.epoch, self.length, self.payload_at)


@dataclass(slots=True)
class _Remote:
    name: str
    endpoint: NixlEndpoint
    reads: int = 0
    announced: float = -math.inf


@dataclass(slots=True)
class Reads:
    """The peers of one agent, and the reads from them.

    Attributes:
        errors: the exceptions that the agent raises for a failed peer or transfer.
        strays: transfers that exceeded their time limit, and the memory they may still write to.
    """

    agent: Agent
    buffers: FetchBuffers
    errors: tuple[type[Exception], ...]
    clock: Callable[[], float] = time.monotonic
    strays: list[tuple[Any, Bytes]] = field(default_factory=list)
    _remotes: dict[bytes, _Remote] = field(default_factory=dict)

    def read(self, endpoint: NixlEndpoint, at: Locator, found: list[Bytes]) -> Reading:
        """Read a tensor; yields while waiting, and appends the bytes to `found`.

        Raises:
            TensorGone: there is no such slot (any more).
            TransportError: the peer is not reached, or too slow.
        """
        layout = endpoint.layout
        is_in_arena = layout.begins_tensor(at.offset) and at.offset + at.nbytes <= layout.length
        if at.segment != SEGMENT or not is_in_arena:
            raise TensorGone(f"there is no slot of {at.nbytes} bytes at {at.offset}, segment {at.segment}")
        pair_at = -(-at.nbytes // 8) * 8
        memory = self.buffers.take(pair_at + PAIR_BYTES)
        try:
            remote = self._meet(endpoint)
            remote.reads += 1
            try:
                if at.nbytes:
                    yield from self._transfer(remote, memory[: at.nbytes], at.offset)
                yield from self._transfer(remote, memory[pair_at:], layout.pair_at(at.offset))
            finally:
                remote.reads -= 1
            if not remote.reads:
                remote.announced = -math.inf
                self.agent.send_notif(remote.name, LEAVING)
        except self.errors as error:
            self.forget(endpoint)
            raise TransportError(f"{type(error).__name__}: {error}") from error
        generation, nbytes = PAIR.unpack(memory[pair_at:].tobytes())
        if (generation, nbytes) != (at.generation, at.nbytes):
            raise TensorGone(f"slot {at.generation} at {at.offset} was freed, or never was")
        memory.flags.writeable = False
        found.append(memory[: at.nbytes])

    def forget(self, endpoint: NixlEndpoint) -> None:
        """Release a peer; the next read adds it again."""
        remote = self._remotes.pop(endpoint.metadata, None)
        if remote is not None:
            with contextlib.suppress(*self.errors):  # released already
                self.agent.remove_remote_agent(remote.name)

    def reap(self) -> None:
        """Release strays that have ended."""
        self.strays = [stray for stray in self.strays if not self._is_over(stray[0])]

    # ---- one transfer ----------------------------------------------------------------------------------

    def _transfer(self, remote: _Remote, into: Bytes, offset: int) -> Generator[None, None, None]:
        until = self.clock() + _STALLED_S + into.nbytes / _SLOWEST_BYTES_S
        self._announce(remote)
        here = self.agent.get_xfer_descs([(into.ctypes.data, into.nbytes, 0)], "DRAM")
        there = self.agent.get_xfer_descs([(remote.endpoint.base + offset, into.nbytes, 0)], "DRAM")
        handle = self.agent.initialize_xfer("READ", here, there, remote.name, b"")
        is_over = False
        try:
            state = self.agent.transfer(handle)
            while state == "PROC":
                yield
                if self.clock() > until:
                    raise TransportError(f"{into.nbytes} bytes did not come in {_STALLED_S:g} s and more")
                self._announce(remote)
                state = self.agent.check_xfer_state(handle)
            is_over = True
        except self.errors:
            is_over = True
            raise
        finally:
            if is_over:
                self._release(handle)
            else:
                self.strays.append((handle, into))
        if state != "DONE":
            raise TransportError(f"NIXL ended a transfer of {into.nbytes} bytes as {state}")

    def _announce(self, remote: _Remote) -> None:
        now = self.clock()
        if now - remote.announced > _ANNOUNCE_S:
            self.agent.send_notif(remote.name, HERE)
            remote.announced = now

    def _is_over(self, handle: Any) -> bool:
        try:
            if self.agent.check_xfer_state(handle) == "PROC":
                return False
        except self.errors:
            pass  # ended with an error
        self._release(handle)
        return True

    def _release(self, handle: Any) -> None:
        with contextlib.suppress(*self.errors):  # NIXL frees the rest with the agent
            self.agent.release_xfer_handle(handle)

    def _meet(self, endpoint: NixlEndpoint) -> _Remote:
        if endpoint.metadata not in self._remotes:
            name = self.agent.add_remote_agent(endpoint.metadata)
            self._remotes[endpoint.metadata] = _Remote(
                name.decode() if isinstance(name, bytes) else name, endpoint
            )
        return self._remotes[endpoint.metadata]
