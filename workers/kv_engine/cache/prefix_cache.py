"""The prefix cache: a radix tree over full blocks of the KV pool. Imports no torch.

The edge to a node is the content of one block (its token ids, and the media that they stand for), and the
path from the root is the content of a prefix. So two sequences share exactly the blocks of their common
prefix. Contents are compared: another prefix never matches. Of a medium its digest is compared.

A block may be *bound*: its keys and values are right for sequences with one property alone, such as a length
of the prompt, and so are those of all blocks after it (`workers.kv_engine.attention.choices`).

A tree belongs to one pool, and so to one set of weights, positions and masks. Sequences with different roots
share nothing, even if their tokens are equal.

Blocks in use stay. Of the others, the pool takes what it needs, the least recently used first, and the end of
a path before its beginning (`workers.kv_engine.cache.blocks`).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shared.errors import BugError
from workers.kv_engine.cache.blocks import BlockManager

Content: TypeAlias = tuple[Hashable, ...]
"""The contents of a block's tokens (`workers.kv_engine.sequence.Sequence.contents`)."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The last entry of the content of a bound block: what a sequence must have to share it."""

    to: Hashable


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A cached block, or a root, which has no block.

    Attributes:
        computing: the contents after this node that running sequences are computing now, with the sequences.
            Sequences that need the same content may wait for it.
    """

    block: int
    content: Content
    parent: "PrefixNode | None"
    children: dict[Content, "PrefixNode"] = field(default_factory=dict)
    computing: dict[Content, object] = field(default_factory=dict)

    @property
    def is_bound(self) -> bool:
        """True if only some sequences may share the block."""
        return bool(self.content) and isinstance(self.content[-1], Bound)


_NO_BLOCK: Final = -1


class PrefixCache:
    """The tree over the blocks of `pool`.

    Attributes:
        on_forgotten: called with the node of an evicted block.
        frees_beginnings: a block may be evicted before the blocks after it, because sequences give back the
            blocks before their window.
    """

    def __init__(self, pool: BlockManager) -> None:
        self.on_forgotten: Callable[[PrefixNode], None] = _ignore
        self.frees_beginnings = False
        self._pool = pool
        self._roots: dict[Hashable, PrefixNode] = {}
        self._nodes: dict[int, PrefixNode] = {}  # by block
        pool.on_evicted = self._forget

    @property
    def size(self) -> int:
        """The number of cached blocks, with and without users."""
        return len(self._nodes)

    def match(
        self, contents: Sequence[Hashable], root: Hashable = None, *, bound: Bound | None = None
    ) -> list[PrefixNode]:
        """Return the longest cached path that is a prefix of `contents`, also of blocks with this bound.

        The last token is never part of it: it has to be computed, for the next token is sampled after it.
        """
        found: list[PrefixNode] = []
        node = self.root(root)
        for number in range((len(contents) - 1) // self._pool.block_size):
            content = self.content(contents, number)
            child = node.children.get(content)
            if child is None and bound is not None:
                child = node.children.get((*content, bound))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def root(self, root: Hashable = None) -> PrefixNode:
        """Return the root node of the sequences with this root."""
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = PrefixNode(_NO_BLOCK, (), None)
        return node

    def content(self, contents: Sequence[Hashable], number: int) -> Content:
        """Return the content of block `number` of a sequence."""
        size = self._pool.block_size
        return tuple(contents[number * size : (number + 1) * size])

    def insert(self, parent: PrefixNode, content: Content, block: int) -> PrefixNode | None:
        """Cache a full block; return None, and cache nothing, if an equal block is cached already."""
        if content in parent.children:
            return None
        if block in self._nodes:
            raise BugError(f"block {block} is cached already")
        if parent.block != _NO_BLOCK and self._nodes.get(parent.block) is not parent:
            raise BugError(f"cannot cache block {block}: the block before it is not cached")
        node = parent.children[content] = self._nodes[block] = PrefixNode(block, content, parent)
        self._pool.cache(block)
        return node

    def hide(self, node: PrefixNode) -> None:
        """Remove a block and the blocks after it from matching; the pool evicts them later."""
        assert node.parent is not None, "a root has no block"
        # Another node may have taken the place of a node that was hidden before.
        if node.parent.children.get(node.content) is node:
            del node.parent.children[node.content]

    def _forget(self, block: int) -> None:
        node = self._nodes.pop(block)
        if node.children and not self.frees_beginnings:
            raise BugError(f"block {block} is evicted before the blocks after it")
        self.hide(node)  # the blocks after it match no more, and are evicted in their turn
        self.on_forgotten(node)


def _ignore(_: PrefixNode) -> None:
    """The default of `on_forgotten`."""
