"""Groups of a log on their way from the store: some are read ahead, and they are taken in the order of their indexes.

What lies in a log never changes, so it does not matter when a group is read, only when it is taken. A name of a group
tells nothing of the next one's: so only listed groups are read ahead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class AheadLimits(NamedTuple):
    """Limits of what is read ahead; one group is read whatever its size."""

    groups: int
    bytes: int


class _Reading(NamedTuple, Generic[T]):
    """A group that is being read, or was."""

    at_index: int
    length: int
    task: asyncio.Task[T]


class ReadAhead(Generic[T]):
    """See the module's description."""

    def __init__(self, read: Callable[[int], Awaitable[T]], limits: AheadLimits) -> None:
        self._read = read
        self._limits = limits
        self._listed: deque[tuple[int, int]] = deque()
        self._reading: deque[_Reading[T]] = deque()
        self._bytes = 0  # of what is being read, or was and is not taken yet

    @property
    def next_index(self) -> int | None:
        """The index of the group that is taken next; None if no more are listed."""
        if self._reading:
            return self._reading[0].at_index
        return self._listed[0][0] if self._listed else None

    def expect(self, sizes: Mapping[int, int]) -> None:
        """Take in a list of groups, by index, with their bytes. What was listed before was taken or dropped."""
        assert self.next_index is None
        self._listed.extend(sorted(sizes.items()))

    async def take(self) -> T:
        """Return the next group, and begin to read those behind it. Cancelled, it has taken nothing."""
        self._begin()
        reading = self._reading[0]
        await asyncio.wait([reading.task])
        self._reading.popleft()
        self._bytes -= reading.length
        self._begin()
        return reading.task.result()

    async def drop(self) -> None:
        """Forget what is listed, and end what is being read."""
        reading, self._reading = self._reading, deque()
        self._listed.clear()
        self._bytes = 0
        for begun in reading:
            begun.task.cancel()
        await asyncio.gather(*(begun.task for begun in reading), return_exceptions=True)

    def _begin(self) -> None:
        while self._listed and len(self._reading) < self._limits.groups:
            index, length = self._listed[0]
            if self._reading and self._bytes + length > self._limits.bytes:
                return
            self._listed.popleft()
            task = asyncio.ensure_future(self._read(index))
            self._reading.append(_Reading(index, length, task))
            self._bytes += length
