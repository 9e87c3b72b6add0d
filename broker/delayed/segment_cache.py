"""Cache of segments that were read for a look at the index, of all topics, bounded in bytes.

Pages follow each other in due order, and each needs a part of the same segment of every bucket as the page before it.
Nothing in here is needed: what is missing is read again.
"""

from __future__ import annotations

from collections import OrderedDict

from broker.delayed.due_rows import ROW_BYTES, DueRows

_Key = tuple[int, int, int]  # topic_id, bucket_id, segment: no id is ever used again


class SegmentCache:
    """Rows of segments, which never change; at most `bytes_max` of them, those that were used last."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._segments: OrderedDict[_Key, DueRows] = OrderedDict()
        self.memory_bytes = 0

    def get(self, key: _Key) -> DueRows | None:
        rows = self._segments.get(key)
        if rows is not None:
            self._segments.move_to_end(key)
        return rows

    def put(self, key: _Key, rows: DueRows) -> None:
        """Keep a segment, in the place of those not used for the longest time."""
        self._drop(key)
        self._segments[key] = rows
        self.memory_bytes += len(rows) * ROW_BYTES
        while self.memory_bytes > self._bytes_max:
            self._drop(next(iter(self._segments)))

    def _drop(self, key: _Key) -> None:
        rows = self._segments.pop(key, None)
        if rows is not None:
            self.memory_bytes -= len(rows) * ROW_BYTES
