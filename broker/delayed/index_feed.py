"""The feed of a topic's index: fills the index from the log, in order, and is the only one that adds to the tracker.

It tails the ledgers' times, independent of every subscription, and adds every DELAYED row it passes, already due or
not. Only a rebuild (after a restart) leaves out rows at or before the frontier it began with: those are delivered by
position (catch-up). What was moved behind the feed is added under its new time.

Rows whose times cannot be read for damage are stepped over, a block of the checksums at a time, and read again every
minute; the buckets that are sealed behind them are named in no manifest, so that a restart builds the index again.

Each call is one bounded step; the pump (`index_pump.py`) makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from broker.delayed.bucket_upkeep import BucketUpkeep
from broker.delayed.tracker import DelayedDeliveryTracker, Frontier
from broker.delayed.unindexed import AppendedRows, LedgerMove, MovedEntries
from broker.errors import Corrupt, NotFound, Unavailable
from broker.model import CANCELLED_MS, DueSpan, Int64Column, Position, UInt32Column
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.storage.amendments import Amendments
from broker.storage.blocks import BLOCK_ROWS
from broker.storage.changes import Changed

log = get_logger(__name__)

_INDEX_ROWS = 65_536
_DAMAGED_NS = 60_000_000_000
"""Interval at which damaged times are read again: by then somebody may have put the file right."""


class IndexedLog(Protocol):
    """A topic's log as the feed needs it."""

    @property
    def begin(self) -> Position: ...

    @property
    def end(self) -> Position: ...

    @property
    def amendments(self) -> Mapping[int, Amendments]: ...

    def entry_count(self, ledger_id: int) -> int | None: ...

    def next_ledger_id(self, ledger_id: int) -> int | None: ...

    def times_nowait(self, ledger_id: int, first: int, count: int) -> Int64Column | None: ...

    async def read_times(self, ledger_id: int, first: int, count: int) -> Int64Column: ...


class SkippedRows(NamedTuple):
    """Rows of a ledger whose times could not be read; `were_appended`: they count as not indexed yet."""

    ledger_id: int
    first: int
    row_count: int
    were_appended: bool


