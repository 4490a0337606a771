"""Making the stream of a deployment, and finding out what it gives, before it says so itself."""

from collections.abc import Awaitable, Callable

from shared.log.nats import api, monitoring
from shared.log.nats.connection import NatsConnection
from shared.log.nats.credentials import Credentials
from shared.log.nats.durability import (
    CLUSTER_NEEDS,
    METADATA,
    REPLICAS,
    StreamPolicy,
    check_group,
    check_stream,
    check_synced,
)
from shared.log.port import Durability, DurabilityError, LogState, LogUnavailableError
from shared.subjects import Subjects


class Provisioner:
    """A lasting connection of who manages the stream of one deployment.

    Args:
        url: the server's.
        subjects: the deployment's.
        connected: called on the event loop when the connection is new, though not the first time.
    """

    def __init__(
        self, url: str, subjects: Subjects, connected: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._connection = NatsConnection(url, connected=connected)
        self._subjects = subjects

    async def open(self, credentials: Credentials, *, timeout_s: float) -> None:
        """Connect.

        Raises:
            LogUnavailableError: nobody answers in time.
        """
        await self._connection.open(credentials=credentials, name="dalsegno-provision", timeout_s=timeout_s)

    async def look(self) -> LogState | None:
        """The log as it is; None where the server has no such stream.

        Raises:
            LogUnavailableError: the server does not say.
        """
        subject = f"$JS.API.STREAM.INFO.{self._subjects.stream}"
        info = await self._connection.call_api(subject, b"", api.StreamInfo)
        if info.error is None:
            return info.log_state()
        if info.error.err_code == api.STREAM_NOT_FOUND:
            return None
        raise LogUnavailableError(f"{self._connection.label}: {info.error.description}")

    async def provide(self, keeping: StreamPolicy) -> None:
        """Make the stream, or bring the one there is up to date.

        Raises:
            LogUnavailableError: the server refuses, or does not answer.
            DurabilityError: it does not give what is asked for.
        """
        await provide(self._connection, self._subjects, keeping)

    async def close(self) -> None:
        await self._connection.close()


async def provide(connection: NatsConnection, subjects: Subjects, keeping: StreamPolicy) -> None:
    """Make the stream, or bring the one there is up to date.

    Raises:
        LogUnavailableError: the server refuses, or does not answer.
        DurabilityError: it does not give what is asked for.
    """
    promise = keeping.durability
    if promise == "host" and not keeping.syncs_always:
        info = await _make(connection, subjects, keeping, "process")  # until it is known to be more
        keepers = [info.cluster.leader, *(one.name for one in info.cluster.replicas)] if info.cluster else []
        told = [await monitoring.ask(monitor) for monitor in keeping.monitors]
        check_synced(keepers or [connection.server_name], told, connection.label)
    info = await _make(connection, subjects, keeping, promise)
    check_stream(promise, info, connection.label)
    if promise == "cluster" and not check_group(info, connection.label):
        raise LogUnavailableError(f"{connection.label}: the stream {subjects.stream!r} has no leader yet")


async def _make(
    connection: NatsConnection, subjects: Subjects, keeping: StreamPolicy, promise: Durability
) -> api.StreamInfo:
    """Made first, then updated: of several at once one makes it, and the others find it there."""
    stream = subjects.stream

    def request(replicas: int) -> bytes:
        return api.stream_request(
            stream,
            subjects.logged(),
            max_bytes=keeping.max_bytes,
            max_age_s=keeping.max_age_s,
            replicas=replicas,
            metadata={METADATA: promise},
        )

    replicas = REPLICAS[keeping.durability]
    info = await connection.call_api(f"$JS.API.STREAM.CREATE.{stream}", request(replicas), api.StreamInfo)
    if info.error is not None and info.error.err_code == api.STREAM_NAME_IN_USE:
        there = await connection.call_api(f"$JS.API.STREAM.INFO.{stream}", b"", api.StreamInfo)
        replicas = max(replicas, there.config.num_replicas)  # nobody asked to take copies away
        info = await connection.call_api(f"$JS.API.STREAM.UPDATE.{stream}", request(replicas), api.StreamInfo)
    if info.error is None:
        return info
    refusal = (
        f"{connection.label} refused the stream {stream!r}: {info.error.description} "
        f"(code {info.error.err_code})"
    )
    if keeping.durability == "cluster" and info.error.err_code in {api.NO_PEERS, api.NOT_CLUSTERED}:
        raise DurabilityError(f"{refusal}; nats.durability asks for cluster: {CLUSTER_NEEDS}")
    raise LogUnavailableError(refusal)
