"""A bounded queue between two threads that hands over all it holds at once.

`take` blocks until there is something; nobody polls. When it is full, `put` waits and `try_put` says so.
Closing it wakes everybody up.
"""

from collections import deque
from threading import Condition
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """At most `capacity` items; more only by `force`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = Condition()
        self._is_closed = False

    def try_put(self, item: T, *, force: bool = False) -> bool:
        """Add an item; False when it is full, or closed. `force` is for what must never be refused."""
        with self._changed:
            if self._is_closed or (len(self._items) >= self._capacity and not force):
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def put(self, item: T) -> bool:
        """Add an item, and wait for room; False when it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._capacity)
            if self._is_closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def take(self, *, wait: bool) -> list[T]:
        """All items; none when there are none and it is not to `wait`, or when it is closed."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._is_closed or bool(self._items))
            items = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return items

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Nothing is added any more; what is in it can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
