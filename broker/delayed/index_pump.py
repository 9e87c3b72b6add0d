"""The index pump: one task per topic that has the index filled from the log, and empties it in time.

    append -> index the new rows -> take what is due -> on_due(chunk) -> load what is due soon

The feed (`index_feed.py`) does the first, in bounded steps. To load comes last, for it may wait for a slow disk. The
timer is computed anew from the index after every step, whatever the step did, and never waits longer than
`clock_recheck_ms`, so that a stepped clock is noticed (P2) and nothing can leave it unarmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from broker.delayed.bucket_upkeep import BucketUpkeep
from broker.delayed.due_rows import DueRows
from broker.delayed.index_feed import IndexedLog, IndexFeed
from broker.delayed.tracker import ENTRY_AFTER_ALL, DelayedDeliveryTracker, Frontier
from broker.delayed.unindexed import NEVER_MS
from broker.errors import Corrupt, PostdateError, Unavailable
from broker.model import DueSpan, Position
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.signal import Signal
from broker.runtime.supervise import YieldBudget
from broker.storage.changes import Changed

log = get_logger(__name__)

_GATHER_MS = 250
_GROUP_NS = 2_000_000
"""While messages come due one by one, each millisecond, they are taken at most this often: every step behind this one
costs nearly the same for three messages as for one. What comes due after a quiet moment is taken at once."""
_RETRY_SECONDS = 1.0
_OVERDUE_MS = 5_000
"""The watchdog's bound: entries this long overdue that `take_due` does not yield mean a broken index."""

AHEAD_MS_MAX = 60_000
"""A clock that was set back by so little has caught up soon: until then the index stands where it stood, and what is
due in between is delivered by position. To read all ledgers again would cost more, at every correction of a clock."""

