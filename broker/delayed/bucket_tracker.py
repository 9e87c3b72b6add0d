"""The delayed index of the `bucket` policy: bounded memory for any number of entries and any delays.

    loaded    all entries held that lie before `loaded_end`, sorted, exact, each once
    mutable   what was added since the last seal (and frozen: what a seal is writing), in memory
    buckets   snapshots on disk, in the order of the log; of each, a window of decoded rows

`loaded_end` is one key for everything: whatever holds an entry before it has handed it to the loaded rows (or it was
taken), and what lies at or after it still *waits*, in memory, in a window or in a segment not read. So loaded
rows are taken without a look at anything else, and no entry is ever loaded twice. A seal or a merge only changes
where entries wait: the new bucket is opened at `loaded_end` as it stands at the swap, whatever was loaded or
taken since the work began.

Invariants (TRACKER stand in `tracker`, MUTABLE in `mutable_bucket`, SEALED in `sealed_bucket`, MERGE in `runs.merging`,
WRITER in `bucket_writer`, GATHERED in `runs.gathered`):
  BUCKET-1  frontier < loaded_end; every loaded row lies before `loaded_end`, every waiting row at or after it. It
      moves over waiting rows only by handing all of them to the loaded rows, in one step without `await`; it moves back
      only as far as the frontier and the last loaded row. It is a whole key, not a time: a million entries of one
      millisecond are handed on in parts.
  BUCKET-2  What is added before `loaded_end` is loaded at once (TRACKER-2), and is remembered for the next seal too,
      unless it lies at or before the frontier. After the clock stepped back it waits there until due (TRACKER-3).
  BUCKET-3  Everything after the frontier that was added is in the mutable bucket, the frozen one, or the file of a
      bucket that `image` names, but for what amendments make stale. What lies at or
      before the frontier may be left out: after a crash it is delivered by position (catch-up).
  BUCKET-4  `image().indexed_through` moves only when everything indexed before it is in buckets that the image names,
      or lies at or before its `frontier_ms`.
  BUCKET-5  A seal that failed leaves everything as it was (GATHERED-1).
  BUCKET-6  Between the look that finds a new bucket's window right for `loaded_end` and the swap there is no `await`.
  BUCKET-7  What began before a `clear` changes nothing after it (generation), and its file goes to `deleted_ids`.
  BUCKET-8  A merge replaces its sources in one step, and only by a bucket that was read back and holds the same entries
      (WRITER-3). Whatever fails before leaves the sources as they were, LIVE.
  BUCKET-9  A file is deleted only after a manifest is durable whose image did not name it: its id is handed out by
      `image().deleted_ids` and comes back through `remove_deleted`.
  BUCKET-10  `count` is exact but for: an entry added twice counts twice until both meet, loaded or in a seal or merge;
      entries of a discarded ledger in unread segments count until these are read or merged, but for those that
      were known as stale; after a start, what was cancelled or moved counts until `seek_stale` has ended, and what
      was moved to one time again may count twice.
  BUCKET-11  A failed read changes nothing and reaches the caller of `load`, unless its bucket is out of use by then.
  BUCKET-12  Rows that amendments made stale are left out when they are taken, sealed or merged; until then `_stale`
      names them, so that they do not count. Whether a row is stale is decided by the amendments, never by `_stale`.
      All rows of a discarded ledger are stale: its amendments say that it is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

import numpy as np

from broker.delayed.bucket_set import BucketSet
from broker.delayed.bucket_stats import histogram_over, stats_of
from broker.delayed.bucket_values import BucketPolicyValues, Marks
from broker.delayed.due_rows import (
    NO_DUE_ROWS,
    DueRows,
    Key,
    bounded_end,
    concatenate,
    count_before,
    key_after,
    rows_before,
    sort_unique,
)
from broker.delayed.loaded_rows import LoadedRows
from broker.delayed.mutable_bucket import MutableBucket
from broker.delayed.scan import UnreadSegments, sorted_in_memory, unsorted_in_memory
from broker.delayed.sealed_bucket import SealedBucket, plan_reads
from broker.delayed.segment_cache import SegmentCache
from broker.delayed.stale import AmendmentsOf, StaleRows
from broker.delayed.tracker import Frontier, Histogram, TrackerStats
from broker.errors import PostdateError
from broker.model import START, Int64Column, Position, UInt32Column
from broker.observe.logs import get_logger
from broker.runs.gathered import Gathered
from broker.storage.bucket_files import BucketStorage

log = get_logger(__name__)


class BucketTracker:
    """A `DelayedDeliveryTracker` over snapshots on disk. `seal` and `merge` may run beside everything else."""

    def __init__(
        self,
        storage: BucketStorage,
        frontier: Frontier,
        *,
        executor: Executor | None = None,
        amendments_of: AmendmentsOf = lambda ledger_id: None,
        policy: BucketPolicyValues | None = None,
        lead_ms: int = 2_000,
        load_entries_max: int = 65_536,
        looked: SegmentCache | None = None,
        give_way: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`lead_ms`: what is due so soon is loaded, and then as much again, so that loads are seldom.

        `looked`: segments that were read for looks, of all topics. `give_way`: as in `StaleRows`.
        """
        self._storage = storage
        self._looked = SegmentCache(0) if looked is None else looked
        self._amendments_of = amendments_of
        self._marks = Marks(frontier, key_after(frontier))
        self._lead_ms = lead_ms
        self._load_entries_max = load_entries_max
        self._loaded = LoadedRows()
        self._stale = StaleRows(amendments_of, give_way)
        self._memory = Gathered(MutableBucket, (START, 0))  # its marks are a position and an lsn
        self.buckets = BucketSet(
            storage,
            executor,
            memory=self._memory,
            stale=self._stale,
            marks=self._marks,
            held_count=self.count,
            amendments_of=amendments_of,
            policy=policy or BucketPolicyValues(),
        )

    # What every tracker offers.

    @property
    def frontier(self) -> Frontier:
        return self._marks.frontier

    @property
    def is_idle(self) -> bool:
        in_memory = self._memory.count or self._loaded.count()
        return not (in_memory or self.buckets.in_use or self.buckets.has_deleted)

    def add(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> None:
        if not len(entry_ids):
            return
        self._stale.revived(ledger_id, entry_ids, deliver_at_ms)  # moved back to where it was
        first = (int(deliver_at_ms.min()), ledger_id, int(entry_ids[0]))
        if first >= self._marks.loaded_end:
            self._memory.recent.append(ledger_id, entry_ids, deliver_at_ms, None)
            return
        columns = DueRows(deliver_at_ms, np.full(len(entry_ids), ledger_id, dtype=np.int64), entry_ids)
        is_loaded = rows_before(columns, self._marks.loaded_end)
        self._loaded.add(columns.part(is_loaded))
        kept = ~rows_before(columns, key_after(self._marks.frontier))  # BUCKET-2
        self._memory.recent.append(ledger_id, entry_ids[kept], deliver_at_ms[kept], ~is_loaded[kept])

    def remove(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> None:
        """See the protocol. The rows stay where they are until they are taken, sealed or merged (BUCKET-12)."""
        ledger_ids = np.full(len(entry_ids), ledger_id, dtype=np.int64)
        self._stale.note(DueRows(deliver_at_ms, ledger_ids, entry_ids), self._marks.frontier)

    def needs_load(self, now_ms: int) -> bool:
        self._move_loaded_end(now_ms)
        first = self._first_waiting_key()
        if first is None or first[0] > now_ms + self._lead_ms:
            return False
        # A million may be due at one moment, and after the clock leapt forward a day may be: what is loaded is taken
        # before more is brought there. Order holds, for the loaded rows lie before what waits (BUCKET-1).
        return self._loaded.count() < self._load_entries_max

    async def load(self, now_ms: int) -> None:
        """See the protocol. Raises Corrupt or OSError if a segment cannot be read (BUCKET-11)."""
        self._move_loaded_end(now_ms)
        last_ms = now_ms + 2 * self._lead_ms
        end = self._end_after(last_ms)
        for bucket in plan_reads(self.buckets.in_use, end, last_ms, self._load_entries_max):
            await self._read_next(bucket)
        self._hand_on(last_ms)
        self.buckets.drop_spent()
        await asyncio.sleep(0)  # a storage that answers from memory never lets others run

    def take_due(self, now_ms: int, limit: int) -> DueRows | None:
        while (chunk := self._loaded.take(now_ms, limit)) is not None:
            last = Frontier(int(chunk.deliver_at_ms[-1]), int(chunk.ledger_ids[-1]), int(chunk.entry_ids[-1]))
            self._marks.frontier = max(self._marks.frontier, last)  # what was late lies before it
            self.buckets.drop_spent()
            if len(chunk := self._stale.without(chunk)):
                return chunk
        return None

    def next_due_ms(self) -> int | None:
        loaded_ms = self._loaded.first_due_ms()
        if loaded_ms is not None:
            return loaded_ms  # the loaded rows lie before what waits (BUCKET-1)
        first = self._first_waiting_key()
        return None if first is None else first[0]

    async def contains(self, ledger_id: int, entry_id: int) -> bool:
        """See the protocol. Reads a bitmap of each bucket, and segments of those that name the entry."""
        amended = self._amendments_of(ledger_id)
        if amended is not None and amended.cancels(entry_id):
            return False
        if self._loaded.contains(ledger_id, entry_id) or any(
            bucket.holds_waiting(ledger_id, entry_id, self._marks.loaded_end)
            for bucket in self._memory.parts()
        ):
            return True
        position = Position(ledger_id, entry_id)
        for bucket in list(self.buckets.in_use):
            if await _holds_waiting(self._storage, bucket, position, lambda: self._marks.loaded_end):
                return True
        return False

    def count(self) -> int:
        in_memory = sum(bucket.waiting for bucket in self._memory.parts())
        rows = self._loaded_count() + in_memory + sum(bucket.waiting for bucket in self.buckets.in_use)
        return max(0, rows - self._stale.surplus)

    def _loaded_count(self) -> int:
        count = self._loaded.count()  # what was added meets what was there
        for rows in self._loaded.take_doubles():
            self._stale.doubles.take_rows(rows)
        return count

    @property
    def is_exact(self) -> bool:
        """Return whether the counts are right; see BUCKET-10."""
        return self._stale.is_exact_at(self._marks.frontier.deliver_at_ms)

    def histogram(self, start_ms: int, end_ms: int, width_ms: int, floor_ms: int = 0) -> Histogram:
        """See the protocol. The entries of a segment that was not read count as spread evenly over its times."""
        limits = {"start_ms": start_ms, "end_ms": end_ms, "width_ms": width_ms, "floor_ms": floor_ms}
        memory, buckets = self._memory.parts(), self.buckets.in_use
        self._loaded_count()
        histogram = histogram_over(
            self._loaded, memory, buckets, self._stale, self._marks.loaded_end, **limits
        )
        return replace(histogram, is_exact=histogram.is_exact and self.is_exact)

    def parts_between(self, start: Key, end: Key, limit: int) -> tuple[DueRows, list[UnreadSegments]]:
        """See the protocol. A merge may replace a bucket meanwhile: reading its segment then fails, some time later."""
        waiting_from = max(start, self._marks.loaded_end)
        windows = concatenate([NO_DUE_ROWS, *(bucket.window for bucket in self.buckets.in_use)])
        parts = [sorted_in_memory(self._loaded.blocks_between(start, end))]
        parts += [
            unsorted_in_memory(bucket.blocks_between(waiting_from, end)) for bucket in self._memory.parts()
        ]
        return windows, [
            *parts,
            *(
                bucket.unread_segments(start, limit, partial(self._read_to_look, bucket))
                for bucket in self.buckets.in_use
            ),
        ]

    def discard_ledger(self, ledger_id: int) -> None:
        """See the protocol; BUCKET-10 says when what lies in unread segments stops to count."""
        is_known = self._stale.may_hold(ledger_id)
        held = [*self._loaded.blocks(), *(bucket.window for bucket in self.buckets.in_use)]
        for memory in self._memory.parts():
            held += [block.part(~rows_before(block, self._marks.loaded_end)) for block in memory.blocks()]
        gone = concatenate([NO_DUE_ROWS, *(rows.part(rows.ledger_ids == ledger_id) for rows in held)])
        self._stale.note_gone(gone, self._marks.frontier)
        # What was added late is among the loaded rows alone, and nobody names what lies before the frontier.
        self._loaded.remove(gone.part(rows_before(gone, key_after(self._marks.frontier))))
        if not is_known:  # or all of it that is unread was cancelled, as far as anybody knows
            for bucket in self.buckets.in_use:
                bucket.discard(ledger_id)

    def clear(self, frontier: Frontier | None = None) -> None:
        """See the protocol. What follows indexes from the start of the log again."""
        self._marks.frontier = frontier or self._marks.frontier
        self._loaded.clear()
        self._marks.loaded_end = key_after(self._marks.frontier)
        self._stale.clear()
        self._memory.clear()
        self.buckets.clear()

    def stats(self) -> TrackerStats:
        memory, count, next_due_ms = self._memory.parts(), self.count(), self.next_due_ms()
        return stats_of(self._loaded, memory, self.buckets.in_use, self._stale, count, next_due_ms)

    async def seek_stale(self) -> None:
        """After `restore`: find the stale rows of buckets, so that they do not count. Raises as `load` does."""
        marks = (lambda: self._marks.frontier), (lambda: self._marks.loaded_end)
        await self._stale.seek(self._storage, lambda: self.buckets.in_use, *marks)

    # Where entries wait.

    def _first_waiting_key(self) -> Key | None:
        """The first key that waits, or one before it; None if nothing does."""
        keys = [key for bucket in self.buckets.in_use if (key := bucket.first_waiting_key) is not None]
        keys += [(bucket.first_waiting_ms, 0, 0) for bucket in self._memory.parts() if bucket.waiting]
        return min(keys, default=None)

    def _move_loaded_end(self, now_ms: int) -> None:
        """Move `loaded_end` as far as a load would, where nothing waits.

        It also goes back with the clock, as far as BUCKET-1 allows, or a clock that leapt forward once by mistake would
        load everything that is added for as long as it leapt.
        """
        end: Key = (now_ms + 2 * self._lead_ms + 1, 0, 0)
        first, last = self._first_waiting_key(), self._loaded.last_key()
        if first is not None:
            end = min(end, first)
        if last is not None:
            end = max(end, key_after(last))
        self._marks.loaded_end = max(end, key_after(self._marks.frontier))

    def _end_after(self, last_ms: int) -> Key:
        """Return how far entries can be handed on without reading more, up to a time."""
        keys = [key for bucket in self.buckets.in_use if (key := bucket.first_unread_key) is not None]
        return min([(last_ms + 1, 0, 0), *keys])

    async def _read_to_look(self, bucket: SealedBucket, segment: int) -> DueRows:
        """The rows of a segment, perhaps as they were read for the page before."""
        key = (self._storage.topic_id, bucket.bucket_id, segment)
        rows = self._looked.get(key)
        if rows is None:
            rows = await bucket.read(self._storage, segment)
            self._looked.put(key, rows)
        return rows

    async def _read_next(self, bucket: SealedBucket) -> None:
        """Read the next segment of a bucket into its window."""
        segment = bucket.next_segment
        if bucket.is_deleting:
            return
        try:
            columns = await bucket.read(self._storage, segment)
            if not bucket.is_deleting:  # SEALED-3; what a merge has left out is not stale once more
                self._stale.meet(columns, self._marks.frontier)
                bucket.feed(columns)
        except (OSError, PostdateError):
            if not bucket.is_deleting:  # else merged or spent while we read (BUCKET-11)
                raise

    def _hand_on(self, last_ms: int) -> None:
        """Load the rows before the next unread segment, up to a time and a number of rows (BUCKET-1)."""
        start, end = self._marks.loaded_end, self._end_after(last_ms)
        if end <= start:
            return
        memory = [
            (bucket, sort_unique(bucket.waiting_between(start, end))) for bucket in self._memory.parts()
        ]
        windows = [(bucket, bucket.window) for bucket in self.buckets.in_use if bucket.count_before(end)]
        waiting = [rows for _, rows in memory if len(rows)]
        waiting += [rows.part(slice(0, count_before(rows, end))) for _, rows in windows]
        end = bounded_end(waiting, end, self._load_entries_max)
        parts = [rows.part(slice(0, count_before(rows, end))) for _, rows in memory]
        parts += [bucket.take(bucket.count_before(end)) for bucket, _ in windows]
        for mutable, _ in memory:
            rows = mutable.waiting_between(start, end)
            self._stale.met(rows)
            mutable.loaded(len(rows), end)
        self._loaded.add(concatenate(parts))
        self._marks.loaded_end = end


async def _holds_waiting(
    storage: BucketStorage, bucket: SealedBucket, position: Position, loaded_end: Callable[[], Key]
) -> bool:
    """Return whether a bucket holds an entry that lies at or after `loaded_end`. Reads its bitmap, then segments."""
    ledger_id, entry_id = position
    try:
        if entry_id not in await storage.read(bucket.bucket_id, lambda reader: reader.read_bitmap(ledger_id)):
            return False
        if not bucket.is_deleting and bucket.window_holds(ledger_id, entry_id):
            return True
        for segment in range(bucket.next_segment, bucket.segment_count):
            columns = await bucket.read(storage, segment)
            is_entry = (columns.ledger_ids == ledger_id) & (columns.entry_ids == entry_id)
            is_entry &= ~rows_before(columns, loaded_end())
            if is_entry.any():
                return True
    except (OSError, PostdateError):
        if not bucket.is_deleting:
            raise
    return False
