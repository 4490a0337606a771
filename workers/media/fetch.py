"""Local copies of media: fetched from the media store before a node reads them, verified, and bounded.

A CPU node reads files in a thread, which never waits for the network: the executor holds the copies of a
request's media (`LocalMedia.held`) before the node starts and until it has ended. Copies that nobody holds
stay, up to a limit, for the next request with the same media.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import DalSegnoError, WorkerError
from shared.events import Media
from shared.media.addresses import is_digest, owner_token
from shared.media.request_check import file_name
from shared.media.store import MediaCorruptError, MediaGoneError, MediaStore, MediaTooLargeError, gone


@dataclass(slots=True)
class _Copy:
    """The copy of one medium.

    Attributes:
        owners: the tenants for which the store had it.
        holders: the number of requests that need it now.
        lock: held while it is fetched.
    """

    size: int
    owners: set[str] = field(default_factory=set)
    holders: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class LocalMedia:
    """The local copies of one process.

    Args:
        store: the media store.
        folder: the folder of the copies, which belongs to this process alone.
        max_bytes: the maximum size of all copies (`media.cache_bytes`).
        max_file_bytes: the maximum size of one medium (`media.max_bytes`).
    """

    def __init__(self, store: MediaStore, folder: Path, *, max_bytes: int, max_file_bytes: int) -> None:
        self._store = store
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_file_bytes = max_file_bytes
        self._copies: OrderedDict[str, _Copy] = OrderedDict()
        self._reserved = 0
        self._released = asyncio.Condition()

    def path_of(self, medium: Media) -> Path:
        """Return the copy of a medium that is held. Any thread may call this.

        Raises:
            MediaGoneError: there is no copy.
        """
        path = self._folder / medium.digest
        if not is_digest(medium.digest) or not path.is_file():
            raise MediaGoneError(f"the medium {medium.digest[:80]!r} has no local copy")
        return path

    @asynccontextmanager
    async def held(self, media: Sequence[Media], tenant: str | None) -> AsyncGenerator[None, None]:
        """Fetch the media of a request of `tenant`, and keep their copies until the end of the block.

        Raises:
            MediaGoneError: a medium is not in the store under this tenant.
            MediaCorruptError: its bytes are not those of its digest.
            MediaTooLargeError: a medium, or all of them together, are too large.
            MediaStoreUnavailableError: the store does not answer.
            WorkerError: a copy cannot be written.
        """
        size = self._checked_size(media)
        await self._reserve(size)
        held: list[str] = []
        try:
            for index, medium in enumerate(media):
                with _named(index, medium):
                    held.append(medium.digest)
                    await self._hold(medium, tenant)
            yield
        finally:
            for digest in held:
                self._copies[digest].holders -= 1
            self._evict()
            await self._release(size)

    # ---- space -------------------------------------------------------------------------------------
    def _checked_size(self, media: Sequence[Media]) -> int:
        """The size of all media together."""
        for index, medium in enumerate(media):
            if medium.size > self._max_file_bytes:
                raise MediaTooLargeError(
                    f"{file_name(index, medium)}: expected at most {self._max_file_bytes} bytes "
                    f"(media.max_bytes), found {medium.size}"
                )
        total = sum({one.digest: one.size for one in media}.values())
        if total > self._max_bytes:
            raise MediaTooLargeError(
                f"files: expected at most {self._max_bytes} bytes in all files of a request "
                f"(media.cache_bytes), found {total}"
            )
        return total

    async def _reserve(self, size: int) -> None:
        """Wait until all media of a request fit beside those of others: so no two wait for each other."""
        async with self._released:
            await self._released.wait_for(lambda: self._reserved + size <= self._max_bytes)
            self._reserved += size

    async def _release(self, size: int) -> None:
        async with self._released:
            self._reserved -= size
            self._released.notify_all()

    def _evict(self) -> None:
        """Remove what nobody holds: failed copies, and beyond the limit those that are unused longest."""
        total = sum(copy.size for copy in self._copies.values())
        for digest, copy in [*self._copies.items()]:
            if not copy.holders and (total > self._max_bytes or not copy.owners):
                del self._copies[digest]
                (self._folder / digest).unlink(missing_ok=True)
                total -= copy.size

    # ---- fetching ----------------------------------------------------------------------------------
    async def _hold(self, medium: Media, tenant: str | None) -> None:
        """Hold the copy of a medium; fetch it if there is none.

        Another tenant than that of the copy may read it only if the store has it for this tenant too.
        """
        copy = self._copies.setdefault(medium.digest, _Copy(medium.size))
        copy.holders += 1
        self._copies.move_to_end(medium.digest)
        owner = owner_token(tenant)
        async with copy.lock:  # one of several requests fetches
            if copy.owners and copy.size != medium.size:
                raise _corrupt(medium)
            if owner in copy.owners:
                return
            if not copy.owners:
                copy.size = medium.size
                self._evict()
                await self._fetch(medium, tenant)
            elif (await self._store.state(medium.digest, tenant=tenant)).medium is None:
                raise gone(medium.digest)
            copy.owners.add(owner)

    async def _fetch(self, medium: Media, tenant: str | None) -> None:
        partial = self._folder / f"{medium.digest}.partial"
        digest, size = hashlib.sha256(), 0
        try:
            with partial.open("wb") as file:
                async with aclosing(self._store.read(medium.digest, tenant=tenant)) as pieces:
                    async for piece in pieces:
                        size += len(piece)
                        if size > medium.size:
                            break
                        digest.update(piece)
                        await asyncio.to_thread(file.write, piece)
            if size != medium.size or digest.hexdigest() != medium.digest:
                raise _corrupt(medium)
            partial.rename(self._folder / medium.digest)
        except OSError as error:
            raise WorkerError(f"the local copy cannot be written to {self._folder}: {error}") from error
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def _named(index: int, medium: Media) -> Iterator[None]:
    """Name the file in the errors about it."""
    try:
        yield
    except DalSegnoError as error:
        message = f"{file_name(index, medium)}: {error.message}"
        raise type(error)(message, code=error.code, status=error.status) from error


def _corrupt(medium: Media) -> MediaCorruptError:
    return MediaCorruptError(
        f"expected {medium.size} bytes with the SHA-256 {medium.digest}, found others: delete the medium, "
        "and upload it again"
    )
