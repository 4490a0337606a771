"""The retention guard: recreates a lost stream, and bounds the log by the free space of its disk.

    the stream is gone       created again; every role sees that it is another log, and starts over on it
    others fill the disk     the stream's limit is lowered to the space that is left: new events are refused
    in time
    the disk was full        the server has stopped storing and does not resume by itself: restarted, once
                             there is space

The disk is checked only for the launcher's own server. The limit never falls further below what the stream
holds than the server tolerates: it refuses new events and deletes nothing.
"""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from shared.log.nats.durability import StreamPolicy
from shared.log.nats.provisioning import Provisioner
from shared.log.port import LogState, LogUnavailableError

LOOK_EVERY_S: Final = 1.0
_RETRY_S: Final = 0.1
_SHARE: Final = 0.75
"""The log's share of the disk space that is free when the server starts, plus what the log already holds."""
_MARGIN: Final = 0.05
_MARGIN_AT_MOST: Final = 256 << 20
"""Space left free for the server's own files, and for others to notice that the disk is full."""
_STEP: Final = 0.01
"""A limit that differs by less is left unchanged."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The space of a file system, in bytes."""

    total: int
    free: int

    @property
    def margin(self) -> int:
        return min(round(self.total * _MARGIN), _MARGIN_AT_MOST)


def disk_of(folder: Path) -> Disk:
    """Return the file system that `folder` is on."""
    usage = shutil.disk_usage(folder)
    return Disk(usage.total, usage.free)


def default_bound(stored: int, disk: Disk) -> int:
    """The limit where none is configured."""
    return round((stored + disk.free) * _SHARE)


def bound(stored: int, disk: Disk, at_most: int) -> int:
    """The limit of a stream that holds `stored` bytes; at least 1, because 0 means no limit."""
    return max(1, min(at_most, stored + disk.free - disk.margin))


class RetentionGuard:
    """Maintains the stream of one log.

    Args:
        provisioner: manages its stream; open.
        keeping: the stream's configuration.
        say: reports a text and its severity to the operator.
        folder: the server's storage folder; None for a server that is not the launcher's.
        failed_write: returns the server's last failed write.
        restart: ends the server, so that its supervisor restarts it.
    """

    def __init__(
        self,
        provisioner: Provisioner,
        keeping: StreamPolicy,
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
        self._reported = ""
        self._wake = asyncio.Event()

    async def prepare(self, patience_s: float) -> None:
        """Create or update the stream, retrying while the server is away.

        Raises:
            LogUnavailableError: the server did not answer, or refused, for `patience_s` seconds.
            DurabilityError: it does not give the configured durability.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while True:
            try:
                return await self._provisioner.provide(self._kept(await self._provisioner.state()))
            except LogUnavailableError:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def run(self) -> None:
        """Check the stream once a second until cancelled."""
        while True:
            with suppress(LogUnavailableError):  # the server is being started
                await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            self._wake.clear()

    async def wake(self) -> None:
        """Check now, because the server was restarted."""
        self._wake.set()

    async def look(self) -> None:
        """Check once, and correct the stream.

        Raises:
            LogUnavailableError: the server does not answer.
        """
        if self._folder is not None and self._has_restarted(disk_of(self._folder)):
            return
        state = await self._provisioner.state()
        if state is None:
            self._say(
                "the log has lost its stream: it is created again; everything it held is gone", "warning"
            )
        if state is None or self._must_change(state):  # a completely full disk refuses even an update
            await self._provisioner.provide(self._kept(state))

    def _kept(self, state: LogState | None) -> StreamPolicy:
        if self._folder is None:
            return self._keeping
        return replace(self._keeping, max_bytes=self._bound(state, disk_of(self._folder)))

    def _bound(self, state: LogState | None, disk: Disk) -> int:
        stored = state.bytes if state is not None else 0
        if self._at_most is None:
            self._at_most = default_bound(stored, disk)
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
        if failed and failed != self._reported:
            self._say(f"the log's server failed to write, and stores nothing until it can: {failed}", "error")
        self._reported = failed
        is_due = bool(failed) and disk.free > disk.margin
        if is_due:
            self._say("the log's disk has space again: its server is restarted", "warning")
            self._restart()
        return is_due
