"""Policy for messages that came due while the broker was down, where a topic does not just deliver them.

    start --> absences (when nobody was there) --> sweep of topics with an action --> expired, or dead letters
                                                   meanwhile the last look holds back what lies in an absence

Overdue are entries with an effective time in an absence, on every subscription that honours delays and was there at
the start, connected or not; not what came back from a consumer, for it was due before. Rows are read off the loop, and
only of ledgers that may hold such times.

An absence begins when the broker was last known to be alive: the time in the file `alive`, which is written every
second while a topic has an action, and synced every 30, so that a power cut costs no more; the time in
`broker.manifest`; the last message in the journal. The latest counts, also if the clock was stepped back since, and
two seconds more, in which the broker may have been there and have sent what came due: in doubt a message is delivered.
It ends when the broker starts.
Until a sweep is done its absences stand in the file: after a crash the next life deals with them beside its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import numpy as np

from broker.errors import Corrupt, NotFound, PostdateError
from broker.model import Entries, bitmap_of, count_entries, without_entries
from broker.observe.logs import get_logger
from broker.policy import OVERDUE_DEAD_LETTER, OVERDUE_EXPIRE
from broker.runtime.clock import Clock
from broker.runtime.patience import Patience
from broker.runtime.supervise import YieldBudget
from broker.runtime.vfs import Vfs
from broker.storage.alive import (
    ABSENCES_MAX,
    Absence,
    Alive,
    read_alive,
    remove_alive,
    within,
    write_alive,
)
from broker.storage.records import SettleReason
from broker.subscriptions import giving_up
from broker.subscriptions.entry_states import HELD, State
from broker.subscriptions.subscription import Subscription
from broker.topics.registry import Registry
from broker.topics.topic import Topic

log = get_logger(__name__)

_BEAT_SECONDS = 1.0
_SYNC_NS = 30_000_000_000
_DOUBT_MS = 2_000
"""A broker may have lived so long after it was last known to: a beat, and time to write it."""
_SCAN_ROWS = 65_536
_NOTHING = Alive(0)


def plan_absences(pending: tuple[Absence, ...], last_alive_ms: int, now_ms: int) -> tuple[Absence, ...]:
    """The absences to deal with: those that the last life did not come to, and the one that ends now."""
    absences = pending
    left_ms = last_alive_ms + _DOUBT_MS
    if left_ms < now_ms:
        absences = (*absences, Absence(left_ms, now_ms))
    # So many lives that ended in a sweep: the oldest are forgotten, and what is left of theirs is delivered.
    return absences[-ABSENCES_MAX:]


class Overdue:
    """See the module's description. `read`, then `begin`; `beat` and `sweep` run from then on."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        vfs: Vfs,
        path: str,
        executor: Executor | None,
        patience: Patience,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._vfs = vfs
        self._path = path
        self._executor = executor
        self._patience = patience
        self._last_alive_ms = 0
        self.absences: tuple[Absence, ...] = ()
        """Times at which nobody was there, as far as they are not dealt with; nothing if nobody asks for it."""
        self._written: Alive | None = None  # what the file says, if it is there
        self._synced_ns = 0

    def read(self, root_alive_ms: int) -> None:
        """Look what the last life left, after the journal was replayed. Blocks."""
        try:
            self._written = read_alive(self._vfs, self._path)
        except Corrupt as error:
            log.warning(
                "The record of when the broker last ran is damaged; the last checkpoint and message are used instead",
                error=error,
            )
            self._written = _NOTHING
        found_ms = self._written.alive_ms if self._written else 0
        self._last_alive_ms = max(root_alive_ms, self._registry.last_publish_ms, found_ms)

    def begin(self, now_ms: int) -> None:
        """Hold back what is overdue, before anything is delivered. Blocks, if any topic has an action."""
        if not self._is_needed():
            return
        pending = self._written.absences if self._written else ()
        self.absences = plan_absences(pending, self._last_alive_ms, now_ms)
        # Signs of life from a clock that was ahead would hide every absence until their time comes.
        self._last_alive_ms = min(self._last_alive_ms, now_ms)
        for topic in self._registry.topics.values():
            if _has_action(topic):
                for subscription in topic.subscriptions.values():
                    if subscription.honors_delay:
                        subscription.absences = self.absences
        # Before the first message of this life: its time in the journal would hide an absence that is not noted.
        self._written = self._now()
        write_alive(self._vfs, self._path, self._written, durable=True)

    async def beat(self) -> None:
        """Note every second that the broker is there, until cancelled."""
        while True:
            if self._is_needed():
                alive, now_ns = self._now(), self._clock.monotonic_ns()
                changed = self._written is None or self._written.absences != alive.absences
                durable = changed or bool(alive.absences) or now_ns - self._synced_ns >= _SYNC_NS
                if durable:
                    self._synced_ns = now_ns
                self._written = alive
                await self._in_thread(partial(write_alive, self._vfs, self._path, alive, durable=durable))
            elif self._written is not None:
                self._written = None
                await self._in_thread(partial(remove_alive, self._vfs, self._path))
            await asyncio.sleep(_BEAT_SECONDS)

    async def sweep(self) -> None:
        """Deal with what is overdue, once."""
        is_done = True
        for topic in list(self._registry.topics.values()):
            held_back = [
                subscription for subscription in topic.subscriptions.values() if subscription.absences
            ]
            if not held_back:
                continue
            try:
                count = await self._sweep_topic(topic, held_back)
            except PostdateError as error:  # also if the broker stops: the next life begins again
                is_done, count = False, 0
                log.error(
                    "Overdue messages could not be determined; they are delivered as usual",
                    topic=topic.name,
                    error=error,
                )
            if count:
                log.info("Messages became due while the broker was down", topic=topic.name, messages=count)
            for subscription in held_back:
                subscription.absences = ()
                if subscription.consumers:  # what was held back and stays owed is found by position
                    subscription.begin_catchup(topic.index.tracker.frontier.deliver_at_ms)
        if is_done:
            self.absences = ()

    async def _sweep_topic(self, topic: Topic, subscriptions: list[Subscription]) -> int:
        """Return how many messages were overdue."""
        begins_ms = min(absence.left_ms for absence in self.absences)
        count = 0
        for ledger_id in [ledger.name.ledger_id for ledger in topic.log]:
            facts = topic.ledgers.facts.get(ledger_id)
            owed = [
                subscription
                for subscription in subscriptions
                if subscription.cursor.mark.ledger_id <= ledger_id
            ]
            if facts is not None and facts.last_due_ms > begins_ms and owed:
                count += await self._sweep_ledger(topic, ledger_id, owed)
        return count

    async def _sweep_ledger(self, topic: Topic, ledger_id: int, subscriptions: list[Subscription]) -> int:
        budget = YieldBudget(self._clock)
        dead_letters = topic.policy.overdue_action == OVERDUE_DEAD_LETTER
        first = count = 0
        while (rows := min(_SCAN_ROWS, (topic.log.entry_count(ledger_id) or 0) - first)) > 0:
            try:
                times = await topic.log.read_times(ledger_id, first, rows)
            except NotFound:
                break  # the ledger has gone: nobody was owed any of it
            ids = np.flatnonzero(within(times, self.absences)) + first
            if len(ids):
                count += len(ids)
                overdue = {ledger_id: bitmap_of(ids.astype(np.uint32))}
                dealt_with = [
                    _deal_with(subscription, overdue, dead_letters=dead_letters)
                    for subscription in subscriptions
                ]
                for done in dealt_with:
                    if done is not None:
                        await done
            first += rows
            await budget.spent()
        return count

    def _is_needed(self) -> bool:
        return any(
            _has_action(topic) or topic.recurring.has_overdue_action
            for topic in self._registry.topics.values()
        )

    def _now(self) -> Alive:
        self._last_alive_ms = max(self._last_alive_ms, self._clock.now_ms())
        return Alive(self._last_alive_ms, self.absences)

    async def _in_thread(self, function: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        # Shielded: a second one must not begin while the file thread is at the first.
        await self._patience.wait_done(lambda: asyncio.shield(loop.run_in_executor(self._executor, function)))


def _has_action(topic: Topic) -> bool:
    return topic.policy.overdue_action in (OVERDUE_EXPIRE, OVERDUE_DEAD_LETTER)


def _deal_with(
    subscription: Subscription, overdue: Entries, *, dead_letters: bool
) -> asyncio.Future[None] | None:
    """Settle what is overdue and owed, or give it up; None if nothing is."""
    if subscription.deleted:
        return None
    owed = subscription.states.without(overdue, State.SETTLED, *HELD)
    owed = {ledger_id: bitmap.copy() for ledger_id, bitmap in owed.items()}
    owed = without_entries(owed, subscription.states.redelivery.came_back(owed))  # sent, so it was due before
    if not count_entries(owed):
        return None
    if dead_letters:
        return subscription.decisions.give_up(owed, giving_up.OVERDUE)
    return subscription.decisions.settle(owed, SettleReason.EXPIRED)
