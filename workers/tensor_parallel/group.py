"""Tensor-parallel groups: the ranks that share one node find one another and notice a lost member (ADR 17).

    follower   listens, and publishes its endpoint and a secret in its `worker.joined`
    leader     reads the endpoint, connects, presents the secret, and assigns the member's index
    all        connect at the leader's address for collectives (`workers.kv_engine.parallel.collectives`)

The leader keeps one `Connection` to each follower, for the steps. It waits for its followers without a time
limit, because they may still be starting. A follower that does not answer as a member belongs to an earlier
group and is about to end; the leader waits for its next incarnation.
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
from shared.events import MalformedEventError, WorkerJoined
from shared.ids import Rank
from shared.log.port import Log
from shared.subject_rules import read_event
from shared.subjects import Subjects
from workers.kv_engine.parallel.connection import Connection, GroupLostError, probe
from workers.kv_engine.parallel.rendezvous import Rendezvous

_LOGGER: Final = logging.getLogger(__name__)

ENDPOINT_NAME: Final = "group"
"""The key of the follower's endpoint in its `worker.joined`."""
GREETING_S: Final = 5.0
"""The time limit of the greeting and its answer."""
RETRY_S: Final = 1.0
"""The pause before a follower that does not answer is tried again; a new endpoint is tried at once."""
_LOG_AFTER_S: Final = 5.0
_WATCH_AGAIN_S: Final = 0.2
_WELCOME: Final = b"welcome"
_ALL_CAME: Final = b"all came"


class FollowerEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The address that a follower listens at, and the secret that its leader presents."""

    address: str
    port: int
    secret: bytes


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's first message to a follower.

    Attributes:
        secret: the secret of the follower's endpoint.
        index: the follower's index in the group of `size` members.
        digest: of the part of the leader's configuration that decisions depend on.
        address, port, key: the rendezvous of the members for collectives (`Rendezvous`).
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
    """A tensor-parallel group, as seen by one member.

    Attributes:
        rendezvous: the address at which all members connect with one another.
        connections: a leader's to each follower, in order; a follower's to its leader.
    """

    rendezvous: Rendezvous
    connections: Sequence[Connection]

    async def watch(self) -> None:
        """Wait until a member is gone. Used while members load, and while no step is computed.

        Raises:
            GroupLostError: a member is gone.
        """
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[Connection] = loop.create_future()

        def on_readable(connection: Connection) -> None:
            if gone.done():
                return
            if connection.has_ended():
                gone.set_result(connection)
                return
            # Bytes have arrived that another task or thread reads: watch again when they have been read.
            loop.remove_reader(connection.fileno())
            loop.call_later(_WATCH_AGAIN_S, watch_connection, connection)

        def watch_connection(connection: Connection) -> None:
            if not gone.done():
                loop.add_reader(connection.fileno(), on_readable, connection)

        for connection in self.connections:
            watch_connection(connection)
        try:
            lost = await gone
        finally:
            gone.cancel()
            for connection in self.connections:
                loop.remove_reader(connection.fileno())
        raise GroupLostError(f"{lost.peer} is gone (the connection is closed); its whole group restarts")

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


# ---- the follower's side -----------------------------------------------------------------------------


@dataclass(slots=True)
class LeaderListener:
    """The listening socket at which a follower awaits its leader."""

    config: DeploymentConfig
    rank: Rank
    _listener: socket.socket = field(init=False)
    _secret: bytes = field(init=False)

    def __post_init__(self) -> None:
        """Start to listen.

        Raises:
            ConfigError: the address is not one of this machine.
        """
        self._listener = _listening(self.config, self.rank)
        self._secret = secrets.token_bytes(16)

    @property
    def endpoint(self) -> bytes:
        address, port = self._listener.getsockname()[:2]
        return msgspec.msgpack.encode(FollowerEndpoint(address=address, port=port, secret=self._secret))

    async def wait_for_leader(self) -> GroupMembership:
        """Accept the leader's connection and return the group; refuse all other connections.

        Raises:
            ConfigError: the leader has another configuration.
            GroupLostError: the leader left before all followers had connected.
        """
        while True:
            connection, peer = await asyncio.get_running_loop().sock_accept(self._listener)
            try:
                async with asyncio.timeout(GREETING_S):
                    greeting = msgspec.msgpack.decode(await _receive(connection), type=Greeting)
                if hmac.compare_digest(greeting.secret, self._secret):
                    self.close()
                    return await self._follow(connection, greeting)
                why = "wrong secret"
            except (OSError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
                why = str(error)
            except BaseException:
                connection.close()
                raise
            connection.close()
            _LOGGER.warning("rank %d refused a connection of %s, not its leader: %s", self.rank, peer[0], why)

    async def _follow(self, connection: socket.socket, greeting: Greeting) -> GroupMembership:
        """Return the group once all members have connected."""
        members = self.config.tp_group_of(self.rank)
        leader = f"rank {members[0]}, which leads,"
        if (greeting.digest, greeting.index) != (_digest(self.config), members.index(self.rank)):
            raise ConfigError(
                f"rank {self.rank} and {leader} have different configurations: expected the same model, "
                "node_groups and model_kwargs on all members of a group"
            )
        try:
            await _send(connection, _WELCOME)
            probe(connection)
            await _receive(connection)  # the leader says that all are connected; there is no time limit
        except (OSError, ValueError) as error:
            raise GroupLostError(f"{leader} is gone before all members had connected") from error
        rendezvous = Rendezvous(
            index=greeting.index,
            size=greeting.size,
            address=greeting.address,
            port=greeting.port,
            own_address=self.config.data_plane.address,
            key=greeting.key,
        )
        return GroupMembership(rendezvous, [Connection(connection, leader)])

    def close(self) -> None:
        self._listener.close()


# ---- the leader's side -------------------------------------------------------------------------------


async def gather(log: Log, subjects: Subjects, config: DeploymentConfig, rank: Rank) -> GroupMembership:
    """Connect a leader with all its followers, as they join; wait for all of them.

    Raises:
        ConfigError: the address is not one of this machine.
        GroupLostError: a follower left before all had connected.
    """
    leader, *following = config.tp_group_of(rank)
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
        for connection in connections:  # not earlier: collectives have a short time limit
            await _send(connection, _ALL_CAME)
    except BaseException as error:
        for one in (listener, *connections):
            one.close()
        if isinstance(error, OSError):
            raise GroupLostError("a follower left before all others had connected") from error
        raise
    rendezvous = Rendezvous(
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
        rendezvous, [Connection(one, f"rank {follower}, which follows,") for one, follower in named]
    )


class _FollowerEndpoints:
    """The latest endpoint of each rank, read from the log; `changed` is set on each new one."""

    def __init__(self) -> None:
        self.by_rank: dict[int, FollowerEndpoint] = {}
        self.changed = asyncio.Event()

    async def read(self, log: Log, subjects: Subjects) -> None:
        async with aclosing(log.read([subjects.worker_any()], 1)) as records:
            async for record in records:
                with contextlib.suppress(MalformedEventError, msgspec.MsgspecError):
                    _, event = read_event(record, subjects)
                    if not isinstance(event, WorkerJoined):
                        continue
                    if ENDPOINT_NAME in event.cards:
                        self.by_rank[event.rank] = msgspec.msgpack.decode(
                            event.cards[ENDPOINT_NAME], type=FollowerEndpoint
                        )
                        self.changed.set()


async def _connect(
    endpoints: _FollowerEndpoints,
    follower: Rank,
    index: int,
    greeting: Callable[[FollowerEndpoint, int], Greeting],
) -> socket.socket:
    """Connect with one follower; retry until it answers."""
    waited_s, is_logged = 0.0, False
    while True:
        endpoints.changed.clear()
        endpoint = endpoints.by_rank.get(follower)
        connection = await _greet(endpoint, greeting(endpoint, index)) if endpoint is not None else None
        if connection is not None:
            _LOGGER.info("rank %d follows", follower)
            return connection
        if waited_s >= _LOG_AFTER_S and not is_logged:
            is_logged = True
            _LOGGER.info("waiting for rank %d, which shares this rank's node", follower)
        waited_s += RETRY_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await endpoints.changed.wait()


async def _greet(endpoint: FollowerEndpoint, greeting: Greeting) -> socket.socket | None:
    """Return a connection to a follower that accepted the greeting; None without an answer."""
    family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        probe(connection)
        async with asyncio.timeout(GREETING_S):
            await asyncio.get_running_loop().sock_connect(connection, (endpoint.address, endpoint.port))
            await _send(connection, msgspec.msgpack.encode(greeting))
            if await _receive(connection) == _WELCOME:
                return connection
    except (OSError, TimeoutError, ValueError):
        pass  # an incarnation that has ended, or an address that is not reached now
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


# ---- both --------------------------------------------------------------------------------------------


def _digest(config: DeploymentConfig) -> str:
    """Return the digest of what all members must agree on; the checkpoint's folder may differ by machine."""
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


_MAX_BYTES: Final = 4096


async def _send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, len(data).to_bytes(2, "little") + data)


async def _receive(connection: socket.socket) -> bytes:
    """Receive one message of the greeting.

    Raises:
        ValueError: the message is too long to be one.
    """
    length = int.from_bytes(await _exactly(connection, 2), "little")
    if length > _MAX_BYTES:
        raise ValueError(f"expected a greeting of at most {_MAX_BYTES} bytes, found {length}")
    return await _exactly(connection, length)


async def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return data
