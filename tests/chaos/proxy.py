"""A TCP proxy, mostly between one role and NATS: it cuts, stalls, slows and heals, and reports what passes.

A cut resets all connections and every new one. A stall keeps connections and forwards nothing, like a network
that loses every packet; stalled data continues afterwards. Slowed, it forwards one piece at a time in each
direction, with a delay.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Final, Self

from tests.chaos.ledger import Account, Ledger

_PIECE_BYTES: Final = 1 << 16


class Moment(Enum):
    """A moment of an event on its way to the log."""

    FORWARDING = "forwarding"
    FORWARDED = "forwarded"
    ACKING = "acking"


class Proxy:
    """One role's connection to NATS, to each of its servers.

    Attributes:
        ports: the listening port by server; they do not change.
        watch: called at every moment of an event (or an ack) that passes, before or after it does.
        ledger: notes all acks.
    """

    def __init__(self, *to_ports: int, ledger: Ledger | None = None) -> None:
        self.ports: list[int] = []
        self.ledger = ledger or Ledger()
        self.watch: Callable[[Moment], None] = lambda _: None
        self._to_ports = to_ports
        self._servers: list[asyncio.Server] = []
        self._flows = asyncio.Event()
        self._flows.set()
        self._is_cut = False
        self._delay_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        for port in self._to_ports:
            server = await asyncio.start_server(partial(self._serve, port), "127.0.0.1", 0)
            self._servers.append(server)
            self.ports.append(server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        self.cut()
        for server in self._servers:
            await server.wait_closed()

    @property
    def port(self) -> int:
        """The listening port for the only server."""
        [port] = self.ports
        return port

    @property
    def url(self) -> str:
        """The URL for the role."""
        return ",".join(f"nats://127.0.0.1:{port}" for port in self.ports)

    def cut(self) -> None:
        """Reset every connection, and every new one, until `heal`."""
        self._is_cut = True
        self._flows.set()  # who waits here is to find its connection gone
        for writer in self._writers:
            _reset(writer)

    def stall(self) -> None:
        """Forward nothing until `heal`."""
        self._flows.clear()

    def slow(self, delay_s: float) -> None:
        """Delay every piece until `heal`."""
        self._delay_s = delay_s

    def heal(self) -> None:
        """Forward everything."""
        self._is_cut = False
        self._delay_s = 0.0
        self._flows.set()

    async def _serve(self, to_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            _reset(writer)
            return
        there: asyncio.StreamWriter | None = None
        self._writers.add(writer)
        try:
            answers, there = await asyncio.open_connection("127.0.0.1", to_port)
            self._writers.add(there)
            async with asyncio.TaskGroup() as tasks:
                account = self.ledger.connection()
                tasks.create_task(self._pump(reader, there, partial(self._up, account)))
                tasks.create_task(self._pump(answers, writer, partial(self._down, account)))
        except* (OSError, ConnectionEndedError):
            pass
        finally:
            for one in (writer, there):
                if one is not None:
                    self._writers.discard(one)
                    _reset(one)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passing: Callable[[bytes, asyncio.StreamWriter], None],
    ) -> None:
        while data := await reader.read(_PIECE_BYTES):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await self._flows.wait()
            passing(data, writer)
            await writer.drain()
        raise ConnectionEndedError

    def _up(self, account: Account, data: bytes, writer: asyncio.StreamWriter) -> None:
        published = account.up(data)
        self._tell(Moment.FORWARDING, published)
        writer.write(data)
        self._tell(Moment.FORWARDED, published)

    def _down(self, account: Account, data: bytes, writer: asyncio.StreamWriter) -> None:
        self._tell(Moment.ACKING, account.down(data))
        writer.write(data)

    def _tell(self, moment: Moment, times: int) -> None:
        for _ in range(times):
            self.watch(moment)


class ConnectionEndedError(Exception):
    """One side closed, so the other is closed, too."""


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset: data in flight is lost, as when a machine fails."""
    with contextlib.suppress(OSError):
        raw = writer.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()
