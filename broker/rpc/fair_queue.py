"""Queue in which connections have turns in turn: first come, first served among what one of them has waiting."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by connection."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, deque[T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._items)

    def __iter__(self) -> Iterator[T]:
        for items in self._items.values():
            yield from items

    def push(self, peer: str, item: T) -> None:
        self._items.setdefault(peer, deque()).append(item)

    def first(self) -> T:
        """Return the item whose turn it is; there is one."""
        return next(iter(self._items.values()))[0]

    def pop(self) -> T:
        """Take the item whose turn it is; then it is another connection's."""
        peer, items = next(iter(self._items.items()))
        item = items.popleft()
        if items:
            self._items.move_to_end(peer)
        else:
            del self._items[peer]
        return item

    def remove(self, peer: str, item: T) -> None:
        """Take an item out, wherever it is, if it still is in."""
        items = self._items.get(peer)
        if items is not None and item in items:
            items.remove(item)
            if not items:
                del self._items[peer]
