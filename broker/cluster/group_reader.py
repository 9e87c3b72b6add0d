"""Reading a log group by group, as it grows: where many wait, they are listed and some are read ahead."""

from __future__ import annotations

from collections.abc import Mapping

from broker.cluster.group_head import LogEntry
from broker.cluster.group_objects import GroupObjects
from broker.cluster.read_ahead import ReadAhead

READ_SINGLY = 32
"""Groups that are found one after the other before what waits is listed: a list costs more than a group."""


class GroupReader:
    """One reader of a log: what it reads ahead, and how far it knows the log to go."""

    def __init__(self, objects: GroupObjects) -> None:
        self._objects = objects
        self._ahead = ReadAhead(objects.entry, objects.ahead_limits)
        self._found_in_row = 0  # groups that were found without a pause since they were last listed
        self._known_end = 1

    @property
    def known_end(self) -> int:
        """The index behind the last group that was listed."""
        return self._known_end

    async def begin(self, from_index: int, end: int, sizes: Mapping[int, int]) -> None:
        """Begin at an index of a log that was listed, to its end."""
        await self._ahead.drop()
        self._ahead.expect({index: length for index, length in sizes.items() if index >= from_index})
        self._known_end = end

    async def read(self, index: int) -> LogEntry | None:
        """Return the group at an index, if it is there. Cancelled, it can be read again."""
        entry = await self._take(index)
        self._found_in_row = 0 if entry is None else self._found_in_row + 1
        return entry

    async def end(self) -> None:
        """End what is being read ahead."""
        await self._ahead.drop()

    async def _take(self, index: int) -> LogEntry | None:
        if self._ahead.next_index != index:
            await self._ahead.drop()
            if self._found_in_row >= READ_SINGLY:
                sizes = await self._objects.sizes(after=index - 1)
                self._found_in_row = len(sizes)
                self._known_end = max(self._known_end, max(sizes, default=0) + 1)
                self._ahead.expect(sizes)
        if self._ahead.next_index != index:
            return await self._objects.entry(index)
        try:
            return await self._ahead.take()
        except OSError:
            self._found_in_row = 0
            await self._ahead.drop()
            raise
