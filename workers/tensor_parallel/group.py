"""How the members of a shared copy find one another, and are told that one is gone (ADR 17).

    follower   listens, and says where in its `worker.joined`, with a secret
    leader     reads that, connects, shows the secret, and says who is who   ── one `Connection` to each
    all        meet at the leader's address, for the sums                    ──
    `workers.kv_engine.parallel.collectives`

A leader waits for its followers as long as it takes: they may be starting. Who was found and does not answer
as a member, one of an earlier copy that is about to end, is passed over for its next life.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import msgspec

from configs.deployment import ConfigError, DeploymentConfig
from shared.events import MalformedEventError, WorkerJoined, decode
from shared.ids import Rank
from shared.log.port import Log
from shared.subjects import Subjects
from workers.kv_engine.parallel.connection import Connection, GroupLostError, probe
from workers.kv_engine.parallel.rendezvous import Rendezvous

_LOGGER: Final = logging.getLogger(__name__)

ENDPOINT_NAME: Final = "group"
"""What the endpoint is called in a follower's `worker.joined`."""
GREETING_S: Final = 5.0
"""Who connects says who it is, and is answered, within this time."""
AGAIN_S: Final = 1.0
"""A follower that does not answer is tried again after this time, and at once when it joins again."""
_SAY_AFTER_S: Final = 5.0
_LOOK_AGAIN_S: Final = 0.2
_WELCOME: Final = b"welcome"
_ALL_CAME: Final = b"all came"


class FollowerEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a follower waits for its leader, and what that has to show."""

    address: str
    port: int
    secret: bytes


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader says to a follower first.

    Attributes:
        secret: of the follower's endpoint.
        index: which member the follower is, of `size`.
        digest: of the leader's configuration, as far as decisions depend on it.
        address, port, key: where the members meet for their sums (`Rendezvous`).
    """

    secret: bytes
    index: int
    size: int
    digest: str
    address: str
    port: int
    key: str


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """A copy as one of its members has it.

    Attributes:
        meeting: where all its members connect with one another.
        lines: of a leader, to each follower in order; of a follower, to its leader.
    """

    meeting: Rendezvous
    lines: Sequence[Connection]

    async def watch(self) -> None:
        """Wait until a member is gone, while others load or nothing is computed.

        Raises:
            GroupLostError: one is.
        """
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[Connection] = loop.create_future()

        def look(line: Connection) -> None:
            if gone.done():
                return
            if line.has_ended():
                gone.set_result(line)
                return
            # It has said something that somebody else is going to read: look again when that may be done.
            loop.remove_reader(line.fileno())
            loop.call_later(_LOOK_AGAIN_S, look_out, line)

        def look_out(line: Connection) -> None:
            if not gone.done():
                loop.add_reader(line.fileno(), look, line)

        for line in self.lines:
            look_out(line)
        try:
            lost = await gone
        finally:
            gone.cancel()
            for line in self.lines:
                loop.remove_reader(line.fileno())
        raise GroupLostError(f"{lost.who} is gone (the connection is closed); all of its copy begin anew")

    def close(self) -> None:
        for line in self.lines:
            line.close()


# ---- the follower's side -----------------------------------------------------------------------------


