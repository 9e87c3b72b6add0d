"""A bucket on disk, and how far it has been read.

    segments   | spent or handed on ... | decoded: `window` | not read yet ...
                                        ^ the tracker's `loaded_end` lies in or before the window

Invariants:
  SEALED-1  Rows before the window lie before the tracker's `loaded_end`: they are in the loaded part, or were taken, or
      were left out at a restart because they lie at or before the frontier.
  SEALED-2  `waiting` counts the rows of the window and of the segments not read. Those of a discarded ledger
      are stale as others are: they stay until they are taken or merged.
  SEALED-3  Nothing of a bucket is used once its state is DELETING, also not what a read that began before returns.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

import numpy as np

from broker.delayed.due_rows import NO_DUE_ROWS, ROW_BYTES, DueRows, Key, concatenate, count_before
from broker.delayed.scan import UnreadSegments
from broker.model import Int64Column
from broker.storage.bucket_files import BucketStorage
from broker.storage.bucket_snapshot import SEGMENT_MEMORY_BYTES, BucketMetadata, Ordinals, decode_segment

_BUCKET_BYTES = 2_000
"""Of the objects that hold a bucket's metadata, about."""


class BucketState(Enum):
    """CREATING: written, and not yet in use. MERGING: in use, and read by a merge. DELETING: out of use."""

    CREATING = "creating"
    LIVE = "live"
    MERGING = "merging"
    DELETING = "deleting"


