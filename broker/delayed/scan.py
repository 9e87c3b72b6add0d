"""Looks into the index without taking anything: the entries of a range of due time, in due order, page by page.

What is in memory is copied in the step that begins a look, so it holds nothing twice; of the buckets only those
segments are read that the page needs. Where enough entries are expected is computed from the segments' borders,
as if each were spread evenly; what was wrong in that is made good by reading on. What is taken, moved or merged
meanwhile may still be in the answer: the caller compares with the effective times, as everybody does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from broker.delayed.near import Columns, Key, concatenate, rows_before, sort_unique
from broker.model import Array, Int64Column

_SPARE = 1.25
"""How many more entries than wanted are looked for: times are never spread quite evenly."""


_READS_AT_ONCE = 64
"""Segments that are asked for together: the read thread need not wait for the loop between them."""


@dataclass(frozen=True, slots=True)
class UnreadSegments:
    """Segments that a look may have to read: their borders in due time, aligned, and how to read one."""

    first_ms: Int64Column
    last_ms: Int64Column
    counts: Int64Column
    read: Callable[[int], Awaitable[Columns]]
    """The rows of the segment with that number here."""


@dataclass(frozen=True, slots=True)
class Page:
    """Entries in due order, each once; nothing between where it starts and `end` is missing."""

    entries: Columns
    end: Key
    """Where the next page begins."""
    is_last: bool


async def scan(
    in_memory: Columns, unread: Sequence[UnreadSegments], start: Key, end: Key, limit: int
) -> Page:
    """The first `limit` entries with start <= key < end, or all if there are fewer.

    `in_memory` holds rows in any order, also outside of the range. Raises what reading a segment raises.
    """
    waiting = _Waiting(unread, start, end)
    parts = [_between(in_memory, start, end)]
    wanted = limit
    while True:
        until_ms = waiting.expected_until(parts, wanted, start[0], end[0])
        reads = waiting.take_until(until_ms)
        for first in range(0, len(reads), _READS_AT_ONCE):
            found = await asyncio.gather(*(read() for read in reads[first : first + _READS_AT_ONCE]))
            parts += [_between(columns, start, end) for columns in found]
        complete = min(end, (waiting.first_ms, 0, 0)) if len(waiting) else end
        inside = concatenate([part.part(rows_before(part, complete)) for part in parts])
        if len(inside) > limit or complete == end:
            break
        wanted += limit
    rows = sort_unique(inside)
    if len(rows) > limit:
        return Page(rows.part(slice(0, limit)), rows.key(limit), is_last=False)
    return Page(rows, complete, is_last=complete == end)


class _Waiting:
    """The segments that overlap the range, those with the earliest times first."""

    def __init__(self, unread: Sequence[UnreadSegments], start: Key, end: Key) -> None:
        nothing = np.empty(0, dtype=np.int64)
        first, last, counts, numbers, owners = [nothing], [nothing], [nothing], [nothing], [nothing]
        for owner, each in enumerate(unread):
            at = np.flatnonzero((each.last_ms >= start[0]) & (each.first_ms <= end[0]))
            first.append(each.first_ms[at])
            last.append(each.last_ms[at])
            counts.append(each.counts[at])
            numbers.append(at)
            owners.append(np.full(len(at), owner))
        first_ms = np.concatenate(first)
        order = np.argsort(first_ms, kind="stable")
        self._first_ms = first_ms[order]
        self._last_ms, self._counts, self._numbers, self._owners = (
            np.concatenate(columns)[order] for columns in (last, counts, numbers, owners)
        )
        self._unread = unread
        self._taken = 0

    def __len__(self) -> int:
        return len(self._first_ms) - self._taken

    @property
    def first_ms(self) -> int:
        """The earliest time of what was not taken."""
        return int(self._first_ms[self._taken])

    def take_until(self, until_ms: int) -> list[Callable[[], Awaitable[Columns]]]:
        """What reads the segments that begin before a time."""
        end = max(self._taken, int(np.searchsorted(self._first_ms, until_ms)))
        taken, self._taken = slice(self._taken, end), end
        segments = zip(self._owners[taken].tolist(), self._numbers[taken].tolist(), strict=True)
        return [partial(self._unread[owner].read, number) for owner, number in segments]

    def expected_until(self, parts: Sequence[Columns], wanted: int, start_ms: int, end_ms: int) -> int:
        """A time before which about `wanted` entries are expected, and some more; some segment begins before it."""
        if not len(self):
            return end_ms + 1
        times = np.sort(np.concatenate([part.deliver_at_ms for part in parts]))
        first, last = self._first_ms[self._taken :], self._last_ms[self._taken :]
        density = self._counts[self._taken :] / (last - first + 1).astype(np.float64)

        def expected(until_ms: int) -> float:
            inside = np.minimum(last + 1, until_ms) - np.maximum(first, start_ms)
            return float((np.maximum(inside, 0) * density).sum()) + int(np.searchsorted(times, until_ms))

        low, high = max(start_ms, self.first_ms), min(end_ms, int(last.max())) + 1
        while low < high:
            middle = (low + high) // 2
            if expected(middle) >= wanted * _SPARE:
                high = middle
            else:
                low = middle + 1
        return max(low, self.first_ms + 1)


def _between(columns: Columns, start: Key, end: Key) -> Columns:
    inside: Array = ~rows_before(columns, start) & rows_before(columns, end)
    return columns.part(inside)
