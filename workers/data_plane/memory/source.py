"""What a transport that serves others asks of its own arena: where bytes are, and whose they are now."""

from typing import NamedTuple, Protocol


class Slot(NamedTuple):
    """What is in a slot now.

    Attributes:
        generation: another one than a reader knows means that its tensor is gone.
        nbytes: the length of the tensor, from the slot's offset.
    """

    generation: int
    nbytes: int


class Source(Protocol):
    """An arena, read by threads of any transport while its owner writes, frees and allocates.

    A slot that is freed shows that first, and is written anew after: whoever has read all bytes and then
    still finds the generation has read the tensor and nothing else.
    """

    def descriptor(self, segment: int) -> int:
        """The file descriptor of a segment, open until the arena is closed.

        Raises:
            LookupError: there is no such segment.
        """
        ...

    def length(self, segment: int) -> int:
        """How many bytes a segment has.

        Raises:
            LookupError: there is no such segment.
        """
        ...

    def slot(self, segment: int, offset: int) -> Slot | None:
        """The slot whose tensor begins at `offset` of a segment; None where none does, or it is free."""
        ...
