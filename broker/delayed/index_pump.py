"""The index cursor and its pump: one task per topic that fills the index from the log and empties it in time.

The cursor tails the ledgers' times in order, independent of every subscription, and adds every DELAYED row it
passes, already due or not. Only a rebuild (after a restart) leaves out rows at or before the frontier it began
with: those are delivered by position (catch-up).

    append -> index the new rows -> load what is due soon -> take what is due -> on_due(chunk)

Rows whose times cannot be read for damage are stepped over, a block of the checksums at a time, and read again every
minute; the buckets that are sealed behind them are named in no manifest, so that a restart builds the index again.

The timer is computed anew from the index after every step, whatever the step did, and never waits longer than
`clock_recheck_ms`, so that a stepped clock is noticed (P2) and nothing can leave it unarmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from broker.delayed.bucket_upkeep import BucketUpkeep
from broker.delayed.due_rows import DueRows
from broker.delayed.tracker import ENTRY_AFTER_ALL, DelayedDeliveryTracker, Frontier
from broker.delayed.unindexed import NEVER_MS, AppendedRows, LedgerMove, MovedEntries
from broker.errors import Corrupt, NotFound, PostdateError, Unavailable
from broker.model import CANCELLED_MS, DueSpan, Int64Column, Position, UInt32Column
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.signal import Signal
from broker.runtime.supervise import YieldBudget
from broker.storage.amendments import Amendments
from broker.storage.blocks import BLOCK_ROWS
from broker.storage.changes import Changed

log = get_logger(__name__)

_INDEX_ROWS = 65_536
_GATHER_MS = 250
_GROUP_NS = 2_000_000
"""While messages come due one by one, each millisecond, they are taken at most this often: every step behind this one
costs nearly the same for three messages as for one. What comes due after a quiet moment is taken at once."""
_RETRY_SECONDS = 1.0
_OVERDUE_MS = 5_000
"""The watchdog's bound: entries this long overdue that `take_due` does not yield mean a broken index."""

_DAMAGED_NS = 60_000_000_000
"""Interval at which damaged times are read again: by then somebody may have put the file right."""

AHEAD_MS_MAX = 60_000
"""A clock that was set back by so little has caught up soon: until then the index stands where it stood, and what is
due in between is delivered by position. To read all ledgers again would cost more, at every correction of a clock."""

_STUCK_MS = 100
"""Interval at which entries that a broken index did not yield are looked for, until the watchdog decides."""


class IndexedLog(Protocol):
    """A topic's log as the pump's cursor needs it."""

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


