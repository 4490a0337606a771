"""Snapshots of recurrent states at the ends of cached blocks. Imports no torch.

Keys and values of a prefix can be cut anywhere; a recurrent state is that of one length. A later sequence
continues where a snapshot was taken, so a prefix is reused up to the last one of its path. There are fixed
slots for snapshots; a new one takes the slot of the least recently used.

A sequence takes snapshots of three lengths: where its path left the blocks of an earlier sequence, because
a third one may leave them there, too; at the last full block of its prompt; and at the last full block of its
answer so far, for the next turn of a chat.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from workers.kv_engine.cache.prefix_cache import PrefixNode


class StateSnapshots:
    """The slots of snapshots, and the cached blocks at whose ends they were taken."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = [*slots]
        self._slots: OrderedDict[PrefixNode, int] = OrderedDict()
        self._readers: Counter[PrefixNode] = Counter()

    @property
    def size(self) -> int:
        """The number of snapshots."""
        return len(self._slots)

    def usable(self, path: Sequence[PrefixNode]) -> list[PrefixNode]:
        """Return the longest beginning of a cached path that ends with a snapshot."""
        for end in range(len(path), 0, -1):
            if path[end - 1] in self._slots:
                return [*path[:end]]
        return []

    def slot(self, node: PrefixNode) -> int:
        """Return the slot of a node's snapshot."""
        return self._slots[node]

    def pin(self, node: PrefixNode) -> None:
        """Keep a node's snapshot until `unpin`: a sequence is to continue from it."""
        self._slots.move_to_end(node)
        self._readers[node] += 1

    def unpin(self, node: PrefixNode) -> None:
        """Note that a sequence has continued from a node's snapshot, or will not."""
        self._readers[node] -= 1
        if not self._readers[node]:
            del self._readers[node]

    def take(self) -> int | None:
        """Take a slot for a new snapshot; None if sequences are to continue from all of them."""
        if self._free:
            return self._free.pop()
        oldest = next((node for node in self._slots if node not in self._readers), None)
        return None if oldest is None else self._slots.pop(oldest)

    def keep(self, node: PrefixNode, slot: int) -> None:
        """Note that a taken slot has the state at the end of a node's block."""
        if node in self._slots:
            self._free.append(slot)
        else:
            self._slots[node] = slot

    def give_back(self, slot: int) -> None:
        """Give back a taken slot without a snapshot."""
        self._free.append(slot)

    def drop(self, node: PrefixNode) -> None:
        """Forget a node's snapshot, if it has one and nothing is to continue from it."""
        if node in self._slots and node not in self._readers:
            self._free.append(self._slots.pop(node))
