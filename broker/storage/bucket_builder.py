"""Makes a bucket's snapshot out of sorted rows, part by part. Pure.

A seal and a merge give it rows as they get them; it cuts and encodes segments, and keeps what the metadata will
say: columns of segments, a bitmap of each ledger, count and checksum. Segments are handed on at once, so memory
is bounded by the metadata and the rows of one part.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from google_crc32c import value
from pyroaring import BitMap

from broker.model import Int64Column, Position, bitmap_of
from broker.runs.tally import Tally
from broker.storage.bucket_segment import (
    SEGMENT_ENTRIES_MAX,
    SEGMENT_ENTRIES_MIN,
    cut_segments,
    encode_segment,
)
from broker.storage.bucket_snapshot import (
    SEGMENT_COLUMNS,
    BucketMetadata,
    LedgerSpan,
    Ordinals,
    SegmentColumns,
    metadata_bytes_max,
)

_BITMAP_ROWS = 65_536  # gathered before bitmaps are changed: few rows at a time would touch every container


class SnapshotBuilder:
    """A snapshot in the making. `spans` hold every position that will be added; each row is added once.

    `tally` is that of the rows so far; `bitmaps` are complete after `end`.
    """

    def __init__(
        self,
        spans: Sequence[LedgerSpan],
        *,
        time_step_ms: int,
        max_entries: int = SEGMENT_ENTRIES_MAX,
        min_entries: int = SEGMENT_ENTRIES_MIN,
    ) -> None:
        self.ordinals = Ordinals(spans)
        self.tally = Tally()
        self.bitmaps: dict[int, BitMap] = {span.ledger_id: BitMap() for span in spans}
        self._spans = tuple(spans)
        self._time_step_ms = time_step_ms
        self._max_entries = max_entries
        self._min_entries = min_entries
        self._unmarked: list[Int64Column] = []  # ordinals that are not in the bitmaps yet
        self._unmarked_count = 0
        self._times = np.empty(0, dtype=np.int64)  # of the rows that are not cut yet
        self._ordinals = np.empty(0, dtype=np.int64)
        # Of each segment, aligned. Flat arrays: lists of numbers would take four times the memory.
        self._columns = {column.name: array("q") for column in SEGMENT_COLUMNS}

    def add(self, times: Int64Column, ordinals: Int64Column) -> list[bytes]:
        """Take the rows that follow, sorted; returns the segments that are complete now."""
        if not len(times):
            return []
        assert int(ordinals.min()) >= 0 and int(ordinals.max()) < self.ordinals.end
        ledger_ids, entry_ids = self.ordinals.to_positions(ordinals)
        self.tally.add(times, ledger_ids, entry_ids)
        self._unmarked.append(ordinals)
        self._unmarked_count += len(ordinals)
        if self._unmarked_count >= _BITMAP_ROWS:
            self._mark()
        self._times = np.concatenate((self._times, times))
        self._ordinals = np.concatenate((self._ordinals, ordinals))
        return self._cut(is_last=False)

    def end(self) -> list[bytes]:
        """No rows follow; returns the last segments."""
        self._mark()
        for bitmap in self.bitmaps.values():
            bitmap.run_optimize()
        return self._cut(is_last=True)

    def metadata(self, topic_id: int, bucket_id: int, start: Position, end: Position) -> BucketMetadata:
        """Return the metadata of the file, after `end`. There must have been a row."""
        assert self.tally.count and not len(self._times)
        segments = SegmentColumns.of(self._columns)
        return BucketMetadata(
            topic_id, bucket_id, start, end, self.tally.count, self.tally.checksum, self._spans, segments
        )

    def reserve_bytes(self, count: int) -> int:
        """Room that header, metadata and bitmaps need at most, if at most `count` rows are added."""
        min_entries = max(1, min(self._min_entries, self._max_entries))
        return metadata_bytes_max(self._spans, count // min_entries + 1)

    def _mark(self) -> None:
        if self._unmarked:
            ordinals = np.concatenate(self._unmarked)
            ordinals.sort()
            for ledger_id, entry_ids in self.ordinals.split(ordinals):
                self.bitmaps[ledger_id] |= bitmap_of(entry_ids)
        self._unmarked, self._unmarked_count = [], 0

    def _cut(self, *, is_last: bool) -> list[bytes]:
        segments: list[bytes] = []
        times, ordinals = self._times, self._ordinals
        ends = cut_segments(
            times, self._time_step_ms, self._max_entries, self._min_entries, is_last=is_last
        ).tolist()
        start = 0
        for end in ends:
            segment = encode_segment(times[start:end], ordinals[start:end])
            segments.append(segment)
            facts = {
                "first_ms": int(times[start]),
                "last_ms": int(times[end - 1]),
                "first_ordinals": int(ordinals[start]),
                "last_ordinals": int(ordinals[end - 1]),
                "counts": end - start,
                "lengths": len(segment),
                "crcs": value(segment),
            }
            for name, gathered in self._columns.items():
                gathered.append(facts[name])
            start = end
        # Copies: views would keep the whole part alive.
        self._times, self._ordinals = times[start:].copy(), ordinals[start:].copy()
        return segments
