"""The media store over a store of pieces: digests, uploads that go on, renewal, verification.

It is the same for every transport (`shared.media.pieces.PieceStore`).
"""

import asyncio
import hashlib
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from shared.errors import ClientError, DalSegnoError
from shared.media.addresses import check_digest, is_digest, owner_token
from shared.media.ages import is_aged
from shared.media.flight import in_flight, in_order
from shared.media.pieces import HEAD, Head, PieceStore, Stored
from shared.media.store import (
    PIECE_BYTES,
    MediaCorruptError,
    MediaStoreUnavailableError,
    MediumState,
    StoredMedium,
    gone,
)
from shared.media.upload import Upload, pieces_of, pieces_of_file, spool

_MOST_IN_FLIGHT: Final = 32
"""Pieces that all media of this process have in flight together: 16 MiB."""


class PiecedMediaStore:
    """A media store (`shared.media.store.MediaStore`) that keeps media as pieces.

    Args:
        pieces: the transport.
        clock: returns the time in nanoseconds since 1970.
    """

    def __init__(self, pieces: PieceStore, clock: Callable[[], int] = time.time_ns) -> None:
        self._pieces = pieces
        self._clock = clock
        self._in_flight = asyncio.Semaphore(_MOST_IN_FLIGHT)
        self._renewals: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def close(self) -> None:
        await self._pieces.close()

    # ---- writing ---------------------------------------------------------------------------------------
    async def put(
        self,
        content: bytes | AsyncIterable[bytes],
        *,
        tenant: str | None,
        content_type: str,
        name: str = "",
        digest: str | None = None,
        start: int = 0,
        max_bytes: int | None = None,
    ) -> StoredMedium:
        owner, upload = owner_token(tenant), Upload(max_bytes)
        head = Head(size=1, content_type=content_type, name=name)
        if digest is not None:
            there = await self._find(owner, check_digest(digest))
            if there is not None:
                return await self._compared(content, owner, there, upload, start)
            since_ns = await self._fold_stored(owner, digest, start, upload)
            head = msgspec.structs.replace(head, since_ns=since_ns)
            return await self._put(pieces_of(content), owner, digest, upload, head)
        if start:
            raise ValueError("start: expected 0 without a digest")
        if isinstance(content, bytes):
            digest = (await asyncio.to_thread(hashlib.sha256, content)).hexdigest()
            there = await self._find(owner, digest)
            if there is not None:
                return await self._fresh(owner, there)
            return await self._put(pieces_of(content), owner, digest, upload, head)
        # Pieces have the digest in their names, so content of an unknown digest waits for its end.
        with tempfile.TemporaryFile() as file:
            digest = await spool(content, file, max_bytes)
            there = await self._find(owner, digest)
            if there is not None:
                return await self._fresh(owner, there)
            return await self._put(pieces_of_file(file), owner, digest, upload, head)

    async def _put(
        self,
        pieces: AsyncGenerator[bytes, None],
        owner: str,
        digest: str,
        upload: Upload,
        head: Head,
    ) -> StoredMedium:
        """Store the pieces, then the head, whose size is known then."""
        try:
            async with aclosing(pieces), in_flight(self._in_flight) as flight:
                async for piece in pieces:
                    number = upload.take(piece)
                    await flight.start(partial(self._pieces.put, owner, digest, number, piece))
            upload.check_end(digest)
        except ClientError:  # the bytes are wrong, so no later call can go on with them
            with suppress(DalSegnoError):  # what a role may not delete expires
                await self._pieces.remove(owner, digest)
            raise
        return await self._complete(owner, digest, msgspec.structs.replace(head, size=upload.size))

    async def _complete(self, owner: str, digest: str, head: Head) -> StoredMedium:
        """Store the head; a medium whose pieces were deleted meanwhile is not complete.

        Another upload under the same digest, of wrong bytes, deletes them, and so does a client.
        """
        await self._pieces.put(owner, digest, HEAD, msgspec.json.encode(head))
        there = await self._find(owner, digest)
        if there is None:
            raise gone(digest)
        if not await self._pieces.numbers(owner, digest) >= set(range(head.pieces)):
            with suppress(DalSegnoError):  # what a role may not delete expires
                await self._pieces.remove(owner, digest)
            raise MediaStoreUnavailableError(
                f"the medium {digest} was deleted while it was stored: store it again"
            )
        return there

    async def _compared(
        self,
        content: bytes | AsyncIterable[bytes],
        owner: str,
        there: StoredMedium,
        upload: Upload,
        start: int,
    ) -> StoredMedium:
        """Return a medium that is stored already; a copy of it is verified, and changes nothing."""
        if not start:
            async with aclosing(pieces_of(content)) as pieces:
                async for piece in pieces:
                    upload.take(piece)
            upload.check_end(there.digest)
        return await self._fresh(owner, there)

    async def _fold_stored(self, owner: str, digest: str, start: int, upload: Upload) -> int | None:
        """Fold the pieces before `start` into the upload; return the time of the oldest one."""
        if not start:
            return None
        times = []
        async with aclosing(self._stored(owner, digest, -(-start // PIECE_BYTES))) as pieces:
            async for piece in pieces:
                upload.take(piece.data)
                times.append(piece.time_ns)
        if upload.size != start:
            raise ValueError(f"start: expected the end of a stored piece, found {start}")
        return min(times)

    async def delete(self, digest: str, *, tenant: str | None) -> bool:
        return is_digest(digest) and await self._pieces.remove(owner_token(tenant), digest)

    # ---- use -------------------------------------------------------------------------------------------
    async def keep(self, digest: str, *, tenant: str | None) -> StoredMedium:
        owner = owner_token(tenant)
        there = await self._find(owner, digest)
        if there is None:
            raise gone(digest)
        return await self._fresh(owner, there)

    async def _fresh(self, owner: str, medium: StoredMedium) -> StoredMedium:
        """Return a medium; it is stored anew if it would expire before events that are published now."""
        if not self._is_aged(medium):
            return medium
        lock = self._renewals.setdefault((owner, medium.digest), asyncio.Lock())
        async with lock:
            there = await self._find(owner, medium.digest)
            if there is None:
                raise gone(medium.digest)
            return await self._renew(owner, there) if self._is_aged(there) else there

    def _is_aged(self, medium: StoredMedium) -> bool:
        return is_aged(medium.stored_ns, self._clock(), self._pieces.max_age_ns)

    async def _renew(self, owner: str, medium: StoredMedium) -> StoredMedium:
        digest = medium.digest
        head = Head(size=medium.size, content_type=medium.content_type, name=medium.name)
        async with (
            aclosing(self._stored(owner, digest, head.pieces)) as pieces,
            in_flight(self._in_flight) as flight,
        ):
            number = 0
            async for piece in pieces:
                await flight.start(partial(self._pieces.put, owner, digest, number, piece.data))
                number += 1
        return await self._complete(owner, digest, head)

    async def state(self, digest: str, *, tenant: str | None) -> MediumState:
        if not is_digest(digest):
            return MediumState(medium=None, received=0)
        owner = owner_token(tenant)
        medium = await self._find(owner, digest)
        if medium is not None:
            return MediumState(medium=medium, received=medium.size)
        numbers = await self._pieces.numbers(owner, digest)
        count = next(number for number in range(len(numbers) + 1) if number not in numbers)
        last = await self._pieces.get(owner, digest, count - 1) if count else None
        if last is None:
            return MediumState(medium=None, received=0)
        return MediumState(medium=None, received=(count - 1) * PIECE_BYTES + len(last.data))

    async def read(self, digest: str, *, tenant: str | None) -> AsyncGenerator[bytes, None]:
        owner = owner_token(tenant)
        medium = await self._find(owner, digest)
        if medium is None:
            raise gone(digest)
        upload = Upload(None)
        head = Head(size=medium.size)
        async with aclosing(self._stored(owner, digest, head.pieces)) as pieces:
            async for piece in pieces:
                upload.take(piece.data)
                if upload.size == medium.size and upload.digest != digest:
                    break
                yield piece.data
        if upload.size != medium.size or upload.digest != digest:
            raise MediaCorruptError(
                f"the stored bytes of the medium {digest} are others: delete it, and store it again"
            )

    async def list(self, *, tenant: str | None) -> AsyncGenerator[StoredMedium, None]:
        owner = owner_token(tenant)
        digests = sorted(await self._pieces.digests(owner))
        operations = (partial(self._find, owner, digest) for digest in digests)
        async with aclosing(in_order(operations, self._in_flight)) as found:
            media = [medium async for medium in found if medium is not None]
        for medium in sorted(media, key=lambda one: one.stored_ns):
            yield medium

    async def _find(self, owner: str, digest: str) -> StoredMedium | None:
        """Return a complete medium by its head; None if it has no readable one."""
        if not is_digest(digest):
            return None
        record = await self._pieces.get(owner, digest, HEAD)
        if record is None:
            return None
        try:
            head = _HEADS.decode(record.data)
        except msgspec.MsgspecError:  # written by another client than ours
            return None
        stored_ns = record.time_ns if head.since_ns is None else min(head.since_ns, record.time_ns)
        limit_ns = self._pieces.max_age_ns
        return StoredMedium(
            digest=digest,
            size=head.size,
            content_type=head.content_type,
            name=head.name,
            stored_ns=stored_ns,
            expires_ns=None if limit_ns is None else stored_ns + limit_ns,
        )

    async def _stored(self, owner: str, digest: str, count: int) -> AsyncGenerator[Stored, None]:
        """Yield the first `count` pieces in order.

        Raises:
            MediaGoneError: one is not there.
        """
        operations = (partial(self._pieces.get, owner, digest, number) for number in range(count))
        async with aclosing(in_order(operations, self._in_flight)) as pieces:
            async for piece in pieces:
                if piece is None:
                    raise gone(digest)
                yield piece


_HEADS: Final = msgspec.json.Decoder(Head)
