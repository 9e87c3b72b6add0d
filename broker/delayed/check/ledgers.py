"""One ledger's rows against what the buckets hold of it. Pure.

No entry is looked at by itself: a mask of one byte a row stands for each set (held, settled, pending), and an
index entry finds its row by direct addressing, in whatever order it comes. About 20 ns an index entry and 10 a
row; 20 bytes a row while a ledger is checked. Only what does not fit is sorted out further.

An index entry whose time is not the effective one is
  stale       if the entry was moved or cancelled: it was right once, and delivery drops it when it is taken
  extra       if the row was never delayed
  wrong time  otherwise
A moved entry may be held more than once under its current time: moved away and back, it was indexed each time.
Delivery takes it once, so up to one copy a move counts as stale and not as a duplicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from broker.delayed.check.findings import (
    NAMED_MAX,
    Finding,
    IndexState,
    Kind,
    LedgerCounts,
    Suspect,
    int64_column,
)
from broker.model import Int64Column, UInt32Column, distinct_values, ids_of
from broker.storage.amendments import NONE, Amendments

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class IndexedEntries:
    """Index entries of one ledger in one bucket, aligned, in any order."""

    bucket_id: int
    entry_ids: UInt32Column
    times: Int64Column | None  # deliver_at_ms; None: not looked at, and taken to be right

    def __len__(self) -> int:
        return len(self.entry_ids)

    def part(self, rows: Mask) -> IndexedEntries:
        times = None if self.times is None else self.times[rows]
        return IndexedEntries(self.bucket_id, self.entry_ids[rows], times)


@dataclass(frozen=True, slots=True)
class LedgerRows:
    """A ledger's rows, and the entries that all subscriptions have settled."""

    ledger_id: int
    times: Int64Column  # deliver_at_ms of each row, 0: not delayed
    amendments: Amendments = NONE
    settled: BitMap = field(default_factory=BitMap)  # by every subscription: see `settled_by_all`


def check_ledger(
    rows: LedgerRows, held: Sequence[IndexedEntries], state: IndexState, named_max: int = NAMED_MAX
) -> tuple[list[Finding], LedgerCounts]:
    """Compare a ledger with all that the buckets hold of it: at most one finding of each kind."""
    check = _LedgerCheck(rows, state, named_max)
    for piece in held:
        check.take(piece)
    return list(check.findings()), check.counts()


