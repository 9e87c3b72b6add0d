"""Stale rows: what the index still holds of messages that were cancelled or moved. Pure, but for waits.

A row is named by position *and* time: a message that was moved has one row for each time it had, and the one under its
present time is not stale. That is for counting alone. Whether a row is due is decided by comparing it with the
amendments, so nothing is lost or sent because of what stands here.

What a seal or merge has left out is forgotten in slices: half a million rows would hold the event loop up for a tenth
of a second. A thread makes a set of them, the rows that are *leaving*, in which each stays until its turn has come.

Invariants:
  STALE-1  `surplus` is right between any two slices: what is known as stale is what the index holds of it and what is
      leaving, whatever is added, moved and taken meanwhile.
  STALE-2  A slice goes through SLICE_ROWS rows and a few ledgers at most, and others run before the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import numpy as np

from broker.delayed.due_rows import (
    NO_DUE_ROWS,
    DueRows,
    Key,
    concatenate,
    count_before,
    doubles_in,
    key_after,
    rows_before,
)
from broker.delayed.mutable_bucket import NEVER_MS
from broker.delayed.sealed_bucket import SealedBucket
from broker.delayed.stale_entries import RepeatedRows, StaleEntries
from broker.errors import PostdateError
from broker.model import Array, Int64Column, UInt32Column, distinct_values
from broker.storage.amendments import Amendments
from broker.storage.bucket_files import BucketStorage, SnapshotReader

AmendmentsOf = Callable[[int], Amendments | None]
"""ledger_id -> its amendments as of now, immutable; None if it has none. Called on the loop."""

SLICE_ROWS = 4_096
_SEEKS_MAX = 5


def is_current(columns: DueRows, amendments_of: AmendmentsOf) -> Array:
    """Return which rows are not stale: neither cancelled nor moved to another time."""
    current = np.ones(len(columns), dtype=np.bool_)
    for ledger_id in distinct_values(columns.ledger_ids).tolist():
        amended = amendments_of(ledger_id)
        if amended is not None:
            rows = np.flatnonzero(columns.ledger_ids == ledger_id)
            current[rows] = amended.is_current(columns.entry_ids[rows], columns.deliver_at_ms[rows])
    return current


class LeftOut:
    """Rows that a seal or merge has left out, as the event loop needs them. Made in a thread: it sorts all of them."""

    def __init__(
        self, rows: Sequence[DueRows], doubles: Sequence[DueRows], frontier: Key, loaded_end: Key
    ) -> None:
        """`doubles`: those that were there once more. `loaded_end`: as it is now; it may move until they are gone."""
        every, again = _in_due_order(rows), _in_due_order(doubles)
        waiting = count_before(every, loaded_end)
        self.loaded = every.part(slice(count_before(every, key_after(frontier)), waiting))
        """Those that were loaded, and are to be met: each may count until it is taken."""
        self.leaving, self.leaving_doubles = RepeatedRows(), RepeatedRows()
        """Those that the index holds no more, or no more as often."""
        self._waiting = every.part(slice(waiting, None))
        self._waiting_doubles = again.part(slice(count_before(again, loaded_end), None))
        self.leaving.add_rows(self._waiting)
        self.leaving_doubles.add_rows(self._waiting_doubles)

    def note_loaded(self, loaded_end: Key) -> None:
        """Note how far rows are loaded by now: those that were loaded since have not left."""
        loaded, doubles = (
            rows.part(slice(0, count_before(rows, loaded_end)))
            for rows in (self._waiting, self._waiting_doubles)
        )
        self._waiting = self._waiting_doubles = NO_DUE_ROWS
        self.leaving.take_rows(loaded)
        self.leaving_doubles.take_rows(doubles)  # the loaded rows meet
        self.loaded = concatenate((self.loaded, loaded))

    @property
    def is_forgotten(self) -> bool:
        return not (len(self.loaded) or self.leaving.count or self.leaving_doubles.count)

    def take_leaving(self, limit: int) -> DueRows:
        """Give up at most so many of those that are leaving."""
        return (self.leaving if self.leaving.count else self.leaving_doubles).take_some(limit)

    def take_loaded(self, limit: int) -> DueRows:
        """Give up at most so many of `loaded`."""
        taken, self.loaded = self.loaded.part(slice(0, limit)), self.loaded.part(slice(limit, None))
        return taken


def _in_due_order(parts: Sequence[DueRows]) -> DueRows:
    rows = concatenate([NO_DUE_ROWS, *parts])
    return rows.part(np.lexsort((rows.entry_ids, rows.ledger_ids, rows.deliver_at_ms)))


class StaleRows:
    """The stale rows of one bucket tracker."""

    def __init__(
        self, amendments_of: AmendmentsOf, give_way: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`give_way`: returns once nobody is served who would wait for the next slice."""
        self.entries = StaleEntries()
        self._amendments_of = amendments_of
        self._give_way = give_way
        self.is_sought = False
        """True if more rows may be stale than are known."""
        self.doubles = RepeatedRows()
        """Rows that are there again: moved back to where they were."""
        self._left_out: list[LeftOut] = []  # not forgotten yet
        self._kept = 0  # after the last merge
        self._unsure_through_ms = 0

    @property
    def surplus(self) -> int:
        """Rows that the index holds and that count for nothing (STALE-1)."""
        leaving = sum(left_out.leaving_doubles.count for left_out in self._left_out)
        return self._known_count() + self.doubles.count - leaving

    def _known_count(self) -> int:
        return self.entries.count - sum(left_out.leaving.count for left_out in self._left_out)

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
        """Return a chunk without its stale rows, and forget these.

        Also where none is known: of a row that was added twice a merge may have left out one, and forgotten both.
        """
        current = is_current(chunk, self._amendments_of)
        if current.all():
            return chunk
        self._forget(chunk.part(~current))
        return chunk.part(current)

    def _forget(self, gone: DueRows) -> None:
        """Rows are gone from the index. Of those that are there more than once the last one stays known as stale."""
        self.entries.remove_rows(self.doubles.take_rows(gone))

    def left_out(self, left_out: LeftOut, frontier: Key, loaded_end: Key, *, by_merge: bool) -> None:
        """A seal or merge has left out stale rows, and rows that were there once more: see `forget_left_out`.

        Those that were loaded are still there, and stale ones count until they are taken.
        """
        left_out.note_loaded(loaded_end)
        self._left_out.append(left_out)
        if by_merge:
            self._kept = self._known_count()
        self._end_if_forgotten(frontier)

    async def forget_left_out(self, frontier: Callable[[], Key]) -> None:
        """Forget what was left out, in slices (STALE-2); whoever began that, several may go on with it."""
        while self._left_out:
            self._forget_slice(frontier())
            await asyncio.sleep(0)
            if self._give_way is not None:
                await self._give_way()

    def _forget_slice(self, frontier: Key) -> None:
        left_out = self._left_out[0]
        if len(loaded := left_out.take_loaded(SLICE_ROWS)):
            self.meet(loaded, frontier)  # perhaps not known before, and perhaps not stale any more
        else:
            self._forget(left_out.take_leaving(SLICE_ROWS))
        self._end_if_forgotten(frontier)

    def _end_if_forgotten(self, frontier: Key) -> None:
        self._left_out = [each for each in self._left_out if not each.is_forgotten]
        if not self._left_out:  # or rows would be left in there that are known no more
            self.doubles.drop_before(frontier[0])

    def revived(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> None:
        """Rows are added (again): those that were stale are not any more, and the index holds them twice."""
        if self.entries.has_any_of(ledger_id):
            again, _ = self.entries.remove(ledger_id, entry_ids, deliver_at_ms)
            self.doubles.add_rows(again)

    def may_hold(self, ledger_id: int) -> bool:
        """Return whether a row of a ledger may count for nothing."""
        return self.is_sought or self.entries.has_any_of(ledger_id)

    def surplus_times(self) -> Int64Column:
        """The times of the rows that count for nothing, in any order; with those of `leaving_times`."""
        return np.concatenate((self.entries.times(), self.doubles.times()))

    def leaving_times(self) -> Int64Column:
        """The times of the rows that are leaving, in any order."""
        columns = [rows.times() for each in self._left_out for rows in (each.leaving, each.leaving_doubles)]
        return np.concatenate([NO_DUE_ROWS.deliver_at_ms, *columns])

    def is_exact_at(self, frontier_ms: int) -> bool:
        """Return whether `surplus` is right: who was moved again and again before the start may be there twice."""
        return not self.is_sought and self._unsure_through_ms <= frontier_ms

    def outweigh(self, count: int) -> bool:
        """Return whether more rows became stale since the last merge than this."""
        return self._known_count() - self._kept > count

    def clear(self) -> None:
        self.entries.clear()
        self.doubles = RepeatedRows()
        self._left_out = []
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
                await self.forget_left_out(frontier)  # or what is found could be forgotten with it
                doubles: list[DueRows] = []
                seen = StaleEntries()
                sought = list(buckets())
                for bucket in sought:
                    async for rows in self._stale_of(storage, bucket, frontier()):
                        doubles.append(seen.known_among(rows))
                        seen.add_rows(rows)
                        self.note(rows, frontier())
                if sought == list(buckets()) and not self._left_out:
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
