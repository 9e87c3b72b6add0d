"""Reclaim: ledgers are dropped when all of their messages are done (P8).

A ledger goes when nothing in it is live: the time of every entry has come, every subscription has settled it (or begins
behind it), and the topic has had a subscription. Retention only adds to this. What goes is decided here and recorded
(`LedgersDropped`); the files go after the next checkpoint.

Invariants:
  RETENTION-1  Nothing that is owed goes, also if a record that makes it owed is on its way: applying a drop looks
      once more.
  RETENTION-2  A ledger goes only when the index is done with it: the cursor has passed it, and none of its entries is
      taken from the index any more.
  RETENTION-3  Of what was cancelled nothing is waited for: a ledger goes when the last of the others came due.
  RETENTION-4  The ledger that takes entries goes only when it rests and every batch for it is stored; the next batch
      begins another one.
  RETENTION-5  A ledger goes only when a durable manifest names what is remembered of its messages with a schedule key
      (`settled_upkeep`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pyroaring import BitMap

from broker.errors import NotFound, PostdateError, Unavailable
from broker.model import CANCELLED_MS, Entries
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.supervise import YieldBudget
from broker.storage.amendments import NONE, Amendments
from broker.storage.ledger_facts import LedgerFacts
from broker.subscriptions.entry_states import HELD, State
from broker.subscriptions.subscription import Subscription
from broker.topics.registry import Registry
from broker.topics.topic import Topic

log = get_logger(__name__)

_READ_ROWS = 65_536
_DROPPED_TOGETHER = 100
"""Ledgers in one record, at most: applying it may look through what the index holds in memory for each."""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """State of one ledger that decides whether it is dropped."""

    ledger_id: int
    data_bytes: int
    facts: LedgerFacts
    is_settled: bool  # by every subscription
    is_indexed: bool  # the index feed has passed it
    takes_entries: bool  # it is the one that does
    awaits_entries: bool  # batches for it, or changes of its entries, may be on their way


@dataclass(frozen=True, slots=True)
class ReclaimRule:
    """Rule for dropping a ledger that is done."""

    retention_ms: int  # 0: no limit in time
    retention_bytes: int  # 0: no limit in bytes
    idle_ms: int  # how long the ledger that takes entries must rest

    @property
    def retains(self) -> bool:
        return self.retention_ms > 0 or self.retention_bytes > 0


def plan_reclaim(
    ledgers: Sequence[LedgerState], rule: ReclaimRule, now_ms: int, spent_through_ms: int
) -> list[int]:
    """The ledgers that can go, of those in the order of the log.

    `spent_through_ms`: up to then nothing is taken from the index any more.
    """
    gone: list[int] = []
    retained_bytes = 0
    fits = True
    for ledger in reversed(ledgers):  # the youngest ones are retained
        if not _is_done(ledger, rule, now_ms, spent_through_ms):
            continue
        retained_bytes += ledger.data_bytes
        fits = fits and (not rule.retention_bytes or retained_bytes <= rule.retention_bytes)
        is_young = not rule.retention_ms or now_ms - ledger.facts.last_publish_ms < rule.retention_ms
        if not (rule.retains and fits and is_young):
            gone.append(ledger.ledger_id)
    return gone[::-1]


def _is_done(ledger: LedgerState, rule: ReclaimRule, now_ms: int, spent_through_ms: int) -> bool:
    """Return whether nothing in a ledger is live, and nobody is at work on it."""
    if not ledger.is_settled or not ledger.is_indexed or ledger.awaits_entries:
        return False
    if ledger.facts.last_due_ms > min(now_ms, spent_through_ms):
        return False
    # A publish time ahead of the clock is one that stepped back; it must not keep the ledger for as long.
    return not ledger.takes_entries or not 0 <= now_ms - ledger.facts.last_publish_ms < rule.idle_ms


def ledger_states(topic: Topic) -> list[LedgerState]:
    """Return the states of the ledgers of a topic that has had a subscription."""
    cursors = [subscription.cursor for subscription in topic.subscriptions.values()]
    end = topic.log.end
    # Most ledgers lie before every mark, whatever the number of subscriptions.
    settled_end = min((cursor.mark for cursor in cursors), default=end)
    return [
        LedgerState(
            ledger_id=ledger_id,
            data_bytes=ledger.data_bytes,
            facts=topic.ledgers.facts[ledger_id],
            is_settled=(ledger_id, ledger.entry_count) <= settled_end
            or all(cursor.has_settled(ledger_id, ledger.entry_count) for cursor in cursors),
            is_indexed=topic.index.position >= (ledger_id, ledger.entry_count)
            and not topic.index.is_rebuilding,
            takes_entries=not ledger.sealed,
            awaits_entries=ledger_id in topic.log.under_way.changing
            or (not ledger.sealed and not topic.ledgers.is_idle),
        )
        for ledger in topic.log
        for ledger_id in (ledger.name.ledger_id,)
    ]


def unsettled_of(subscription: Subscription, ledger_id: int, entry_count: int) -> Entries:
    """Return a ledger's unsettled entries that nobody holds: a holder may still acknowledge."""
    cursor = subscription.cursor
    if cursor.has_settled(ledger_id, entry_count):
        return {}
    return subscription.states.without({ledger_id: BitMap(range(entry_count))}, State.SETTLED, *HELD)


