"""A connection for beats alone: who must be heard, whatever the log does to it, says so on one of its own.

It reads nothing and stores nothing. While the server is away beats are lost, and nobody waits.
"""

from shared.log.nats.connection import Connection
from shared.log.nats.credentials import Credentials


class BeatLine:
    """A way out for beats; made by `open_line`, and belongs to the event loop it was made in."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def beat(self, subject: str, data: bytes) -> None:
        """Tell whoever listens now."""
        self._connection.send_publish(subject, "", data, None)

    async def close(self) -> None:
        await self._connection.close()


async def open_line(url: str, *, credentials: Credentials, name: str, timeout_s: float) -> BeatLine:
    """Connect; `name` labels the connection on the server.

    Raises:
        LogUnavailableError: nobody answers within `timeout_s`, or it refuses the credentials.
    """
    connection = Connection(url)
    connection.where += ", for beats"  # beside another connection that says the same of itself
    try:
        await connection.open(credentials=credentials, name=name, timeout_s=timeout_s)
    except BaseException:
        await connection.close()
        raise
    return BeatLine(connection)
