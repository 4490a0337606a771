"""Creation and update of a deployment's streams, the log's and that of media; verification of durability.

The verified durability is stored in the stream's metadata, where every role reads it.
"""

from collections.abc import Awaitable, Callable

from shared.log.nats import api, monitoring
from shared.log.nats.connection import NatsConnection
from shared.log.nats.credentials import Credentials
from shared.log.nats.durability import (
    CLUSTER_NEEDS,
    METADATA,
    REPLICAS,
    StreamPolicy,
    check_cluster,
    check_stream,
    check_synced,
)
from shared.log.port import Durability, DurabilityError, LogState, LogUnavailableError
from shared.subjects import Subjects


class Provisioner:
    """A permanent connection that manages the stream of one deployment.

    Args:
        url: the servers.
        subjects: the deployment's subjects.
        connected: called on the event loop after each reconnect.
    """

    def __init__(
        self, url: str, subjects: Subjects, connected: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._connection = NatsConnection(url, connected=connected)
        self._subjects = subjects

    async def open(self, credentials: Credentials, *, timeout_s: float) -> None:
        """Connect.

        Raises:
            LogUnavailableError: no server answers in time.
        """
        await self._connection.open(credentials=credentials, name="dalsegno-provision", timeout_s=timeout_s)

    async def state(self) -> LogState | None:
        """Return the state of the log; None if the server has no such stream.

        Raises:
            LogUnavailableError: the server does not answer, or reports another error.
        """
        return await self._state_of(self._subjects.stream)

    async def media_state(self) -> LogState | None:
        """Return the state of the stream of media, by the same rules."""
        return await self._state_of(self._subjects.media_stream)

    async def _state_of(self, stream: str) -> LogState | None:
        info = await self._connection.call_api(f"$JS.API.STREAM.INFO.{stream}", b"", api.StreamInfo)
        if info.error is None:
            return info.log_state()
        if info.error.err_code == api.STREAM_NOT_FOUND:
            return None
        raise LogUnavailableError(f"{self._connection.label}: {info.error.description}")

    async def provide(self, policy: StreamPolicy) -> None:
        """Create or update both streams.

        Raises:
            LogUnavailableError: the server refuses, or does not answer.
            DurabilityError: the server does not provide the required durability.
        """
        await provide(self._connection, self._subjects, policy)

    async def close(self) -> None:
        await self._connection.close()


async def provide(connection: NatsConnection, subjects: Subjects, policy: StreamPolicy) -> None:
    """Create or update both streams.

    Raises:
        LogUnavailableError: the server refuses, or does not answer.
        DurabilityError: the server does not provide the required durability.
    """
    durability = policy.durability
    if durability == "host" and not policy.syncs_always:
        info = await _make(connection, subjects, policy, "process")  # until `host` is verified
        servers = [info.cluster.leader, *(one.name for one in info.cluster.replicas)] if info.cluster else []
        reports = [await monitoring.read(monitor) for monitor in policy.monitors]
        check_synced(servers or [connection.server_name], reports, connection.label)
    info = await _make(connection, subjects, policy, durability)
    check_stream(durability, info, connection.label)
    if info.config.max_consumers != policy.max_consumers:
        raise LogUnavailableError(
            f"{connection.label}: expected max_consumers {policy.max_consumers} for the stream "
            f"{subjects.stream!r}, found {info.config.max_consumers}: set nats.max_consumers to that, or "
            "raise the limit of the server's account"
        )
    if durability == "cluster" and not check_cluster(info, connection.label):
        raise LogUnavailableError(f"{connection.label}: the stream {subjects.stream!r} has no leader yet")
    await _make_media(connection, subjects, policy)


async def _make(
    connection: NatsConnection, subjects: Subjects, policy: StreamPolicy, verified: Durability
) -> api.StreamInfo:
    """Create the stream, or update it if it exists: of several processes, one creates it."""

    def request(replicas: int) -> bytes:
        return api.stream_request(
            subjects.stream,
            subjects.logged(),
            max_bytes=policy.max_bytes,
            max_age_s=policy.max_age_s,
            max_consumers=policy.max_consumers,
            replicas=replicas,
            metadata={METADATA: verified},
        )

    return await _create_or_update(connection, subjects.stream, request, policy.durability)


async def _make_media(connection: NatsConnection, subjects: Subjects, policy: StreamPolicy) -> None:
    """Create or update the stream of media, which keeps them longer than the log keeps events."""

    def request(replicas: int) -> bytes:
        return api.media_stream_request(
            subjects.media_stream,
            subjects.media(),
            max_bytes=policy.media_limit,
            max_age_s=policy.media_max_age_s,
            replicas=replicas,
        )

    await _create_or_update(connection, subjects.media_stream, request, policy.durability)


async def _create_or_update(
    connection: NatsConnection, stream: str, request: Callable[[int], bytes], durability: Durability
) -> api.StreamInfo:
    replicas = REPLICAS[durability]
    info = await connection.call_api(f"$JS.API.STREAM.CREATE.{stream}", request(replicas), api.StreamInfo)
    if info.error is not None and info.error.err_code == api.STREAM_NAME_IN_USE:
        existing = await connection.call_api(f"$JS.API.STREAM.INFO.{stream}", b"", api.StreamInfo)
        replicas = max(replicas, existing.config.num_replicas)  # replicas are never removed
        info = await connection.call_api(f"$JS.API.STREAM.UPDATE.{stream}", request(replicas), api.StreamInfo)
    if info.error is None:
        return info
    refusal = (
        f"{connection.label} refused the stream {stream!r}: {info.error.description} "
        f"(code {info.error.err_code})"
    )
    if durability == "cluster" and info.error.err_code in {api.NO_PEERS, api.NOT_CLUSTERED}:
        raise DurabilityError(f"{refusal}; nats.durability is cluster: {CLUSTER_NEEDS}")
    if info.error.err_code == api.INSUFFICIENT_STORAGE:
        refusal += (
            "; the server adds up the limits of the log and of media: lower nats.max_bytes or "
            "media.store_bytes, or raise its max_file_store"
        )
    raise LogUnavailableError(refusal)
