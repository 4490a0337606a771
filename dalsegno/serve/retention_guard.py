"""Keeps the log of a deployment while it runs: makes it anew where it was lost, and bounds it by its disk.

    the stream is gone       made again; every role sees that it is another log, and begins on it
    others fill the disk     the stream's bound comes down to what is left: nothing new is taken, in time
    the disk was full        the server has stopped storing, and does not begin again by itself: started anew,
                             once there is room

The disk is looked at only where the server is the launcher's own. The bound never falls below what the stream
holds by more than the server minds: it refuses what comes, and deletes nothing.
"""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from shared.log.nats.durability import Keeping
from shared.log.nats.provisioning import Provisioner
from shared.log.port import LogState, LogUnavailableError

LOOK_EVERY_S: Final = 1.0
_RETRY_S: Final = 0.1
_SHARE: Final = 0.75
"""Of the disk that is free when the server starts, what the log already holds included."""
_MARGIN: Final = 0.05
_MARGIN_AT_MOST: Final = 256 << 20
"""Left free on the disk, for the server's own files and for others to notice that it is full."""
_STEP: Final = 0.01
"""A bound that differs by less is left as it is."""


@dataclass(frozen=True, slots=True)
class Disk:
    """What is left of a file system, in bytes."""

    total: int
    free: int

    @property
    def margin(self) -> int:
        return min(round(self.total * _MARGIN), _MARGIN_AT_MOST)


def disk_of(folder: Path) -> Disk:
    """The file system that `folder` is on."""
    usage = shutil.disk_usage(folder)
    return Disk(usage.total, usage.free)


def most(stored: int, disk: Disk) -> int:
    """The bound where nobody told one."""
    return round((stored + disk.free) * _SHARE)


def bound(stored: int, disk: Disk, at_most: int) -> int:
    """The bound of a stream that holds `stored` bytes; 1 where there is no room at all, as 0 is none."""
    return max(1, min(at_most, stored + disk.free - disk.margin))


class RetentionGuard:
    """Keeps one log.

    Args:
        provisioner: manages its stream; open.
        keeping: how it is to be kept.
        say: tells the operator something, and how bad it is.
        folder: where the server keeps it; None for a server that is not ours.
        failed_write: tells of a write that failed.
        restart: ends the server, to be started anew.
    """

    def __init__(
        self,
        provisioner: Provisioner,
        keeping: Keeping,
        say: Callable[[str, str], None],
        *,
        folder: Path | None = None,
        failed_write: Callable[[], str] = str,
        restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._provisioner = provisioner
        self._keeping = keeping
        self._say = say
        self._folder = folder
        self._failed_write = failed_write
        self._restart = restart
        self._at_most = keeping.max_bytes
        self._said = ""
        self._wake = asyncio.Event()

    async def prepare(self, patience_s: float) -> None:
        """Make the stream, or bring the one there is up to date, if it takes some tries.

        Raises:
            LogUnavailableError: the server does not answer, or refuses, for so long.
            DurabilityError: it does not give what is asked for.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while True:
            try:
                return await self._provisioner.provide(self._kept(await self._provisioner.look()))
            except LogUnavailableError:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def run(self) -> None:
        """Look after it until cancelled."""
        while True:
            with suppress(LogUnavailableError):  # it is being started
                await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            self._wake.clear()

    async def wake(self) -> None:
        """Look now: the server is new."""
        self._wake.set()

    async def look(self) -> None:
        """Look once, and do what is to be done.

        Raises:
            LogUnavailableError: the server does not answer.
        """
        if self._folder is not None and self._has_restarted(disk_of(self._folder)):
            return
        state = await self._provisioner.look()
        if state is None:
            self._say("the log has lost its stream: it is made anew, and what it held is gone", "warning")
        if state is None or self._must_change(state):  # on a disk that is full to the last byte it cannot
            await self._provisioner.provide(self._kept(state))

    def _kept(self, state: LogState | None) -> Keeping:
        if self._folder is None:
            return self._keeping
        return replace(self._keeping, max_bytes=self._bound(state, disk_of(self._folder)))

    def _bound(self, state: LogState | None, disk: Disk) -> int:
        stored = state.bytes if state is not None else 0
        if self._at_most is None:
            self._at_most = most(stored, disk)
        return bound(stored, disk, self._at_most)

    def _must_change(self, state: LogState) -> bool:
        if self._folder is None:
            return False
        wanted, found = self._bound(state, disk_of(self._folder)), state.max_bytes
        if found is None:
            return True
        return abs(wanted - found) > (0 if wanted == self._at_most else found * _STEP)

    def _has_restarted(self, disk: Disk) -> bool:
        failed = self._failed_write()
        if failed and failed != self._said:
            self._say(f"the log's server could not write, and stores nothing until it can: {failed}", "error")
        self._said = failed
        is_due = bool(failed) and disk.free > disk.margin
        if is_due:
            self._say("there is room on the log's disk again: its server is started anew", "warning")
            self._restart()
        return is_due
