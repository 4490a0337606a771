"""The blocks of one program: reserved when it starts, and shared by its contexts. Imports no torch."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from shared.errors import BugError


class Pages:
    """Blocks of the KV pool that belong to one run.

    Args:
        blocks: the reserved blocks.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        self.reserved: Final = tuple(blocks)
        self._free = deque(blocks)
        self._users: Counter[int] = Counter()

    def take(self) -> int:
        """Return a block for one context.

        Raises:
            BugError: all of them are used: the driver declared too few tokens or contexts.
        """
        if not self._free:
            raise BugError(
                f"a program uses more than its {len(self.reserved)} reserved blocks: expected its driver to "
                "declare max_tokens and max_contexts that cover all its contexts"
            )
        block = self._free.popleft()
        self._users[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Add a user to each of these blocks."""
        self._users.update(blocks)

    def leave(self, block: int) -> None:
        """Remove a user from a block; the last one frees it."""
        self._users[block] -= 1
        if not self._users[block]:
            self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """True if several contexts use a block."""
        return self._users[block] > 1
