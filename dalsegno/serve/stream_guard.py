"""The stream guard: creates the streams of the log and of media, fits their byte limits to the disk.

    a stream is gone         created again; every role sees that it is another log, and starts over on it
    others fill the disk     the byte limits are lowered to the space that is left, so that new events and
                             media are refused before the disk is full; raised again when space is freed
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
    """Maintains the streams of one deployment.

    Args:
        provisioner: manages its streams; connected by the caller.
        policy: the streams' configured retention and durability.
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
        """Create or update the streams, retrying while the server is away.

        Raises:
            LogUnavailableError: the server did not answer, or refused, for `patience_s` seconds.
            DurabilityError: it does not give the configured durability.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while True:
            try:
                return await self._provisioner.provide(self._bounded_policy(*await self._states()))
            except LogUnavailableError:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def run(self) -> None:
        """Check the streams once a second until cancelled."""
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
        """Check once, and correct the streams.

        Raises:
            LogUnavailableError: the server does not answer.
        """
        if self._folder is not None and self._has_restarted(disk_of(self._folder)):
            return
        state, media = await self._states()
        if state is None:
            self._report(
                "the log has lost its stream: it is created again; everything it held is gone", "warning"
            )
        elif media is None:
            self._report("the stream of media is lost: it is created again, without the media", "warning")
        policy = self._bounded_policy(state, media)
        if (
            state is None
            or media is None
            or self._must_change(state, policy.max_bytes, self._max_bytes)
            or self._must_change(media, policy.media_max_bytes, self._policy.media_max_bytes)
        ):  # a completely full disk refuses even an update
            await self._provisioner.provide(policy)

    async def _states(self) -> tuple[LogState | None, LogState | None]:
        return await self._provisioner.state(), await self._provisioner.media_state()

    def _bounded_policy(self, state: LogState | None, media: LogState | None) -> StreamPolicy:
        """The policy with the limits that the disk allows."""
        if self._folder is None:
            return self._policy
        disk = disk_of(self._folder)
        stored = state.bytes if state is not None else 0
        stored_media = media.bytes if media is not None else 0
        if self._max_bytes is None:
            self._max_bytes = default_byte_limit(stored, disk)
        media_limit = replace(self._policy, max_bytes=self._max_bytes).media_limit
        assert media_limit is not None  # there is a limit of the log
        return replace(
            self._policy,
            max_bytes=byte_limit(stored, disk, self._max_bytes),
            media_max_bytes=byte_limit(stored_media, disk, media_limit),
        )

    def _must_change(self, state: LogState, wanted: int | None, configured: int | None) -> bool:
        if self._folder is None or wanted is None:
            return False
        if state.max_bytes is None:
            return True
        return abs(wanted - state.max_bytes) > (0 if wanted == configured else state.max_bytes * _MIN_CHANGE)

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
