"""The stream guard: creates the log's stream, recreates a lost one, fits its byte limit to the disk.

    the stream is gone       created again; every role sees that it is another log, and starts over on it
    others fill the disk     the stream's byte limit is lowered to the space that is left, so that new events
                             are refused before the disk is full; it is raised again when space is freed
    a write has failed       the server stores nothing more and does not resume by itself: restarted, once
                             the disk has space

The disk is checked only for the launcher's own server. The byte limit may be below what the stream holds; the
server then refuses new events and deletes nothing. The launcher runs the guard as a background task.
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

CHECK_EVERY_S: Final = 1.0
_RETRY_S: Final = 0.1
_SHARE_OF_DISK: Final = 0.75
"""The log's share of the disk space that is free when the server starts, plus what the log already holds."""
_MARGIN: Final = 0.05
_MARGIN_AT_MOST: Final = 256 << 20
"""Space left free for the server's own files, and for others to notice that the disk is full."""
_MIN_CHANGE: Final = 0.01
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


def default_byte_limit(stored: int, disk: Disk) -> int:
    """The byte limit if none is configured: 75 % of the free space and what the log holds."""
    return round((stored + disk.free) * _SHARE_OF_DISK)


def byte_limit(stored: int, disk: Disk, max_bytes: int) -> int:
    """The byte limit of a stream that holds `stored` bytes; at least 1, because 0 means no limit."""
    return max(1, min(max_bytes, stored + disk.free - disk.margin))


class StreamGuard:
    """Maintains the stream of one log.

    Args:
        provisioner: manages its stream; connected by the caller.
        policy: the stream's configured retention and durability.
        report: reports a text and its severity to the operator.
        folder: the server's storage folder; None for a server that is not the launcher's.
        failed_write: returns the server's last failed write; empty if there is none.
        restart: kills the server; its supervisor starts it again.
    """

    def __init__(
        self,
        provisioner: Provisioner,
        policy: StreamPolicy,
        report: Callable[[str, str], None],
        *,
        folder: Path | None = None,
        failed_write: Callable[[], str] = str,
        restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._provisioner = provisioner
        self._policy = policy
        self._report = report
        self._folder = folder
        self._failed_write = failed_write
        self._restart = restart
        self._max_bytes = policy.max_bytes
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
                return await self._provisioner.provide(self._bounded_policy(await self._provisioner.state()))
            except LogUnavailableError:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def run(self) -> None:
        """Check the stream once a second until cancelled."""
        while True:
            with suppress(LogUnavailableError):  # the server is being started
                await self.check()
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._wake.wait()
            self._wake.clear()

    async def wake(self) -> None:
        """Make `run` check at once; called when the server was restarted."""
        self._wake.set()

    async def check(self) -> None:
        """Check once, and correct the stream.

        Raises:
            LogUnavailableError: the server does not answer.
        """
        if self._folder is not None and self._has_restarted(disk_of(self._folder)):
            return
        state = await self._provisioner.state()
        if state is None:
            self._report(
                "the log has lost its stream: it is created again; everything it held is gone", "warning"
            )
        if state is None or self._must_change(state):  # a completely full disk refuses even an update
            await self._provisioner.provide(self._bounded_policy(state))

    def _bounded_policy(self, state: LogState | None) -> StreamPolicy:
        if self._folder is None:
            return self._policy
        return replace(self._policy, max_bytes=self._byte_limit(state, disk_of(self._folder)))

    def _byte_limit(self, state: LogState | None, disk: Disk) -> int:
        stored = state.bytes if state is not None else 0
        if self._max_bytes is None:
            self._max_bytes = default_byte_limit(stored, disk)
        return byte_limit(stored, disk, self._max_bytes)

    def _must_change(self, state: LogState) -> bool:
        if self._folder is None:
            return False
        wanted, found = self._byte_limit(state, disk_of(self._folder)), state.max_bytes
        if found is None:
            return True
        return abs(wanted - found) > (0 if wanted == self._max_bytes else found * _MIN_CHANGE)

    def _has_restarted(self, disk: Disk) -> bool:
        failed = self._failed_write()
        if failed and failed != self._reported:
            self._report(
                f"the log's server failed to write, and stores nothing until it can: {failed}", "error"
            )
        self._reported = failed
        is_due = bool(failed) and disk.free > disk.margin
        if is_due:
            self._report("the log's disk has space again: its server is restarted", "warning")
            self._restart()
        return is_due