class IndexFeed:
    """See the module's description."""

    def __init__(
        self,
        source: IndexedLog,
        tracker: DelayedDeliveryTracker,
        upkeep: BucketUpkeep | None,
        *,
        clock: Clock,
        on_unread: Callable[[], None],
    ) -> None:
        """`on_unread`: rows could not be read for damage."""
        self.position = Position(0, 0)
        """Every row before it was looked at."""
        self.appended = AppendedRows()
        self.moved = MovedEntries()
        self._source = source
        self._tracker = tracker
        self._upkeep = upkeep
        self._clock = clock
        self._on_unread = on_unread
        self._rebuild_end = source.end
        self._rebuild_frontier = tracker.frontier
        self._skipped: list[SkippedRows] = []
        self._skipped_again_ns = 0
        self._by_block_until = Position(0, 0)  # before it something is damaged: rows are read block by block

    @property
    def is_behind(self) -> bool:
        """Return whether rows were appended that are not indexed yet."""
        return self.position < self._source.end

    @property
    def is_rebuilding(self) -> bool:
        return self.position < self._rebuild_end

    @property
    def has_full_step(self) -> bool:
        """Return whether as many rows wait as one step takes."""
        return self.appended.count >= _INDEX_ROWS

    @property
    def unindexed_count(self) -> int:
        """Return how many pending entries the index does not have yet."""
        return self.moved.count + self.appended.count

    def end(self) -> tuple[Position, int]:
        """Return the end of the log, and the lsn of the last record whose moves wait; 0 if none do."""
        return self._source.end, self.moved.last_lsn

    def has_passed(self, end: Position, lsn: int) -> bool:
        """Return whether all before a position, and all that records up to an lsn have moved, is in the index."""
        return self.position >= end and self.moved.added_lsn >= lsn and not self.is_rebuilding

    def skipped_wait_ns(self) -> int | None:
        """Return the time until rows that could not be read are read again; None if there are none."""
        return self._skipped_again_ns - self._clock.monotonic_ns() if self._skipped else None

    def changed(self, ledger_id: int, changed: Changed, lsn: int) -> None:
        """Entries of a ledger were cancelled or moved; the log says so already.

        Rows that the feed has not passed it will meet as they are now, and what buckets cover that are being taken
        up is looked for after that.
        """
        passed = _rows_before(ledger_id, changed.entry_ids, self.position)
        old = _rows_before(ledger_id, changed.entry_ids, self._rebuild_end)  # not counted as unindexed
        indexed = np.flatnonzero(~self.moved.take_back(ledger_id, changed.entry_ids[:passed]))
        self._tracker.remove(ledger_id, changed.entry_ids[indexed], changed.old_ms[indexed])
        if changed.new_ms is None:
            self.appended.count -= len(changed.entry_ids) - max(passed, old)
            return
        # A rebuild leaves out what lies at or before the frontier that it began with.
        is_left_out = changed.new_ms[passed:old] <= self._rebuild_frontier.deliver_at_ms
        first = np.concatenate((np.arange(passed), passed + np.flatnonzero(is_left_out)))
        self.appended.may_lie_at(DueSpan.of(changed.new_ms[passed:]))
        moved = Changed(changed.entry_ids[first], changed.old_ms[first], changed.new_ms[first])
        self.moved.append(LedgerMove(ledger_id, moved, lsn))

    def take_up(self, indexed_through: Position, index_lsn: int) -> None:
        """The buckets cover the log up to a position: add what was moved since they were written."""
        self.position = max(self.position, indexed_through)
        self._add_moved_since(index_lsn)

    def begin_anew(self, frontier: Frontier, *, goes_back: bool) -> None:
        """Build the index again from the ledgers, but for indexed rows that lie at or before a frontier."""
        self._tracker.clear(frontier if goes_back else None)
        if goes_back:
            # What was moved lies before the rebuild's end, which meets it at its new time, or is due and found by
            # position.
            self.moved.clear()
        self._skipped.clear()  # they are met again
        if self._upkeep is not None:
            self._upkeep.begin_anew()
        if self.is_rebuilding:  # rows that lie ahead were taken only up to the frontier of then
            frontier = min(frontier, self._rebuild_frontier)
        # Rows from the feed on are new to the index: nobody took them, whenever they were due.
        self._rebuild_end = max(self._rebuild_end, self.position)
        self._rebuild_frontier = frontier
        self.position = self._source.begin

    def _add_moved_since(self, index_lsn: int) -> None:
        """Add the entries that records above an lsn have moved, if the buckets cover their rows."""
        added_lsn = index_lsn
        for ledger_id, amendments in self._source.amendments.items():
            times = amendments.effective(amendments.entry_ids, amendments.deliver_at_ms)
            wanted = (amendments.lsns > index_lsn) & (times > self._tracker.frontier.deliver_at_ms)
            if ledger_id >= self.position.ledger_id:
                end = self.position.entry_id if ledger_id == self.position.ledger_id else 0
                wanted &= amendments.entry_ids < end
            if len(amendments.lsns):
                added_lsn = max(added_lsn, int(amendments.lsns.max()))
            self._tracker.add(ledger_id, amendments.entry_ids[wanted], times[wanted])
        self.moved.added_lsn = added_lsn
        self._passed()

    def add_moved(self) -> bool:
        """Add what was moved, as much as one step may; whether there was any."""
        count, lsn_before = self.moved.count, self.moved.added_lsn
        for ledger_id, moved, _ in self.moved.take(_INDEX_ROWS):
            assert moved.new_ms is not None
            self._tracker.add(ledger_id, moved.entry_ids, moved.new_ms)
        was_any = self.moved.count != count
        if was_any or self.moved.added_lsn != lsn_before:
            self._passed()
        return was_any

    def _passed(self) -> None:
        """Tell the buckets up to where everything was added. No await since `add`: a seal must not come between."""
        if self._upkeep is not None:
            self._upkeep.passed(self.position, self.moved.added_lsn)

    async def index_rows(self) -> None:
        """Add the rows that come next, as many as one step may."""
        ledger_id, first = self.position
        count = self._source.entry_count(ledger_id)
        if count is None or first >= count:
            following = self._source.next_ledger_id(ledger_id)
            self.position = Position(following, 0) if following is not None else self._source.end
            return
        count = min(_INDEX_ROWS, count - first)
        if self.is_rebuilding and ledger_id == self._rebuild_end.ledger_id:
            count = min(count, self._rebuild_end.entry_id - first)
        if self.position < self._by_block_until:
            count = min(count, BLOCK_ROWS - first % BLOCK_ROWS)
        times = self._source.times_nowait(ledger_id, first, count)
        if times is None:
            try:
                times = await self._read_times(ledger_id, first, count)
            except Corrupt as damage:
                self._meet_damage(ledger_id, first, count, damage)
                return
        if times is None:
            return  # the next step goes on behind it
        wanted = (times > 0) & (times < CANCELLED_MS)
        if self.is_rebuilding:
            wanted &= self._after_rebuild_frontier(ledger_id, first, times)
        at = np.flatnonzero(wanted)
        if len(at):
            self._tracker.add(ledger_id, (at + first).astype(np.uint32), times[at])
            if not self.is_rebuilding:
                self.appended.count -= len(at)
        self.position = Position(ledger_id, first + count)
        self._passed()
        if not self.is_behind:
            self.appended.all_passed()

    async def _read_times(self, ledger_id: int, first: int, count: int) -> Int64Column | None:
        """Times from the files; None if the ledger went meanwhile, or nobody would take its rows out again."""
        try:
            times = await self._source.read_times(ledger_id, first, count)
        except NotFound:
            return None
        return times if self._source.entry_count(ledger_id) is not None else None

    def _meet_damage(self, ledger_id: int, first: int, count: int, damage: Corrupt) -> None:
        """Step over rows that cannot be read; of many, look first which."""
        end = Position(ledger_id, first + count)
        if count > BLOCK_ROWS - first % BLOCK_ROWS:
            self._by_block_until = max(self._by_block_until, end)
            return
        log.error(
            "Delivery times of messages cannot be read; the index continues without them and retries",
            ledger_id=ledger_id,
            entry_id=first,
            messages=count,
            error=str(damage),
        )
        self._on_unread()
        if not self._skipped:
            self._skipped_again_ns = self._clock.monotonic_ns() + _DAMAGED_NS
        self._skipped.append(SkippedRows(ledger_id, first, count, not self.is_rebuilding))
        if self._upkeep is not None:
            self._upkeep.miss_rows()
        self.position = end
        self._passed()

    async def index_skipped(self) -> bool:
        """Add what was stepped over and can be read by now; whether there was any.

        All of it is added: what is overdue, the last look sorts out.
        """
        was_any = False
        skipped, self._skipped = self._skipped, []
        for rows in skipped:
            ledger_id, first, count, were_appended = rows
            try:
                times = await self._read_times(ledger_id, first, count)
            except (Corrupt, Unavailable):
                self._on_unread()
                self._skipped.append(rows)
                continue
            if times is None:
                continue
            at = np.flatnonzero((times > 0) & (times < CANCELLED_MS))
            self._tracker.add(ledger_id, (at + first).astype(np.uint32), times[at])
            self.appended.count -= len(at) if were_appended else 0
            was_any = True
        self._skipped_again_ns = self._clock.monotonic_ns() + _DAMAGED_NS
        return was_any

    def _after_rebuild_frontier(self, ledger_id: int, first: int, times: Int64Column) -> np.ndarray:
        """Rows beyond the frontier that the rebuild began with. The live one has moved on since: rows between
        the two were taken by nobody, and leaving them out would lose them."""
        frontier = self._rebuild_frontier
        after = times > frontier.deliver_at_ms
        if ledger_id >= frontier.ledger_id:
            at_frontier = times == frontier.deliver_at_ms
            if ledger_id == frontier.ledger_id:
                at_frontier &= np.arange(first, first + len(times)) > frontier.entry_id
            after |= at_frontier
        return after


def _rows_before(ledger_id: int, entry_ids: UInt32Column, position: Position) -> int:
    """Return how many of a ledger's entries (ids rising) lie before a position."""
    if ledger_id != position.ledger_id:
        return len(entry_ids) if ledger_id < position.ledger_id else 0
    return int(np.searchsorted(entry_ids, position.entry_id))
