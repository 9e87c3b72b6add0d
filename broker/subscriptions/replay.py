"""The replay queue: references to what became due, in due order. Pure: no file, no clock, no await."""

from __future__ import annotations

from collections import deque

import numpy as np

from broker.delayed.due_rows import DueRows

_SMALL_ENTRIES = 1_024


class ReplayQueue:
    """Queue of what became due and was not handed out yet, as references into chunks that all subscriptions share.

    A queue that would pass its limit is emptied instead, and says so: the subscription then finds what it
    missed by position (catch-up), which needs no memory.
    """

    __slots__ = ("_chunks", "_count", "_entries_max", "_offset", "clears")

    def __init__(self, entries_max: int) -> None:
        self.clears = 0
        """Number of times that the queue was emptied: what was taken before is then somebody else's to find."""
        self._entries_max = entries_max
        self._chunks: deque[DueRows] | None = None  # an empty one costs 760 bytes, and most have no consumers
        self._offset = 0  # taken from the first chunk
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, chunk: DueRows) -> bool:
        """Queue a chunk; False if it does not fit: then the queue is empty and must be made good by catch-up."""
        if self._count + len(chunk) > self._entries_max:
            self.clear()
            return False
        if self._chunks is None:
            self._chunks = deque()
        self._chunks.append(chunk)
        self._count += len(chunk)
        return True

    def take(self, limit: int) -> DueRows | None:
        """Take at most `limit` entries, in due order; None if there are none."""
        if not self._chunks:
            return None
        if len(self._chunks) > 1 and len(self._chunks[0]) - self._offset < min(limit, _SMALL_ENTRIES):
            self._join_small(self._chunks)
        chunk, first = self._chunks[0], self._offset
        end = min(first + limit, len(chunk))
        if end == len(chunk):
            self._chunks.popleft()
            self._offset = 0
        else:
            self._offset = end
        self._count -= end - first
        return DueRows(
            chunk.deliver_at_ms[first:end], chunk.ledger_ids[first:end], chunk.entry_ids[first:end]
        )

    def put_back(self, chunk: DueRows) -> None:
        """Return what `take` gave, or a part of it, to the front: due order is kept. May pass the limit by one take."""
        if self._chunks is None:
            self._chunks = deque()
        if self._offset:
            self._chunks[0] = _from(self._chunks[0], self._offset)
            self._offset = 0
        self._chunks.appendleft(chunk)
        self._count += len(chunk)

    def _join_small(self, chunks: deque[DueRows]) -> None:
        """Make one chunk, in due order, of the first ones while they are small. Large ones stay shared by all."""
        parts = [_from(chunks.popleft(), self._offset)]
        self._offset = 0
        count = len(parts[0])
        while chunks and count + len(chunks[0]) <= _SMALL_ENTRIES:
            parts.append(chunks.popleft())
            count += len(parts[-1])
        times = np.concatenate([part.deliver_at_ms for part in parts])
        ledger_ids = np.concatenate([part.ledger_ids for part in parts])
        entry_ids = np.concatenate([part.entry_ids for part in parts])
        order = np.lexsort(
            (entry_ids, ledger_ids, times)
        )  # what was indexed late may be due before its chunk
        chunks.appendleft(DueRows(times[order], ledger_ids[order], entry_ids[order]))

    def clear(self) -> None:
        self.clears += 1
        self._chunks = None
        self._offset = 0
        self._count = 0


def _from(chunk: DueRows, first: int) -> DueRows:
    return DueRows(chunk.deliver_at_ms[first:], chunk.ledger_ids[first:], chunk.entry_ids[first:])
