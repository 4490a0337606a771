"""The block manager: which blocks of the paged pool are free.

A block holds the keys and values of `block_size` tokens, in every layer. This knows their numbers
only, neither bytes nor sequences. Ask, then do.
"""

from collections import deque

from shared.errors import BugError


class BlockManager:
    """The free blocks of a pool of `num_blocks`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, found {num_blocks}x{block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def can_allocate(self, tokens: int) -> bool:
        return self.blocks_for(tokens) <= len(self._free)

    def allocate(self, tokens: int) -> list[int]:
        """Take blocks for so many tokens; ask `can_allocate` first."""
        count = self.blocks_for(tokens)
        if count > len(self._free):
            raise BugError(f"asked for {count} blocks, but only {len(self._free)} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Give blocks back; each must be taken."""
        if not self._taken.issuperset(blocks) or len(set(blocks)) != len(blocks):
            raise BugError(f"blocks {blocks} are given back, but not all of them are taken")
        self._taken.difference_update(blocks)
        self._free.extend(blocks)
