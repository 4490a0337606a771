"""The lower interface of the media store: pieces and heads of media, as a transport keeps them.

A medium is its pieces (`PIECE_BYTES` each, the last one shorter), and a head that is stored after all of them
are acked. Without its head a medium does not exist; its pieces wait there for the rest of an upload.
"""

from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from shared.media.store import PIECE_BYTES

HEAD: Final = "head"
"""The part of a medium that is stored last."""


class Head(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record that completes a medium, as JSON.

    Attributes:
        since_ns: the time of the oldest piece, if it is much older than the head: the end of an upload that
            was interrupted.
    """

    size: Annotated[int, Meta(ge=1)]
    content_type: Annotated[str, Meta(max_length=128)] = ""
    name: Annotated[str, Meta(max_length=255)] = ""
    since_ns: int | None = None

    @property
    def pieces(self) -> int:
        return -(-self.size // PIECE_BYTES)


class Stored(msgspec.Struct, frozen=True):
    """A stored piece or head, and the time at which it was stored."""

    data: bytes
    time_ns: int


class PieceStore(Protocol):
    """Pieces and heads by owner and digest. A later one of the same name replaces the earlier one."""

    @property
    def max_age_ns(self) -> int | None:
        """The time for which a piece is kept; None: without end. Known once an operation succeeded."""
        ...

    async def put(self, owner: str, digest: str, part: int | str, data: bytes) -> None:
        """Store a piece by its number, or the `head`; return once it is acked.

        Raises:
            MediaStoreFullError: there is no space.
            MediaStoreUnavailableError: the store does not answer.
        """
        ...

    async def get(self, owner: str, digest: str, part: int | str) -> Stored | None:
        """Return a piece or the `head`; None if it is not there.

        Raises:
            MediaStoreUnavailableError: the store does not answer.
        """
        ...

    async def numbers(self, owner: str, digest: str) -> set[int]:
        """Return the numbers of the pieces that are there.

        Raises:
            MediaStoreUnavailableError: the store does not answer.
        """
        ...

    async def digests(self, owner: str) -> set[str]:
        """Return the digests of an owner whose head is there.

        Raises:
            MediaStoreUnavailableError: the store does not answer.
        """
        ...

    async def remove(self, owner: str, digest: str) -> bool:
        """Delete the head and all pieces; return whether there was anything.

        Raises:
            MediaStoreUnavailableError: the store does not answer, or the role may not delete.
        """
        ...

    async def close(self) -> None: ...
