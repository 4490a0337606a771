"""The contract of the media store, which runs against the store in memory and against a real nats-server.

A test class inherits `MediaStoreContract` and provides the fixture `deployment`.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final, Protocol

import pytest

from shared.errors import ClientError
from shared.media.store import (
    PIECE_BYTES,
    MediaCorruptError,
    MediaDigestError,
    MediaGoneError,
    MediaStore,
    MediaStoreFullError,
    MediaStoreUnavailableError,
    MediaTooLargeError,
    StoredMedium,
)

PICTURE: Final = random.Random(1).randbytes(2 * PIECE_BYTES + 7)
DIGEST: Final = hashlib.sha256(PICTURE).hexdigest()


class Deployment(Protocol):
    """One media store, and what a test can do to it behind its back."""

    async def open(self) -> MediaStore:
        """Return a store of a further process."""
        ...

    async def age(self, seconds: float) -> None:
        """Let all media appear this much older to stores. Their limit is `limit_s`."""
        ...

    async def expire(self) -> None:
        """Let all media reach their limit."""
        ...

    async def fill(self) -> None:
        """Let the store be full, with room for small records at most."""
        ...

    async def overwrite(self, tenant: str | None, digest: str, number: int, data: bytes) -> None: ...

    async def stored_bytes(self) -> int: ...

    limit_s: float


async def chunks(data: bytes, size: int, *, most: int | None = None) -> AsyncIterator[bytes]:
    """Yield `data` in chunks; after `most` of them the connection of the client breaks."""
    for number, start in enumerate(range(0, len(data), size)):
        if number == most:
            raise ConnectionError("the client is gone")
        yield data[start : start + size]


async def content(store: MediaStore, digest: str, tenant: str | None = None) -> bytes:
    async with aclosing(store.read(digest, tenant=tenant)) as pieces:
        return b"".join([piece async for piece in pieces])


async def put(store: MediaStore, data: bytes = PICTURE, tenant: str | None = None) -> StoredMedium:
    return await store.put(data, tenant=tenant, content_type="image/png")


class MediaStoreContract:
    # ---- putting and reading -----------------------------------------------------------------------------
    @pytest.mark.parametrize("size", [1, PIECE_BYTES, PIECE_BYTES + 1])
    async def test_bytes_are_read_as_they_were_put(self, deployment: Deployment, size: int) -> None:
        store, data = await deployment.open(), PICTURE[:size]
        medium = await put(store, data)

        assert (medium.digest, medium.size) == (hashlib.sha256(data).hexdigest(), size)
        assert medium.content_type == "image/png"
        assert await content(await deployment.open(), medium.digest) == data

    @pytest.mark.parametrize("digest", [None, DIGEST])
    async def test_chunks_of_any_size_are_one_medium(
        self, deployment: Deployment, digest: str | None
    ) -> None:
        store = await deployment.open()
        medium = await store.put(
            chunks(PICTURE, 100_003), tenant=None, content_type="image/png", digest=digest
        )

        assert medium.digest == DIGEST
        assert await content(store, DIGEST) == PICTURE

    async def test_a_medium_is_stored_once_per_tenant(self, deployment: Deployment) -> None:
        store = await deployment.open()
        first = await put(store)
        before = await deployment.stored_bytes()

        assert await put(store) == first
        assert await deployment.stored_bytes() == before
        await put(store, tenant="other")
        assert await deployment.stored_bytes() > before + len(PICTURE)

    async def test_a_medium_of_another_tenant_does_not_exist(self, deployment: Deployment) -> None:
        store = await deployment.open()
        await put(store, tenant="blue")

        for tenant in (None, "red", "none", "*"):
            with pytest.raises(MediaGoneError):
                await store.keep(DIGEST, tenant=tenant)
            with pytest.raises(MediaGoneError):
                await content(store, DIGEST, tenant)
            assert (await store.state(DIGEST, tenant=tenant)).received == 0
            assert not await store.delete(DIGEST, tenant=tenant)
        assert await content(store, DIGEST, "blue") == PICTURE

    @pytest.mark.parametrize("digest", ["", "*", "A" * 64, DIGEST[:-1] + "*", DIGEST + ".head"])
    async def test_a_digest_that_is_none_is_unknown(self, deployment: Deployment, digest: str) -> None:
        store = await deployment.open()
        await put(store)

        with pytest.raises(MediaGoneError):
            await store.keep(digest, tenant=None)
        with pytest.raises(MediaGoneError):
            await content(store, digest)
        assert (await store.state(digest, tenant=None)).medium is None
        assert not await store.delete(digest, tenant=None)
        with pytest.raises(ValueError, match="64 lower-case hex digits"):
            await store.put(PICTURE, tenant=None, content_type="", digest=digest)

    async def test_the_complete_media_of_a_tenant_are_listed(self, deployment: Deployment) -> None:
        store = await deployment.open()
        first = await store.put(PICTURE, tenant="t", content_type="image/png", name="cat.png")
        second = await store.put(b"x", tenant="t", content_type="text/plain")
        await put(store, b"y", tenant="other")
        await deployment.overwrite("t", "0" * 64, 0, b"a piece without a head")

        assert [medium async for medium in store.list(tenant="t")] == [first, second]
        assert (first.name, second.name) == ("cat.png", "")
        assert [medium async for medium in store.list(tenant=None)] == []

    # ---- refusals ----------------------------------------------------------------------------------------
    @pytest.mark.parametrize("digest", [None, DIGEST])
    async def test_nothing_is_left_of_a_medium_above_the_limit(
        self, deployment: Deployment, digest: str | None
    ) -> None:
        store = await deployment.open()
        before = await deployment.stored_bytes()

        with pytest.raises(MediaTooLargeError, match=f"at most {len(PICTURE) - 1} bytes"):
            await store.put(
                chunks(PICTURE, 65_536),
                tenant=None,
                content_type="",
                digest=digest,
                max_bytes=len(PICTURE) - 1,
            )
        assert await deployment.stored_bytes() == before

    async def test_nothing_is_left_of_bytes_with_another_digest(self, deployment: Deployment) -> None:
        store, wrong = await deployment.open(), hashlib.sha256(b"").hexdigest()
        before = await deployment.stored_bytes()

        with pytest.raises(MediaDigestError, match=f"{wrong}, found {len(PICTURE)} bytes with {DIGEST}"):
            await store.put(chunks(PICTURE, 65_536), tenant=None, content_type="", digest=wrong)
        assert await deployment.stored_bytes() == before

    async def test_a_stored_medium_is_not_changed_by_wrong_bytes(self, deployment: Deployment) -> None:
        store = await deployment.open()
        await put(store)

        with pytest.raises(MediaDigestError):
            await store.put(PICTURE[:-1], tenant=None, content_type="", digest=DIGEST)
        assert await content(store, DIGEST) == PICTURE

    async def test_an_upload_whose_pieces_are_deleted_under_way_is_stored_again(
        self, deployment: Deployment
    ) -> None:
        store = await deployment.open()
        large = PICTURE * 5  # more pieces than one upload has in flight: some are stored before the last one
        digest = hashlib.sha256(large).hexdigest()

        async def disturbed() -> AsyncIterator[bytes]:
            yield large[:-1]
            with pytest.raises(MediaDigestError):  # wrong bytes under the same digest
                await store.put(PICTURE[:9], tenant=None, content_type="", digest=digest)
            yield large[-1:]

        with pytest.raises(MediaStoreUnavailableError, match="deleted while it was stored"):
            await store.put(disturbed(), tenant=None, content_type="", digest=digest)
        await put(store, large)
        assert await content(store, digest) == large

    async def test_no_bytes_are_no_medium(self, deployment: Deployment) -> None:
        store = await deployment.open()
        with pytest.raises(ClientError, match="found no bytes"):
            await put(store, b"")

    async def test_a_full_store_refuses_and_keeps_what_it_has(self, deployment: Deployment) -> None:
        store = await deployment.open()
        await put(store, PICTURE[:100])
        await deployment.fill()

        with pytest.raises(MediaStoreFullError, match="full"):
            await put(store)
        kept = hashlib.sha256(PICTURE[:100]).hexdigest()
        assert await content(store, kept) == PICTURE[:100]

    # ---- uploads that are interrupted --------------------------------------------------------------------
    async def test_an_upload_goes_on_in_another_process(self, deployment: Deployment) -> None:
        store = await deployment.open()
        with pytest.raises(ConnectionError):
            await store.put(chunks(PICTURE, PIECE_BYTES, most=1), tenant="t", content_type="", digest=DIGEST)
        with pytest.raises(MediaGoneError):
            await store.keep(DIGEST, tenant="t")

        other = await deployment.open()
        received = (await other.state(DIGEST, tenant="t")).received
        assert received == PIECE_BYTES
        rest = chunks(PICTURE[received:], 10_000)
        medium = await other.put(rest, tenant="t", content_type="a/b", digest=DIGEST, start=received)
        assert (medium.size, medium.content_type) == (len(PICTURE), "a/b")
        assert await content(store, DIGEST, "t") == PICTURE

    async def test_an_upload_that_missed_only_its_end_is_ended(self, deployment: Deployment) -> None:
        store = await deployment.open()
        for number in range(3):
            piece = PICTURE[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
            await deployment.overwrite(None, DIGEST, number, piece)
        state = await store.state(DIGEST, tenant=None)
        assert (state.medium, state.received) == (None, len(PICTURE))

        await store.put(b"", tenant=None, content_type="", digest=DIGEST, start=len(PICTURE))
        assert await content(store, DIGEST) == PICTURE

    async def test_an_upload_goes_on_only_where_bytes_are(self, deployment: Deployment) -> None:
        store = await deployment.open()
        with pytest.raises(MediaGoneError):
            await store.put(b"", tenant=None, content_type="", digest=DIGEST, start=PIECE_BYTES)
        await deployment.overwrite(None, DIGEST, 0, PICTURE[:PIECE_BYTES])
        with pytest.raises(ValueError, match="the end of a stored piece, found 7"):
            await store.put(b"", tenant=None, content_type="", digest=DIGEST, start=7)
        with pytest.raises(ValueError, match="expected 0 without a digest"):
            await store.put(b"", tenant=None, content_type="", start=PIECE_BYTES)

    async def test_the_state_of_a_complete_medium_is_its_size(self, deployment: Deployment) -> None:
        store = await deployment.open()
        medium = await put(store)
        state = await store.state(DIGEST, tenant=None)
        assert (state.medium, state.received) == (medium, len(PICTURE))

    async def test_concurrent_uploads_of_the_same_bytes_all_succeed(self, deployment: Deployment) -> None:
        store = await deployment.open()
        async with asyncio.TaskGroup() as tasks:
            for digest in (None, DIGEST) * 3:
                upload = store.put(
                    chunks(PICTURE, 65_536), tenant=None, content_type="image/png", digest=digest
                )
                tasks.create_task(upload)
        assert await content(store, DIGEST) == PICTURE

    # ---- the end of a medium -----------------------------------------------------------------------------
    async def test_a_deleted_medium_is_gone_and_can_be_put_again(self, deployment: Deployment) -> None:
        store = await deployment.open()
        await put(store)

        assert await store.delete(DIGEST, tenant=None)
        assert not await store.delete(DIGEST, tenant=None)
        with pytest.raises(MediaGoneError, match=f"{DIGEST} is not stored: it expired, was deleted"):
            await store.keep(DIGEST, tenant=None)
        assert (await store.state(DIGEST, tenant=None)).received == 0
        await put(store)
        assert await content(store, DIGEST) == PICTURE

    async def test_media_expire(self, deployment: Deployment) -> None:
        store = await deployment.open()
        medium = await put(store)
        assert medium.expires_ns == medium.stored_ns + int(deployment.limit_s * 1e9)

        await deployment.expire()
        with pytest.raises(MediaGoneError):
            await content(store, DIGEST)
        with pytest.raises(MediaGoneError):
            await store.keep(DIGEST, tenant=None)

    @pytest.mark.parametrize("again", ["keep", "put", "put chunks"])
    async def test_use_renews_a_medium_that_has_aged(self, deployment: Deployment, again: str) -> None:
        store = await deployment.open()
        first = await put(store)
        fresh = await store.keep(DIGEST, tenant=None)
        await deployment.age(deployment.limit_s / 4)
        match again:
            case "keep":
                renewed = await store.keep(DIGEST, tenant=None)
            case "put":
                renewed = await put(store)
            case _:
                renewed = await store.put(chunks(PICTURE, 65_536), tenant=None, content_type="image/png")

        assert fresh == first
        assert renewed.stored_ns > first.stored_ns
        await deployment.age(deployment.limit_s * 0.8)  # as old as the log's events become
        assert await content(store, DIGEST) == PICTURE

    # ---- damage ------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("junk", [b"x", b"x" * PIECE_BYTES])
    async def test_other_bytes_under_a_digest_are_noticed(self, deployment: Deployment, junk: bytes) -> None:
        store = await deployment.open()
        await put(store)
        await deployment.overwrite(None, DIGEST, 1, junk)

        with pytest.raises(MediaCorruptError, match=f"medium {DIGEST} are others"):
            await content(store, DIGEST)
        await store.delete(DIGEST, tenant=None)
        await put(store)
        assert await content(store, DIGEST) == PICTURE
