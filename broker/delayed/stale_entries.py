"""Sets of rows of the delayed index, by entry and time, in 8 bytes a row. Pure.

A bulk change adds rows again and again to a ledger that has many, while others are served. So a ledger's rows lie in
parts, each takes what is new as a block of its own, and with each addition one part makes its blocks one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise

import numpy as np
from pyroaring import BitMap

from broker.delayed.due_rows import NO_DUE_ROWS, DueRows, concatenate, doubles_in, stable_order
from broker.model import Array, Int64Column, UInt32Column, UInt64Column, bitmap_of, distinct_values

# A row in 64 bits, but for those that name its part. Entry ids have 32, times 53.
_ID_BITS, _TIME_BITS = 18, 46
_ID_MASK, _TIME_MASK = (1 << _ID_BITS) - 1, (1 << _TIME_BITS) - 1
_TIME_SHIFT = np.uint64(_TIME_BITS)
_PART_TIME_BITS = 16
_PART_TIME_MASK = (1 << _PART_TIME_BITS) - 1
_PARTS_AT_ONCE = 16
"""Of a thousand ledgers with a row each, one at a time would take a thousand rounds of the loop, and all at once would
hold it up: a part costs as much as some hundred rows."""


class StaleEntries:
    """Rows, each once."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: dict[int, dict[int, _Part]] = {}  # by ledger, by number; none is empty

    def has_any_of(self, ledger_id: int) -> bool:
        return ledger_id in self._parts

    def add(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> DueRows:
        """Note rows of one ledger; what is there already stays there once, and is returned."""
        if not len(entry_ids):
            return NO_DUE_ROWS
        parts, known = self._parts.setdefault(ledger_id, {}), [NO_DUE_ROWS]
        for number, wanted in _by_part(entry_ids, deliver_at_ms):
            there = parts.setdefault(number, _Part()).add(wanted)
            self.count += len(wanted) - len(there)
            if len(there):
                known.append(_rows_of_part(ledger_id, number, there))
        max(parts.values(), key=_Part.block_count).join()
        return concatenate(known)

    def remove(
        self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column
    ) -> tuple[DueRows, DueRows]:
        """Forget rows of one ledger; those that were there and those that were not, each once."""
        parts = self._parts.get(ledger_id, {})
        removed, missing = [NO_DUE_ROWS], [NO_DUE_ROWS]
        for number, wanted in _by_part(entry_ids, deliver_at_ms):
            gone, absent = wanted[:0], wanted
            if (part := parts.get(number)) is not None:
                gone, absent = part.remove(wanted)
                if not len(part.join()):
                    del parts[number]
            removed.append(_rows_of_part(ledger_id, number, gone))
            missing.append(_rows_of_part(ledger_id, number, absent))
        if not parts:
            self._parts.pop(ledger_id, None)
        gone_rows = concatenate(removed)
        self.count -= len(gone_rows)
        return gone_rows, concatenate(missing)

    def add_rows(self, rows: DueRows) -> DueRows:
        """Note rows of any ledgers; those that were there already, each once."""
        return concatenate(
            [
                NO_DUE_ROWS,
                *(self.add(key, some.entry_ids, some.deliver_at_ms) for key, some in _by_ledger(rows)),
            ]
        )

    def known_among(self, rows: DueRows) -> DueRows:
        """Those of some rows that are here, each once."""
        known = [NO_DUE_ROWS]
        for ledger_id, some in _by_ledger(rows):
            parts = self._parts.get(ledger_id, {})
            for number, wanted in _by_part(some.entry_ids, some.deliver_at_ms):
                if (part := parts.get(number)) is not None:
                    _, is_held = _find(part.join(), wanted)
                    known.append(_rows_of_part(ledger_id, number, wanted[is_held]))
        return concatenate(known)

    def remove_rows(self, rows: DueRows) -> tuple[DueRows, DueRows]:
        """Forget rows of any ledgers; those that were there and those that were not, each once."""
        removed, missing = [NO_DUE_ROWS], [NO_DUE_ROWS]
        for ledger_id, some in _by_ledger(rows):
            gone, absent = self.remove(ledger_id, some.entry_ids, some.deliver_at_ms)
            removed.append(gone)
            missing.append(absent)
        return concatenate(removed), concatenate(missing)

    def take_some(self, limit: int) -> DueRows:
        """Give up at most so many rows, of few parts; none only if there are none."""
        taken = [NO_DUE_ROWS]
        places = ((ledger_id, number) for ledger_id, parts in self._parts.items() for number in parts)
        for ledger_id, number in list(islice(places, _PARTS_AT_ONCE)):
            parts = self._parts[ledger_id]
            numbers = parts[number].take(limit)
            limit -= len(numbers)
            self.count -= len(numbers)
            taken.append(_rows_of_part(ledger_id, number, numbers))
            if not len(parts[number].join()):
                del parts[number]
            if not parts:
                del self._parts[ledger_id]
            if not limit:
                break
        return concatenate(taken)

    def times(self) -> Int64Column:
        """The times of all rows, in any order."""
        columns = [
            _times_of_part(number, block)
            for parts in self._parts.values()
            for number, part in parts.items()
            for block in part.blocks
        ]
        return np.concatenate([NO_DUE_ROWS.deliver_at_ms, *columns])

    def drop_before(self, time_ms: int) -> None:
        """Forget the rows of earlier times."""
        for ledger_id, parts in list(self._parts.items()):
            for number, part in list(parts.items()):
                held = part.join()
                kept = held[_times_of_part(number, held) >= time_ms]
                self.count -= len(held) - len(kept)
                part.blocks = [kept]
                if not len(kept):
                    del parts[number]
            if not parts:
                del self._parts[ledger_id]

    def clear(self) -> None:
        self.count = 0
        self._parts = {}

    def memory_bytes(self) -> int:
        return sum(
            block.nbytes for parts in self._parts.values() for part in parts.values() for block in part.blocks
        )


class RepeatedRows:
    """Rows, each as often as it was added."""

    def __init__(self) -> None:
        self._levels: list[
            StaleEntries
        ] = []  # the first has each row once, the next what is there twice, ...

    @property
    def count(self) -> int:
        """Number of rows, each as often as it is there."""
        return sum(level.count for level in self._levels)

    def add_rows(self, rows: DueRows) -> None:
        """Note rows, each as often as it is among them."""
        level = 0
        while len(rows):
            if level == len(self._levels):
                self._levels.append(StaleEntries())
            rows = concatenate((doubles_in(rows), self._levels[level].add_rows(rows)))
            level += 1

    def take_rows(self, rows: DueRows) -> DueRows:
        """Remove rows, each as often as it is among them and here; those that were not here."""
        for level in reversed(self._levels):
            if level.count and len(rows):
                again = doubles_in(rows)
                _, missing = level.remove_rows(rows)
                rows = concatenate((again, missing))
        return rows

    def take_some(self, limit: int) -> DueRows:
        """As `StaleEntries.take_some`."""
        for level in reversed(self._levels):
            if level.count:
                return level.take_some(limit)
        return NO_DUE_ROWS

    def cover_rows(self, rows: DueRows) -> None:
        """Add rows as far as they are not here as often as among them."""
        self.take_rows(rows)
        self.add_rows(rows)

    def drop_before(self, time_ms: int) -> None:
        """Forget the rows of earlier times."""
        for level in self._levels:
            level.drop_before(time_ms)

    def times(self) -> Int64Column:
        """The times of all rows, in any order."""
        return np.concatenate([NO_DUE_ROWS.deliver_at_ms, *(level.times() for level in self._levels)])


class _Part:
    """Rows of one ledger with the same upper bits of entry id and time, as numbers of the lower bits."""

    __slots__ = ("_added_ids", "blocks")

    def __init__(self) -> None:
        self.blocks = [np.empty(0, dtype=np.uint64)]
        """Blocks of rising numbers. An entry in one of them but the first is in no other one of these."""
        self._added_ids = BitMap()  # of all blocks but the first

    def block_count(self) -> int:
        return len(self.blocks)

    def add(self, numbers: UInt64Column) -> UInt64Column:
        """Add rising numbers; those that were here already."""
        ids = bitmap_of((numbers >> _TIME_SHIFT).astype(np.uint32))
        if not ids.isdisjoint(self._added_ids):
            self.join()
        _, is_held = _find(self.blocks[0], numbers)
        self.blocks.append(numbers[~is_held])
        self._added_ids |= ids
        return numbers[is_held]

    def remove(self, numbers: UInt64Column) -> tuple[UInt64Column, UInt64Column]:
        """Remove rising numbers; those that were here and those that were not."""
        held = self.join()
        places, is_held = _find(held, numbers)
        self.blocks = [np.delete(held, places[is_held])]
        return numbers[is_held], numbers[~is_held]

    def take(self, limit: int) -> UInt64Column:
        """Remove and return the first numbers."""
        held = self.join()
        self.blocks = [held[limit:]]
        return held[:limit]

    def join(self) -> UInt64Column:
        """Make one block of all; that block."""
        if len(self.blocks) > 1:
            held, *blocks = self.blocks
            added = np.sort(np.concatenate(blocks), kind="stable")
            self.blocks = [np.insert(held, np.searchsorted(held, added), added)]
            self._added_ids = BitMap()
        return self.blocks[0]


def _by_part(entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> Iterator[tuple[int, UInt64Column]]:
    """Rows of one ledger by the number of their part, as numbers in it: rising, each once."""
    parts = (entry_ids >> _ID_BITS).astype(np.int64) << _PART_TIME_BITS | deliver_at_ms >> _TIME_BITS
    low_ids, low_times = entry_ids & _ID_MASK, deliver_at_ms & _TIME_MASK
    numbers = low_ids.astype(np.uint64) << _TIME_SHIFT | low_times.astype(np.uint64)
    if not len(parts):
        return
    rise = (parts[1:] > parts[:-1]) | (parts[1:] == parts[:-1]) & (numbers[1:] > numbers[:-1])
    if rise.all():  # as those of a record, and a part of what `take_some` gave
        begins = np.flatnonzero(np.diff(parts, prepend=-1))
        for begin, end in pairwise([*begins.tolist(), len(parts)]):
            yield int(parts[begin]), numbers[begin:end]
        return
    for part in distinct_values(parts).tolist():
        yield part, distinct_values(numbers[parts == part])


def _rows_of_part(ledger_id: int, part: int, numbers: UInt64Column) -> DueRows:
    first_id = part >> _PART_TIME_BITS << _ID_BITS
    entry_ids = (numbers >> _TIME_SHIFT).astype(np.uint32) | np.uint32(first_id)
    ledger_ids = np.full(len(numbers), ledger_id, dtype=np.int64)
    return DueRows(_times_of_part(part, numbers), ledger_ids, entry_ids)


def _times_of_part(part: int, numbers: UInt64Column) -> Int64Column:
    times: Int64Column = numbers.astype(np.int64) & _TIME_MASK | (part & _PART_TIME_MASK) << _TIME_BITS
    return times


def _by_ledger(rows: DueRows) -> Iterator[tuple[int, DueRows]]:
    if (np.diff(rows.ledger_ids) < 0).any():
        rows = rows.part(stable_order(rows.ledger_ids))  # to look for each ledger costs as many passes
    begins = np.flatnonzero(np.diff(rows.ledger_ids, prepend=-1)).tolist()
    for begin, end in pairwise([*begins, len(rows)]):
        yield int(rows.ledger_ids[begin]), rows.part(slice(begin, end))


def _find(held: Array, wanted: Array) -> tuple[Array, Array]:
    """Return where sorted keys are or belong, and which of them are there."""
    places = np.searchsorted(held, wanted)
    is_held = np.zeros(len(wanted), dtype=np.bool_)
    inside = places < len(held)
    is_held[inside] = held[places[inside]] == wanted[inside]
    return places, is_held
