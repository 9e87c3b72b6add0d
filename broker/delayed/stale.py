"""Stale rows: what the index still holds of messages that were cancelled or moved. Pure.

A row is named by position *and* time: a message that was moved has one row for each time it had, and the one under its
present time is not stale. That is for counting alone. Whether a row is due is decided by comparing it with the
amendments, so nothing is lost or sent because of what stands here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from pyroaring import BitMap

from broker.delayed.due_rows import (
    NO_DUE_ROWS,
    DueRows,
    Key,
    concatenate,
    doubles_in,
    key_after,
    rows_before,
)
from broker.delayed.mutable_bucket import NEVER_MS
from broker.delayed.sealed_bucket import SealedBucket
from broker.errors import PostdateError
from broker.model import Array, Int64Column, UInt32Column, UInt64Column, bitmap_of
from broker.storage.amendments import Amendments
from broker.storage.bucket_files import BucketStorage, SnapshotReader

AmendmentsOf = Callable[[int], Amendments | None]
"""ledger_id -> its amendments as of now, immutable; None if it has none. Called on the loop."""

_KEY = np.dtype([("entry_id", ">u4"), ("deliver_at_ms", ">i8")])
_SORTABLE = "S12"  # the same bytes: big-endian numbers sort as bytes do
_NO_KEYS = np.empty(0, dtype=_SORTABLE)
_SEEKS_MAX = 5

# A row in 64 bits, but for those that name its part. Entry ids have 32, times 53.
_ID_BITS, _TIME_BITS = 18, 46
_ID_MASK, _TIME_MASK = (1 << _ID_BITS) - 1, (1 << _TIME_BITS) - 1
_TIME_SHIFT = np.uint64(_TIME_BITS)
_PART_TIME_BITS = 16
_PART_TIME_MASK = (1 << _PART_TIME_BITS) - 1


class StaleEntries:
    """Rows of the index that are out of date, each once; 8 bytes a row.

    A bulk change adds rows again and again to a ledger that has many, while others are served. So a ledger's rows lie
    in parts, each takes what is new as a block of its own, and with each addition one part makes its blocks one.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: dict[int, dict[int, _Part]] = {}  # by ledger, by number; none is empty

    def has_any_of(self, ledger_id: int) -> bool:
        return ledger_id in self._parts

    def add(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> None:
        """Note rows of one ledger; what is there already stays there once."""
        if not len(entry_ids):
            return
        parts = self._parts.setdefault(ledger_id, {})
        for number, wanted in _by_part(entry_ids, deliver_at_ms):
            self.count += parts.setdefault(number, _Part()).add(wanted)
        max(parts.values(), key=_Part.block_count).join()

    def remove(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> DueRows:
        """Forget rows of one ledger, as far as they are there; those that were."""
        parts = self._parts.get(ledger_id)
        if parts is None:
            return NO_DUE_ROWS
        removed = [NO_DUE_ROWS]
        for number, wanted in _by_part(entry_ids, deliver_at_ms):
            if (part := parts.get(number)) is not None:
                removed.append(_rows_of_part(ledger_id, number, part.remove(wanted)))
                if not len(part.join()):
                    del parts[number]
        if not parts:
            del self._parts[ledger_id]
        gone = concatenate(removed)
        self.count -= len(gone)
        return gone

    def add_rows(self, rows: DueRows) -> None:
        """Note rows of any ledgers."""
        for ledger_id, some in _by_ledger(rows):
            self.add(ledger_id, some.entry_ids, some.deliver_at_ms)

    def known_among(self, rows: DueRows) -> DueRows:
        """Those of some rows that are here, each once."""
        known = [NO_DUE_ROWS]
        for ledger_id, some in _by_ledger(rows):
            parts = self._parts.get(ledger_id, {})
            for number, wanted in _by_part(some.entry_ids, some.deliver_at_ms):
                if (part := parts.get(number)) is not None:
                    _, is_held = _find(part.join(), wanted)
                    known.append(_rows_of_part(ledger_id, number, wanted[is_held]))
        return concatenate(known)

    def remove_rows(self, rows: DueRows) -> None:
        """Forget rows of any ledgers, as far as they are there."""
        for ledger_id, some in _by_ledger(rows):
            self.remove(ledger_id, some.entry_ids, some.deliver_at_ms)

    def times(self) -> Int64Column:
        """The times of all rows, in any order."""
        columns = [
            _times_of_part(number, block)
            for parts in self._parts.values()
            for number, part in parts.items()
            for block in part.blocks
        ]
        return np.concatenate([NO_DUE_ROWS.deliver_at_ms, *columns])

    def clear(self) -> None:
        self.count = 0
        self._parts = {}

    def memory_bytes(self) -> int:
        return sum(
            block.nbytes for parts in self._parts.values() for part in parts.values() for block in part.blocks
        )


class _Part:
    """Rows of one ledger with the same upper bits of entry id and time, as numbers of the lower bits."""

    __slots__ = ("_added_ids", "blocks")

    def __init__(self) -> None:
        self.blocks = [np.empty(0, dtype=np.uint64)]
        """Blocks of rising numbers. An entry in one of them but the first is in no other one of these."""
        self._added_ids = BitMap()  # of all blocks but the first

    def block_count(self) -> int:
        return len(self.blocks)

    def add(self, numbers: UInt64Column) -> int:
        """Add rising numbers; returns how many were not here."""
        ids = bitmap_of((numbers >> _TIME_SHIFT).astype(np.uint32))
        if not ids.isdisjoint(self._added_ids):
            self.join()
        _, is_held = _find(self.blocks[0], numbers)
        added = numbers[~is_held]
        self.blocks.append(added)
        self._added_ids |= ids
        return len(added)

    def remove(self, numbers: UInt64Column) -> UInt64Column:
        """Remove rising numbers as far as they are here; those that were."""
        held = self.join()
        places, is_held = _find(held, numbers)
        self.blocks = [np.delete(held, places[is_held])]
        return numbers[is_held]

    def join(self) -> UInt64Column:
        """Make one block of all; that block."""
        if len(self.blocks) > 1:
            held, *blocks = self.blocks
            added = np.sort(np.concatenate(blocks), kind="stable")
            self.blocks = [np.insert(held, np.searchsorted(held, added), added)]
            self._added_ids = BitMap()
        return self.blocks[0]


def _by_part(entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> Iterator[tuple[int, UInt64Column]]:
    """Rows of one ledger by the number of their part, as numbers in it: rising, each once."""
    parts = (entry_ids >> _ID_BITS).astype(np.int64) << _PART_TIME_BITS | deliver_at_ms >> _TIME_BITS
    low_ids, low_times = entry_ids & _ID_MASK, deliver_at_ms & _TIME_MASK
    numbers = low_ids.astype(np.uint64) << _TIME_SHIFT | low_times.astype(np.uint64)
    if not len(parts):
        return
    rise = (parts[1:] > parts[:-1]) | (parts[1:] == parts[:-1]) & (numbers[1:] > numbers[:-1])
    if rise.all():  # as those of a record, and what a merge left out
        begins = np.flatnonzero(np.diff(parts, prepend=-1))
        for begin, end in pairwise([*begins.tolist(), len(parts)]):
            yield int(parts[begin]), numbers[begin:end]
        return
    for part in np.unique(parts).tolist():
        some = np.sort(numbers[parts == part])  # np.unique takes several times as long
        yield part, some[np.append(True, some[1:] != some[:-1])]


def _rows_of_part(ledger_id: int, part: int, numbers: UInt64Column) -> DueRows:
    first_id = part >> _PART_TIME_BITS << _ID_BITS
    entry_ids = (numbers >> _TIME_SHIFT).astype(np.uint32) | np.uint32(first_id)
    ledger_ids = np.full(len(numbers), ledger_id, dtype=np.int64)
    return DueRows(_times_of_part(part, numbers), ledger_ids, entry_ids)


def _times_of_part(part: int, numbers: UInt64Column) -> Int64Column:
    times: Int64Column = numbers.astype(np.int64) & _TIME_MASK | (part & _PART_TIME_MASK) << _TIME_BITS
    return times


def _by_ledger(rows: DueRows) -> Iterator[tuple[int, DueRows]]:
    steps = np.diff(rows.ledger_ids, prepend=-1)
    if (steps >= 0).all():
        begins = np.flatnonzero(steps).tolist()
        for begin, end in pairwise([*begins, len(rows)]):
            yield int(rows.ledger_ids[begin]), rows.part(slice(begin, end))
        return
    for ledger_id in np.unique(rows.ledger_ids).tolist():
        yield ledger_id, rows.part(np.flatnonzero(rows.ledger_ids == ledger_id))


def _keys(entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> Array:
    keys = np.empty(len(entry_ids), dtype=_KEY)
    keys["entry_id"], keys["deliver_at_ms"] = entry_ids, deliver_at_ms
    return keys.view(_SORTABLE)


def _rows(ledger_id: int, keys: Array) -> DueRows:
    """The rows of one ledger that keys name."""
    fields = keys.view(_KEY)
    ledger_ids = np.full(len(keys), ledger_id, dtype=np.int64)
    return DueRows(fields["deliver_at_ms"].astype(np.int64), ledger_ids, fields["entry_id"].astype(np.uint32))


def _keys_by_ledger(rows: DueRows) -> Iterator[tuple[int, Array]]:
    for ledger_id, some in _by_ledger(rows):
        yield ledger_id, _keys(some.entry_ids, some.deliver_at_ms)


def _find(held: Array, wanted: Array) -> tuple[Array, Array]:
    """Return where sorted keys are or belong, and which of them are there."""
    places = np.searchsorted(held, wanted)
    is_held = np.zeros(len(wanted), dtype=np.bool_)
    inside = places < len(held)
    is_held[inside] = held[places[inside]] == wanted[inside]
    return places, is_held


def is_current(columns: DueRows, amendments_of: AmendmentsOf) -> Array:
    """Return which rows are not stale: neither cancelled nor moved to another time."""
    current = np.ones(len(columns), dtype=np.bool_)
    for ledger_id in np.unique(columns.ledger_ids).tolist():
        amended = amendments_of(ledger_id)
        if amended is not None:
            rows = np.flatnonzero(columns.ledger_ids == ledger_id)
            current[rows] = amended.is_current(columns.entry_ids[rows], columns.deliver_at_ms[rows])
    return current


class Doubles:
    """Rows that are there once more than they should be, each as often as that."""

    def __init__(self) -> None:
        self.count = 0
        self._keys: dict[int, Array] = {}  # by ledger, sorted

    def add_rows(self, rows: DueRows) -> None:
        for ledger_id, keys in _keys_by_ledger(rows):
            self._put(ledger_id, np.sort(np.concatenate((self._keys.get(ledger_id, _NO_KEYS), keys))))

    def take_rows(self, rows: DueRows) -> DueRows:
        """Remove rows, each as often as it is among them and here; those that were not here."""
        if not self.count:
            return rows
        rest = [NO_DUE_ROWS]
        for ledger_id, keys in _keys_by_ledger(rows):
            held = self._keys.get(ledger_id, _NO_KEYS)
            wanted, counts = np.unique(keys, return_counts=True)
            first = np.searchsorted(held, wanted)
            gone = np.minimum(np.searchsorted(held, wanted, side="right") - first, counts)
            places = np.repeat(first - np.cumsum(gone) + gone, gone) + np.arange(gone.sum())
            self._put(ledger_id, np.delete(held, places))
            rest.append(_rows(ledger_id, np.repeat(wanted, counts - gone)))
        return concatenate(rest)

    def cover_rows(self, rows: DueRows) -> None:
        """Add rows as far as they are not here as often as among them."""
        self.take_rows(rows)
        self.add_rows(rows)

    def drop_before(self, time_ms: int) -> None:
        for ledger_id, keys in list(self._keys.items()):
            self._put(ledger_id, keys[keys.view(_KEY)["deliver_at_ms"] >= time_ms])

    def times(self) -> Int64Column:
        """The times of all rows, in any order."""
        columns = [keys.view(_KEY)["deliver_at_ms"] for keys in self._keys.values()]
        return np.concatenate([np.empty(0, dtype=np.int64), *columns]).astype(np.int64)

    def _put(self, ledger_id: int, keys: Array) -> None:
        self.count += len(keys) - len(self._keys.get(ledger_id, _NO_KEYS))
        self._keys[ledger_id] = keys
        if not len(keys):
            del self._keys[ledger_id]


class StaleRows:
    """The stale rows of one bucket tracker."""

    def __init__(self, amendments_of: AmendmentsOf) -> None:
        self.entries = StaleEntries()
        self._amendments_of = amendments_of
        self.is_sought = False
        """True if more rows may be stale than are known."""
        self.doubles = Doubles()
        """Rows that are there again: moved back to where they were."""
        self._kept = 0  # after the last merge
        self._unsure_through_ms = 0

    @property
    def surplus(self) -> int:
        """Rows that the index holds and that count for nothing."""
        return self.entries.count + self.doubles.count

    def note(self, rows: DueRows, frontier: Key) -> None:
        """Rows became stale; those at or before the frontier are not in the index any more."""
        self.entries.add_rows(rows.part(~rows_before(rows, key_after(frontier))))

    def note_gone(self, rows: DueRows, frontier: Key) -> None:
        """Rows of a deleted ledger are stale, each as often as the index holds it."""
        self.note(rows, frontier)
        self.doubles.cover_rows(doubles_in(rows.part(~rows_before(rows, key_after(frontier)))))

    def meet(self, rows: DueRows, frontier: Key) -> None:
        """Rows were read: what is stale of them is known from now on, also of ledgers that are gone."""
        self.note(rows.part(~is_current(rows, self._amendments_of)), frontier)

    def met(self, rows: DueRows) -> None:
        """Rows are loaded together, of which the index keeps each once."""
        if self.doubles.count:
            self.doubles.take_rows(doubles_in(rows))

    def without(self, chunk: DueRows) -> DueRows:
        """Return a chunk without its stale rows, and forget these."""
        if not self.surplus and not self.is_sought:
            return chunk
        current = is_current(chunk, self._amendments_of)
        if current.all():
            return chunk
        self._forget(chunk.part(~current))
        return chunk.part(current)

    def _forget(self, gone: DueRows) -> None:
        """Rows are gone from the index. Of those that are there more than once the last one stays known as stale."""
        self.entries.remove_rows(self.doubles.take_rows(gone))

    def left_out(
        self,
        rows: Sequence[DueRows],
        doubles: Sequence[DueRows],
        frontier: Key,
        loaded_end: Key,
        *,
        by_merge: bool,
    ) -> None:
        """A seal or merge has left out stale rows, and rows that were there once more.

        Those that were loaded are still there, and stale ones count until they are taken.
        """
        left_out = concatenate([NO_DUE_ROWS, *rows])  # at once: each look goes through all that is stale
        is_loaded = rows_before(left_out, loaded_end)
        self._forget(left_out.part(~is_loaded))
        loaded = left_out.part(is_loaded)  # perhaps not known before, and perhaps not stale any more
        self.note(loaded.part(~is_current(loaded, self._amendments_of)), frontier)
        for columns in doubles:
            self.doubles.take_rows(columns.part(~rows_before(columns, loaded_end)))
        self.doubles.drop_before(frontier[0])
        if by_merge:
            self._kept = self.entries.count

    def revived(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> None:
        """Rows are added (again): those that were stale are not any more, and the index holds them twice."""
        if self.entries.has_any_of(ledger_id):
            self.doubles.add_rows(self.entries.remove(ledger_id, entry_ids, deliver_at_ms))

    def may_hold(self, ledger_id: int) -> bool:
        """Return whether a row of a ledger may count for nothing."""
        return self.is_sought or self.entries.has_any_of(ledger_id)

    def surplus_times(self) -> Int64Column:
        """The times of the rows that count for nothing, in any order."""
        return np.concatenate((self.entries.times(), self.doubles.times()))

    def is_exact_at(self, frontier_ms: int) -> bool:
        """Return whether `surplus` is right: who was moved again and again before the start may be there twice."""
        return not self.is_sought and self._unsure_through_ms <= frontier_ms

    def outweigh(self, count: int) -> bool:
        """Return whether more rows became stale since the last merge than this."""
        return self.entries.count - self._kept > count

    def clear(self) -> None:
        self.entries.clear()
        self.doubles = Doubles()
        self._kept = self._unsure_through_ms = 0

    async def seek(
        self,
        storage: BucketStorage,
        buckets: Callable[[], Sequence[SealedBucket]],
        frontier: Callable[[], Key],
        loaded_end: Callable[[], Key],
    ) -> None:
        """Find what is stale in buckets: after a start nobody knows. Raises what reading one raises."""
        self.is_sought = True
        try:
            for _ in range(_SEEKS_MAX):
                doubles: list[DueRows] = []
                seen = StaleEntries()
                sought = list(buckets())
                for bucket in sought:
                    async for rows in self._stale_of(storage, bucket, frontier()):
                        doubles.append(seen.known_among(rows))
                        seen.add_rows(rows)
                        self.note(rows, frontier())
                if sought == list(buckets()):
                    for rows in doubles:  # those that were loaded have met among the loaded rows
                        self.doubles.cover_rows(rows.part(~rows_before(rows, loaded_end())))
                    return
            self._unsure_through_ms = NEVER_MS
        finally:
            self.is_sought = False

    async def _stale_of(
        self, storage: BucketStorage, bucket: SealedBucket, frontier: Key
    ) -> AsyncIterator[DueRows]:
        try:
            if not await self._may_hold_stale(storage, bucket):
                return
            for segment in range(bucket.first_segment_from(key_after(frontier)), bucket.segment_count):
                rows = await bucket.read(storage, segment)
                if bucket.is_deleting:
                    return  # merged: what is stale in there was left out, or is found in the new one
                yield rows.part(~is_current(rows, self._amendments_of))
        except (OSError, PostdateError):
            if not bucket.is_deleting:
                raise

    async def _may_hold_stale(self, storage: BucketStorage, bucket: SealedBucket) -> bool:
        """Return whether a bucket has an entry that was cancelled or moved at any time."""
        for span in bucket.metadata.spans:
            amended = self._amendments_of(span.ledger_id)
            if amended is None:
                continue
            moved_again_ms = amended.deliver_at_ms[amended.revisions > 1]
            self._unsure_through_ms = max(self._unsure_through_ms, int(moved_again_ms.max(initial=0)))
            read = partial(SnapshotReader.read_bitmap, ledger_id=span.ledger_id)
            held = await storage.read(bucket.bucket_id, read)
            if amended.touches(held):
                return True
        return False
