"""Scopes: paths such as `request/attempt/step`; the end of a scope ends all scopes below it. Pure.

A scope ends for good. An item for an ended scope, or for one below it, is refused, because nothing would ever
end it again. The latest `REMEMBERED` ended scopes are remembered.
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
    """Items by scope: `r`, `r/1`, `r/1/3`."""

    def __init__(self) -> None:
        self._root: _Scope[T] = _Scope()
        self._scope_of: dict[T, str] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    @property
    def count(self) -> int:
        """The number of scopes that hold an item directly."""
        return sum(bool(scope.items) for scope in _all(self._root))

    def has_ended(self, scope: str) -> bool:
        """Return True if the scope, or one above it, has ended."""
        return any(path in self._ended for path in _upwards(scope))

    def add(self, item: T, scope: str) -> bool:
        """Move an item into a scope; return False, and change nothing, if the scope has ended."""
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
        """Remove an item, if present, and the scopes that are empty then."""
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
        """End a scope for good; remove and return the items in it and below it."""
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
        """Remove and return all items, and forget the ended scopes."""
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
