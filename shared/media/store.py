"""The interface of the media store, with its values and errors.

A request names its media by digest (`shared.events.Media`); the bytes are here, beside the log and never in
it. A medium is the SHA-256 of its bytes, and belongs to one tenant: for another tenant it does not exist.

There are two implementations, `shared.media.jetstream.JetStreamMediaStore` and
`shared.media.memory.MemoryMediaStore`, under one contract suite (`tests/shared/media/contract.py`).
"""

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Final, Protocol

import msgspec

from shared.errors import CapacityError, ClientError

PIECE_BYTES: Final = 524_288
"""The size of a stored piece; the last one of a medium is shorter."""


class StoredMedium(msgspec.Struct, frozen=True, kw_only=True):
    """A complete medium of the store.

    Attributes:
        digest: the SHA-256 of the bytes, 64 hex digits.
        size: the number of bytes.
        content_type: the MIME type that it was stored with.
        name: the file's name that it was stored with; empty if it has none.
        stored_ns: the time at which it was stored or last renewed, in nanoseconds since 1970.
        expires_ns: the time at which it is deleted unless it is used before; None: it does not expire.
    """

    digest: str
    size: int
    content_type: str
    name: str = ""
    stored_ns: int
    expires_ns: int | None = None


class MediumState(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of one digest that the store has.

    Attributes:
        medium: the complete medium; None if it is incomplete or unknown.
        received: the number of bytes from the start on that are stored without a gap, where an upload goes
            on; the medium's size if it is complete.
    """

    medium: StoredMedium | None
    received: int


class MediaGoneError(ClientError):
    """The medium is not in the store: it expired, was deleted, or never was in it under this tenant."""

    code = "media_gone"
    status = 410


def gone(digest: str) -> MediaGoneError:
    """Return the error for a medium that a tenant does not have: the same if another tenant has it."""
    return MediaGoneError(
        f"the medium {digest[:80]} is not stored: it expired, was deleted, or belongs to another tenant; "
        "upload it again"
    )


class MediaDigestError(ClientError):
    """The bytes have another digest or size than was announced. Nothing of them is kept."""

    code = "media_digest_mismatch"


class MediaTooLargeError(ClientError):
    """The medium exceeds a limit. Nothing of it is kept."""

    code = "media_too_large"
    status = 413


class MediaCorruptError(ClientError):
    """The stored bytes are not those of the digest: their writer stored others. Delete, and store it anew."""

    code = "media_corrupt"
    status = 422


class MediaStoreFullError(CapacityError):
    """The media store has no space left; space returns as media expire."""

    code = "media_store_full"


class MediaStoreUnavailableError(CapacityError):
    """The media store cannot be reached, or does not exist."""

    code = "media_store_unavailable"


class MediaStore(Protocol):
    """The media of all tenants of a deployment. `tenant` is that of the request; None: it has none."""

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
        """Store a medium, and return it once it is acked; equal bytes are stored once per tenant.

        Memory is bounded by a few pieces: content that arrives in chunks, without a digest, waits in a
        temporary file until its digest is known. An interrupted call with a digest leaves what was acked
        (`state`), and a later call can go on there.

        Args:
            content: all bytes, or chunks of any size.
            tenant: the owner.
            content_type: the MIME type.
            name: the file's name. A medium that is stored already keeps its type and name.
            digest: the expected SHA-256; None: it is computed.
            start: with a digest, the number of bytes that are stored already and that `content` leaves out,
                from `state`: a multiple of `PIECE_BYTES`, or the size.
            max_bytes: the maximum size of the medium.

        Raises:
            ValueError: `digest` is not a digest, or `start` is not a position to go on at.
            MediaDigestError: the bytes have another digest.
            MediaTooLargeError: there are more than `max_bytes` bytes, or none.
            MediaGoneError: bytes before `start` are not there any more.
            MediaStoreFullError: the store is full.
            MediaStoreUnavailableError: the store does not answer.
        """
        ...

    async def keep(self, digest: str, *, tenant: str | None) -> StoredMedium:
        """Return a stored medium that is about to be used; one that has aged is renewed.

        A medium that was put or kept before its request was published lives as long as the request's events.

        Raises:
            MediaGoneError: there is no such medium.
            MediaStoreFullError: it has to be renewed, and the store is full.
            MediaStoreUnavailableError: the store does not answer.
        """
        ...

    async def state(self, digest: str, *, tenant: str | None) -> MediumState:
        """Return the bytes of a digest that are there.

        Raises:
            MediaStoreUnavailableError: the store does not answer.
        """
        ...

    def read(self, digest: str, *, tenant: str | None) -> AsyncGenerator[bytes, None]:
        """Iterate over the bytes of a medium, in pieces. The digest is verified with the last of them.

        Raises:
            MediaGoneError: there is no such medium, or it expires while it is read.
            MediaCorruptError: the bytes are not those of the digest.
            MediaStoreUnavailableError: the store does not answer.
        """
        ...

    def list(self, *, tenant: str | None) -> AsyncGenerator[StoredMedium, None]:
        """Iterate over the complete media of a tenant, in the order of storing.

        Raises:
            MediaStoreUnavailableError: the store does not answer.
        """
        ...

    async def delete(self, digest: str, *, tenant: str | None) -> bool:
        """Delete a medium, or the pieces of an incomplete one; return whether there was anything.

        Raises:
            MediaStoreUnavailableError: the store does not answer, or the role may not delete.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...
