"""A log of groups in memory, with the faults that a log may have."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from broker.errors import Corrupt, Fenced
from broker.runtime.vfs import WriteFailed
from broker.storage.frame import encode_group
from broker.storage.group_log import NewRecord, StoredGroup
from broker.storage.segment import HEADER_BYTES, Group, read_group

Groups = dict[int, bytes]


class AppendFault(Enum):
    """A failure of one append, told as the error that goes with it."""

    NOTHING_STORED = "nothing stored"
    """An OSError; the group may be appended again."""

    LOST = "lost"
    """WriteFailed; the group is not there."""

    ANSWER_LOST = "answer lost"
    """WriteFailed; the group is there."""


class MemoryGroupLog:
    """The groups of a dictionary, as bytes; whoever has the dictionary has the log, as after a crash.

    Appends are stored at once and answered a step later, or when `work` is called while `hold` is set.
    """

    def __init__(self, groups: Groups | None = None, *, hold: bool = False) -> None:
        self.groups: Groups = {} if groups is None else groups
        self.faults: deque[AppendFault] = deque()
        """Of the next appends, one each."""
        self.hold = hold
        self.closed = False
        self._held: list[Callable[[], None]] = []
        self._grown = asyncio.Event()
        self._next_index = 1
        for index in sorted(self.groups):
            self._next_index = index + len(self._decode(index).records)

    @property
    def next_index(self) -> int:
        return self._next_index

    @property
    def stored_bytes(self) -> int:
        return sum(map(len, self.groups.values()))

    @property
    def waiting_count(self) -> int:
        """The appends that wait for `work`."""
        return len(self._held)

    def append(self, index: int, records: Sequence[NewRecord]) -> asyncio.Future[StoredGroup]:
        assert not self.closed
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[StoredGroup] = loop.create_future()
        self._held.append(lambda: self._store(index, records, answer))
        if not self.hold:
            loop.call_soon(self.work)
        return answer

    def work(self) -> None:
        """Store and answer what was appended."""
        held, self._held = self._held, []
        for store in held:
            store()

    def read(self, index: int) -> Iterator[Group]:
        if index < self._next_index and not any(first <= index for first in self.groups):
            raise Corrupt(f"The log begins after index {index}")
        last = max((first for first in self.groups if first <= index), default=0)
        for first in sorted(first for first in self.groups if first >= last):
            group = self._decode(first)
            if first + len(group.records) > index:
                yield group

    async def tail(self, index: int, wait_ms: int) -> Group | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ms / 1e3):
                while self._next_index <= index:
                    self._grown.clear()
                    await self._grown.wait()
        return next(self.read(index), None)

    async def trim(self, below: int) -> None:
        kept = max((first for first in self.groups if first <= below), default=0)
        for first in [first for first in self.groups if first < kept]:
            del self.groups[first]

    async def shrink(self, below: int) -> None:
        await self.trim(below)

    async def close(self) -> None:
        self.closed = True

    def _store(self, index: int, records: Sequence[NewRecord], answer: asyncio.Future[StoredGroup]) -> None:
        fault = self.faults.popleft() if self.faults else None
        if index != self._next_index or index in self.groups:
            _fail(
                answer,
                Fenced(
                    f"The log goes on with index {self._next_index}, not with {index}",
                    reason="JOURNAL_FENCED",
                ),
            )
            return
        if fault is AppendFault.NOTHING_STORED:
            _fail(answer, OSError("Nothing was stored"))
            return
        if fault is not AppendFault.LOST:
            parts, length = encode_group(index, HEADER_BYTES, records)
            self.groups[index] = b"".join(parts)
            self._next_index = index + len(records)
            self._grown.set()
            if fault is None and not answer.done():
                answer.set_result(StoredGroup(length, 0.0))
        if fault is not None:
            _fail(answer, WriteFailed("Nobody knows what was stored"))

    def _decode(self, index: int) -> Group:
        group = read_group(memoryview(self.groups[index]), index, HEADER_BYTES, index, HEADER_BYTES)
        if group is None:
            raise Corrupt(f"The group at index {index} is damaged")
        return group


def _fail(answer: asyncio.Future[StoredGroup], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
