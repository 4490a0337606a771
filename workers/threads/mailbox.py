"""A bounded queue between two threads; a reader takes all items at once.

`take` blocks until there are items, without polling. On a full mailbox `put` waits, and `try_put` returns
False. Closing the mailbox wakes all waiting threads.
"""

from collections import deque
from threading import Condition
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue of at most `capacity` items; more only with `force`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = Condition()
        self._is_closed = False

    def try_put(self, item: T, *, force: bool = False) -> bool:
        """Add an item; return False if the mailbox is closed, or full and not `force`."""
        with self._changed:
            if self._is_closed or (len(self._items) >= self._capacity and not force):
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def put(self, item: T) -> bool:
        """Wait for room and add an item; return False if the mailbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._capacity)
            if self._is_closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def take(self, *, wait: bool) -> list[T]:
        """Remove and return all items. With `wait`, wait for the first one, or for the closing."""
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
        """Refuse new items; the items in the mailbox can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
