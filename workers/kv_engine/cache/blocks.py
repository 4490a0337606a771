"""The blocks of the paged pool: whose they are, and which are free.

A block holds the keys and values of `block_size` tokens, in every layer. Several sequences may share one
that is full: it is never written again. When the last of them gives it back it is free, or, if the prefix
cache holds it, *kept*: it stays readable until its room is needed, the one that was given back first goes
first. Numbers only, neither bytes nor sequences. Ask, then do.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from shared.errors import BugError


class BlockManager:
    """The blocks of a pool of `num_blocks`.

    Attributes:
        reached: the blocks from this one on nobody has had yet.
        on_evicted: called with a kept block whose room is taken; nobody may share it any more.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, found {num_blocks}x{block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.high_water = 0
        self.on_evicted: Callable[[int], None] = _nobody
        self._free = deque(range(num_blocks))
        self._shares = [0] * num_blocks
        self._cached: set[int] = set()
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """How many can be had: those that are free, and those that are only kept."""
        return len(self._free) + len(self._kept)

    @property
    def evictable(self) -> int:
        """How many nobody uses, but may be used again as they are."""
        return len(self._kept)

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def is_evictable(self, block: int) -> bool:
        """Whether nobody uses a block, though it is cached."""
        return block in self._kept

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take so many blocks, whose contents nobody needs; ask `free` first."""
        if count > self.free:
            raise BugError(f"asked for {count} blocks, but only {self.free} are free")
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._shares[block] = 1
        self.high_water = max(self.high_water, 1 + max(blocks, default=-1))
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Take these beside whoever has them; they must be cached."""
        if not self._cached.issuperset(blocks):
            raise BugError(f"blocks {list(blocks)} are to be shared, but not all of them are cached")
        for block in blocks:
            self._shares[block] += 1
            self._kept.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one share of each; of a chain, the end is forgotten before the beginning."""
        if len(set(blocks)) != len(blocks) or not all(self._shares[block] for block in blocks):
            raise BugError(f"blocks {list(blocks)} are given back, but not all of them are taken")
        for block in reversed(blocks):
            self._shares[block] -= 1
            if self._shares[block]:
                continue
            if block in self._cached:
                self._kept[block] = None
            else:
                self._free.appendleft(block)  # its memory is there already

    def cache(self, block: int) -> None:
        """A block that somebody has is full, and may be shared from now on."""
        if not self._shares[block]:
            raise BugError(f"block {block} is to be cached, but nobody has it")
        self._cached.add(block)

    def _evict(self) -> int:
        block, _ = self._kept.popitem(last=False)
        self._cached.discard(block)
        self.on_evicted(block)
        return block


def _nobody(_: int) -> None:
    """Nothing is cached yet."""
