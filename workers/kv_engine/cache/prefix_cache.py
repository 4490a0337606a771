"""The prefix cache: which blocks hold the keys and values of which beginnings of texts.

A radix tree over full blocks. An edge is the content of one block, a path from the root the content of a
prefix: so two texts share exactly the blocks of their common beginning, and a block is found only behind the
very tokens that are before it. The content is compared, not a digest of it: a hit cannot be somebody else's.

One tree is for one pool, and so for one set of weights, position rule and mask; `root` of a sequence keeps
apart what must not be shared even if the tokens are equal.

Blocks that are in use stay; of the others the pool takes what it needs, the least recently used first, and
of a path the end before the beginning (`workers.kv_engine.cache.blocks`).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shared.errors import BugError
from workers.kv_engine.cache.blocks import BlockManager

Content: TypeAlias = tuple[int, ...]
"""The token ids of one block."""


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A cached block, or a root, which has none.

    Attributes:
        computing: contents behind it that a running sequence computes now: who wants the same may wait.
    """

    block: int
    content: Content
    parent: "PrefixNode | None"
    children: dict[Content, "PrefixNode"] = field(default_factory=dict)
    computing: dict[Content, object] = field(default_factory=dict)


_NO_BLOCK: Final = -1


class PrefixCache:
    """The tree over the blocks of `pool`."""

    def __init__(self, pool: BlockManager) -> None:
        self._pool = pool
        self._roots: dict[Hashable, PrefixNode] = {}
        self._of_block: dict[int, PrefixNode] = {}
        pool.on_evicted = self._forget

    @property
    def size(self) -> int:
        """How many blocks are cached, in use or kept."""
        return len(self._of_block)

    def match(self, ids: Sequence[int], root: Hashable = None) -> list[PrefixNode]:
        """The longest path that `ids` begin with; full blocks, never all of `ids`.

        One token at least is left to compute, for the next one is sampled behind it.
        """
        found: list[PrefixNode] = []
        node = self.root(root)
        for number in range((len(ids) - 1) // self._pool.block_size):
            child = node.children.get(self.content(ids, number))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def root(self, root: Hashable = None) -> PrefixNode:
        """Where the texts begin that are kept apart as `root`."""
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = PrefixNode(_NO_BLOCK, (), None)
        return node

    def content(self, ids: Sequence[int], number: int) -> Content:
        """What the block `number` of a text holds."""
        size = self._pool.block_size
        return tuple(ids[number * size : (number + 1) * size])

    def insert(self, parent: PrefixNode, content: Content, block: int) -> PrefixNode | None:
        """Cache a block that is full now; None where an equal one is there: this stays its owner's alone."""
        if content in parent.children:
            return None
        if block in self._of_block:
            raise BugError(f"block {block} is cached already")
        if parent.block != _NO_BLOCK and self._of_block.get(parent.block) is not parent:
            raise BugError(f"block {block} is to be cached behind one that is not")
        node = parent.children[content] = self._of_block[block] = PrefixNode(block, content, parent)
        self._pool.cache(block)
        return node

    def hide(self, node: PrefixNode) -> None:
        """Let nobody find a block and what is cached behind it; the pool takes them in their turn."""
        assert node.parent is not None, "a root has no block"
        if node.parent.children.get(node.content) is node:  # and not hidden before, and another in its place
            del node.parent.children[node.content]

    def _forget(self, block: int) -> None:
        node = self._of_block.pop(block)
        if node.children:
            raise BugError(f"block {block} is evicted before what is cached behind it")
        self.hide(node)
