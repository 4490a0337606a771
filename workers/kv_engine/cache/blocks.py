"""Block allocation of the paged KV pool, with blocks shared between sequences. Imports no torch.

A block holds the keys and values of `block_size` tokens, in all layers. Several sequences may share a full
block, which is never written again. A block that its last user releases becomes free; a cached one becomes
*evictable*: its contents stay valid until the block is allocated again, the least recently released first.

The manager knows block numbers, but neither bytes nor sequences. Callers check `free` before they allocate.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from shared.errors import BugError


class BlockManager:
    """The blocks of a pool of `num_blocks` blocks.

    Attributes:
        high_water: the number of the first block that was never allocated, nor any after it.
        on_evicted: called with an evictable block when it is allocated again; its contents are lost.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs at least one block of one token, found {num_blocks} blocks of {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.high_water = 0
        self.on_evicted: Callable[[int], None] = _ignore
        self._free = deque(range(num_blocks))
        self._users = [0] * num_blocks
        self._cached: set[int] = set()
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """The number of blocks that can be allocated, the evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def evictable(self) -> int:
        """The number of cached blocks without a user."""
        return len(self._evictable)

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def is_evictable(self, block: int) -> bool:
        """True if a block is cached and has no user."""
        return block in self._evictable

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate so many blocks; their old contents are lost. At most `free` can be allocated."""
        if count > self.free:
            raise BugError(f"cannot allocate {count} blocks: only {self.free} are free")
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        self.high_water = max(self.high_water, 1 + max(blocks, default=-1))
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a user to each of these blocks, which must be cached."""
        if not self._cached.issuperset(blocks):
            raise BugError(f"cannot share blocks {list(blocks)}: not all of them are cached")
        for block in blocks:
            self._users[block] += 1
            self._evictable.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user from each of these blocks. The last blocks of a sequence are evicted first."""
        if len(set(blocks)) != len(blocks) or not all(self._users[block] for block in blocks):
            raise BugError(f"cannot release blocks {list(blocks)}: not all of them are in use")
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._cached:
                self._evictable[block] = None
            else:
                self._free.appendleft(block)  # reused first: its memory is committed already

    def cache(self, block: int) -> None:
        """Mark a full block in use as cached: it can be shared from now on."""
        if not self._users[block]:
            raise BugError(f"cannot cache block {block}: it is not in use")
        self._cached.add(block)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._cached.discard(block)
        self.on_evicted(block)
        return block


def _ignore(_: int) -> None:
    """The default of `on_evicted`."""
