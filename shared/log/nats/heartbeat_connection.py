"""A separate NATS connection for heartbeats, so that the log's traffic never delays them.

It reads nothing and stores nothing. Heartbeats are lost while the server is away, and no caller waits.
"""

from shared.log.nats.connection import NatsConnection
from shared.log.nats.credentials import Credentials


class NatsHeartbeatConnection:
    """Sends heartbeats. It belongs to the event loop in which `open_heartbeat_connection` made it."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection

    async def send_heartbeat(self, subject: str, data: bytes) -> None:
        """Send a heartbeat to all current subscribers."""
        self._connection.send_publish(subject, "", data, None)

    async def close(self) -> None:
        await self._connection.close()


async def open_heartbeat_connection(
    url: str, *, credentials: Credentials, name: str, timeout_s: float
) -> NatsHeartbeatConnection:
    """Connect; `name` labels the connection on the server.

    Raises:
        LogUnavailableError: no server answers within `timeout_s`, or it refuses the credentials.
    """
    connection = NatsConnection(url)
    connection.label += ", for heartbeats"  # the process logs the same of its other connection
    try:
        await connection.open(credentials=credentials, name=name, timeout_s=timeout_s)
    except BaseException:
        await connection.close()
        raise
    return NatsHeartbeatConnection(connection)
