"""A watch over the log's capacity, for the gateway (submits requests) and the conductor (admits them).

It polls the log's state once a second, logs each change, and reports when new requests have to stop or may
start again.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from shared.log.capacity import Capacity, capacity_of, describe
from shared.log.port import Log, LogFullError, LogState, LogUnavailableError

_LOGGER: Final = logging.getLogger(__name__)

POLL_EVERY_S: Final = 1.0
STATE_TIMEOUT_S: Final = 2.0
"""The time limit for the log's state: it takes milliseconds unless the log hangs, is busy or has no
leader."""
_SILENT: Final = "the log does not answer"
_STALLED: Final = "the log acks nothing that it is sent (is its disk full?)"


class CapacityWatch:
    """The capacity of one log, as of the last poll.

    Args:
        log: the log to watch.
        on_change: called on the event loop when new requests have to stop or may start again.
    """

    def __init__(self, log: Log, on_change: Callable[[], None] | None = None) -> None:
        self._log = log
        self._on_change = on_change
        self._state: LogState | None = None
        self._is_silent = False
        self._last_reason = ""
        self._logged_capacity = Capacity.FREE

    @property
    def capacity(self) -> Capacity:
        """The log's capacity. Before the first answer, it is full only if the log just refused an event."""
        if self._state is None:
            return Capacity.FULL if self._log.is_full else Capacity.FREE
        return capacity_of(self._state, refuses=self._log.is_full)

    @property
    def share(self) -> float:
        """The share of the log's maximum size that is in use, as of the last poll; 0 without a maximum."""
        if self._state is None or not self._state.max_bytes:
            return 0.0
        return self._state.bytes / self._state.max_bytes

    @property
    def is_responsive(self) -> bool:
        """True if the log answered the last poll."""
        return not self._is_silent

    @property
    def reason(self) -> str:
        """The reason why no new request may start; empty if requests may start."""
        if self._is_silent:
            return _SILENT
        if self._log.is_stalled:
            return _STALLED
        if self.capacity is Capacity.FREE:
            return ""
        if self._state is None:
            return f"the log is {self.capacity}"
        return describe(self.capacity, self._state)

    def require_capacity(self) -> None:
        """Return if a new request may start.

        Raises:
            LogFullError: the log has too little capacity left.
            LogUnavailableError: the log stores nothing now, or does not answer.
        """
        reason = self.reason
        if reason in {_SILENT, _STALLED}:
            raise LogUnavailableError(f"{reason}; the request was not accepted, try again")
        if reason:
            raise LogFullError(
                f"{reason}: no new requests are accepted, running requests continue; try again later"
            )

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_EVERY_S)

    async def poll(self) -> None:
        """Read the log's state once, and report a change."""
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                self._state = await self._log.state()
            self._is_silent = False
        except (TimeoutError, LogUnavailableError):
            self._is_silent = True
        self._log_change()
        before, self._last_reason = self._last_reason, self.reason
        if self._on_change is not None and bool(before) is not bool(self._last_reason):
            self._on_change()

    def _log_change(self) -> None:
        """Log each change of the capacity. The log's own client logs that it does not answer."""
        before, self._logged_capacity = self._logged_capacity, self.capacity
        if self._logged_capacity is before:
            return
        if self._logged_capacity is Capacity.FREE:
            _LOGGER.info("the log has capacity again")
        else:
            _LOGGER.warning(
                "%s: no new requests are accepted, running requests continue; raise nats.max_bytes, free "
                "space on its disk, or wait for old events to expire",
                self.reason,
            )
