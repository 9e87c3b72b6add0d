"""Redelivery queue: entries that came back, what is owed since, and what is queued. Pure: no clock, no await.

Two things are known of an entry, and kept apart:

- *Durable*: that it came back and is not settled since, and the time it may not precede. That changes with records
  alone (`put`, `settle`). An entry that is out again keeps its old time, because handing out is not recorded: should
  the broker crash now, it is to be sent again, and not before that time.
- *Volatile*: whether it is queued. An entry is queued once at most, under one time. That of its record, or another
  one if the dispatcher put it back (`push`). After a start all that is durable is queued.

The rows of the first serve the second too: a million entries that wait cost a million rows, and no objects. Entries
whose time came are sets again, and go out in the log's order, whatever they waited for: who takes over from a
consumer gets what that one held as it arrived.
"""

from __future__ import annotations

from pyroaring import BitMap

from broker.model import (
    Entries,
    UInt32Column,
    common_entries,
    count_entries,
    ids_of,
    merge_entries,
    remove_entries,
    without_entries,
)
from broker.storage.manifest import LedgerTimes
from broker.subscriptions.entry_time_runs import NEVER
from broker.subscriptions.entry_times import EntryTimes, TimesCapture

_DUE_ROWS = 1 << 17
"""So many rows that became due are looked at in one step; more of them only if a million became due at once."""


class RedeliveryQueue:
    """See the module's description."""

    __slots__ = ("_owed", "_put_off", "_ready", "queued")

    def __init__(self, owed: dict[int, LedgerTimes] | None = None) -> None:
        self.queued: Entries = {}
        self._ready: Entries = {}  # of `queued`: what may go now
        self._owed = EntryTimes(owed)
        self._put_off = EntryTimes()  # what is queued under a time that no record gave
        self.queue_owed()

    # -- durable ---------------------------------------------------------------------------------------------

    def put(self, not_before_ms: int, entries: Entries) -> None:
        """Entries came back: they are owed and queued under this time (0: at once), and no longer under another."""
        self.forget(entries)
        self._owed.put(not_before_ms, entries)
        merge_entries(self.queued, entries)
        if not not_before_ms:
            merge_entries(self._ready, entries)

    def settle(self, entries: Entries) -> None:
        """Entries are done."""
        self.forget(entries)
        self._owed.forget(entries)

    def capture(self) -> TimesCapture:
        """Capture the durable part for a checkpoint."""
        return self._owed.capture()

    # -- volatile --------------------------------------------------------------------------------------------

    def queue_owed(self) -> None:
        """Queue exactly what is durable, under its times."""
        self.clear()
        self._owed.all_wait()
        merge_entries(self.queued, self._owed.waits)

    def push(self, not_before_ms: int, entries: Entries) -> None:
        """Queue entries that are not queued yet, without a record; 0: at once."""
        fresh = without_entries(entries, self.queued)
        if not fresh:
            return
        merge_entries(self.queued, fresh)
        if not_before_ms:
            self._put_off.put(not_before_ms, fresh)
        else:
            merge_entries(self._ready, fresh)
            self._owed.wait_again(fresh)  # it was not sent, so it has waited since its time

    def take(self, now_ms: int, limit: int) -> tuple[int, UInt32Column] | None:
        """Take at most `limit` entries of one ledger whose time has come; None if there are none."""
        self._find_due(now_ms)
        if not self._ready:
            return None
        ledger_id = min(self._ready)
        taken = self._ready[ledger_id]
        taken = taken[:limit] if len(taken) > limit else taken.copy()
        self.forget({ledger_id: taken})
        return ledger_id, ids_of(taken)

    def forget(self, entries: Entries) -> None:
        """Queue entries no more: they are out, or about to be settled."""
        remove_entries(self.queued, entries)
        remove_entries(self._ready, entries)
        self._owed.wait_no_more(entries)
        self._put_off.forget(entries)

    def clear(self) -> None:
        """Queue nothing; what is durable stays."""
        self.queued.clear()
        self._ready.clear()
        self._owed.waits = {}
        self._put_off = EntryTimes()

    # -- facts -----------------------------------------------------------------------------------------------

    def next_ms(self) -> int | None:
        """The earliest time anything may be taken at (0 if something was found to be due); None if nothing waits."""
        if self._ready:
            return 0
        first_ms = min(self._owed.next_time(), self._put_off.next_time())
        return first_ms if first_ms != NEVER else None

    def count_after(self, now_ms: int) -> int:
        """Return how many queued entries wait for a time that has not come.

        Exact, because what is due is sought in the rows that come next, as `take` does, and the rest is counted by
        its sets, which hold no dead entries. What came due before the clock stepped back counts as come.
        """
        self.find_all_due(now_ms)
        return count_entries(self.queued) - count_entries(self._ready)

    def find_all_due(self, now_ms: int) -> None:
        """Make ready all that has become due: `ready` is then exact."""
        while self._find_due(now_ms):
            pass

    def not_before_ms(self, ledger_id: int, entry_ids: BitMap) -> dict[int, int]:
        """Of some queued entries, the times that they are queued under; 0: at once."""
        return self._owed.times_of(ledger_id, entry_ids) | self._put_off.times_of(ledger_id, entry_ids)

    @property
    def ready(self) -> Entries:
        """Return the queued entries that may go now, as far as they were sought."""
        return self._ready

    def came_back(self, entries: Entries) -> Entries:
        """Return which of some entries came back once at least, counted or not, so that they were sent before."""
        return self._owed.held_among(entries)

    def ready_among(self, entries: Entries) -> Entries:
        """Return which of some entries are queued and may go now."""
        return common_entries(entries, self._ready)

    def at_once(self) -> Entries:
        """Return the entries that may go now and had no time to wait for."""
        at_once = without_entries(self._ready, self._put_off.waits)
        return without_entries(at_once, self._owed.timed_among(common_entries(at_once, self._owed.waits)))

    def ready_since_ms(self, now_ms: int) -> int | None:
        """The earliest time for which an entry waited that has come; None if there is none.

        What is to be sent at once has no such time, unless it is put back by who took it and has one in a record.
        """
        first_ms = min(self._owed.first_time(), self._put_off.first_time())
        return first_ms if first_ms <= now_ms else None

    def _find_due(self, now_ms: int) -> bool:
        """Make ready what has become due, or a part of it: then True."""
        is_more = False
        for times in (self._owed, self._put_off):
            due, is_partial = times.find_due(now_ms, _DUE_ROWS)
            merge_entries(self._ready, due)
            is_more |= is_partial
        return is_more
