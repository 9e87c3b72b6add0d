"""What the index still holds of messages that were cancelled or moved: rows that count for nothing. Pure.

A row is named by position *and* time: a message that was moved has one row for each time it had, and the one under its
present time is not stale. That is for counting alone. Whether a row is due is decided by comparing it with the
amendments, so nothing is lost or sent because of what stands here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from broker.delayed.bucket_storage import BucketSnapshotStorage
from broker.delayed.mutable_bucket import NEVER_MS
from broker.delayed.near import Columns, Key, key_after, rows_before
from broker.delayed.sealed_bucket import SealedBucket
from broker.delayed.tracker import DueChunk
from broker.errors import PostdateError
from broker.model import Array, Int64Column, UInt32Column
from broker.storage.amendments import Amendments

AmendmentsOf = Callable[[int], Amendments | None]
"""ledger_id -> its amendments as of now, immutable; None if it has none. Called on the loop."""

_KEY = np.dtype([("entry_id", ">u4"), ("deliver_at_ms", ">i8")])
_SORTABLE = "S12"  # the same bytes: big-endian numbers sort as bytes do
_NO_KEYS = np.empty(0, dtype=_SORTABLE)
_SEEKS_MAX = 5


class StaleEntries:
    """Rows of the index that are out of date, each once; 12 bytes a row."""

    def __init__(self) -> None:
        self.count = 0
        self._keys: dict[int, Array] = {}  # by ledger, sorted

    def has_any_of(self, ledger_id: int) -> bool:
        return ledger_id in self._keys

    def add(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> None:
        """Note rows of one ledger; what is there already stays there once."""
        new = np.unique(_keys(entry_ids, deliver_at_ms))
        held = self._keys.get(ledger_id, _NO_KEYS)
        places, is_held = _find(held, new)
        self._put(ledger_id, held, np.insert(held, places[~is_held], new[~is_held]))

    def remove(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> Int64Column:
        """Forget rows of one ledger, as far as they are there; the times of those."""
        held = self._keys.get(ledger_id)
        if held is None:
            return np.empty(0, dtype=np.int64)
        wanted = np.unique(_keys(entry_ids, deliver_at_ms))
        places, is_held = _find(held, wanted)
        self._put(ledger_id, held, np.delete(held, places[is_held]))
        return wanted[is_held].view(_KEY)["deliver_at_ms"].astype(np.int64)

    def add_rows(self, rows: Columns) -> list[Columns]:
        """Note rows of any ledgers; those that were there already."""
        known = []
        for ledger_id in np.unique(rows.ledger_ids).tolist():
            part = rows.part(rows.ledger_ids == ledger_id)
            held = self._keys.get(ledger_id, _NO_KEYS)
            _, is_held = _find(held, _keys(part.entry_ids, part.deliver_at_ms))
            if is_held.any():
                known.append(part.part(is_held))
            self.add(ledger_id, part.entry_ids, part.deliver_at_ms)
        return known

    def remove_rows(self, rows: Columns) -> int:
        """Forget rows of any ledgers, as far as they are there; how many were."""
        before = self.count
        for ledger_id in np.unique(rows.ledger_ids).tolist():
            at = rows.ledger_ids == ledger_id
            self.remove(ledger_id, rows.entry_ids[at], rows.deliver_at_ms[at])
        return before - self.count

    def times(self) -> Int64Column:
        """The times of all rows, in any order."""
        columns = [keys.view(_KEY)["deliver_at_ms"] for keys in self._keys.values()]
        return np.concatenate([np.empty(0, dtype=np.int64), *columns]).astype(np.int64)

    def clear(self) -> None:
        self.count = 0
        self._keys = {}

    def memory_bytes(self) -> int:
        return sum(keys.nbytes for keys in self._keys.values())

    def _put(self, ledger_id: int, before: Array, after: Array) -> None:
        self.count += len(after) - len(before)
        if len(after):
            self._keys[ledger_id] = after
        else:
            self._keys.pop(ledger_id, None)


def _keys(entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> Array:
    keys = np.empty(len(entry_ids), dtype=_KEY)
    keys["entry_id"], keys["deliver_at_ms"] = entry_ids, deliver_at_ms
    return keys.view(_SORTABLE)


def _find(held: Array, wanted: Array) -> tuple[Array, Array]:
    """Where sorted keys are or belong, and which of them are there."""
    places = np.searchsorted(held, wanted)
    is_held = np.zeros(len(wanted), dtype=np.bool_)
    inside = places < len(held)
    is_held[inside] = held[places[inside]] == wanted[inside]
    return places, is_held


def is_current(columns: Columns, amendments_of: AmendmentsOf) -> Array:
    """Which rows are not stale: neither cancelled nor moved to another time."""
    current = np.ones(len(columns), dtype=np.bool_)
    for ledger_id in np.unique(columns.ledger_ids).tolist():
        amended = amendments_of(ledger_id)
        if amended is not None:
            rows = np.flatnonzero(columns.ledger_ids == ledger_id)
            current[rows] = amended.is_current(columns.entry_ids[rows], columns.deliver_at_ms[rows])
    return current


class StaleRows:
    """The stale rows of one bucket tracker."""

    def __init__(self, amendments_of: AmendmentsOf) -> None:
        self.entries = StaleEntries()
        self._amendments_of = amendments_of
        self.is_sought = False
        """Whether more rows may be stale than are known."""
        self.doubles = 0
        """Rows that are there a second time: moved back to where they were."""
        self._doubled_ms: list[Int64Column] = []  # their times
        self._kept = 0  # after the last merge
        self._unsure_through_ms = 0

    @property
    def surplus(self) -> int:
        """Rows that the index holds and that count for nothing."""
        return self.entries.count + self.doubles

    def note(self, rows: Columns, frontier: Key) -> None:
        """Rows became stale; those at or before the frontier are not in the index any more."""
        self.entries.add_rows(rows.part(~rows_before(rows, key_after(frontier))))

    def without(self, chunk: DueChunk) -> DueChunk:
        """What was taken from the index, but for stale rows, which are gone with that."""
        if not self.surplus and not self.is_sought:
            return chunk
        columns = Columns(chunk.deliver_at_ms, chunk.ledger_ids, chunk.entry_ids)
        current = is_current(columns, self._amendments_of)
        if current.all():
            return chunk
        gone, rows = columns.part(~current), columns.part(current)
        if self.entries.remove_rows(gone) < len(
            gone
        ):  # second rows of some that a seal or merge has left out
            self.met_at(gone.deliver_at_ms)
        return DueChunk(rows.deliver_at_ms, rows.ledger_ids, rows.entry_ids)

    def left_out(
        self, rows: Sequence[Columns], frontier: Key, loaded_end: Key, waiting_less: int, *, by_merge: bool
    ) -> None:
        """A seal or merge has left stale rows out, and so many rows wait less now.

        Stale rows that were loaded are in near, and count until they are taken. What else waits no more was there
        twice.
        """
        removed = 0
        for columns in rows:
            is_loaded = rows_before(columns, loaded_end)
            removed += self.entries.remove_rows(columns.part(~is_loaded))
            self.note(columns.part(is_loaded), frontier)  # perhaps not found before
        self.met(waiting_less - removed)
        if by_merge:
            self._kept = self.entries.count

    def met_at(self, deliver_at_ms: Int64Column) -> None:
        """Rows of these times met others like them; not all of which we know to be doubles."""
        known = [times[np.isin(times, deliver_at_ms)] for times in self._doubled_ms]
        self.met(min(len(deliver_at_ms), sum(map(len, known))))

    def met(self, count: int) -> None:
        """So many rows met their doubles, and are there once now."""
        self.doubles = max(0, self.doubles - count)
        if not self.doubles:
            self._doubled_ms.clear()

    def revived(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> None:
        """Rows are added (again): those that were stale are not any more, and the index holds them twice."""
        if self.entries.has_any_of(ledger_id):
            revived = self.entries.remove(ledger_id, entry_ids, deliver_at_ms)
            self.doubles += len(revived)
            self._doubled_ms.append(revived)

    def may_hold(self, ledger_id: int) -> bool:
        """Whether a row of a ledger may count for nothing."""
        return self.is_sought or self.entries.has_any_of(ledger_id)

    def surplus_times(self) -> Int64Column | None:
        """The times of the rows that count for nothing; None if some are not known: only some of the doubles met."""
        if sum(map(len, self._doubled_ms)) != self.doubles:
            return None
        return np.concatenate([self.entries.times(), *self._doubled_ms])

    def is_exact_at(self, frontier_ms: int) -> bool:
        """Whether `surplus` is right: who was moved again and again before the start may be there twice."""
        return not self.is_sought and self._unsure_through_ms <= frontier_ms

    def outweigh(self, count: int) -> bool:
        """Whether more rows became stale since the last merge than this."""
        return self.entries.count - self._kept > count

    def clear(self) -> None:
        self.entries.clear()
        self.doubles = self._kept = self._unsure_through_ms = 0
        self._doubled_ms.clear()

    async def seek(
        self,
        storage: BucketSnapshotStorage,
        buckets: Callable[[], Sequence[SealedBucket]],
        frontier: Callable[[], Key],
        loaded_end: Callable[[], Key],
    ) -> None:
        """Find what is stale in buckets: after a start nobody knows. Raises what reading one raises."""
        self.is_sought = True
        try:
            for _ in range(_SEEKS_MAX):
                doubles: list[Columns] = []
                found = StaleEntries()
                sought = list(buckets())
                for bucket in sought:
                    async for rows in self._stale_of(storage, bucket, frontier()):
                        doubles += found.add_rows(rows)
                        self.note(rows, frontier())
                if sought == list(buckets()):
                    for rows in doubles:  # those that were loaded have met in near
                        times = rows.part(~rows_before(rows, loaded_end())).deliver_at_ms
                        self.doubles += len(times)
                        self._doubled_ms.append(times)
                    return
            self._unsure_through_ms = NEVER_MS
        finally:
            self.is_sought = False

    async def _stale_of(
        self, storage: BucketSnapshotStorage, bucket: SealedBucket, frontier: Key
    ) -> AsyncIterator[Columns]:
        try:
            if not await self._may_hold_stale(storage, bucket):
                return
            for segment in range(bucket.first_segment_from(key_after(frontier)), bucket.segment_count):
                rows = bucket.decode(segment, await storage.read_segment(bucket.metadata, segment))
                if bucket.is_deleting:
                    return  # merged: what is stale in there was left out, or is found in the new one
                rows = bucket.without_discarded(rows)
                yield rows.part(~is_current(rows, self._amendments_of))
        except (OSError, PostdateError):
            if not bucket.is_deleting:
                raise

    async def _may_hold_stale(self, storage: BucketSnapshotStorage, bucket: SealedBucket) -> bool:
        """Whether a bucket has an entry that was cancelled or moved at any time."""
        for span in bucket.metadata.spans:
            amended = self._amendments_of(span.ledger_id)
            if amended is None or span.ledger_id in bucket.discarded:
                continue
            moved_again_ms = amended.deliver_at_ms[amended.revisions > 1]
            self._unsure_through_ms = max(self._unsure_through_ms, int(moved_again_ms.max(initial=0)))
            held = await storage.read_bitmap(bucket.bucket_id, span.ledger_id)
            if amended.touches(held):
                return True
        return False