class SealedBucket:
    """See the module's description. The tracker reads the file; this keeps what was read."""

    def __init__(self, metadata: BucketMetadata) -> None:
        self.metadata = metadata
        self.state = BucketState.CREATING
        self.next_segment = 0
        self.is_unsure = False
        """True if unread segments may hold entries of a ledger that is gone."""
        self.window = NO_DUE_ROWS
        self._ordinals = Ordinals(metadata.spans)
        self._unread = metadata.count
        self._unread_key: Key | None = None
        self._go_to(0)

    @property
    def bucket_id(self) -> int:
        return self.metadata.bucket_id

    @property
    def is_deleting(self) -> bool:
        return self.state is BucketState.DELETING

    @property
    def segment_count(self) -> int:
        return len(self.metadata.segments)

    @property
    def waiting(self) -> int:
        return len(self.window) + self._unread

    @property
    def first_unread_key(self) -> Key | None:
        """The first key of the first segment that was not read; None after the last one."""
        return self._unread_key

    @property
    def first_waiting_key(self) -> Key | None:
        return self.window.key(0) if len(self.window) else self._unread_key

    @property
    def last_key(self) -> Key:
        return self.last_key_of(self.segment_count - 1)

    def first_key_of(self, segment: int) -> Key:
        segments = self.metadata.segments
        return self._key(int(segments.first_ms[segment]), int(segments.first_ordinals[segment]))

    def last_key_of(self, segment: int) -> Key:
        segments = self.metadata.segments
        return self._key(int(segments.last_ms[segment]), int(segments.last_ordinals[segment]))

    def start_at(self, loaded_end: Key) -> int | None:
        """Skip the segments that lie before `loaded_end`; the one to read now if it lies in the middle of one."""
        assert not len(self.window)
        self._go_to(self.first_segment_from(loaded_end))
        is_between = self._unread_key is not None and self._unread_key < loaded_end
        return self.next_segment if is_between else None

    def first_segment_from(self, key: Key) -> int:
        """The first segment that holds anything at or after `key`."""
        # Whole keys only where times are the same: to make one costs more than to compare all times.
        bounds: list[int] = self.metadata.segments.last_ms.searchsorted((key[0], key[0] + 1)).tolist()
        low, high = bounds
        return low + bisect_left(range(low, high), key, key=self.last_key_of)

    def decode(self, segment: int, data: bytes) -> DueRows:
        """The rows of a segment; raises Corrupt."""
        segments = self.metadata.segments
        times, ordinals = decode_segment(
            data,
            int(segments.counts[segment]),
            int(segments.first_ms[segment]),
            int(segments.first_ordinals[segment]),
        )
        ledger_ids, entry_ids = self._ordinals.to_positions(ordinals)
        return DueRows(times, ledger_ids, entry_ids)

    async def read(self, storage: BucketStorage, segment: int) -> DueRows:
        """The rows of a segment, from its file; raises Corrupt, Unavailable."""
        metadata = self.metadata
        (data,) = await storage.read(
            metadata.bucket_id, lambda reader: reader.read_segments(metadata, segment, segment + 1)
        )
        return self.decode(segment, data)

    def feed(self, columns: DueRows) -> None:
        """The next segment was read: its rows follow the window's."""
        self._go_to(self.next_segment + 1)
        if len(columns):
            self.window = concatenate((self.window, columns)) if len(self.window) else columns

    def count_before(self, key: Key) -> int:
        """Return how many rows of the window lie before `key`."""
        return count_before(self.window, key) if len(self.window) else 0

    def take(self, count: int) -> DueRows:
        """Hand on the first rows of the window."""
        taken = self.window.part(slice(0, count))
        self.window = self.window.part(slice(count, None)) if count < len(self.window) else NO_DUE_ROWS
        return taken

    def discard(self, ledger_id: int) -> None:
        """Note that a ledger is gone of which unread segments may hold entries."""
        if any(span.ledger_id == ledger_id for span in self.metadata.spans):
            self.is_unsure = True

    def window_holds(self, ledger_id: int, entry_id: int) -> bool:
        return bool(np.any((self.window.ledger_ids == ledger_id) & (self.window.entry_ids == entry_id)))

    def unread_spread(self) -> tuple[Int64Column, Int64Column, Int64Column]:
        """Of each unread segment: first and last time, and count."""
        segments, rest = self.metadata.segments, slice(self.next_segment, None)
        return segments.first_ms[rest], segments.last_ms[rest], segments.counts[rest]

    def unread_segments(
        self, start: Key, limit: int, read: Callable[[int], Awaitable[DueRows]]
    ) -> UnreadSegments:
        """The segments that were not read yet, for a look at the first `limit` rows from `start` on.

        As many as hold more rows than that: what lies behind them is in no such page.
        """
        segments = self.metadata.segments
        first = max(self.next_segment, self.first_segment_from(start))
        # Of the first one a part lies before the start, perhaps all but a row.
        counted = segments.counts[first + 1 :].cumsum()
        end = min(first + 2 + int(counted.searchsorted(limit)), self.segment_count)
        some = slice(first, end)
        first_positions = self._ordinals.to_positions(segments.first_ordinals[some])
        last_positions = self._ordinals.to_positions(segments.last_ordinals[some])
        return UnreadSegments(
            DueRows(segments.first_ms[some], *first_positions),
            DueRows(segments.last_ms[some], *last_positions),
            segments.counts[some],
            lambda number: read(first + number),
        )

    def memory_bytes(self) -> int:
        return ROW_BYTES * len(self.window) + SEGMENT_MEMORY_BYTES * self.segment_count + _BUCKET_BYTES

    def disk_bytes(self) -> int:
        return self.metadata.file_bytes

    def _go_to(self, segment: int) -> None:
        self.next_segment = segment
        self._unread = int(self.metadata.segments.counts[segment:].sum())
        self._unread_key = self.first_key_of(segment) if segment < self.segment_count else None

    def _key(self, time: int, ordinal: int) -> Key:
        ledger_ids, entry_ids = self._ordinals.to_positions(np.array([ordinal], dtype=np.int64))
        return time, int(ledger_ids[0]), int(entry_ids[0])


def plan_reads(
    buckets: Sequence[SealedBucket], end: Key, last_ms: int, entries_max: int
) -> list[SealedBucket]:
    """The buckets whose next segment to read up to a time, first keys first, as much as one load may bring.

    `end`: up to there nothing more has to be read.
    """
    rows = sum(bucket.count_before(end) for bucket in buckets)
    first_keys = [
        (bucket.first_unread_key, index, bucket.next_segment)
        for index, bucket in enumerate(buckets)
        if bucket.first_unread_key is not None
    ]
    heapq.heapify(first_keys)
    plan: list[SealedBucket] = []
    while first_keys and first_keys[0][0][0] <= last_ms and rows < entries_max:
        _, index, segment = heapq.heappop(first_keys)
        bucket = buckets[index]
        plan.append(bucket)
        rows += int(bucket.metadata.segments.counts[segment])
        if segment + 1 < bucket.segment_count:
            heapq.heappush(first_keys, (bucket.first_key_of(segment + 1), index, segment + 1))
    return plan
