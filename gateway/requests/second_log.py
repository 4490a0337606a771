"""A second connection to the log, for events without which requests are served as well.

A server whose configuration is of an earlier version may deny their subjects, and a denied publish ends the
connection. So they do not go over the connection that serves requests (ADR 80).
"""

from shared.log.port import Log, LogUnavailableError


class SecondLog:
    """The connection, while there is one."""

    def __init__(self) -> None:
        self._log: Log | None = None

    @property
    def log(self) -> Log:
        """The connection.

        Raises:
            LogUnavailableError: there is none.
        """
        if self._log is None:
            raise LogUnavailableError(
                "this gateway has no second connection to the log, for batches and conversations; try again"
            )
        return self._log

    @property
    def is_connected(self) -> bool:
        return self._log is not None

    def connected(self, log: Log | None) -> None:
        """Set the connection; None after its end."""
        self._log = log
