"""An upload in progress: its digest, its size and limits, and its content as pieces."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterable
from typing import IO

from shared.errors import ClientError
from shared.media.store import PIECE_BYTES, MediaDigestError, MediaTooLargeError


class Upload:
    """The hash and the size of what has arrived of a medium."""

    def __init__(self, max_bytes: int | None) -> None:
        self.size = 0
        self._max_bytes = max_bytes
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def take(self, piece: bytes) -> int:
        """Count the next piece, and return its number.

        Raises:
            MediaTooLargeError: the medium has more bytes than allowed.
        """
        number = self.size // PIECE_BYTES
        self.size += len(piece)
        if self._max_bytes is not None and self.size > self._max_bytes:
            raise MediaTooLargeError(
                f"expected at most {self._max_bytes} bytes (media.max_bytes), found more"
            )
        self._hash.update(piece)
        return number

    def check_end(self, expected: str) -> None:
        """Check the complete medium.

        Raises:
            ClientError: there are no bytes.
            MediaDigestError: the bytes have another digest.
        """
        if not self.size:
            raise ClientError("expected a file, found no bytes", code="media_empty")
        if self.digest != expected:
            raise MediaDigestError(
                f"expected bytes with the SHA-256 {expected}, found {self.size} bytes with {self.digest}"
            )


async def spool(content: AsyncIterable[bytes], file: IO[bytes], max_bytes: int | None) -> str:
    """Write content to a file, and return its digest.

    Raises:
        MediaTooLargeError: there are more than `max_bytes` bytes.
    """
    upload = Upload(max_bytes)
    async for piece in cut(content):
        upload.take(piece)
        await asyncio.to_thread(file.write, piece)
    file.seek(0)
    return upload.digest


async def pieces_of(content: bytes | AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield content in pieces of `PIECE_BYTES`, the last one shorter."""
    if isinstance(content, bytes):
        for start in range(0, len(content), PIECE_BYTES):
            yield content[start : start + PIECE_BYTES]
        return
    async for piece in cut(content):
        yield piece


async def pieces_of_file(file: IO[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of an open file from its position on."""
    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield piece


async def cut(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of chunks of any size as pieces."""
    rest = bytearray()
    async for chunk in chunks:
        view = memoryview(chunk)
        while view.nbytes:
            taken = min(PIECE_BYTES - len(rest), view.nbytes)
            rest += view[:taken]
            view = view[taken:]
            if len(rest) == PIECE_BYTES:
                yield bytes(rest)
                rest.clear()
    if rest:
        yield bytes(rest)
