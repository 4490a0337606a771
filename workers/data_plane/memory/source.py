"""The arena as seen by a transport that serves it: positions of bytes, and their current owners."""

from typing import NamedTuple, Protocol


class Slot(NamedTuple):
    """The current content of a slot.

    Attributes:
        generation: if it differs from a reader's, the reader's tensor is gone.
        nbytes: the length of the tensor.
    """

    generation: int
    nbytes: int


class Source(Protocol):
    """An arena, read by threads of any transport while its owner writes, frees and allocates.

    A freed slot loses its generation before it is written again. So a reader that finds the generation after
    reading all bytes has read the tensor.
    """

    def descriptor(self, segment: int) -> int:
        """Return the file descriptor of a segment, open until the arena is closed.

        Raises:
            LookupError: there is no such segment.
        """
        ...

    def length(self, segment: int) -> int:
        """Return the length of a segment in bytes.

        Raises:
            LookupError: there is no such segment.
        """
        ...

    def slot(self, segment: int, offset: int) -> Slot | None:
        """Return the slot whose tensor begins at `offset` of a segment; None if none does, or it is free."""
        ...