@dataclass(frozen=True, slots=True, eq=False)
class _LiveDue:
    """Last live due time of a ledger, as of some amendments and a number of entries."""

    amendments: Amendments
    entry_count: int
    last_ms: int  # the last time at which an entry is due that was not cancelled


@dataclass(frozen=True, slots=True, eq=False)
class _Remembered:
    """The keys of a ledger are remembered, as of these amendments and so many entries."""

    amendments: Amendments
    entry_count: int | None
    version: int  # see `TopicKeys.is_remembered`


class Reclaimer:
    """The task that lets ledgers go: visits every topic now and then, one at a time."""

    def __init__(
        self, registry: Registry, *, interval_ms: int, clock: Clock, changed: Callable[[Topic], None]
    ) -> None:
        self._registry = registry
        self._changed = changed
        self._interval_ms = interval_ms
        self._clock = clock
        self._budget = YieldBudget(clock)
        self._dropping: dict[int, asyncio.Future[None]] = {}  # by topic: a record on its way
        self._live_due: dict[int, dict[int, _LiveDue]] = {}  # by topic, by ledger
        self._remembered: dict[int, dict[int, _Remembered]] = {}  # by topic, by ledger

    async def run(self) -> None:
        """Visit all topics, again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            for topic in list(self._registry.topics.values()):
                topic.intake.forget_expired(self._clock.now_ms(), topic.policy)
                await self._look_at_amended(topic)
                await self._remember_keys(topic)
                # Once writing has ended nothing is recorded any more, which tells of itself. This goes on until then:
                # who takes every Unavailable for that stops at the first read that fails.
                with contextlib.suppress(Unavailable):
                    self._visit(topic)
                await self._budget.spent()

    async def _look_at_amended(self, topic: Topic) -> None:
        """Find the last due time of what was not cancelled, where that may let a ledger go (RETENTION-3)."""
        now_ms = self._clock.now_ms()
        known = self._live_due.get(topic.topic_id, {})
        due_by_ledger: dict[int, _LiveDue] = {}
        for state in ledger_states(topic):
            amendments = topic.log.amendments.get(state.ledger_id)
            if amendments is None or not state.is_settled or state.facts.last_due_ms <= now_ms:
                continue
            count = topic.log.entry_count(state.ledger_id) or 0
            due = known.get(state.ledger_id)
            if due is None or due.amendments is not amendments or due.entry_count != count:
                try:
                    due = _LiveDue(
                        amendments, count, await self._last_live_due_ms(topic, state.ledger_id, count)
                    )
                except NotFound:
                    continue  # dropped meanwhile
                except (OSError, PostdateError) as error:
                    # It stays for now, and is looked at again at the next visit. Others go.
                    log.error(
                        "The disk space of a ledger is not reclaimed because it cannot be read",
                        topic=topic.name,
                        ledger_id=state.ledger_id,
                        error=error,
                    )
                    continue
            due_by_ledger[state.ledger_id] = due
        if due_by_ledger or known:
            self._live_due[topic.topic_id] = due_by_ledger

    async def _last_live_due_ms(self, topic: Topic, ledger_id: int, count: int) -> int:
        last_ms = 0
        for first in range(0, count, _READ_ROWS):
            times = await topic.log.read_times(ledger_id, first, min(_READ_ROWS, count - first))
            last_ms = max(last_ms, int(times[times < CANCELLED_MS].max(initial=0)))
            await self._budget.spent()
        return last_ms

    def _states(self, topic: Topic) -> list[LedgerState]:
        """Return the states of the ledgers, with the live due times of amended ones."""
        known = self._live_due.get(topic.topic_id, {})
        states = ledger_states(topic)
        for index, state in enumerate(states):
            due = known.get(state.ledger_id)
            if due is not None and due.amendments is topic.log.amendments.get(state.ledger_id):
                facts = replace(state.facts, last_due_ms=due.last_ms)
                states[index] = replace(state, facts=facts)
        return states

    async def _remember_keys(self, topic: Topic) -> None:
        """Let the keys of ledgers that can go be remembered (RETENTION-5)."""
        if not topic.keys.is_used or self._is_busy(topic):
            self._remembered.pop(topic.topic_id, None)
            return
        known, self._remembered[topic.topic_id] = self._remembered.get(topic.topic_id, {}), {}
        for ledger_id in self._plan(topic, self._clock.now_ms()):
            amendments, count = topic.log.amendments.get(ledger_id, NONE), topic.log.entry_count(ledger_id)
            remembered = known.get(ledger_id)
            if (
                remembered is None
                or remembered.amendments is not amendments
                or remembered.entry_count != count
            ):
                version = await topic.keys.remember(ledger_id)
                remembered = None if version is None else _Remembered(amendments, count, version)
            if remembered is not None:
                self._remembered[topic.topic_id][ledger_id] = remembered

    def _is_remembered(self, topic: Topic, ledger_id: int) -> bool:
        if not topic.keys.is_used:
            return True
        remembered = self._remembered.get(topic.topic_id, {}).get(ledger_id)
        return (
            remembered is not None
            and remembered.amendments is topic.log.amendments.get(ledger_id, NONE)
            and remembered.entry_count == topic.log.entry_count(ledger_id)
            and topic.keys.is_remembered(remembered.version)
        )

    def _is_busy(self, topic: Topic) -> bool:
        return topic.deleted or topic.topic_id in self._dropping

    def _plan(self, topic: Topic, now_ms: int) -> list[int]:
        """The ledgers of a topic that can go."""
        if not topic.subscriptions.had_any:
            return []  # what is there waits for the first subscription
        policy = topic.policy
        rule = ReclaimRule(policy.retention_ms, policy.retention_bytes, self._interval_ms)
        return plan_reclaim(self._states(topic), rule, now_ms, topic.index.spent_through_ms())

    def _visit(self, topic: Topic) -> None:
        """One step, without await: what is looked at is what is decided on."""
        if self._is_busy(topic):
            return
        now_ms = self._clock.now_ms()
        self._expire(topic, now_ms)
        if topic.log.dropped:
            self._changed(topic)  # their files wait for a checkpoint
        gone = [ledger for ledger in self._plan(topic, now_ms) if self._is_remembered(topic, ledger)]
        came_due_ms = (
            {state.ledger_id: state.facts.last_due_ms for state in self._states(topic)} if gone else {}
        )
        for first in range(0, len(gone), _DROPPED_TOGETHER):
            some = gone[first : first + _DROPPED_TOGETHER]
            self._drop(topic, some, max(came_due_ms[ledger_id] for ledger_id in some))

    def _expire(self, topic: Topic, now_ms: int) -> None:
        """Settle what is left of ledgers of which every message has expired: nobody need be there to meet them."""
        for ledger in topic.log:
            ledger_id = ledger.name.ledger_id
            if 0 < topic.ledgers.facts[ledger_id].last_expire_ms <= now_ms:
                for subscription in topic.subscriptions.values():
                    if expired := unsettled_of(subscription, ledger_id, ledger.entry_count):
                        subscription.decisions.expire(expired)

    def _drop(self, topic: Topic, ledger_ids: Sequence[int], came_due_ms: int) -> None:
        done = topic.drop_ledgers(ledger_ids, came_due_ms)
        self._dropping[topic.topic_id] = done
        done.add_done_callback(lambda future: self._dropped(topic.topic_id, future))

    def _dropped(self, topic_id: int, done: asyncio.Future[None]) -> None:
        _ = done.cancelled() or done.exception()  # a failed journal reports itself
        if self._dropping.get(topic_id) is done:
            del self._dropping[topic_id]