class IndexPump:
    """See the module's description. Owns the tracker: nobody else changes it."""

    def __init__(
        self,
        source: IndexedLog,
        tracker: DelayedDeliveryTracker,
        *,
        clock: Clock,
        clock_recheck_ms: int,
        due_entries: int,
        on_due: Callable[[DueRows], None],
        on_rebuild: Callable[[], None],
        upkeep: BucketUpkeep | None = None,
        on_unread: Callable[[], None] = lambda: None,
        on_set_back: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_unread`: rows could not be read for damage. `on_set_back`: the frontier has gone back, with the clock."""
        self.tracker = tracker
        self.upkeep = upkeep
        """Of a bucket tracker: what seals and merges."""
        self.position = Position(0, 0)
        """The cursor: every row before it was looked at."""
        self.rebuilds = self.set_backs = 0  # and how often for a clock that was set back
        self.reached_ms = 0
        """The latest time that the frontier had before it went back: what is due by it may have been sent."""
        self._source = source
        self._clock = clock
        self._clock_recheck_ms = clock_recheck_ms
        self._due_entries = due_entries
        self._on_due = on_due
        self._on_rebuild = on_rebuild
        self._on_unread = on_unread
        self._on_set_back = on_set_back
        self._rebuild_end = source.end
        self._rebuild_frontier = tracker.frontier
        self._work = Signal()
        self._built = asyncio.Event()
        self._gathering: asyncio.TimerHandle | None = None
        self._moved = MovedEntries()
        self._appended = AppendedRows()
        self._is_restored = upkeep is None
        self._waiters: list[asyncio.Future[None]] = []
        self._took_ns = -_GROUP_NS  # when something was last taken, and nothing was left
        self._looked_ms = 0  # up to when the index was last asked for what is due
        self._load_again_ns = 0  # after a read that failed
        self._skipped: list[SkippedRows] = []
        self._skipped_again_ns = 0
        self._by_block_until = Position(0, 0)  # before it something is damaged: rows are read block by block
        self._budget = YieldBudget(clock)

    @property
    def is_behind(self) -> bool:
        """Return whether rows were appended that are not indexed yet."""
        return self.position < self._source.end

    @property
    def is_rebuilding(self) -> bool:
        return self.position < self._rebuild_end

    @property
    def is_exact(self) -> bool:
        """Return whether the counts are right: what is stale in buckets takes a moment to be found after a start."""
        is_built = self._is_restored and not self.is_rebuilding
        return is_built and (self.upkeep is None or self.upkeep.is_exact)

    async def wait_built(self) -> None:
        """Return once no rebuild is under way."""
        while self.is_rebuilding:
            self._built.clear()
            await self._built.wait()

    def appended(self, due: DueSpan) -> None:
        """Rows were appended, at least one of which is DELAYED.

        Rows that have time are indexed a little later, many at once: a thousand random times touch a thousand
        buckets, and so do sixty thousand.
        """
        self._appended.add(due)
        # The earliest of all that is not indexed yet: these rows may have time, and those before them none.
        if self._must_hurry():
            if self._gathering is not None:  # what has time gathers no longer
                self._gathering.cancel()
            self._gathered()
        else:
            self.appended_undelayed()

    def appended_undelayed(self) -> None:
        """Rows were appended that can wait: the cursor passes them a little later."""
        if self._gathering is None and not self._work.is_set():
            self._gathering = asyncio.get_running_loop().call_later(_GATHER_MS / 1000, self._gathered)

    def changed(self, ledger_id: int, changed: Changed, lsn: int) -> None:
        """Entries of a ledger were cancelled or moved; the log says so already.

        Rows that the cursor has not passed it will meet as they are now, and what buckets cover that are being taken
        up is looked for after that.
        """
        passed = _rows_before(ledger_id, changed.entry_ids, self.position)
        old = _rows_before(ledger_id, changed.entry_ids, self._rebuild_end)  # not counted as unindexed
        indexed = np.flatnonzero(~self._moved.take_back(ledger_id, changed.entry_ids[:passed]))
        self.tracker.remove(ledger_id, changed.entry_ids[indexed], changed.old_ms[indexed])
        if changed.new_ms is None:
            self._appended.count -= len(changed.entry_ids) - max(passed, old)
        else:
            # A rebuild leaves out what lies at or before the frontier that it began with.
            is_left_out = changed.new_ms[passed:old] <= self._rebuild_frontier.deliver_at_ms
            first = np.concatenate((np.arange(passed), passed + np.flatnonzero(is_left_out)))
            self._appended.may_lie_at(DueSpan.of(changed.new_ms[passed:]))
            moved = Changed(changed.entry_ids[first], changed.old_ms[first], changed.new_ms[first])
            self._moved.append(LedgerMove(ledger_id, moved, lsn))
        self._looked_ms = 0
        self._work.set()

    async def caught_up(self) -> None:
        """Return once everything that was appended or changed before this call is in the index."""
        end, lsn = self._source.end, self._moved.last_lsn
        while (
            self.position < end or self._moved.added_lsn < lsn or self.is_rebuilding or not self._is_restored
        ):
            if self._gathering is not None:
                self._gathering.cancel()
                self._gathered()
            self._work.set()
            passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(passed)
            await passed

    def scheduled_count(self) -> int:
        """Entries whose time has not come, indexed or not yet."""
        return max(0, self.tracker.count() + self._moved.count + self._appended.count)

    def next_due_ms(self) -> int | None:
        """Return the due time of the next entry, or a little before; None if nothing is pending."""
        if not self.scheduled_count():
            return None  # the index may still hold what was cancelled
        known = (self.tracker.next_due_ms(), self._appended.first_due_ms, self._moved.first_due_ms)
        return min((ms for ms in known if ms is not None), default=None)

    def last_due_ms(self) -> int | None:
        """Return the due time of the last entry, or a little after; None if nothing is pending."""
        if not self.scheduled_count():
            return None
        known = (self.tracker.stats().last_due_ms, self._appended.last_due_ms, self._moved.last_due_ms)
        return max((ms for ms in known if ms is not None), default=None)

    def spent_through_ms(self) -> int:
        """Of the rows before the cursor, those that are due at or before this time were taken from the index."""
        next_due_ms = self.tracker.next_due_ms()
        return NEVER_MS if next_due_ms is None else next_due_ms - 1

    def discard_ledgers(self, ledger_ids: Iterable[int]) -> bool:
        """Forget ledgers that are gone from the log; whether the index held anything of them."""
        held_count = self.tracker.count()
        for ledger_id in ledger_ids:
            self.tracker.discard_ledger(ledger_id)
        return self.tracker.count() != held_count

    def _must_hurry(self) -> bool:
        """Return whether a row that is not indexed yet is due soon."""
        return self._appended.is_due_by(self._clock.now_ms() + 2 * _GATHER_MS)

    def _gathered(self) -> None:
        self._gathering = None
        self._work.set()

    async def run(self) -> None:
        """Index and take until cancelled."""
        await self._restore()
        while True:
            self._work.clear()
            try:
                busy = await self._step()
            except (Corrupt, Unavailable) as error:
                # Nothing is lost: the rows are indexed, and due, once they can be read. Other topics go on.
                log.error("The delayed index has stopped because a ledger cannot be read", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if busy:
                await self._budget.spent()
            elif not self._work.is_set():
                seconds = self._idle_seconds()
                if seconds is None:
                    await self._work.wait()
                    continue
                timer = asyncio.get_running_loop().call_later(seconds, self._work.set)
                try:
                    await self._work.wait()
                finally:
                    timer.cancel()

    async def _restore(self) -> None:
        """Take up the buckets, and add what was moved since they were written."""
        if self.upkeep is None:
            return
        indexed_through, index_lsn = self.upkeep.indexed_through, self.upkeep.image().index_lsn
        if await self.upkeep.restore():
            self.position = max(self.position, indexed_through)
            self._add_moved_since(index_lsn)
            self.upkeep.seek_stale()
        else:
            self._count_rebuild()
        self._is_restored = True

    def _add_moved_since(self, index_lsn: int) -> None:
        """Add the entries that records above an lsn have moved, if the buckets cover their rows."""
        added_lsn = index_lsn
        for ledger_id, amendments in self._source.amendments.items():
            times = amendments.effective(amendments.entry_ids, amendments.deliver_at_ms)
            wanted = (amendments.lsns > index_lsn) & (times > self.tracker.frontier.deliver_at_ms)
            if ledger_id >= self.position.ledger_id:
                end = self.position.entry_id if ledger_id == self.position.ledger_id else 0
                wanted &= amendments.entry_ids < end
            if len(amendments.lsns):
                added_lsn = max(added_lsn, int(amendments.lsns.max()))
            self.tracker.add(ledger_id, amendments.entry_ids[wanted], times[wanted])
        self._moved.added_lsn = added_lsn
        self._passed()

    def _add_moved(self) -> bool:
        """Add what was moved, as much as one step may; whether there was any."""
        count, lsn_before = self._moved.count, self._moved.added_lsn
        for ledger_id, moved, _ in self._moved.take(_INDEX_ROWS):
            assert moved.new_ms is not None
            self.tracker.add(ledger_id, moved.entry_ids, moved.new_ms)
        was_any = self._moved.count != count
        if was_any or self._moved.added_lsn != lsn_before:
            self._looked_ms = 0
            self._passed()
        return was_any

    def _passed(self) -> None:
        """Tell the buckets up to where everything was added. No await since `add`: a seal must not come between."""
        if self.upkeep is not None:
            self.upkeep.passed(self.position, self._moved.added_lsn)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _step(self) -> bool:
        """One bounded step; whether there is more to do at once."""
        # A rebuild gathers nothing: appends would hold it up again and again, and some of its rows are due soon.
        # Nor does what is due soon, though rows that can wait were appended before the cursor came to it.
        has_time = self._appended.count < _INDEX_ROWS and not self.is_rebuilding and not self._must_hurry()
        gathers = self._gathering is not None and has_time
        self._look_at_clock()
        indexed = self._add_moved()
        if self._skipped and self._clock.monotonic_ns() >= self._skipped_again_ns:
            await self._index_skipped()
        if self.is_behind and not gathers:
            indexed = True
            await self._index_rows()
        if self._waiters:
            self._wake()
        if not self.is_rebuilding:
            self._built.set()
        now_ms = self._clock.now_ms()
        if self.upkeep is not None:
            self.upkeep.look(now_ms)
        loaded = self.tracker.needs_load(now_ms) and self._clock.monotonic_ns() >= self._load_again_ns
        if loaded:
            await self._load(now_ms)
            self._looked_ms = 0
            now_ms = self._clock.now_ms()
        gathers_due = self._group_wait_ns() > 0
        chunk = None
        if not gathers_due:
            chunk = self.tracker.take_due(now_ms, self._due_entries)
            self._looked_ms = now_ms
        if chunk is not None:
            self._on_due(chunk)
            if len(chunk) < self._due_entries:
                self._took_ns = self._clock.monotonic_ns()
            return True
        if not (indexed or loaded or gathers_due or self._clock.monotonic_ns() < self._load_again_ns):
            self._watch(now_ms)
        return indexed or loaded or self.is_rebuilding  # the watchdog may have begun a rebuild

    async def _load(self, now_ms: int) -> None:
        if self.upkeep is None:
            await self.tracker.load(now_ms)
            return
        try:
            await self.upkeep.load(now_ms)
        except (OSError, Unavailable) as error:
            # What passes costs a wait, and what is in memory goes on meanwhile.
            log.error("A bucket cannot be read; retrying", error=str(error))
            self._load_again_ns = self._clock.monotonic_ns() + int(_RETRY_SECONDS * 1e9)
        except PostdateError as error:
            log.error(
                "A bucket cannot be read; rebuilding the delayed index from the ledgers", error=str(error)
            )
            now_ms = self._clock.now_ms()
            while (chunk := self.tracker.take_due(now_ms, self._due_entries)) is not None:
                self._on_due(chunk)  # what was late for the index lies before the frontier
            # So everything indexed, due by now and at or before the frontier was taken; what the clock stepped back
            # over was not.
            self._rebuild(min(self.tracker.frontier, Frontier(now_ms, *ENTRY_AFTER_ALL)))

    async def _index_rows(self) -> None:
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
            self.tracker.add(ledger_id, (at + first).astype(np.uint32), times[at])
            self._looked_ms = 0  # it may hold what is overdue and was not asked for yet
            if not self.is_rebuilding:
                self._appended.count -= len(at)
        self.position = Position(ledger_id, first + count)
        self._passed()
        if not self.is_behind:
            self._appended.all_passed()

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
        if self.upkeep is not None:
            self.upkeep.miss_rows()
        self.position = end
        self._passed()

    async def _index_skipped(self) -> None:
        """Add what was stepped over and can be read by now. All of it: what is overdue, the last look sorts out."""
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
            self.tracker.add(ledger_id, (at + first).astype(np.uint32), times[at])
            self._appended.count -= len(at) if were_appended else 0
            self._looked_ms = 0
        self._skipped_again_ns = self._clock.monotonic_ns() + _DAMAGED_NS

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

    def _watch(self, now_ms: int) -> None:
        """The watchdog: must never fire. What is long overdue and cannot be taken means a broken index."""
        next_due_ms = self.tracker.next_due_ms()
        if next_due_ms is None or next_due_ms > now_ms - _OVERDUE_MS:
            return
        log.error(
            "The delayed index returned no entries although some are overdue; rebuilding it from the ledgers",
            next_due_ms=next_due_ms,
        )
        self._rebuild(Frontier(0, 0, 0))  # everything: the last look sorts it out

    def wake(self) -> None:
        """The clock was set back: look at it, also if there is nothing else to do."""
        self._work.set()

    def _look_at_clock(self) -> None:
        """Rebuild the index after the clock was set far back: entries taken under it are pending again."""
        frontier_ms, now_ms = self.tracker.frontier.deliver_at_ms, self._clock.now_ms()
        if frontier_ms - now_ms <= AHEAD_MS_MAX:
            return
        log.warning("The clock was set back; rebuilding the delayed index from the ledgers", now_ms=now_ms)
        self.reached_ms = max(self.reached_ms, frontier_ms)
        # What was moved lies before the rebuild's end, which meets it at its new time, or is due and found by position.
        self._moved.clear()
        self.set_backs += 1
        self._rebuild(Frontier(now_ms, *ENTRY_AFTER_ALL), goes_back=True)
        self._on_set_back()

    def _rebuild(self, frontier: Frontier, *, goes_back: bool = False) -> None:
        """Build the index again from the ledgers, but for indexed rows that lie at or before a frontier."""
        self.tracker.clear(frontier if goes_back else None)
        self._skipped.clear()  # they are met again
        if self.upkeep is not None:
            self.upkeep.begin_anew()
        if self.is_rebuilding:  # rows that lie ahead were taken only up to the frontier of then
            frontier = min(frontier, self._rebuild_frontier)
        # Rows from the cursor on are new to the index: nobody took them, whenever they were due.
        self._rebuild_end = max(self._rebuild_end, self.position)
        self._rebuild_frontier = frontier
        self.position = self._source.begin
        self._count_rebuild()

    def _count_rebuild(self) -> None:
        self.rebuilds += 1
        self._on_rebuild()

    def _idle_seconds(self) -> float | None:
        """Return the seconds until there is work; None if only an append brings any: idle topics cost nothing."""
        is_idle = self.tracker.is_idle and not self._skipped and not self.is_behind
        if is_idle and self._group_wait_ns() <= 0:
            return None
        next_due_ms = self.tracker.next_due_ms()
        wait_ms = self._clock_recheck_ms
        if self._skipped:
            wait_ms = min(wait_ms, (self._skipped_again_ns - self._clock.monotonic_ns()) // 1_000_000 + 1)
        if next_due_ms is not None:
            wait_ms = min(wait_ms, next_due_ms - self._clock.now_ms())
            if wait_ms <= 0 and next_due_ms <= self._looked_ms:
                wait_ms = _STUCK_MS
        group_seconds = self._group_wait_ns() / 1e9
        if group_seconds > 0:
            group_seconds += 0.0002  # timers may fire a little early; do not come back in vain
        return max(wait_ms / 1000, group_seconds, 0.0)

    def _group_wait_ns(self) -> int:
        return self._took_ns + _GROUP_NS - self._clock.monotonic_ns()


def _rows_before(ledger_id: int, entry_ids: UInt32Column, position: Position) -> int:
    """Return how many of a ledger's entries (ids rising) lie before a position."""
    if ledger_id != position.ledger_id:
        return len(entry_ids) if ledger_id < position.ledger_id else 0
    return int(np.searchsorted(entry_ids, position.entry_id))
