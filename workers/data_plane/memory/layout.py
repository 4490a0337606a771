"""Where things are in an arena's file: a header, one word pair for each page, then the pages.

    0              magic, epoch, length of the file, where the pages begin       64 bytes
    4096           for each page its generation and its tensor's length          16 bytes a page
    `payload_at`   the pages; a tensor begins at the beginning of one

The word pairs stand apart from the pages, so no tensor is ever written over a generation: a reader with a
stale handle finds what the owner has said of that page last, whatever lies there now. Both of a pair are 0
while no tensor begins at that page. The file is sparse: a page of it that nobody has written takes no memory.
"""

import struct
from dataclasses import dataclass
from typing import Final

PAGE: Final = 4096
HEADER_BYTES: Final = 64
WORDS_AT: Final = PAGE
PAIR: Final = struct.Struct("=QQ")
"""What is said of a page: the generation of the tensor that begins there, and its length."""
PAIR_BYTES: Final = PAIR.size

_MAGIC: Final = b"dalsegn1"
_HEADER: Final = struct.Struct("<8sQQQ")


class LayoutError(Exception):
    """These bytes are no arena's header."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Of one arena's file.

    Attributes:
        epoch: chosen by chance for each arena; tells it from another one that stands in its place.
        length: of the file in bytes.
        payload_at: where the first page begins.
    """

    epoch: int
    length: int
    payload_at: int

    @classmethod
    def holding(cls, payload_bytes: int, epoch: int) -> "Layout":
        """For an arena with room for so many bytes, rounded up to whole pages."""
        pages = pages_of(payload_bytes)
        payload_at = WORDS_AT + pages_of(pages * PAIR_BYTES) * PAGE
        return cls(epoch, payload_at + pages * PAGE, payload_at)

    @classmethod
    def read(cls, header: bytes, length: int) -> "Layout":
        """What a file says of itself, whose length is `length`.

        Raises:
            LayoutError: it is no arena, or its parts do not fit one another.
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
        """Whether a tensor may begin there."""
        return self.payload_at <= offset < self.length and offset % PAGE == 0

    def word_of(self, offset: int) -> int:
        """The place of its generation, counted in words of 8 bytes from `WORDS_AT`; its length is next."""
        return (offset - self.payload_at) // PAGE * 2

    def pair_at(self, offset: int) -> int:
        """Where in the file the pair of the page at `offset` is."""
        return WORDS_AT + 8 * self.word_of(offset)


def pages_of(nbytes: int) -> int:
    """So many pages hold `nbytes`; none takes less than one."""
    return max(1, -(-nbytes // PAGE))
