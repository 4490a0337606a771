"""Whose a thing is: scopes are paths, and the end of one is the end of all below it.

Pure. A scope ends for good: what is put into one that has ended, or below it, is refused, because nobody
would ever end it again. Ended scopes are remembered as long as there are not too many later ones.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

T = TypeVar("T")

REMEMBERED: Final = 16_384


@dataclass(slots=True)
class _Scope(Generic[T]):
    items: set[T] = field(default_factory=set)
    below: "dict[str, _Scope[T]]" = field(default_factory=dict)


class Scopes(Generic[T]):
    """Things by scope: `r`, `r/1`, `r/1/3`."""

    def __init__(self) -> None:
        self._root: _Scope[T] = _Scope()
        self._scope_of: dict[T, str] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    @property
    def count(self) -> int:
        """How many scopes hold something themselves."""
        return sum(bool(scope.items) for scope in _all(self._root))

    def has_ended(self, scope: str) -> bool:
        """Whether it, or one above it, has ended."""
        return any(path in self._ended for path in _upwards(scope))

    def add(self, item: T, scope: str) -> bool:
        """Put a thing into a scope, out of the one it was in; False, and nothing done, where it has ended."""
        if self.has_ended(scope):
            return False
        self.discard(item)
        node = self._root
        for name in scope.split("/"):
            node = node.below.setdefault(name, _Scope())
        node.items.add(item)
        self._scope_of[item] = scope
        return True

    def discard(self, item: T) -> None:
        """Take a thing out, if it is in; scopes that are empty then are gone."""
        scope = self._scope_of.pop(item, None)
        if scope is None:
            return
        path = [self._root]
        names = scope.split("/")
        for name in names:
            path.append(path[-1].below[name])
        path[-1].items.discard(item)
        for above, name, node in zip(reversed(path[:-1]), reversed(names), reversed(path[1:]), strict=True):
            if node.items or node.below:
                break
            del above.below[name]

    def end(self, scope: str) -> list[T]:
        """End a scope for good; everything in it and below it is taken out and returned."""
        self._ended[scope] = None
        self._ended.move_to_end(scope)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        node: _Scope[T] | None = self._root
        for name in scope.split("/"):
            node = node.below.get(name) if node is not None else None
        items = [item for inner in _all(node) for item in inner.items] if node is not None else []
        for item in items:
            self.discard(item)
        return items

    def clear(self) -> list[T]:
        """Take everything out, and forget which scopes have ended."""
        items = list(self._scope_of)
        self._root = _Scope()
        self._scope_of.clear()
        self._ended.clear()
        return items


def _all(node: _Scope[T]) -> Iterator[_Scope[T]]:
    yield node
    for inner in node.below.values():
        yield from _all(inner)


def _upwards(scope: str) -> Iterator[str]:
    yield scope
    while "/" in scope:
        scope = scope.rpartition("/")[0]
        yield scope
