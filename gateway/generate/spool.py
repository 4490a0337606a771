"""The bytes of one answer that wait until the answer is complete: in memory up to a limit, then in a file.

The file has no name, so nothing is left behind. Bytes are read back in blocks, at the client's speed.
"""

from collections.abc import Iterable, Iterator
from tempfile import SpooledTemporaryFile
from typing import Final, NamedTuple

MEMORY_BYTES: Final = 1024 * 1024
"""The most bytes of an answer that are kept in memory."""
_BLOCK_BYTES: Final = 256 * 1024


class Span(NamedTuple):
    """A place in the spool."""

    start: int
    stop: int


class Spool:
    """Bytes that are appended, and read back by their place."""

    def __init__(self) -> None:
        self._file: SpooledTemporaryFile[bytes] | None = None
        self._size = 0

    @property
    def is_on_disk(self) -> bool:
        """True once there are more bytes than are kept in memory."""
        return self._size > MEMORY_BYTES

    def append(self, data: bytes) -> Span:
        """Append bytes; return their place."""
        if self._file is None:
            self._file = SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 - closed by `clear`
        self._file.seek(self._size)
        self._file.write(data)
        start, self._size = self._size, self._size + len(data)
        return Span(start, self._size)

    def blocks(self, spans: Iterable[Span]) -> Iterator[bytes]:
        """The bytes of these places, in blocks."""
        for span in spans:
            for start in range(span.start, span.stop, _BLOCK_BYTES):
                assert self._file is not None, "a place in the spool was returned by append"
                self._file.seek(start)
                yield self._file.read(min(_BLOCK_BYTES, span.stop - start))

    def clear(self) -> None:
        """Forget everything; the places are void."""
        if self._file is not None:
            self._file.close()
        self._file, self._size = None, 0
