"""The layout of an arena's file: a header, one pair of words per page, then the pages.

    0              magic, epoch, length of the file, where the pages begin       64 bytes
    4096           for each page its generation and its tensor's length          16 bytes a page
    `payload_at`   the pages; a tensor begins at the beginning of one

The words are apart from the pages, so no tensor ever overwrites a generation: a reader with a stale handle
finds the owner's latest word about that page, whatever the page contains now. Both words are 0 while no
tensor begins at the page. The file is sparse: an unwritten page takes no memory.
"""

import struct
from dataclasses import dataclass
from typing import Final

PAGE: Final = 4096
HEADER_BYTES: Final = 64
WORDS_AT: Final = PAGE
PAIR: Final = struct.Struct("=QQ")
"""The words of a page: the generation of the tensor that begins there, and its length."""
PAIR_BYTES: Final = PAIR.size

_MAGIC: Final = b"dalsegn1"
_HEADER: Final = struct.Struct("<8sQQQ")


class LayoutError(Exception):
    """The bytes are not an arena's header."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one arena's file.

    Attributes:
        epoch: random; distinguishes the arena from another one in its place.
        length: the length of the file in bytes.
        payload_at: the offset of the first page.
    """

    epoch: int
    length: int
    payload_at: int

    @classmethod
    def holding(cls, payload_bytes: int, epoch: int) -> "Layout":
        """Return the layout of an arena with that capacity, rounded up to whole pages."""
        pages = pages_of(payload_bytes)
        payload_at = WORDS_AT + pages_of(pages * PAIR_BYTES) * PAGE
        return cls(epoch, payload_at + pages * PAGE, payload_at)

    @classmethod
    def read(cls, header: bytes, length: int) -> "Layout":
        """Decode the header of a file of length `length`.

        Raises:
            LayoutError: the file is not an arena, or its header is inconsistent.
        """
        if len(header) < HEADER_BYTES:
            raise LayoutError(f"a header has {HEADER_BYTES} bytes, found {len(header)}")
        magic, epoch, told_length, payload_at = _HEADER.unpack_from(header)
        layout = cls(epoch, told_length, payload_at)
        if magic != _MAGIC or told_length != length or layout != cls.holding(length - payload_at, epoch):
            raise LayoutError("this file is no arena, or not one of this version")
        return layout

    def header(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.epoch, self.length, self.payload_at).ljust(HEADER_BYTES, b"\0")

    @property
    def pages(self) -> int:
        return (self.length - self.payload_at) // PAGE

    def begins_tensor(self, offset: int) -> bool:
        """Return True if a tensor may begin there."""
        return self.payload_at <= offset < self.length and offset % PAGE == 0

    def word_of(self, offset: int) -> int:
        """Return the index of its generation, in 8-byte words from `WORDS_AT`; its length is next."""
        return (offset - self.payload_at) // PAGE * 2

    def pair_at(self, offset: int) -> int:
        """Return the file offset of the words of the page at `offset`."""
        return WORDS_AT + 8 * self.word_of(offset)


def pages_of(nbytes: int) -> int:
    """Return the number of pages for `nbytes`, at least one."""
    return max(1, -(-nbytes // PAGE))
