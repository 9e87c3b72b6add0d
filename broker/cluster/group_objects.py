"""The groups of a shard's log as objects of a store.

shards/<shard>/log/<index, 16 hex>   head and group, see `group_head.py`
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from broker.cluster.group_head import ADVICE, HEAD_BYTES, Head, LogEntry, Shard, decode_entry, decode_head
from broker.cluster.object_store import ObjectStore
from broker.cluster.patient_store import PatientReads
from broker.cluster.read_ahead import AheadLimits, ReadAhead
from broker.errors import Corrupt
from broker.settings import MIB

AHEAD = AheadLimits(groups=8, bytes=8 * MIB)


class Trimmed(Corrupt):
    """A group of a log that is not there any more."""


class GroupObjects:
    """Names, creates, reads, lists and removes the groups of one log. Holds no state of it."""

    def __init__(self, store: ObjectStore, shard: Shard, ahead: AheadLimits = AHEAD) -> None:
        """`ahead`: limits of what a reader of many groups reads ahead."""
        self.shard = shard
        self.ahead_limits = ahead
        self._store = store

    def place(self, index: int) -> str:
        """Return the URL of a group."""
        return f"{self._store.url}/{self._name(index)}"

    async def create(self, index: int, body: bytes) -> None:
        """Store a group; FileExistsError if there is one at its index."""
        await self._store.create(self._name(index), body)

    async def read(self, index: int) -> bytes | None:
        """Return the bytes of a group, if it is there."""
        try:
            return await self._store.read(self._name(index))
        except FileNotFoundError:
            return None

    async def entry(self, index: int) -> LogEntry | None:
        """Return a group, if it is there."""
        data = await self.read(index)
        return None if data is None else decode_entry(data, index, self.shard, self.place(index))

    async def head(self, index: int) -> Head | None:
        """Return the head of a group, if it is there."""
        try:
            return decode_head(
                await self._store.read_range(self._name(index), 0, HEAD_BYTES), self.place(index)
            )
        except FileNotFoundError:
            return None

    async def remove(self, index: int) -> None:
        await self._store.remove(self._name(index))

    async def sizes(self, *, after: int = 0) -> dict[int, int]:
        """Return the bytes of the groups behind an index, by index."""
        name = self._name(after) if after else ""
        return {
            self._index(info.name): info.bytes
            async for info in self._store.objects(log_folder(self.shard.number), after=name)
        }

    async def has_any_behind(self, index: int) -> bool:
        """Return whether there is a group behind an index."""
        async for _ in self._store.objects(log_folder(self.shard.number), after=self._name(index)):
            return True
        return False

    async def entries(self, index: int, end: int) -> AsyncGenerator[LogEntry, None]:
        """Yield the groups from the one that holds `index` to the one before `end`, with some read ahead.

        Reads that fail in passing are repeated: an owner that has just taken its shard over would end with the first of
        them, and wait for a lease before it could do so again.
        """
        patient = GroupObjects(PatientReads(self._store), self.shard, self.ahead_limits)
        async with contextlib.aclosing(patient._entries(index, end)) as entries:
            async for entry in entries:
                yield entry

    async def _entries(self, index: int, end: int) -> AsyncGenerator[LogEntry, None]:
        sizes = await self._sizes_from(index, end)
        ahead = ReadAhead(self.entry, self.ahead_limits)
        ahead.expect(sizes)
        expected = min(sizes)
        try:
            while ahead.next_index is not None:
                entry = await ahead.take()
                if entry is None or entry.head.first_lsn != expected:
                    raise self._trimmed(expected)
                yield entry
                expected = entry.next_index
            if expected < end:
                raise self._trimmed(expected)
        finally:
            await ahead.drop()

    async def _sizes_from(self, index: int, end: int) -> dict[int, int]:
        """The bytes of the groups from the one that holds `index` on; raises Corrupt if it was trimmed."""
        is_first = index > 1 and await self.read(index) is not None
        sizes = await self.sizes(after=index - 1 if is_first else 0)
        first = max((known for known in sizes if known <= index), default=0)
        entry = await self.entry(first) if first else None
        if entry is None or entry.next_index <= index:
            raise self._trimmed(index)
        return {known: length for known, length in sizes.items() if first <= known < end}

    def _trimmed(self, index: int) -> Trimmed:
        return Trimmed(
            f"The journal has no group with lsn {index} any more", path=self.place(index), advice=ADVICE
        )

    def _name(self, index: int) -> str:
        return entry_name(self.shard.number, index)

    def _index(self, name: str) -> int:
        last = name.rpartition("/")[2]
        try:
            index = int(last, 16)
        except ValueError:
            index = 0
        if f"{index:016x}" != last:
            raise Corrupt("Not a group of a journal", path=f"{self._store.url}/{name}", advice=ADVICE)
        return index


def log_folder(shard: int) -> str:
    """Return the folder of a shard's log."""
    return f"shards/{shard}/log"


def entry_name(shard: int, index: int) -> str:
    """Return the name of a group."""
    return f"{log_folder(shard)}/{index:016x}"
