"""Counts of what the subscriptions of a topic are owed, by state: exact, without a walk over messages.

    unsettled = leased + promised + scheduled + ready

All but `scheduled` follow from a subscription's own sets. Scheduled is what the index holds for all subscriptions
together, less what of it is *hidden* from this one, and what waits to be sent again at a later time. Hidden is what
lies before the subscription's start (LATEST, a seek, a skip), and what it has settled, lent out or put off although
its time has not come (messages that were stored for another subscription alone, a subscription that ignored delays
until now). Without consumers the same holds.

Invariants:
  COUNTS-1  `before` counts the index's entries before the start and after `frontier`. It is found once, and lowered by
      what is taken. The index yields each entry once and the frontier never goes back, so that it does not matter
      what was taken while the log was read.
  COUNTS-2  `elsewhere` names only what the index still holds: an entry goes in while it lies after the index's
      frontier, and out when it is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from broker.delayed.due_rows import DueRows
from broker.delayed.index_pump import IndexPump
from broker.delayed.tracker import Frontier
from broker.errors import Corrupt, NotFound, Unavailable
from broker.model import (
    CANCELLED_MS,
    Array,
    Entries,
    Int64Column,
    Position,
    bitmap_of,
    count_entries,
    merge_entries,
    remove_entries,
)
from broker.observe.logs import Notice, get_logger
from broker.runtime.clock import Clock
from broker.runtime.supervise import Spawn, YieldBudget
from broker.storage.changes import Cancelled, Changed, Moved
from broker.storage.ledger_facts import LedgerFacts
from broker.storage.log import TopicLog
from broker.storage.records import (
    GivenBack,
    LedgersDropped,
    Produced,
    Record,
    Replaced,
    Seeked,
    SubscriptionChanged,
    SubscriptionCreated,
    SubscriptionDeleted,
    Transferred,
)
from broker.storage.salvage import UNREADABLE_TIME, times_around_damage
from broker.subscriptions.entry_states import HELD, PROMISED, State
from broker.subscriptions.subscription import Subscription
from broker.topics.component import not_applied
from broker.topics.oldest import OldestReady

log = get_logger(__name__)


SCAN_ROWS = 65_536
_RETRY_SECONDS = 1.0
_BEFORE_ALL = Frontier(-1, 0, 0)


@dataclass(frozen=True, slots=True)
class SubscriptionCounts:
    """Messages that one subscription is owed."""

    scheduled: int  # their time has not come, or they wait to be sent again
    ready: int  # could be delivered now
    leased: int  # consumers hold them


@dataclass(slots=True, eq=False)
class Hidden:
    """Entries of the index that one subscription is not owed; see COUNTS-1 and COUNTS-2."""

    subscription: Subscription
    start: Position
    frontier: Frontier
    before: int = 0
    is_known: bool = False
    elsewhere: Entries = field(default_factory=dict)

    def count(self) -> int:
        return max(0, self.before) + count_entries(self.elsewhere)

    def took(self, chunk: DueRows) -> None:
        """A chunk has left the index."""
        if self.before or not self.is_known:
            ledger_id, entry_id = self.start
            hidden = (chunk.ledger_ids < ledger_id) | (
                (chunk.ledger_ids == ledger_id) & (chunk.entry_ids < entry_id)
            )
            if hidden.any():
                hidden &= _after(self.frontier, chunk.deliver_at_ms, chunk.ledger_ids, chunk.entry_ids)
                self.before -= int(np.count_nonzero(hidden))
        for ledger_id in list(self.elsewhere):
            ids = chunk.entry_ids[chunk.ledger_ids == ledger_id]
            if len(ids):
                remove_entries(self.elsewhere, {ledger_id: bitmap_of(ids)})

    def cancelled(self, ledgers: Mapping[int, Changed], frontier: Frontier) -> None:
        """Entries were cancelled: they are not in the index any more, nor hidden from anybody."""
        for ledger_id, changed in ledgers.items():
            ids = changed.entry_ids
            held = _after(frontier, changed.old_ms, np.int64(ledger_id), ids)
            before = np.full(len(ids), ledger_id < self.start.ledger_id)
            if ledger_id == self.start.ledger_id:
                before = ids < self.start.entry_id
            counted = _after(self.frontier, changed.old_ms, np.int64(ledger_id), ids)
            self.before -= int(np.count_nonzero(held & before & counted))
            remove_entries(self.elsewhere, {ledger_id: bitmap_of(ids)})


class TopicCounts:
    """The counts of one topic's subscriptions."""

    def __init__(
        self,
        log: TopicLog,
        ledger_facts: Mapping[int, LedgerFacts],
        subscriptions: Mapping[int, Subscription],
        *,
        clock: Clock,
        spawn: Spawn,
        topic_id: int,
    ) -> None:
        self._log = log
        self._facts = ledger_facts
        self._subscriptions = subscriptions
        self._clock = clock
        self._spawn = spawn
        self._topic_id = topic_id
        self._index: IndexPump | None = None
        self._hidden: dict[int, Hidden] = {}
        self._oldest: dict[int, OldestReady] = {}
        self._scan: asyncio.Task[None] | None = None
        self._sought: dict[int, OldestReady] = {}
        self._search: asyncio.Task[None] | None = None
        self._notice = Notice(clock)

    # -- what changes them -----------------------------------------------------------------------------------

    def start(self, index: IndexPump) -> None:
        """Begin to count, after the recovery; before it, what is applied changes nothing here."""
        self._index = index
        self.recount_all()

    def stop(self) -> None:
        self._index = None
        for task in (self._scan, self._search):
            if task is not None:
                task.cancel()

    def recount_all(self) -> None:
        """The index begins anew."""
        for subscription in self._subscriptions.values():
            self.recount(subscription)

    def apply(self, record: Record, lsn: int) -> None:
        """See `Applier`. All other components are as the record says already."""
        match record:
            case Seeked() | SubscriptionChanged():
                self._recount(record.subscription_id)
            case GivenBack():
                self._oldest.pop(record.subscription_id, None)  # what came back may be older
            case SubscriptionCreated():
                self._recount(record.subscription.subscription_id)
            case SubscriptionDeleted():
                self._forget(record.subscription_id)
            case Cancelled():
                self._cancel(record)
            case Replaced():
                self._cancel(record.cancelled)
            case Moved():
                self._move(record)
            case Transferred():
                self._transfer(record)
            case LedgersDropped():
                # A scan that is under way would miss rows of them that were taken since it began, and have them taken
                # off.
                self._recount_unknown()
            case _:
                not_applied(self, record)

    def recount(self, subscription: Subscription) -> None:
        """Find out anew what is hidden from a subscription: it is new, begins elsewhere, or has other rules."""
        self._forget(subscription.subscription_id)
        index, start = self._index, subscription.cursor.start
        if index is None or not subscription.honors_delay:
            return
        hidden = Hidden(subscription, start, _BEFORE_ALL)
        has_none_elsewhere = not self._may_be_elsewhere(subscription)
        if start <= self._log.begin and has_none_elsewhere:
            return
        if start >= self._log.end and has_none_elsewhere and index.is_exact:
            hidden.before = index.scheduled_count()  # all of it, indexed or not yet
            hidden.is_known = True
        self._hidden[subscription.subscription_id] = hidden
        if not hidden.is_known and self._scan is None:
            self._scan = self._spawn(f"counts of topic {self._topic_id}", self._find_hidden())

    def _recount(self, subscription_id: int) -> None:
        if subscription := self._subscriptions.get(subscription_id):
            self.recount(subscription)

    def discarded(self) -> None:
        """The index held something of ledgers that are gone."""
        for hidden in list(self._hidden.values()):
            self.recount(hidden.subscription)

    def _recount_unknown(self) -> None:
        for hidden in list(self._hidden.values()):
            if not hidden.is_known:
                self.recount(hidden.subscription)

    def _transfer(self, record: Transferred) -> None:
        if record.produced.topic_id == self._topic_id and record.subscription_id:
            for subscription in self._subscriptions.values():
                if subscription.subscription_id != record.subscription_id:
                    self._store_for_another(subscription, record.produced)

    def _store_for_another(self, subscription: Subscription, record: Produced) -> None:
        """Messages were stored that this subscription is not owed, and that the index gets all the same."""
        delayed = np.flatnonzero(record.times)
        if self._index is None or not subscription.honors_delay or not len(delayed):
            return
        hidden = self._hidden.get(subscription.subscription_id)
        if hidden is None:
            hidden = Hidden(subscription, subscription.cursor.start, _BEFORE_ALL, is_known=True)
            self._hidden[subscription.subscription_id] = hidden
        ids = (delayed + record.first_entry_id).astype(np.uint32)
        merge_entries(hidden.elsewhere, {record.ledger_id: bitmap_of(ids)})

    def _cancel(self, record: Cancelled) -> None:
        if self._index is None:
            return
        for hidden in self._hidden.values():
            if hidden.is_known:
                hidden.cancelled(record.ledgers, self._index.tracker.frontier)
        self._recount_unknown()  # their scan may have passed them

    def _move(self, record: Moved) -> None:
        if self._index is None:
            return
        frontier_ms = self._index.tracker.frontier.deliver_at_ms
        if any(bool((changed.old_ms <= frontier_ms).any()) for changed in record.ledgers.values()):
            self.recount_all()  # what was due is scheduled again, perhaps not for all
        else:
            self._recount_unknown()

    def took(self, chunk: DueRows) -> None:
        """A chunk has left the index."""
        if self._hidden:
            for hidden in self._hidden.values():
                hidden.took(chunk)
            self._drop_empty()

    def _forget(self, subscription_id: int) -> None:
        """A subscription is gone, or counted anew."""
        self._hidden.pop(subscription_id, None)
        self._oldest.pop(subscription_id, None)

    # -- what they are ---------------------------------------------------------------------------------------

    @property
    def is_exact(self) -> bool:
        """Return whether the counts are exact: after a start, a seek or a rebuild of the index that takes a moment."""
        if self._index is None:
            return False
        return self._index.is_exact and all(hidden.is_known for hidden in self._hidden.values())

    async def wait_exact(self, seconds: float) -> None:
        """Return once the counts are exact, or after a while."""
        if self.is_exact:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._index is not None and not self.is_exact:
                    await self._index.wait_built()
                    if self._scan is None:
                        return
                    await asyncio.wait([self._scan])

    def of(self, subscription: Subscription) -> SubscriptionCounts:
        """Return the counts of a subscription, by state."""
        leased = subscription.states.count(State.LEASED)
        rest = subscription.unsettled_count() - leased - subscription.states.count(*PROMISED)
        scheduled = subscription.states.redelivery.count_after(self._clock.now_ms())
        if self._index is not None and subscription.honors_delay:
            indexed = self._index.scheduled_count()
            if hidden := self._hidden.get(subscription.subscription_id):
                indexed = max(0, indexed - hidden.count())
                # What came back although its time has not come waits for that, as soon as the dispatcher looks.
                scheduled += count_entries(subscription.states.redelivery.ready_among(hidden.elsewhere))
            scheduled += indexed
        scheduled = min(scheduled, max(0, rest))
        return SubscriptionCounts(scheduled, max(0, rest - scheduled), leased)

    def known_oldest_age_ms(self, subscription: Subscription, counts: SubscriptionCounts) -> int:
        """Age of the oldest ready message without a wait: if that one is gone, the age when it was last sought.

        It is then sought again, so that the next call has a newer answer.
        """
        if not counts.ready or self._index is None:
            return 0
        oldest = self._oldest_of(subscription)
        if not oldest.is_known:
            self._sought[subscription.subscription_id] = oldest
            if self._search is None:
                self._search = self._spawn(f"oldest messages of topic {self._topic_id}", self._find_oldest())
        return oldest.last_age_ms()

    @property
    def search(self) -> asyncio.Task[None] | None:
        """The search for oldest messages that is under way, if there is one."""
        return self._search

    async def find_oldest_age_ms(self, subscription: Subscription) -> int:
        """Age of the oldest ready message, since it was due, or produced, or ready to be sent again."""
        if not self.of(subscription).ready or self._index is None:
            return 0
        oldest = self._oldest_of(subscription)
        try:
            return await oldest.find_age_ms()
        except (Corrupt, Unavailable):  # told by whoever delivers from there; the other counts are right
            return oldest.last_age_ms()

    def _oldest_of(self, subscription: Subscription) -> OldestReady:
        oldest = self._oldest.get(subscription.subscription_id)
        if oldest is None:
            oldest = OldestReady(subscription, self._log, self._facts, self._clock)
            self._oldest[subscription.subscription_id] = oldest
        return oldest

    async def _find_oldest(self) -> None:
        try:
            while self._sought:
                _, oldest = self._sought.popitem()
                with contextlib.suppress(Corrupt, Unavailable):  # told by whoever delivers from there
                    await oldest.find_age_ms()
        finally:
            self._search = None

    # -- the search for what is hidden -----------------------------------------------------------------------

    def _may_be_elsewhere(self, subscription: Subscription) -> bool:
        """Return whether anything whose time has not come may be settled, held or put off."""
        cursor = subscription.cursor
        return bool(
            cursor.mark > cursor.start or cursor.settled or subscription.states.count(*HELD, State.QUEUED)
        )

    async def _find_hidden(self) -> None:
        try:
            while sought := [hidden for hidden in self._hidden.values() if not hidden.is_known]:
                assert self._index is not None
                for hidden in sought:  # no await up to here since: COUNTS-1
                    hidden.frontier, hidden.before, hidden.elsewhere = self._index.tracker.frontier, 0, {}
                try:
                    await self._count_hidden(sought)
                except Unavailable as error:
                    if self._notice.is_time():
                        log.error(
                            "Scheduled messages cannot be counted because a ledger cannot be read",
                            error=str(error),
                        )
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                for hidden in sought:
                    hidden.is_known = True
                self._drop_empty()
        finally:
            self._scan = None

    def _drop_empty(self) -> None:
        for key, hidden in list(self._hidden.items()):
            if hidden.is_known and not hidden.before and not hidden.elsewhere:
                del self._hidden[key]

    async def _count_hidden(self, sought: list[Hidden]) -> None:
        budget = YieldBudget(self._clock)
        ledger_id: int | None = self._log.begin.ledger_id
        while ledger_id is not None:
            facts, first = self._facts.get(ledger_id), 0
            concerned = [hidden for hidden in sought if self._concerns(hidden, ledger_id)]
            is_due = facts is None or facts.last_due_ms < sought[0].frontier.deliver_at_ms
            while concerned and not is_due and first < (self._log.entry_count(ledger_id) or 0):
                count = min(SCAN_ROWS, (self._log.entry_count(ledger_id) or 0) - first)
                try:
                    times = await self._times(ledger_id, first, count)
                except NotFound:
                    break  # dropped meanwhile: all of it is due
                for hidden in concerned:
                    self._count_rows(hidden, ledger_id, first, times)
                first += count
                await budget.spent()
            ledger_id = self._log.next_ledger_id(ledger_id)

    async def _times(self, ledger_id: int, first: int, count: int) -> Int64Column:
        """Effective times. Nobody knows when what is damaged is due: it counts as hidden from nobody."""
        try:
            times = self._log.times_nowait(ledger_id, first, count)
            return await self._log.read_times(ledger_id, first, count) if times is None else times
        except Corrupt:
            ids = np.arange(first, first + count, dtype=np.uint32)
            return (await times_around_damage(self._log.times_of, ledger_id, ids))[0]

    def _concerns(self, hidden: Hidden, ledger_id: int) -> bool:
        subscription = hidden.subscription
        sets = (
            subscription.cursor.settled,
            *map(subscription.states.column, (*HELD, State.QUEUED)),
        )
        # The mark lies at or after the start.
        return subscription.cursor.mark > (ledger_id, 0) or any(ledger_id in entries for entries in sets)

    def _count_rows(self, hidden: Hidden, ledger_id: int, first: int, times: Int64Column) -> None:
        """Count, or note, what is hidden among consecutive rows. No await in here: COUNTS-2."""
        if self._index is None:
            return
        ids = np.arange(first, first + len(times), dtype=np.uint32)
        is_pending = (times != UNREADABLE_TIME) & (times < CANCELLED_MS)
        later = _after(hidden.frontier, times, np.int64(ledger_id), ids) & is_pending
        start = hidden.start
        below = (
            ids < start.entry_id
            if ledger_id == start.ledger_id
            else np.full(len(ids), ledger_id < start.ledger_id)
        )
        hidden.before += int(np.count_nonzero(later & below))
        held = later & ~below & _after(self._index.tracker.frontier, times, np.int64(ledger_id), ids)
        at = np.flatnonzero(held)
        if len(at):
            refused = hidden.subscription.settled_or_in(ledger_id, ids[at], (*HELD, State.QUEUED))
            if refused.any():
                merge_entries(hidden.elsewhere, {ledger_id: bitmap_of(ids[at][refused])})


def _after(frontier: Frontier, times: Int64Column, ledger_ids: Array | np.int64, entry_ids: Array) -> Array:
    """Return which entries lie after a frontier: were not taken when it was that."""
    behind = (ledger_ids > frontier.ledger_id) | (
        (ledger_ids == frontier.ledger_id) & (entry_ids > frontier.entry_id)
    )
    after: Array = (times > frontier.deliver_at_ms) | ((times == frontier.deliver_at_ms) & behind)
    return after
