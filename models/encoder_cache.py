"""A cache of what an encoder computed for media, on the encoder's device.

A node that encodes media (a stateless node) has one as its attribute `encoder_cache`; the worker reports its
counters. The key must name everything that the rows depend on apart from the node's weights: the digest of
the medium, and the arguments of its preprocessing. The cache is as old as the node, so weights need no key.

    keys = [(item.args["digest"], item.args["size"]) for item in items]
    rows = self.encoder_cache.fill(keys, lambda new: self._encode([items[index] for index in new]))

Only the thread of the node may call it; the counters may be read by any thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    import torch

DEFAULT_BYTES: Final = 256 << 20
"""The size of a cache where nothing else is configured."""


class CacheCounters(msgspec.Struct, kw_only=True):
    """Counters since the start, and the present content.

    Attributes:
        hits, misses: lookups that found rows, and those that did not.
        evicted: entries that were dropped for newer ones.
        entries, nbytes: the entries at present, and the size of their rows in bytes.
    """

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    entries: int = 0
    nbytes: int = 0


class EncoderCache:
    """Rows by key, the least recently used dropped first.

    Args:
        max_bytes: the size of all rows; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.counters: Final = CacheCounters()
        self._max_bytes = max_bytes
        self._rows: OrderedDict[Hashable, torch.Tensor] = OrderedDict()

    def get(self, key: Hashable) -> "torch.Tensor | None":
        """Return the rows of a key, counted as a hit, or None, counted as a miss. Do not write into them."""
        rows = self._rows.get(key)
        if rows is None:
            self.counters.misses += 1
            return None
        self.counters.hits += 1
        self._rows.move_to_end(key)
        return rows

    def put(self, key: Hashable, rows: "torch.Tensor") -> "torch.Tensor":
        """Keep rows, and return what the cache holds: a copy without the batch that they were a view of.

        Rows larger than the whole cache are returned as they are, and not kept.
        """
        if rows.nbytes > self._max_bytes:
            return rows
        if rows.untyped_storage().nbytes() > rows.nbytes:
            rows = rows.clone()  # a view would keep its whole batch alive
        if (former := self._rows.pop(key, None)) is not None:
            self.counters.nbytes -= former.nbytes
        self._rows[key] = rows
        self.counters.nbytes += rows.nbytes
        while self.counters.nbytes > self._max_bytes:
            _, oldest = self._rows.popitem(last=False)
            self.counters.nbytes -= oldest.nbytes
            self.counters.evicted += 1
        self.counters.entries = len(self._rows)
        return rows

    def fill(
        self, keys: Sequence[Hashable], compute: "Callable[[Sequence[int]], Sequence[torch.Tensor]]"
    ) -> "list[torch.Tensor]":
        """Return the rows of all keys; those that are missing are computed together, each once.

        `compute` gets indices into `keys`, and returns the rows of each.
        """
        found: dict[Hashable, torch.Tensor] = {}
        new: list[int] = []
        for index, key in enumerate(keys):
            if keys.index(key) != index:
                continue
            rows = self.get(key)
            if rows is None:
                new.append(index)
            else:
                found[key] = rows
        if new:
            for index, computed in zip(new, compute(new), strict=True):
                found[keys[index]] = self.put(keys[index], computed)
        return [found[key] for key in keys]
