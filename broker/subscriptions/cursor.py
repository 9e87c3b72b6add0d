"""Cursor: all that one subscription has settled. Pure: no file, no clock, no await."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from broker.model import Entries, Position, UInt32Column, members

Mask = npt.NDArray[np.bool_]


class LedgerSpans(Protocol):
    """Part of the log that a cursor must know: which ledgers there are and how long."""

    def entry_count(self, ledger_id: int) -> int | None:
        """Entries of a ledger; None if there is no such ledger."""

    def next_ledger_id(self, ledger_id: int) -> int | None:
        """The ledger after this one; None if this is the last."""


class Cursor:
    """Record of what one subscription has settled: acknowledged, or expired.

    Delayed delivery settles out of order as a matter of course, so besides the mark the cursor keeps a bitmap of
    everything settled beyond it, per ledger, without a limit on holes.

    Invariants:
      CURSOR-1  Every position from `start` up to, but not including, `mark` is settled.
      CURSOR-2  After `settle`, the position at `mark` is not: the mark moves as far as it can.
      CURSOR-3  `mark` never moves back; `settled` holds nothing below it.
    """

    __slots__ = ("mark", "settled", "start")

    def __init__(self, start: Position, mark: Position | None = None, settled: Entries | None = None) -> None:
        self.start = start
        self.mark = mark if mark is not None else start
        self.settled: Entries = settled if settled is not None else {}

    def settle(self, entries: Entries, spans: LedgerSpans) -> Entries:
        """Settle entries; the answer holds those that were not settled before."""
        fresh: Entries = {}
        for ledger_id, bitmap in entries.items():
            if spans.entry_count(ledger_id) is None:
                continue  # dropped, and therefore settled
            new = self._beyond_mark(ledger_id, bitmap)
            held = self.settled.get(ledger_id)
            if held is not None:
                new = new - held
            if not new:
                continue
            fresh[ledger_id] = new
            if held is None:
                self.settled[ledger_id] = new.copy()
            else:
                held |= new  # in place
        # Also when the mark stood at the end of its ledger: what is settled may lie in ledgers that came since.
        mark_count = spans.entry_count(self.mark.ledger_id)
        if self.mark.ledger_id in fresh or mark_count is None or self.mark.entry_id >= mark_count:
            self._advance(spans)
        return fresh

    def drop(self, ledger_ids: Iterable[int], spans: LedgerSpans) -> bool:
        """Ledgers are gone from the log, all of them settled; whether anything changed here."""
        mark, held_count = self.mark, len(self.settled)
        for ledger_id in ledger_ids:
            self.settled.pop(ledger_id, None)
        if spans.entry_count(self.mark.ledger_id) is None:
            self._advance(spans)
        return self.mark != mark or len(self.settled) != held_count

    def has_settled(self, ledger_id: int, entry_count: int) -> bool:
        """Return whether a whole ledger is settled, or lies before the start."""
        if ledger_id < self.mark.ledger_id:
            return True
        below = self.mark.entry_id if ledger_id == self.mark.ledger_id else 0
        return len(self.settled.get(ledger_id, _NOTHING)) >= entry_count - below  # CURSOR-3

    def is_settled(self, position: Position) -> bool:
        """Return whether a position is settled, or lies before the start."""
        return position < self.mark or position.entry_id in self.settled.get(position.ledger_id, _NOTHING)

    def has_any(self, entries: Entries) -> bool:
        """Return whether any of a set is settled, or lies before the start."""
        for ledger_id, bitmap in entries.items():
            if ledger_id <= self.mark.ledger_id and (ledger_id, bitmap.min()) < self.mark:
                return True
            if not self.settled.get(ledger_id, _NOTHING).isdisjoint(bitmap):
                return True
        return False

    def settled_part(self, entries: Entries) -> Entries:
        """The part of a set that is settled, or lies before the start."""
        part = {}
        for ledger_id, bitmap in entries.items():
            held = self.settled.get(ledger_id)
            unsettled = self._beyond_mark(ledger_id, bitmap)
            if held is not None:
                unsettled = unsettled - held
            if settled := bitmap - unsettled:
                part[ledger_id] = settled
        return part

    def settled_mask(self, ledger_id: int, entry_ids: UInt32Column) -> Mask | None:
        """For each of some rising ids, whether it is settled, or lies before the start; None: none of them is."""
        if ledger_id < self.mark.ledger_id:
            return np.ones(len(entry_ids), dtype=np.bool_)
        mask: Mask | None = None
        held = self.settled.get(ledger_id)
        if held is not None:
            mask = members(entry_ids, held)
        if ledger_id == self.mark.ledger_id and len(entry_ids) and entry_ids[0] < self.mark.entry_id:
            below: Mask = entry_ids < self.mark.entry_id
            mask = below if mask is None else mask | below
        return mask if mask is not None and mask.any() else None

    def settled_beyond_mark(self) -> int:
        """Return how many entries are settled at or after the mark."""
        return sum(map(len, self.settled.values()))

    def _beyond_mark(self, ledger_id: int, bitmap: BitMap) -> BitMap:
        if ledger_id > self.mark.ledger_id:
            return bitmap
        if ledger_id < self.mark.ledger_id:
            return BitMap()
        rest = bitmap.copy()
        rest.remove_range(0, self.mark.entry_id)
        return rest

    def _advance(self, spans: LedgerSpans) -> None:
        ledger_id, entry_id = self.mark
        while True:
            count = spans.entry_count(ledger_id)
            if count is not None:
                settled = self.settled.get(ledger_id)
                entry_id = _first_missing(settled, entry_id, count) if settled is not None else entry_id
                if entry_id < count:
                    break
            following = spans.next_ledger_id(ledger_id)
            if following is None:
                break
            self.settled.pop(ledger_id, None)
            ledger_id, entry_id = following, 0
        self.mark = Position(ledger_id, entry_id)
        settled = self.settled.get(ledger_id)
        if settled is not None:
            settled.remove_range(0, entry_id)
            if not settled:
                del self.settled[ledger_id]


_NOTHING = BitMap()


def entries_between(entries: Entries, first: Position, end: Position) -> Entries:
    """The part of a set that lies at or after `first` and before `end`."""
    between: Entries = {}
    for ledger_id, bitmap in entries.items():
        if not first.ledger_id <= ledger_id <= end.ledger_id:
            continue
        part = bitmap.copy()
        if ledger_id == first.ledger_id:
            part.remove_range(0, first.entry_id)
        if ledger_id == end.ledger_id:
            part.remove_range(end.entry_id, 1 << 32)
        if part:
            between[ledger_id] = part
    return between


def _first_missing(bitmap: BitMap, first: int, end: int) -> int:
    """The first id at or after `first` that is not in the set, at most `end`."""
    if first >= end or first not in bitmap:
        return first
    low, high = first + 1, end  # [first, low) is full; the answer lies in [low, high]
    while low < high:
        middle = (low + high + 1) // 2
        if bitmap.contains_range(first, middle):
            low = middle
        else:
            high = middle - 1
    return low