class _LedgerCheck:
    def __init__(self, rows: LedgerRows, state: IndexState, named_max: int) -> None:
        self._ledger_id = rows.ledger_id
        self._named_max = named_max
        self._times = int64_column(rows.times)
        row_count = len(self._times)
        self._settled = _mask(ids_of(rows.settled), row_count)
        self._amendments = amendments = rows.amendments
        if amendments is NONE:
            self._effective = self._times
            self._moved = self._amended = self._moved_late = np.empty(0, dtype=np.bool_)
        else:
            all_ids = np.arange(row_count, dtype=np.uint32)
            self._effective = amendments.effective(all_ids, self._times)
            self._moved = _mask(amendments.entry_ids, row_count)
            self._amended = self._moved | _mask(ids_of(amendments.cancelled), row_count)
            self._moved_late = _mask(amendments.entry_ids[amendments.lsns > state.index_lsn], row_count)
        self._end = _indexed_end(rows.ledger_id, row_count, state.indexed_through)
        self._pending = self._effective > state.frontier_ms
        self._pending[self._end :] = False
        self._pending &= ~self._settled
        if len(self._moved_late):
            self._pending &= ~self._moved_late
        self._held = np.zeros(row_count, dtype=np.bool_)  # under its current time
        self._current: list[IndexedEntries] = []
        self._wrong: list[IndexedEntries] = []
        self._extra: list[IndexedEntries] = []
        self._entries = 0
        self._stale = 0

    def take(self, held: IndexedEntries) -> None:
        """Look at what one bucket holds."""
        self._entries += len(held)
        inside = held.entry_ids < self._end
        if not inside.all():
            self._take_outside(held.part(~inside))
            held = held.part(inside)
        expected = self._effective.take(held.entry_ids)
        fits = expected != 0
        if held.times is not None:
            fits &= expected == held.times
        if not fits.all():
            self._take_unfit(held.part(~fits))
            held = held.part(fits)
        if len(held):
            self._held[held.entry_ids] = True
            self._current.append(held)

    def _take_outside(self, held: IndexedEntries) -> None:
        """Entries beyond the end of the ledger, or of what is indexed."""
        there = held.entry_ids < len(self._times)
        excused = np.zeros(len(held), dtype=np.bool_)
        excused[there] = self._settled[held.entry_ids[there]]
        self._extra.append(held.part(~excused))

    def _take_unfit(self, held: IndexedEntries) -> None:
        """Entries whose time is not the effective one."""
        held = held.part(~self._settled[held.entry_ids])
        delayed = self._times[held.entry_ids] != 0
        stale = np.zeros(len(held), dtype=np.bool_)
        if len(self._amended):
            delayed |= self._moved[held.entry_ids]
            stale = delayed & self._amended[held.entry_ids]
        self._stale += int(np.count_nonzero(stale))
        self._extra.append(held.part(~delayed))
        self._wrong.append(held.part(delayed & ~stale))

    def findings(self) -> Iterator[Finding]:
        wrong_ids, wrong_count = name_suspects(self._wrong, self._effective, self._named_max)
        extra_ids, extra_count = name_suspects(self._extra, self._effective, self._named_max)
        lost = self._pending & ~self._held
        for held in self._wrong:
            lost[held.entry_ids] = False  # it is there: one finding is enough
        lost_ids = np.flatnonzero(lost)
        duplicate_ids = self._duplicate_ids()
        named = lost_ids[: self._named_max].tolist()
        suspects = [Suspect(entry_id, int(self._effective[entry_id]), None) for entry_id in named]
        yield from self._finding(Kind.LOST, "pending, but in no bucket", len(lost_ids), suspects)
        named = duplicate_ids[: self._named_max].tolist()
        suspects = [
            Suspect(entry_id, int(self._effective[entry_id]), None, self._buckets_of(entry_id))
            for entry_id in named
        ]
        yield from self._finding(Kind.DUPLICATE, "held more than once", len(duplicate_ids), suspects)
        yield from self._finding(Kind.WRONG_TIME, "held under a time it never had", wrong_count, wrong_ids)
        yield from self._finding(
            Kind.EXTRA, "held, but no delayed row that is indexed backs it", extra_count, extra_ids
        )

    def _finding(self, kind: Kind, what: str, count: int, suspects: Sequence[Suspect]) -> Iterator[Finding]:
        if count:
            yield Finding(kind, what, count, ledger_id=self._ledger_id, suspects=tuple(suspects))

    def _duplicate_ids(self) -> npt.NDArray[np.intp]:
        """Entries held more than once; copies of moved ones are added to what is stale."""
        row_count = len(self._times)
        total = sum(map(len, self._current))
        if total == np.count_nonzero(self._held):
            return np.empty(0, dtype=np.intp)
        copies = np.zeros(row_count, dtype=np.intp)
        for held in self._current:
            copies += np.bincount(held.entry_ids, minlength=row_count)
        copies[self._settled] = 0
        amendments = self._amendments
        inside = amendments.entry_ids < row_count
        moved, revisions = amendments.entry_ids[inside], amendments.revisions[inside].astype(np.intp)
        superseded = np.minimum(np.maximum(copies[moved] - 1, 0), revisions)
        self._stale += int(superseded.sum())
        copies[moved] -= superseded
        return np.flatnonzero(copies > 1)

    def _buckets_of(self, entry_id: int) -> tuple[int, ...]:
        """A bucket for each time that the entry is held."""
        return tuple(
            held.bucket_id
            for held in self._current
            for _ in range(int(np.count_nonzero(held.entry_ids == entry_id)))
        )[:NAMED_MAX]

    def counts(self) -> LedgerCounts:
        """To be asked for after `findings`, which counts superseded copies."""
        pending = int(np.count_nonzero(self._pending))
        settled = int(np.count_nonzero(self._held & self._settled))
        return LedgerCounts(self._entries, pending, self._stale, settled)


def name_suspects(
    held: Sequence[IndexedEntries], effective: Int64Column, named_max: int = NAMED_MAX
) -> tuple[list[Suspect], int]:
    """The first of some faulty index entries, and how many entries they are of."""
    ids = distinct_values(np.concatenate([np.empty(0, np.uint32), *(piece.entry_ids for piece in held)]))
    suspects = []
    for entry_id in ids[:named_max].tolist():
        holders = [piece for piece in held if (piece.entry_ids == entry_id).any()]
        times = holders[0].times
        found_ms = None if times is None else int(times[holders[0].entry_ids == entry_id][0])
        expected_ms = int(effective[entry_id]) if entry_id < len(effective) else 0
        bucket_ids = tuple(dict.fromkeys(piece.bucket_id for piece in holders))
        suspects.append(Suspect(entry_id, expected_ms or None, found_ms, bucket_ids))
    return suspects, len(ids)


def _indexed_end(ledger_id: int, row_count: int, through: tuple[int, int]) -> int:
    """The first entry that the buckets need not hold."""
    if ledger_id < through[0]:
        return row_count
    return min(row_count, through[1]) if ledger_id == through[0] else 0


def _mask(entry_ids: UInt32Column, row_count: int) -> Mask:
    """Return whether each row is in a set; ids beyond the rows are left out."""
    mask = np.zeros(row_count, dtype=np.bool_)
    mask[entry_ids[entry_ids < row_count]] = True
    return mask
