"""Anchoring: records each seal's chain value at places outside of the log.

A chain value covers all records before it, so only the newest one is sent: at most one a second to each
place, repeated until it is accepted. Nothing waits for it, except a conductor that stops, for a moment.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from shared.sealing.anchors import Anchor
from shared.sealing.seals import SignedSeal
from shared.sealing.segment import LogIdentity

_LOGGER: Final = logging.getLogger(__name__)

EVERY_S: Final = 1.0
_MAX_PAUSE_S: Final = 60.0


class AnchorError(Exception):
    """A place did not accept an anchor; the message says why."""


class Place(Protocol):
    """A place for anchors."""

    @property
    def name(self) -> str:
        """The name in log lines, without secrets."""
        ...

    async def put(self, anchor: Anchor) -> None:
        """Store an anchor durably.

        Raises:
            AnchorError: it is not stored; a later call may succeed.
        """
        ...

    def last(self, stream: str, created_ns: int) -> Anchor | None:
        """Return the last anchor of a log, if this place can be read."""
        ...


class Anchoring:
    """The newest anchor, and the places that it is sent to."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._senders = [_Sender(place) for place in places]

    def put(self, anchor: Anchor) -> None:
        """Send an anchor soon, in place of earlier ones that were not sent yet."""
        for sender in self._senders:
            sender.put(anchor)

    async def run(self) -> None:
        """Send anchors until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for sender in self._senders:
                tasks.create_task(sender.run())

    async def flush(self) -> None:
        """Send what was not sent yet, once."""
        async with asyncio.TaskGroup() as tasks:
            for sender in self._senders:
                tasks.create_task(sender.flush())

    def check(self, log: LogIdentity, last: SignedSeal | None) -> None:
        """Compare the last seal of the log with the last anchors, and report an error if it is older."""
        for sender in self._senders:
            anchor = sender.place.last(log.stream, log.created_ns)
            if anchor is None:
                continue
            found = last.seal.last_seq if last is not None else 0
            is_same = last is None or found != anchor.last_seq or last.seal.chain.hex() == anchor.chain
            if found < anchor.last_seq or not is_same:
                _LOGGER.error(
                    "the log is not the one that was anchored: %s names a seal of the records up to %d, the "
                    "log's last seal covers %d; `dalsegno verify` shows the difference",
                    sender.place.name,
                    anchor.last_seq,
                    found,
                )


class _Sender:
    """Sends the newest anchor to one place."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._next: Anchor | None = None
        self._is_new = asyncio.Event()
        self._failed = False
        self._lock = asyncio.Lock()

    def put(self, anchor: Anchor) -> None:
        self._next = anchor
        self._is_new.set()

    async def run(self) -> None:
        pause_s = EVERY_S
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            pause_s = EVERY_S if await self.flush() else min(2 * pause_s, _MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def flush(self) -> bool:
        """Send the newest anchor; return whether nothing is left to send."""
        async with self._lock:
            if self._next is None:
                return True
            anchor, self._next = self._next, None
            try:
                await self.place.put(anchor)
            except AnchorError as error:
                self._keep(anchor, error)
                return False
            except asyncio.CancelledError:
                self._restore(anchor)
                raise
        if self._failed:
            _LOGGER.info("anchors are stored at %s again", self.place.name)
        self._failed = False
        return True

    def _restore(self, anchor: Anchor) -> None:
        """Send an anchor again, unless there is a newer one."""
        self.put(self._next or anchor)

    def _keep(self, anchor: Anchor, error: AnchorError) -> None:
        self._restore(anchor)
        level = logging.DEBUG if self._failed else logging.ERROR
        self._failed = True
        _LOGGER.log(level, "an anchor is not stored at %s, and is sent again: %s", self.place.name, error)