_STUCK_MS = 100
"""Interval at which entries that a broken index did not yield are looked for, until the watchdog decides."""


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
        self.rebuilds = self.set_backs = 0  # and how often for a clock that was set back
        self.reached_ms = 0
        """The latest time that the frontier had before it went back: what is due by it may have been sent."""
        self._feed = IndexFeed(source, tracker, upkeep, clock=clock, on_unread=on_unread)
        self._clock = clock
        self._clock_recheck_ms = clock_recheck_ms
        self._due_entries = due_entries
        self._on_due = on_due
        self._on_rebuild = on_rebuild
        self._on_set_back = on_set_back
        self._work = Signal()
        self._built = asyncio.Event()
        self._gathering: asyncio.TimerHandle | None = None
        self._is_restored = upkeep is None
        self._waiters: list[asyncio.Future[None]] = []
        self._took_ns = -_GROUP_NS  # when something was last taken, and nothing was left
        self._looked_ms = 0  # up to when the index was last asked for what is due
        self._load_again_ns = 0  # after a read that failed
        self._budget = YieldBudget(clock)

    @property
    def position(self) -> Position:
        """Return the feed's position: every row before it was looked at."""
        return self._feed.position

    @property
    def is_rebuilding(self) -> bool:
        return self._feed.is_rebuilding

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
        self._feed.appended.add(due)
        # The earliest of all that is not indexed yet: these rows may have time, and those before them none.
        if self._must_hurry():
            if self._gathering is not None:  # what has time gathers no longer
                self._gathering.cancel()
            self._gathered()
        else:
            self.appended_undelayed()

    def appended_undelayed(self) -> None:
        """Rows were appended that can wait: the feed passes them a little later."""
        if self._gathering is None and not self._work.is_set():
            self._gathering = asyncio.get_running_loop().call_later(_GATHER_MS / 1000, self._gathered)

    def changed(self, ledger_id: int, changed: Changed, lsn: int) -> None:
        """Entries of a ledger were cancelled or moved; the log says so already."""
        self._feed.changed(ledger_id, changed, lsn)
        self._looked_ms = 0
        self._work.set()

    async def caught_up(self) -> None:
        """Return once everything that was appended or changed before this call is in the index."""
        end, lsn = self._feed.end()
        while not (self._is_restored and self._feed.has_passed(end, lsn)):
            if self._gathering is not None:
                self._gathering.cancel()
                self._gathered()
            self._work.set()
            passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(passed)
            await passed

    def scheduled_count(self) -> int:
        """Entries whose time has not come, indexed or not yet."""
        return max(0, self.tracker.count() + self._feed.unindexed_count)

    def next_due_ms(self) -> int | None:
        """Return the due time of the next entry, or a little before; None if nothing is pending."""
        if not self.scheduled_count():
            return None  # the index may still hold what was cancelled
        feed = self._feed
        known = (self.tracker.next_due_ms(), feed.appended.first_due_ms, feed.moved.first_due_ms)
        return min((ms for ms in known if ms is not None), default=None)

    def last_due_ms(self) -> int | None:
        """Return the due time of the last entry, or a little after; None if nothing is pending."""
        if not self.scheduled_count():
            return None
        feed = self._feed
        known = (self.tracker.stats().last_due_ms, feed.appended.last_due_ms, feed.moved.last_due_ms)
        return max((ms for ms in known if ms is not None), default=None)

    def spent_through_ms(self) -> int:
        """Of the rows before the feed, those that are due at or before this time were taken from the index."""
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
        return self._feed.appended.is_due_by(self._clock.now_ms() + 2 * _GATHER_MS)

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
            self._feed.take_up(indexed_through, index_lsn)
            self.upkeep.seek_stale()
        else:
            self._count_rebuild()
        self._is_restored = True

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _step(self) -> bool:
        """One bounded step; whether there is more to do at once."""
        # A rebuild gathers nothing: appends would hold it up again and again, and some of its rows are due soon.
        # Nor does what is due soon, though rows that can wait were appended before the feed came to it.
        feed = self._feed
        has_time = not feed.has_full_step and not feed.is_rebuilding and not self._must_hurry()
        gathers = self._gathering is not None and has_time
        self._look_at_clock()
        indexed = feed.add_moved()
        skipped_wait_ns = feed.skipped_wait_ns()
        if skipped_wait_ns is not None and skipped_wait_ns <= 0:
            indexed = await feed.index_skipped() or indexed
        if feed.is_behind and not gathers:
            indexed = True
            await feed.index_rows()
        if indexed:
            self._looked_ms = 0  # the index may hold what is overdue and was not asked for yet
        if self._waiters:
            self._wake()
        if not self.is_rebuilding:
            self._built.set()
        now_ms = self._clock.now_ms()
        if self.upkeep is not None:
            self.upkeep.look(now_ms)
        gathers_due = self._group_wait_ns() > 0
        took = not gathers_due and self._take(now_ms)
        is_paused = self._clock.monotonic_ns() < self._load_again_ns
        loads = not is_paused and self.tracker.needs_load(now_ms)
        if loads:
            await self._load(now_ms)
            self._looked_ms = 0
        elif not (indexed or took or gathers_due or is_paused):
            self._watch(now_ms)
        return indexed or took or loads or self.is_rebuilding  # the watchdog may have begun a rebuild

    def _take(self, now_ms: int) -> bool:
        """Hand on the next chunk of what is due; whether there was any."""
        chunk = self.tracker.take_due(now_ms, self._due_entries)
        self._looked_ms = now_ms
        if chunk is None:
            return False
        self._on_due(chunk)
        if len(chunk) < self._due_entries:
            self._took_ns = self._clock.monotonic_ns()
        return True

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
        self.set_backs += 1
        self._rebuild(Frontier(now_ms, *ENTRY_AFTER_ALL), goes_back=True)
        self._on_set_back()

    def _rebuild(self, frontier: Frontier, *, goes_back: bool = False) -> None:
        """Build the index again from the ledgers, but for indexed rows that lie at or before a frontier."""
        self._feed.begin_anew(frontier, goes_back=goes_back)
        self._count_rebuild()

    def _count_rebuild(self) -> None:
        self.rebuilds += 1
        self._on_rebuild()

    def _idle_seconds(self) -> float | None:
        """Return the seconds until there is work; None if only an append brings any: idle topics cost nothing."""
        skipped_wait_ns = self._feed.skipped_wait_ns()
        is_idle = self.tracker.is_idle and skipped_wait_ns is None and not self._feed.is_behind
        if is_idle and self._group_wait_ns() <= 0:
            return None
        next_due_ms = self.tracker.next_due_ms()
        wait_ms = self._clock_recheck_ms
        if skipped_wait_ns is not None:
            wait_ms = min(wait_ms, skipped_wait_ns // 1_000_000 + 1)
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
