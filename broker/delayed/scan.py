"""Looks into the index without taking anything: the entries of a range of due time, in due order, page by page.

What is in memory is held in the step that begins a look, so it holds nothing twice. Of the buckets only those
segments are read that the page needs, and of many rows in memory only those parts are looked at. Where enough entries
are expected is computed from the segments' borders, as if each were spread evenly; what was wrong in that is made good
by reading on. What is taken, moved or merged meanwhile may still be in the answer: the caller compares with the
effective times, as everybody does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from broker.delayed.due_rows import NO_DUE_ROWS, DueRows, Key, concatenate, rows_before, sort_unique
from broker.model import Array, Int64Column

_SPARE = 1.25
"""Factor by which more entries are looked for than wanted: times are never spread quite evenly."""


_PART_ROWS = 4_096
"""Rows in memory that are looked at together, if they are sorted."""

_READS_AT_ONCE = 64
"""Segments that are asked for together: the read thread need not wait for the loop between them."""


@dataclass(frozen=True, slots=True)
class UnreadSegments:
    """Segments that a look may have to read, or to look at: their borders, aligned, and how to read one.

    Borders are whole keys: a million entries may be due in one millisecond.
    """

    first: DueRows
    """No row lies before it."""
    last: DueRows
    """No row lies after it."""
    counts: Int64Column
    read: Callable[[int], Awaitable[DueRows]]
    """The rows of the segment with that number here."""


def sorted_in_memory(blocks: Sequence[DueRows]) -> UnreadSegments:
    """Rows in memory, in order, as segments."""
    parts = [
        block.part(slice(row, row + _PART_ROWS))
        for block in blocks
        for row in range(0, len(block), _PART_ROWS)
    ]
    first = concatenate([NO_DUE_ROWS, *(part.part(slice(0, 1)) for part in parts)])
    last = concatenate([NO_DUE_ROWS, *(part.part(slice(-1, None)) for part in parts)])
    return _in_memory(parts, first, last)


def unsorted_in_memory(blocks: Sequence[DueRows]) -> UnreadSegments:
    """Rows in memory, in any order, as segments: a block each, none of them empty."""
    first = concatenate([NO_DUE_ROWS, *(_extreme(block, np.min) for block in blocks)])
    last = concatenate([NO_DUE_ROWS, *(_extreme(block, np.max) for block in blocks)])
    return _in_memory(blocks, first, last)


def _in_memory(parts: Sequence[DueRows], first: DueRows, last: DueRows) -> UnreadSegments:
    async def read(number: int) -> DueRows:
        return parts[number]

    return UnreadSegments(first, last, np.array([len(part) for part in parts], dtype=np.int64), read)


def _extreme(rows: DueRows, of: Callable[[Array], int]) -> DueRows:
    """The first or the last of some rows."""
    for column in range(3):
        values = rows.columns[column]
        rows = rows.part(np.flatnonzero(values == of(values)))
        if len(rows) == 1:  # as nearly always
            break
    return rows.part(slice(0, 1))


@dataclass(frozen=True, slots=True)
class Page:
    """Entries in due order, each once; nothing between where it starts and `end` is missing."""

    entries: DueRows
    end: Key
    """Place at which the next page begins."""
    is_last: bool


async def scan(
    in_memory: DueRows, unread: Sequence[UnreadSegments], start: Key, end: Key, limit: int
) -> Page:
    """The first `limit` entries with start <= key < end, or all if there are fewer; perhaps fewer, where entries are
    doubled.

    `in_memory` holds rows in any order, also outside of the range. Raises what reading a segment raises.
    """
    waiting = _SegmentQueue(unread, start, end)
    parts = [_between(in_memory, start, end)]
    wanted = limit
    while True:
        reads = waiting.take(concatenate(parts), wanted) if len(waiting) else []
        for first in range(0, len(reads), _READS_AT_ONCE):
            read_columns = await asyncio.gather(*(read() for read in reads[first : first + _READS_AT_ONCE]))
            parts += [_between(columns, start, end) for columns in read_columns]
        complete = min(end, waiting.first_key) if len(waiting) else end
        inside = concatenate([part.part(rows_before(part, complete)) for part in parts])
        if len(inside) > limit or complete == end:
            break
        wanted *= 2
    if len(inside) > limit + 1:
        # Of what was read most lies behind the page, and is not sorted for it.
        times = inside.deliver_at_ms
        last_ms = int(np.partition(times, limit)[limit])
        complete = min(complete, (last_ms + 1, 0, 0))
        inside = inside.part(np.flatnonzero(times <= last_ms))
    rows = sort_unique(inside)
    if len(rows) > limit:
        return Page(rows.part(slice(0, limit)), rows.key(limit), is_last=False)
    return Page(rows, complete, is_last=complete == end)


class _SegmentQueue:
    """The segments that overlap the range, those with the earliest rows first."""

    def __init__(self, unread: Sequence[UnreadSegments], start: Key, end: Key) -> None:
        nothing = np.empty(0, dtype=np.int64)
        first, last, counts, numbers, owners = [NO_DUE_ROWS], [NO_DUE_ROWS], [nothing], [nothing], [nothing]
        for owner, segments in enumerate(unread):
            at = np.flatnonzero(~rows_before(segments.last, start) & rows_before(segments.first, end))
            first.append(segments.first.part(at))
            last.append(segments.last.part(at))
            counts.append(segments.counts[at])
            numbers.append(at)
            owners.append(np.full(len(at), owner))
        unsorted = concatenate(first)
        order = np.lexsort((unsorted.entry_ids, unsorted.ledger_ids, unsorted.deliver_at_ms))
        self._first, self._last = unsorted.part(order), concatenate(last).part(order)
        self._counts, self._numbers, self._owners = (
            np.concatenate(columns)[order] for columns in (counts, numbers, owners)
        )
        self._start = start
        self._unread = unread
        self._taken = 0

    def __len__(self) -> int:
        return len(self._first) - self._taken

    @property
    def first_key(self) -> Key:
        """Nothing of what was not taken lies before it."""
        return self._first.key(self._taken)

    def take(self, known: DueRows, wanted: int) -> list[Callable[[], Awaitable[DueRows]]]:
        """Return readers of the next segments: one at least, and about as many as give `wanted` rows."""
        low, high = self._taken + 1, len(self._first)
        while low < high:
            middle = (low + high) // 2
            if self._expected_before(middle, known) >= wanted * _SPARE:
                high = middle
            else:
                low = middle + 1
        taken, self._taken = slice(self._taken, low), low
        segments = zip(self._owners[taken].tolist(), self._numbers[taken].tolist(), strict=True)
        return [partial(self._unread[owner].read, number) for owner, number in segments]

    def _expected_before(self, segment: int, known: DueRows) -> float:
        """About how many rows lie before a segment. One that ends before it counts whole, others by their times."""
        until, some = self._first.key(segment), slice(self._taken, segment)
        first, last, counts = self._first.part(some), self._last.part(some), self._counts[some]
        begins = np.maximum(first.deliver_at_ms, self._start[0])
        parts = (until[0] - begins) / (last.deliver_at_ms - begins + 1)
        parts[rows_before(last, until)] = 1.0
        # Of the first ones a part lies before the range, perhaps all but a row.
        parts[rows_before(first, self._start)] = 0.0
        return float((np.maximum(parts, 0.0) * counts).sum()) + int(rows_before(known, until).sum())


def _between(columns: DueRows, start: Key, end: Key) -> DueRows:
    inside: Array = ~rows_before(columns, start) & rows_before(columns, end)
    return columns.part(inside)
