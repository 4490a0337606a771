"""Who may let something new begin looks at the log's room once a second, and says so when it changes."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from shared.log.capacity import Room, room_in, told
from shared.log.port import Log, LogFullError, LogState, LogUnavailableError

_LOGGER: Final = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
ANSWER_S: Final = 2.0
"""How long the log may take to say how it is: milliseconds, unless it hangs, has no leader, or is busy."""
_SILENT: Final = "the log does not answer"
_STALLED: Final = "the log acks nothing of what it is given (is its disk full?)"


class RoomWatch:
    """The room in one log, as it was found last.

    Args:
        log: whose it is.
        on_change: called on the event loop when something new may begin again, or may no more.
    """

    def __init__(self, log: Log, on_change: Callable[[], None] | None = None) -> None:
        self._log = log
        self._on_change = on_change
        self._state: LogState | None = None
        self._is_silent = False
        self._said = ""
        self._said_room = Room.FREE

    @property
    def room(self) -> Room:
        """What may be written; nothing is known of a log that was not reached yet, so it counts as free."""
        if self._state is None:
            return Room.FULL if self._log.is_full else Room.FREE
        return room_in(self._state, refuses=self._log.is_full)

    @property
    def answers(self) -> bool:
        """Whether it did when it was asked last."""
        return not self._is_silent

    @property
    def words(self) -> str:
        """Why nothing new may begin; nothing while it may."""
        if self._is_silent:
            return _SILENT
        if self._log.is_stalled:
            return _STALLED
        if self.room is Room.FREE:
            return ""
        return told(self.room, self._state) if self._state is not None else f"the log is {self.room}"

    def check(self) -> None:
        """Let something new begin.

        Raises:
            LogFullError: there is no room for it.
            LogUnavailableError: the log stores nothing now, or does not answer.
        """
        words = self.words
        if words in {_SILENT, _STALLED}:
            raise LogUnavailableError(f"{words}; the request was not taken, try again")
        if words:
            raise LogFullError(f"{words}: nothing new is taken, what is under way goes on; try again later")

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Look once."""
        try:
            async with asyncio.timeout(ANSWER_S):
                self._state = await self._log.state()
            self._is_silent = False
        except (TimeoutError, LogUnavailableError):
            self._is_silent = True
        self._say()
        before, self._said = self._said, self.words
        if self._on_change is not None and bool(before) is not bool(self._said):
            self._on_change()

    def _say(self) -> None:
        """Once for each change; that the log does not answer is said by who talks to it."""
        before, self._said_room = self._said_room, self.room
        if self._said_room is before:
            return
        if self._said_room is Room.FREE:
            _LOGGER.info("the log has room again")
        else:
            _LOGGER.warning(
                "%s: nothing new is taken, what is under way goes on; raise nats.max_bytes, make room on its "
                "disk, or wait until old events leave it",
                self.words,
            )