@dataclass(slots=True)
class LeaderListener:
    """Where a follower waits for its leader."""

    config: DeploymentConfig
    rank: Rank
    _listener: socket.socket = field(init=False)
    _secret: bytes = field(init=False)

    def __post_init__(self) -> None:
        """Begin to listen.

        Raises:
            ConfigError: the address is not this machine's.
        """
        self._listener = _listening(self.config, self.rank)
        self._secret = secrets.token_bytes(16)

    @property
    def endpoint(self) -> bytes:
        address, port = self._listener.getsockname()[:2]
        return msgspec.msgpack.encode(FollowerEndpoint(address=address, port=port, secret=self._secret))

    async def leader(self) -> GroupMembership:
        """Wait for the leader; whoever else comes is sent away.

        Raises:
            ConfigError: the leader has another configuration.
            GroupLostError: the leader came, and went before all other followers had come.
        """
        while True:
            connection, peer = await asyncio.get_running_loop().sock_accept(self._listener)
            try:
                async with asyncio.timeout(GREETING_S):
                    greeting = msgspec.msgpack.decode(await _hear(connection), type=Greeting)
                if hmac.compare_digest(greeting.secret, self._secret):
                    self.close()
                    return await self._follow(connection, greeting)
                why = "it does not know the secret"
            except (OSError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
                why = str(error)
            except BaseException:
                connection.close()
                raise
            connection.close()
            _LOGGER.warning("rank %d sent %s away, which is not its leader: %s", self.rank, peer[0], why)

    async def _follow(self, connection: socket.socket, greeting: Greeting) -> GroupMembership:
        """The copy, once all have come to it."""
        copy = self.config.copy_of(self.rank)
        leader = f"rank {copy[0]}, which leads,"
        if (greeting.digest, greeting.index) != (_digest(self.config), copy.index(self.rank)):
            raise ConfigError(
                f"rank {self.rank} and {leader} have different configurations: expected the same model, "
                "node_groups and model_kwargs on all members of a copy"
            )
        try:
            await _say(connection, _WELCOME)
            probe(connection)
            await _hear(connection)  # that all have come, however long that takes
        except (OSError, ValueError) as error:
            raise GroupLostError(f"{leader} is gone before all others had come") from error
        meeting = Rendezvous(
            index=greeting.index,
            size=greeting.size,
            address=greeting.address,
            port=greeting.port,
            own_address=self.config.data_plane.address,
            key=greeting.key,
        )
        return GroupMembership(meeting, [Connection(connection, leader)])

    def close(self) -> None:
        self._listener.close()


# ---- the leader's side -------------------------------------------------------------------------------


async def gather(log: Log, subjects: Subjects, config: DeploymentConfig, rank: Rank) -> GroupMembership:
    """Connect with all followers of a leader, as they come; waits for them.

    Raises:
        ConfigError: the address is not this machine's.
        GroupLostError: one that had come has gone, before all others had come.
    """
    leader, *following = config.copy_of(rank)
    listener = _listening(config, leader)
    address, port = listener.getsockname()[:2]
    key = secrets.token_hex(16)
    endpoints = _FollowerEndpoints()
    connections: list[socket.socket] = []

    def greeting(endpoint: FollowerEndpoint, index: int) -> Greeting:
        return Greeting(
            secret=endpoint.secret,
            index=index,
            size=len(following) + 1,
            digest=_digest(config),
            address=address,
            port=port,
            key=key,
        )

    try:
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(endpoints.read(log, subjects), name="endpoints")
            for index, follower in enumerate(following, start=1):
                connections.append(await _connect(endpoints, follower, index, greeting))
            reading.cancel()
        for connection in connections:  # not before: who waits for the others' sums waits not for long
            await _say(connection, _ALL_CAME)
    except BaseException as error:
        for one in (listener, *connections):
            one.close()
        if isinstance(error, OSError):
            raise GroupLostError("a follower came, and went before all others had come") from error
        raise
    meeting = Rendezvous(
        index=0,
        size=len(following) + 1,
        address=address,
        port=port,
        own_address=config.data_plane.address,
        key=key,
        listener=listener,
    )
    named = zip(connections, following, strict=True)
    return GroupMembership(
        meeting, [Connection(one, f"rank {follower}, which follows,") for one, follower in named]
    )


class _FollowerEndpoints:
    """The latest endpoint of each rank, as the log is read; `news` is set when there is another."""

    def __init__(self) -> None:
        self.of: dict[int, FollowerEndpoint] = {}
        self.news = asyncio.Event()

    async def read(self, log: Log, subjects: Subjects) -> None:
        async with aclosing(log.read([subjects.worker_any()], 1)) as records:
            async for record in records:
                address = subjects.parse(record.subject)
                with contextlib.suppress(MalformedEventError, msgspec.MsgspecError):
                    event = decode(record.data)
                    if not isinstance(event, WorkerJoined) or address is None or address.rank != event.rank:
                        continue
                    if ENDPOINT_NAME in event.cards:
                        self.of[event.rank] = msgspec.msgpack.decode(
                            event.cards[ENDPOINT_NAME], type=FollowerEndpoint
                        )
                        self.news.set()


async def _connect(
    endpoints: _FollowerEndpoints,
    follower: Rank,
    index: int,
    greeting: Callable[[FollowerEndpoint, int], Greeting],
) -> socket.socket:
    """A connection to one follower, once there is one that answers."""
    waited_s, said = 0.0, False
    while True:
        endpoints.news.clear()
        endpoint = endpoints.of.get(follower)
        connection = await _greet(endpoint, greeting(endpoint, index)) if endpoint is not None else None
        if connection is not None:
            _LOGGER.info("rank %d follows", follower)
            return connection
        if waited_s >= _SAY_AFTER_S and not said:
            said = True
            _LOGGER.info("waiting for rank %d, which shares this rank's node", follower)
        waited_s += AGAIN_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                await endpoints.news.wait()


async def _greet(endpoint: FollowerEndpoint, greeting: Greeting) -> socket.socket | None:
    """A connection to a follower that took the greeting; None where nobody does."""
    family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        probe(connection)
        async with asyncio.timeout(GREETING_S):
            await asyncio.get_running_loop().sock_connect(connection, (endpoint.address, endpoint.port))
            await _say(connection, msgspec.msgpack.encode(greeting))
            if await _hear(connection) == _WELCOME:
                return connection
    except (OSError, TimeoutError, ValueError):
        pass  # of a life that is over, or not reached now
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


# ---- both --------------------------------------------------------------------------------------------


def _digest(config: DeploymentConfig) -> str:
    """Of what all members must have alike; where the checkpoint lies may be another place on each machine."""
    return msgspec.structs.replace(config, checkpoint="").digest


def _listening(config: DeploymentConfig, rank: Rank) -> socket.socket:
    address = config.data_plane.address
    try:
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"rank {rank} shares a node and cannot listen at data_plane.address {address!r}: {error.strerror}"
        ) from error
    listener.setblocking(False)
    return listener


_MOST_BYTES: Final = 4096


async def _say(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, len(data).to_bytes(2, "little") + data)


async def _hear(connection: socket.socket) -> bytes:
    """One message of a greeting.

    Raises:
        ValueError: it is none.
    """
    length = int.from_bytes(await _exactly(connection, 2), "little")
    if length > _MOST_BYTES:
        raise ValueError(f"a greeting of {length} bytes")
    return await _exactly(connection, length)


async def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data
