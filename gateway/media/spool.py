"""A medium on its way into the store: its bytes in memory if they are few, else in a temporary file.

The digest is computed while the bytes are written or first read, in chunks, so that memory does not grow with
the size of a medium.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from io import BytesIO
from tempfile import SpooledTemporaryFile
from typing import IO, Final

from gateway.media.content_kinds import HEAD_BYTES

CHUNK_BYTES: Final = 1 << 17
_IN_MEMORY_BYTES: Final = 1 << 17


class SpoolLimitError(Exception):
    """The content is larger than allowed."""


@dataclass(frozen=True, slots=True)
class Spool:
    """A complete medium.

    Attributes:
        digest: the SHA-256 of the bytes, in hex.
        size: the number of bytes.
        head: the first bytes, for the detection of the type.
    """

    file: IO[bytes]
    digest: str
    size: int
    head: bytes

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Iterate over the bytes."""
        await asyncio.to_thread(self.file.seek, 0)
        while chunk := await asyncio.to_thread(self.file.read, CHUNK_BYTES):
            yield chunk

    def close(self) -> None:
        """Free the bytes."""
        self.file.close()


def _digested(file: IO[bytes]) -> Spool:
    digest, size, head = hashlib.sha256(), 0, b""
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        head = head or chunk[:HEAD_BYTES]
        digest.update(chunk)
        size += len(chunk)
    return Spool(file, digest.hexdigest(), size, head)


async def of_file(file: IO[bytes]) -> Spool:
    """Return the spool of a file that somebody else wrote; its bytes are read once."""
    return await asyncio.to_thread(_digested, file)


async def of_bytes(data: bytes) -> Spool:
    """Return the spool of bytes in memory."""
    return await of_file(BytesIO(data))


async def of_chunks(chunks: AsyncIterable[bytes], max_bytes: int) -> Spool:
    """Read all chunks into a spool.

    Raises:
        SpoolLimitError: there are more than `max_bytes` bytes.
    """
    file = SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115 - the spool closes it
    digest, size, head = hashlib.sha256(), 0, b""
    try:
        async for chunk in chunks:
            size += len(chunk)
            if size > max_bytes:
                raise SpoolLimitError
            head += chunk[: HEAD_BYTES - len(head)]
            await asyncio.to_thread(_append, file, digest, chunk)
    except BaseException:
        file.close()
        raise
    return Spool(file, digest.hexdigest(), size, head)


def _append(file: IO[bytes], digest: "hashlib._Hash", chunk: bytes) -> None:
    file.write(chunk)
    digest.update(chunk)
