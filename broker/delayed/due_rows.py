"""Rows of the delayed index, as columns: a due time and a position each. Pure.

Whatever part of the index holds them: what was added, what is loaded, what was read of a bucket, what came due.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, Array, Int64Column, UInt32Column

Key = tuple[int, int, int]
"""(deliver_at_ms, ledger_id, entry_id): the place of an entry in due order."""

ROW_BYTES = 20


@dataclass(frozen=True, slots=True)
class DueRows:
    """Entries and their times, aligned: 20 bytes a row. The arrays are never written."""

    deliver_at_ms: Int64Column
    ledger_ids: Int64Column
    entry_ids: UInt32Column

    def __len__(self) -> int:
        return len(self.deliver_at_ms)

    @property
    def columns(self) -> tuple[Int64Column, Int64Column, UInt32Column]:
        return self.deliver_at_ms, self.ledger_ids, self.entry_ids

    def part(self, rows: slice | Array) -> DueRows:
        return DueRows(self.deliver_at_ms[rows], self.ledger_ids[rows], self.entry_ids[rows])

    def key(self, row: int) -> Key:
        return int(self.deliver_at_ms[row]), int(self.ledger_ids[row]), int(self.entry_ids[row])

    def copy(self) -> DueRows:
        return DueRows(self.deliver_at_ms.copy(), self.ledger_ids.copy(), self.entry_ids.copy())


NO_DUE_ROWS = DueRows(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint32))


def key_after(key: Key) -> Key:
    """The least key above `key`, which may lie beyond every position of its millisecond."""
    time, ledger_id, entry_id = key
    if ledger_id > LEDGER_ID_MAX:
        return time + 1, 0, 0
    return (time, ledger_id, entry_id + 1) if entry_id < ENTRY_ID_MAX else (time, ledger_id + 1, 0)


def rows_before(columns: DueRows, key: Key) -> Array:
    """For rows in any order: whether each lies before `key`."""
    time, ledger_id, entry_id = key
    before = columns.deliver_at_ms < time
    if ledger_id or entry_id:
        same = columns.deliver_at_ms == time
        same &= (columns.ledger_ids < ledger_id) | (
            (columns.ledger_ids == ledger_id) & (columns.entry_ids < entry_id)
        )
        before |= same
    return before


def count_before(columns: DueRows, key: Key) -> int:
    """Return how many of the sorted rows lie before `key`."""
    time, ledger_id, entry_id = key
    low, high = np.searchsorted(columns.deliver_at_ms, (time, time + 1))
    if low == high:
        return int(low)
    ledgers = columns.ledger_ids[low:high]
    first, end = np.searchsorted(ledgers, (ledger_id, ledger_id + 1))
    return int(low + first + np.searchsorted(columns.entry_ids[low + first : low + end], np.uint32(entry_id)))


def bounded_end(parts: list[DueRows], end: Key, limit: int) -> Key:
    """The end of about the first `limit` rows of some sorted parts, all of which lie before `end`; at least a row.

    Found from a sample of each part, so that its cost does not grow with what lies there.
    """
    if sum(map(len, parts)) <= limit:
        return end
    stride = max(1, limit // (4 * len(parts)))
    # Row `stride - 1` of a part, and each `stride` rows on: that many rows lie at or before each of them.
    samples = sort_unique(concatenate([rows.part(slice(stride - 1, None, stride)) for rows in parts]))
    last = max(limit // stride - len(parts), 1) - 1
    return min(end, key_after(samples.key(last))) if last < len(samples) else end


def concatenate(parts: Iterable[DueRows]) -> DueRows:
    several = list(parts)
    if len(several) == 1:
        return several[0]
    return DueRows(
        np.concatenate([part.deliver_at_ms for part in several]),
        np.concatenate([part.ledger_ids for part in several]),
        np.concatenate([part.entry_ids for part in several]),
    )


def stable_order(numbers: Int64Column) -> Array:
    """`argsort` that keeps the order of equals; several times faster while the numbers lie close together."""
    lowest = numbers.min()
    if int(numbers.max()) - int(lowest) <= 0xFFFF:
        return np.argsort(
            (numbers - lowest).astype(np.uint16), kind="stable"
        )  # a radix sort, for 16 bits only
    return np.argsort(numbers, kind="stable")


def sort_unique(columns: DueRows) -> DueRows:
    """Rows in (deliver_at_ms, position) order, each once."""
    if len(columns) < 2:
        return columns
    times = columns.deliver_at_ms
    if np.any(times[1:] < times[:-1]):
        columns = columns.part(stable_order(times))
    # Entries mostly arrive in position order, so a stable sort by time alone is mostly enough; sorting by all
    # three columns takes four times as long. Whether it was enough is cheap to see.
    if rises(columns).all():
        return columns
    columns = columns.part(np.lexsort((columns.entry_ids, columns.ledger_ids, columns.deliver_at_ms)))
    return columns.part(np.concatenate(([True], rises(columns))))


def doubles_in(columns: DueRows) -> DueRows:
    """Of rows in any order, each that was there before."""
    if len(columns) < 2:
        return NO_DUE_ROWS
    columns = columns.part(np.lexsort((columns.entry_ids, columns.ledger_ids, columns.deliver_at_ms)))
    return columns.part(np.concatenate(([False], ~rises(columns))))


def rises(columns: DueRows) -> Array:
    """Of rows whose times do not fall: whether each but the first lies after the row before it."""
    times, ledgers, entries = columns.deliver_at_ms, columns.ledger_ids, columns.entry_ids
    rises = entries[1:] > entries[:-1]
    rises &= ledgers[1:] == ledgers[:-1]
    rises |= ledgers[1:] > ledgers[:-1]
    rises |= times[1:] > times[:-1]
    return rises
