"""Entries due soon, with their exact times: sorted columns in blocks.

A block is three columns sorted by (deliver_at_ms, ledger_id, entry_id); blocks follow one another in that
order. What is added waits unsorted, and the next look sorts all of it at once and merges it into the blocks
it falls into. One sorted array would be simpler, but an entry that arrives while a million are due would
copy the million.

Invariants:
  NEAR-1  Blocks are never empty; the last row of each lies before the first row of the next.
  NEAR-2  No (deliver_at_ms, position) is held twice once `_settle` ran, and every public look runs it first.
  NEAR-3  The arrays of a block are never written: a chunk handed out may be a part of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from broker.delayed.tracker import DueChunk
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, Array, Int64Column, UInt32Column

Key = tuple[int, int, int]
"""(deliver_at_ms, ledger_id, entry_id): the place of an entry in due order."""

BLOCK_ROWS = 65_536
ROW_BYTES = 20


@dataclass(frozen=True, slots=True)
class Columns:
    """Entries and their times, aligned: 20 bytes a row."""

    deliver_at_ms: Int64Column
    ledger_ids: Int64Column
    entry_ids: UInt32Column

    def __len__(self) -> int:
        return len(self.deliver_at_ms)

    def part(self, rows: slice | Array) -> Columns:
        return Columns(self.deliver_at_ms[rows], self.ledger_ids[rows], self.entry_ids[rows])

    def key(self, row: int) -> Key:
        return int(self.deliver_at_ms[row]), int(self.ledger_ids[row]), int(self.entry_ids[row])

    def copy(self) -> Columns:
        return Columns(self.deliver_at_ms.copy(), self.ledger_ids.copy(), self.entry_ids.copy())


NO_COLUMNS = Columns(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint32))


class NearEntries:
    """Entries that a tracker can hand out without reading anything."""

    def __init__(self) -> None:
        self._blocks: list[Columns] = []
        self._added: list[Columns] = []
        self._count = 0  # of the blocks' rows
        self._doubles: list[Columns] = []  # dropped since they were last asked for

    def add(self, columns: Columns) -> None:
        """Keep entries in any order of time; the arrays become ours."""
        if len(columns):
            self._added.append(columns)

    def take(self, now_ms: int, limit: int) -> DueChunk | None:
        """Remove at most `limit` entries with deliver_at_ms <= now_ms, the first in order."""
        self._settle()
        parts: list[Columns] = []
        wanted, spent = limit, 0
        for block in self._blocks:
            due = min(wanted, int(np.searchsorted(block.deliver_at_ms, now_ms, side="right")))
            if due:
                parts.append(block.part(slice(0, due)))
                wanted -= due
            if due < len(block):
                break
            spent += 1
        if not parts:
            return None
        if len(parts) > spent:  # the last part leaves a rest behind
            self._blocks[spent] = self._blocks[spent].part(slice(len(parts[-1]), None))
            # A copy, or a small chunk in a slow replay queue would keep the whole block alive.
            parts[-1] = parts[-1].copy()
        del self._blocks[:spent]
        self._count -= limit - wanted
        return _to_chunk(concatenate(parts))

    def first_due_ms(self) -> int | None:
        self._settle()
        return int(self._blocks[0].deliver_at_ms[0]) if self._blocks else None

    def last_due_ms(self) -> int | None:
        self._settle()
        return int(self._blocks[-1].deliver_at_ms[-1]) if self._blocks else None

    def last_key(self) -> Key | None:
        self._settle()
        return self._blocks[-1].key(-1) if self._blocks else None

    def count(self) -> int:
        self._settle()
        return self._count

    def contains(self, ledger_id: int, entry_id: int) -> bool:
        self._settle()
        return any(
            bool(np.any((block.ledger_ids == ledger_id) & (block.entry_ids == entry_id)))
            for block in self._blocks
        )

    def times_between(self, start_ms: int, end_ms: int) -> Int64Column:
        """The due times in [start_ms, end_ms), rising."""
        self._settle()
        parts = [np.empty(0, dtype=np.int64)]
        for block in self._blocks:
            first, end = np.searchsorted(block.deliver_at_ms, (start_ms, end_ms))
            parts.append(block.deliver_at_ms[first:end])
        return np.concatenate(parts)

    def rows_between(self, start: Key, end: Key) -> Columns:
        """The entries with start <= key < end, in order."""
        self._settle()
        parts = [NO_COLUMNS]
        for block in self._blocks:
            first, last = count_before(block, start), count_before(block, end)
            if last > first:
                parts.append(block.part(slice(first, last)))
        return concatenate(parts)

    def blocks(self) -> list[Columns]:
        """All entries, in order."""
        self._settle()
        return list(self._blocks)

    def discard_ledger(self, ledger_id: int) -> None:
        self._settle()
        kept = [block.part(block.ledger_ids != ledger_id) for block in self._blocks]
        self._blocks = [block for block in kept if len(block)]
        self._count = sum(len(block) for block in self._blocks)

    def remove(self, rows: Columns) -> None:
        """Forget entries under just these times, as far as they are there."""
        self._settle()
        if not len(rows):
            return
        first_ms, last_ms = int(rows.deliver_at_ms.min()), int(rows.deliver_at_ms.max())
        keys = {rows.key(row) for row in range(len(rows))}
        for index, block in enumerate(self._blocks):
            if block.key(-1)[0] >= first_ms and block.key(0)[0] <= last_ms:
                is_like = np.isin(block.entry_ids, rows.entry_ids)
                is_like &= np.isin(block.deliver_at_ms, rows.deliver_at_ms)
                gone = [row for row in np.flatnonzero(is_like).tolist() if block.key(row) in keys]
                self._blocks[index] = block.part(np.delete(np.arange(len(block)), gone))
        self._blocks = [block for block in self._blocks if len(block)]
        self._count = sum(map(len, self._blocks))

    def clear(self) -> None:
        self._blocks, self._added, self._count = [], [], 0

    def memory_bytes(self) -> int:
        return ROW_BYTES * (self._count + sum(len(columns) for columns in self._added))

    def _settle(self) -> None:
        """Sort what was added and merge it into the blocks it falls into."""
        if not self._added:
            return
        everything = [*self._blocks, *self._added]
        added = sort_unique(concatenate(self._added))
        self._added = []
        blocks: list[Columns] = []
        start = 0
        for index, block in enumerate(self._blocks):
            is_last = index + 1 == len(self._blocks)
            end = len(added) if is_last else count_before(added, self._blocks[index + 1].key(0))
            blocks.extend(_merge(block, added.part(slice(start, end))) if end > start else (block,))
            start = end
        if not self._blocks:
            blocks.extend(_split(added))
        self._blocks = blocks
        self._count = sum(len(block) for block in blocks)
        if self._count < sum(map(len, everything)):
            self._doubles.append(_doubles_in(concatenate(everything)))

    def take_doubles(self) -> list[Columns]:
        """The rows that were dropped since the last call because they were there."""
        doubles, self._doubles = self._doubles, []
        return doubles


def key_after(key: Key) -> Key:
    """The least key above `key`, which may lie beyond every position of its millisecond."""
    time, ledger_id, entry_id = key
    if ledger_id > LEDGER_ID_MAX:
        return time + 1, 0, 0
    return (time, ledger_id, entry_id + 1) if entry_id < ENTRY_ID_MAX else (time, ledger_id + 1, 0)


def rows_before(columns: Columns, key: Key) -> Array:
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


def count_before(columns: Columns, key: Key) -> int:
    """Return how many of the sorted rows lie before `key`."""
    time, ledger_id, entry_id = key
    low, high = np.searchsorted(columns.deliver_at_ms, (time, time + 1))
    if low == high:
        return int(low)
    ledgers = columns.ledger_ids[low:high]
    first, end = np.searchsorted(ledgers, (ledger_id, ledger_id + 1))
    return int(low + first + np.searchsorted(columns.entry_ids[low + first : low + end], np.uint32(entry_id)))


def bounded_end(parts: list[Columns], end: Key, limit: int) -> Key:
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


def concatenate(parts: Iterable[Columns]) -> Columns:
    several = list(parts)
    if len(several) == 1:
        return several[0]
    return Columns(
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


def sort_unique(columns: Columns) -> Columns:
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


def _doubles_in(columns: Columns) -> Columns:
    """Of rows in any order, each that was there before."""
    columns = columns.part(np.lexsort((columns.entry_ids, columns.ledger_ids, columns.deliver_at_ms)))
    return columns.part(np.concatenate(([False], ~rises(columns))))


def rises(columns: Columns) -> Array:
    """Of rows whose times do not fall: whether each but the first lies after the row before it."""
    times, ledgers, entries = columns.deliver_at_ms, columns.ledger_ids, columns.entry_ids
    rises = entries[1:] > entries[:-1]
    rises &= ledgers[1:] == ledgers[:-1]
    rises |= ledgers[1:] > ledgers[:-1]
    rises |= times[1:] > times[:-1]
    return rises


def _merge(block: Columns, added: Columns) -> Iterable[Columns]:
    return _split(sort_unique(concatenate((block, added))))


def _split(columns: Columns) -> Iterable[Columns]:
    if len(columns) <= 2 * BLOCK_ROWS:
        return (columns,)
    # Copies, so that each block's memory goes when the block does.
    return (columns.part(slice(row, row + BLOCK_ROWS)).copy() for row in range(0, len(columns), BLOCK_ROWS))


def _to_chunk(columns: Columns) -> DueChunk:
    for column in (columns.deliver_at_ms, columns.ledger_ids, columns.entry_ids):
        column.flags.writeable = False  # shared by every subscription of the topic
    return DueChunk(columns.deliver_at_ms, columns.ledger_ids, columns.entry_ids)
