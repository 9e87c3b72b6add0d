"""What was sent and came back: how often, and not before when. Pure: no file, no clock, no await."""

from __future__ import annotations

import heapq

import numpy as np
from pyroaring import BitMap

from broker.model import Entries, UInt32Column, ids_of, members, merge_entries, remove_entries


class Attempts:
    """How often each entry was sent and came back.

    The counts are kept as binary digits: bit k of every entry's count is one bitmap per ledger. A thousand
    entries that come back together cost a few bitmap operations, and what never came back costs nothing.
    """

    def __init__(self, digits: dict[int, list[BitMap]] | None = None) -> None:
        self.digits: dict[int, list[BitMap]] = digits if digits is not None else {}

    def add(self, entries: Entries) -> None:
        """Count one more for each entry."""
        for ledger_id, bitmap in entries.items():
            digits = self.digits.setdefault(ledger_id, [])
            carry = bitmap
            for k, digit in enumerate(digits):
                digits[k], carry = digit ^ carry, digit & carry
                if not carry:
                    break
            if carry:
                digits.append(carry.copy())

    def forget(self, entries: Entries) -> None:
        """Drop the counts of entries that are done."""
        for ledger_id, bitmap in entries.items():
            digits = self.digits.get(ledger_id)
            if digits is None:
                continue
            for digit in digits:
                digit -= bitmap  # noqa: PLW2901 - in place
            while digits and not digits[-1]:
                digits.pop()
            if not digits:
                del self.digits[ledger_id]

    def counts(self, ledger_id: int, entry_ids: UInt32Column) -> UInt32Column:
        """The count of each entry, aligned."""
        counts = np.zeros(len(entry_ids), dtype=np.uint32)
        for k, digit in enumerate(self.digits.get(ledger_id, ())):
            counts += members(entry_ids, digit).astype(np.uint32) << np.uint32(k)
        return counts


class Waiting:
    """What came back and is not settled since: durable, rebuilt from the journal, independent of hand-outs.

    An entry that is out again stays here with its old time, because handing out is not recorded: should the
    broker crash now, it is to be sent again.
    """

    def __init__(self) -> None:
        self._times: dict[int, dict[int, BitMap]] = {}

    def put(self, not_before_ms: int, entries: Entries) -> None:
        """Note entries under a time; an older time of theirs is forgotten."""
        self.forget(entries)
        for ledger_id, bitmap in entries.items():
            times = self._times.setdefault(ledger_id, {})
            times[not_before_ms] = times[not_before_ms] | bitmap if not_before_ms in times else bitmap.copy()

    def forget(self, entries: Entries) -> None:
        """Drop entries that are done."""
        for ledger_id, bitmap in entries.items():
            times = self._times.get(ledger_id)
            if times is None:
                continue
            for not_before_ms in [t for t, held in times.items() if not held.isdisjoint(bitmap)]:
                times[not_before_ms] -= bitmap
                if not times[not_before_ms]:
                    del times[not_before_ms]
            if not times:
                del self._times[ledger_id]

    def items(self) -> list[tuple[int, int, BitMap]]:
        """All of it, as (not_before_ms, ledger_id, entries), in that order."""
        return sorted(
            (
                (not_before_ms, ledger_id, bitmap.copy())
                for ledger_id, times in self._times.items()
                for not_before_ms, bitmap in times.items()
            ),
            key=lambda item: item[:2],
        )

    def entries(self) -> Entries:
        """All of it, without times."""
        return {ledger_id: BitMap.union(*times.values()) for ledger_id, times in self._times.items()}


class RedeliveryQueue:
    """What waits to be handed out again, by time. Volatile; each entry is in it once at most.

    What may go is handed out in the log's order, whatever it waited for: who takes over from a consumer gets what
    that one held as it arrived.
    """

    def __init__(self) -> None:
        self.queued: Entries = {}
        self._heap: list[tuple[int, int, int, BitMap]] = []  # (not_before_ms, ledger_id, serial, entries)
        self._ready: Entries = {}  # its time came; like the heap's, its sets may name what is queued no more
        self._serial = 0

    def push(self, not_before_ms: int, entries: Entries) -> None:
        """Queue entries that are not queued yet."""
        for ledger_id, bitmap in entries.items():
            held = self.queued.get(ledger_id)
            fresh = bitmap - held if held is not None else bitmap
            if not fresh:
                continue
            merge_entries(self.queued, {ledger_id: fresh})
            remove_entries(self._ready, {ledger_id: fresh})  # left over from an earlier time in the queue
            self._serial += 1
            heapq.heappush(self._heap, (not_before_ms, ledger_id, self._serial, fresh))

    def take(self, now_ms: int, limit: int) -> tuple[int, UInt32Column] | None:
        """Take at most `limit` entries of one ledger whose time has come; None if there are none."""
        while self._heap and self._heap[0][0] <= now_ms:
            _, ledger_id, _, bitmap = heapq.heappop(self._heap)
            merge_entries(self._ready, {ledger_id: bitmap})
        while self._ready:
            ledger_id = min(self._ready)
            live = self._live(ledger_id, self._ready.pop(ledger_id))
            if not live:
                continue
            ids = ids_of(live)
            if len(ids) > limit:
                rest = live.copy()
                rest.remove_range(0, int(ids[limit]))
                self._ready[ledger_id] = rest
                ids = ids[:limit]
                live = live - rest
            remove_entries(self.queued, {ledger_id: live})
            return ledger_id, ids
        return None

    def forget(self, entries: Entries) -> None:
        """Drop entries that are done."""
        remove_entries(self.queued, entries)

    def next_ms(self) -> int | None:
        """The earliest time anything may be taken at; None if nothing waits."""
        if any(self._live(ledger_id, bitmap) for ledger_id, bitmap in self._ready.items()):
            return 0
        while self._heap and not self._live(self._heap[0][1], self._heap[0][3]):
            heapq.heappop(self._heap)  # all of it was settled meanwhile
        return self._heap[0][0] if self._heap else None

    def clear(self) -> None:
        self.queued.clear()
        self._ready.clear()
        self._heap.clear()

    def _live(self, ledger_id: int, bitmap: BitMap) -> BitMap:
        return bitmap & self.queued.get(ledger_id, _NOTHING)


_NOTHING = BitMap()
