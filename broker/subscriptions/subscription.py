"""One subscription: what it is owed, who holds what, and what its consumers say of it.

Two kinds of state, never mixed. *Durable* state (cursor, attempts, what waits for redelivery) changes only in
`apply_*`, which the journal calls in lsn order, today and in a recovery: no clock, no configuration, no lease is
looked at there. *Volatile* state (consumers, leases, queues, read position) changes on the loop and is lost in a
crash, after which every unsettled entry is owed again.

Invariants:
  SUBSCRIPTION-1  Without consumers there is no chunk and no reader, only the cursor and the counts; and a dispatcher
      for as long as there are leases that Receive took.
  SUBSCRIPTION-2  A consumer that is starved of bytes holds something: what it waits for is to be rid of it, or to
      grant more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from broker.delayed.tracker import DueChunk
from broker.errors import LimitReached, Refused, Unavailable
from broker.model import (
    Entries,
    UInt32Column,
    count_entries,
    members,
    merge_entries,
    without_entries,
)
from broker.observe.metrics import SubscriptionCounters
from broker.policy import effective
from broker.runtime.signal import Signal
from broker.runtime.supervise import forget_result
from broker.storage.alive import Absence
from broker.storage.manifest import CursorImage, SubscriptionImage
from broker.storage.records import (
    GivenBack,
    ReturnReason,
    Seeked,
    Settled,
    SettleReason,
    SubscriptionChanged,
)
from broker.subscriptions.asked import known, not_held, plausible, there
from broker.subscriptions.attempts import Attempts
from broker.subscriptions.backoff import delays
from broker.subscriptions.brake import Brake
from broker.subscriptions.capture import CursorCapture
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.cursor import Cursor
from broker.subscriptions.entry_states import NOT_UNSENT, EntryStates, State
from broker.subscriptions.failures import Failure, failures_of
from broker.subscriptions.giving_up import NACKED, TOO_OFTEN, worn_out
from broker.subscriptions.leases import lease_end_ns
from broker.subscriptions.reader import Reader
from broker.subscriptions.reasons import Reasons
from broker.subscriptions.replay import ReplayQueue
from broker.subscriptions.services import SubscriptionLog, SubscriptionServices
from broker.subscriptions.types import SubscriptionType

Mask = npt.NDArray[np.bool_]


class Subscription:
    """See the module's description."""

    def __init__(
        self,
        topic_id: int,
        image: SubscriptionImage,
        cursor: CursorImage | None,
        *,
        log: SubscriptionLog,
        services: SubscriptionServices,
    ) -> None:
        self.topic_id = topic_id
        self.image = image
        self.type = SubscriptionType(image.type)
        self.policy = effective(image.policy, services.defaults)
        """In force; every field set but the dead-letter topic."""
        self.honors_delay = self.type.honors_delay(self.policy.honor_delay)
        self.limits = services.limits
        self.log = log
        self.clock = services.clock
        self.counters = SubscriptionCounters()
        self._services = services
        self.states = EntryStates(
            Cursor(image.start, max(image.mark, image.start), cursor.settled if cursor else None),
            cursor.waiting if cursor else None,
            self._lease_ended,
        )
        # durable
        self.attempts = Attempts(cursor.attempts if cursor else None)
        self.reasons = Reasons(cursor.reasons if cursor else None)
        self.dead_letters: Entries = cursor.dead_letters if cursor else {}
        """What was given up here and may still be held: entries of the dead-letter topic."""
        self.cursor_file = image.cursor_file
        self.changed = False  # since the cursor's file was written
        # volatile
        self.consumers: list[Consumer] = []
        self._brake = Brake()
        self.absences: tuple[Absence, ...] = ()
        """What came due in them is held back until it was found out what becomes of it."""
        self.replay = ReplayQueue(services.limits.replay_entries_max)
        self.reader = Reader(log, honors_delay=self.honors_delay)
        self.frontier_ms = 0  # of the index, while there are consumers: what is due later comes in chunks
        self.unknown_through_ms = 0
        self.work = Signal()
        self.deleted = False
        self.decided: SubscriptionChanged | None = None  # the last change that was submitted, applied or not

    # -- facts -----------------------------------------------------------------------------------------------

    @property
    def subscription_id(self) -> int:
        return self.image.subscription_id

    @property
    def name(self) -> str:
        return self.image.name

    @property
    def cursor(self) -> Cursor:
        """Record of what is settled."""
        return self.states.cursor

    @property
    def paused(self) -> bool:
        """Return whether nothing is delivered until it is resumed."""
        return self.image.paused

    def start(self, frontier_ms: int) -> None:
        """Called once, before anything is delivered. `frontier_ms`: see `begins_anew`."""
        self.counters = SubscriptionCounters()  # what was replayed was counted by the process before
        self.states.redelivery.queue_owed()
        self.begins_anew(frontier_ms)

    def begins_anew(self, frontier_ms: int) -> None:
        """Of what was due by then nobody knows what was sent: the broker has just started, or it was sought."""
        self.unknown_through_ms = frontier_ms

    def unsettled_count(self) -> int:
        """Messages that are owed: stored since the start, not settled, due or not."""
        return self.log.count_from(self.cursor.mark) - self.cursor.settled_beyond_mark()

    # -- durable state: called by the journal, in lsn order --------------------------------------------------

    def apply(self, record: Settled | GivenBack | Seeked | SubscriptionChanged) -> None:
        """Change durable state as a record says."""
        match record:
            case Settled():
                self.apply_settled(record)
            case GivenBack():
                self.apply_given_back(record)
            case Seeked():
                self.apply_seeked(record)
            case SubscriptionChanged():
                self.apply_changed(record)

    def apply_settled(self, record: Settled) -> None:
        """Entries are done."""
        fresh = self.states.settled(record.entries, self.log)
        self.attempts.forget(record.entries)
        self.reasons.forget(record.entries)
        self.changed = True
        if record.reason is not SettleReason.CANCELLED:  # which the topic counts, once for all
            self.counters.note_settled(record.reason.name.lower(), count_entries(fresh))

    def apply_given_back(self, record: GivenBack) -> None:
        """Entries were sent and come back, not before a time."""
        owed = self.states.returned(record.not_before_ms, record.entries)
        if record.reason is not ReturnReason.RELEASED:
            self.attempts.add(owed)
        if record.text:
            self.reasons.note(owed, record.text)
        self.changed = True
        self.work.set()

    def apply_dead_letters(self, entries: Entries) -> None:
        """Note the entries of the dead-letter topic that hold what was given up here."""
        merge_entries(self.dead_letters, entries)
        self.changed = True

    def apply_not_for(self, entries: Entries) -> None:
        """Entries were stored for another subscription alone."""
        self.states.settled(entries, self.log)
        self.changed = True

    def apply_changed(self, record: SubscriptionChanged) -> None:
        """Other settings hold, or it is paused or not."""
        self.image = replace(self.image, policy=record.policy, paused=record.paused)
        self.policy = effective(record.policy, self._services.defaults)
        for consumer in self.consumers:
            consumer.paused = record.paused
        honors_delay = self.type.honors_delay(self.policy.honor_delay)
        if self.honors_delay != honors_delay:
            self.honors_delay = honors_delay
            self.reader.honors_delay = self.honors_delay
            self.states.park_cleared()
            self._end_streams()
        self.work.set()

    def apply_seeked(self, record: Seeked) -> None:
        """Begin elsewhere: what was settled, counted and put off is forgotten, and what is out is nobody's."""
        self.image = replace(self.image, start=record.start, mark=record.start)
        self.states.sought(record.start)
        self.attempts = Attempts()
        self.reasons = Reasons()
        self.changed = True
        self._end_streams()
        self.work.set()

    def apply_moved(self, entries: Entries) -> None:
        """Entries are due at another time: the index brings them, whatever they waited for until now."""
        if self.honors_delay:
            self.states.moved(entries)

    def apply_dropped(self, ledger_ids: Iterable[int]) -> None:
        """Ledgers are gone; every entry of them was settled here, or lay before the start."""
        self.changed |= self.states.dropped(ledger_ids, self.log)

    def capture(self, lsn: int) -> CursorCapture | None:
        """Name the cursor's file by an lsn and return its content; None if it is as it was written. One step."""
        if not self.changed:
            return None
        self.cursor_file = f"{self.subscription_id}.{lsn:x}"
        self.changed = False
        return self.capture_cursor()

    def capture_cursor(self) -> CursorCapture:
        """Capture the cursor for a checkpoint: copies, or objects that never change, so that the loop may go on."""
        self.dead_letters = self._services.dead_letter_sink.still_held(self)
        others = CursorImage(
            topic_id=self.topic_id,
            subscription_id=self.subscription_id,
            settled={ledger_id: bitmap.copy() for ledger_id, bitmap in self.cursor.settled.items()},
            attempts={
                ledger_id: [d.copy() for d in digits] for ledger_id, digits in self.attempts.digits.items()
            },
            waiting={},
            dead_letters={ledger_id: bitmap.copy() for ledger_id, bitmap in self.dead_letters.items()},
            reasons=self.reasons.texts.copy(),
        )
        return CursorCapture(others, self.states.redelivery.capture())

    # -- consumers -------------------------------------------------------------------------------------------

    def attach(self, consumer: Consumer, catchup_ms: int) -> None:
        """Take in a consumer; the first one starts catch-up. `catchup_ms` is the time of the index's frontier."""
        if not self.type.admits(len(self.consumers)):
            raise Refused(
                f"Subscription {self.name!r} is {self.type.name} and has a consumer",
                reason="CONSUMER_ALREADY_CONNECTED",
            )
        if len(self.consumers) >= self.limits.consumers_max:
            raise LimitReached(
                f"Subscription {self.name!r} has {len(self.consumers)} consumers", reason="TOO_MANY_CONSUMERS"
            )
        if not self.consumers:
            self.begin_catchup(catchup_ms)
        consumer.paused = self.paused
        self.consumers.append(consumer)
        self.work.set()

    def detach(self, consumer: Consumer, *, keep_leases: bool = False) -> None:
        """Let a consumer go; unless it keeps its leases, what it holds goes to others.

        That counts as one attempt, but for what was never sent, and for what a consumer that `hands_back` leaves.
        """
        if consumer in self.consumers:  # else it was let go before
            self.consumers.remove(consumer)
        if not self.deleted:
            self._take_back_unsent(consumer)
        held = self.states.leases.held(consumer.consumer_id)
        if held and not keep_leases and not self.deleted:
            reason = ReturnReason.RELEASED if consumer.hands_back else ReturnReason.CONSUMER_LOST
            self._give_back_unasked(consumer.consumer_id, held, reason)
        if not self.consumers:
            self.replay.clear()
            self.states.park_cleared()
        self.work.set()

    def drain(self, consumer: Consumer) -> None:
        """Send a consumer no more: also what was handed out and is not on its way yet goes to others."""
        consumer.draining = True
        self._take_back_unsent(consumer)
        self.work.set()  # another one may be the active consumer now

    def _take_back_unsent(self, consumer: Consumer) -> None:
        """As if it had never been handed out; by a record of it, it would count as sent, and could not be changed."""
        unsent = consumer.take_back()
        held = {} if unsent is None else self.states.leases.held_by(consumer.consumer_id, unsent.entries())
        if held:
            self.states.taken_back(consumer.consumer_id, held, 0, keeps_place=self.type.by_key)

    def begin_catchup(self, catchup_ms: int) -> None:
        """From here on, what is due by now is found by position. One step, without await."""
        self.replay.clear()
        self.states.park_cleared()
        self.frontier_ms = catchup_ms
        self.reader.begin(self.cursor.mark, self.log.end, catchup_ms)
        self.work.set()

    def on_due(self, chunk: DueChunk, catchup_ms: int) -> None:
        """Take a reference to a chunk. On overflow the queue is emptied and catch-up finds what was in it."""
        if not self.honors_delay or not self.consumers:
            return
        self.frontier_ms = catchup_ms
        if not self.replay.push(chunk):
            self.begin_catchup(catchup_ms)
        self.work.set()

    def _end_streams(self) -> None:
        """Let all consumers go; who comes next is the first one, and starts catch-up."""
        for consumer in self.consumers:
            self._take_back_unsent(consumer)
            consumer.end()
        self.consumers.clear()
        self.replay.clear()
        self.reader.begin(self.cursor.mark, self.log.end, 0)

    # -- what consumers say ----------------------------------------------------------------------------------

    async def acknowledge(self, entries: Entries) -> list[Failure]:
        """Settle entries; returns when that is durable. Failures name what can not have been sent here."""
        entries, _, failures = there(self, entries)
        unknown = without_entries(entries, known(self, entries))
        if unknown:
            # Not out now, but perhaps before a restart or before its lease ended. Only what cannot have been sent
            # is refused: an acknowledgement that is lost would bring the message back.
            refused = without_entries(unknown, await plausible(self, unknown))
            failures += failures_of(refused, "NOT_FOUND")
            entries = without_entries(entries, refused)
        fresh = without_entries(entries, self.cursor.settled_part(entries))
        if fresh:
            await self.settle(fresh, SettleReason.ACKED)
        return failures

    async def give_back(
        self,
        consumer_id: str,
        entries: Entries,
        redeliver_after_ms: int,
        *,
        dead_letter: bool = False,
        reason: str = "",
        release: bool = False,
    ) -> list[Failure]:
        """Give back entries that this consumer holds; returns when that is durable.

        With `dead_letter` they are given up, for this reason; so is what was delivered as often as it may be.
        With `release` they go out again at once, and this delivery does not count.
        """
        if dead_letter:
            self._services.dead_letter_sink.check_place(self)
        held = self.states.leases.held_by(consumer_id, entries)
        failures = not_held(self, without_entries(entries, held))
        if release:
            for done in self._release(consumer_id, held):
                await done
            return failures
        now_ms, now_ns = self.clock.now_ms(), self.clock.monotonic_ns()
        dead = held if dead_letter else self._worn_out(held)
        waits = []
        if dead:
            self.counters.nacked_messages += count_entries(dead)
            why = (reason or NACKED) if dead_letter else TOO_OFTEN
            waits.append(self.give_up(dead, why, reason, consumer_id=consumer_id))
        rest = without_entries(held, dead)
        for delay_ms, part in delays(
            rest, redeliver_after_ms, self.attempts, self.policy, self._services.rng
        ):
            parts = ((delay_ms, part),) if delay_ms else self._brake.waits(part, now_ns)
            for wait_ms, some in parts:
                until_ms = now_ms + wait_ms
                waits.append(self._give_back(consumer_id, some, ReturnReason.NACKED, until_ms, reason))
        for done in waits:
            await done
        return failures

    def extend(self, consumer_id: str, entries: Entries, lease_ms: int) -> list[Failure]:
        """Hold entries longer. Leases are not durable, so there is nothing to wait for."""
        held = self.states.leases.held_by(consumer_id, entries)
        if held:
            self.states.leases.extend(held, lease_end_ns(self.clock.monotonic_ns(), lease_ms))
            self.work.set()
        return not_held(self, without_entries(entries, held))

    # -- used by the dispatcher ------------------------------------------------------------------------------

    def expire_leases(self) -> None:
        """Give back what is held beyond its deadline; of a consumer that hangs, all that it holds."""
        now_ns = self.clock.monotonic_ns()
        for consumer_id, late in self.states.leases.expired(now_ns):
            consumer = next((each for each in self.consumers if each.consumer_id == consumer_id), None)
            hung = consumer is not None and self._hung(consumer, now_ns)
            if consumer is not None and consumer.waits_with(late):
                self._take_back_unsent(consumer)  # its stream did not come to send it: no attempt was made
            leases = self.states.leases
            entries = leases.held(consumer_id) if hung else leases.held_by(consumer_id, late)
            if entries:
                self.counters.lease_expired_messages += count_entries(entries)
                self._give_back_unasked(consumer_id, entries, ReturnReason.LEASE_EXPIRED)

    def _lease_ended(self, consumer_id: str) -> None:
        """Wake the dispatcher for a consumer that waits for room for a large message (SUBSCRIPTION-2)."""
        for consumer in self.consumers:
            if consumer.starved and consumer.consumer_id == consumer_id:
                consumer.starved = False
                self.work.set()

    def _hung(self, consumer: Consumer, now_ns: int) -> bool:
        """Return whether nothing was heard of a consumer for as long as its lease: then others go before it."""
        if now_ns < lease_end_ns(consumer.heard_ns, consumer.lease_ms):
            return False
        consumer.silent = True
        self.consumers.remove(consumer)
        self.consumers.append(consumer)  # a FAILOVER subscription has another active one from now on
        return True

    def heard(self, consumer: Consumer) -> None:
        """A consumer said something."""
        consumer.heard_ns = self.clock.monotonic_ns()
        if consumer.silent:
            consumer.silent = False
            self.work.set()

    def takers(self) -> list[Consumer]:
        """The consumers that messages may go to: those that hang only if there is nobody else."""
        if not any(each.silent for each in self.consumers):
            return self.consumers
        lively = [each for each in self.consumers if not each.silent and not each.draining]
        return lively or self.consumers

    def expire_messages(self, entries: Entries) -> None:
        """Settle entries whose time to live has passed; nobody waits for it."""
        with contextlib.suppress(Unavailable):  # they expire again after the restart
            forget_result(self.settle(entries, SettleReason.EXPIRED))

    def give_up(
        self, entries: Entries, reason: str, last_reason: str = "", *, consumer_id: str | None = None
    ) -> asyncio.Future[None]:
        """Make dead letters of entries that a consumer holds, or (None) nobody; done when that is durable.

        `last_reason` is of the nack that did it; empty: what was said before counts.
        """
        self.states.given_up(consumer_id, entries)
        if self.type.by_key:
            self.work.set()  # as when they are settled: they do not come back
        return self._services.dead_letter_sink.give_up(self, entries, reason, last_reason)

    def keep_given_up(
        self, entries: Entries, not_before_ms: int, last_reason: str, *, was_sent: bool
    ) -> asyncio.Future[None] | None:
        """Entries cannot become dead letters and wait for redelivery; None if no record says so."""
        if was_sent:
            return self._return(None, entries, ReturnReason.NACKED, not_before_ms, last_reason)
        self.states.taken_back(None, entries, not_before_ms)
        return None

    def not_to_send(
        self, ledger_id: int, entry_ids: UInt32Column, states: Iterable[State] = NOT_UNSENT
    ) -> Mask:
        """For each entry, whether it is not to be sent now: in one of the states, or about to be cancelled or moved."""
        refused = self.not_owed(ledger_id, entry_ids, states)
        changing = self.log.changing.get(ledger_id)
        if (
            changing is not None and self.honors_delay
        ):  # else it reads each once, and would not come back to it
            refused |= members(entry_ids, changing)
        return refused

    def not_owed(self, ledger_id: int, entry_ids: UInt32Column, states: Iterable[State] = NOT_UNSENT) -> Mask:
        """For each entry, whether it is settled, or in one of the states."""
        if self.log.entry_count(ledger_id) is None:
            return np.ones(len(entry_ids), dtype=np.bool_)  # dropped, and therefore settled
        return self.states.mask(ledger_id, entry_ids, states)

    # -- decisions -------------------------------------------------------------------------------------------

    def settle(self, entries: Entries, reason: SettleReason) -> asyncio.Future[None]:
        """Settle entries that nobody has settled; done when that is durable."""
        done = self._services.submit(Settled(self.topic_id, self.subscription_id, reason, entries))
        self.promise_settled(entries)
        return done

    def promise_settled(self, entries: Entries) -> None:
        """A record that settles entries was submitted just now."""
        # A crash before the record is durable takes that back, and nobody was answered.
        self.states.settling(entries)
        if self.type.by_key:
            self.work.set()  # another consumer may be given the next ones of these keys now

    def _give_back(
        self, consumer_id: str, entries: Entries, reason: ReturnReason, not_before_ms: int, text: str = ""
    ) -> asyncio.Future[None]:
        self.counters.redelivered_messages += count_entries(entries)
        if reason is ReturnReason.NACKED:
            self.counters.nacked_messages += count_entries(entries)
        return self._return(consumer_id, entries, reason, not_before_ms, text)

    def _release(self, consumer_id: str, held: Entries) -> list[asyncio.Future[None]]:
        """Give back unbegun: at once and uncounted, unless the same came back so again and again just now."""
        now_ms, now_ns = self.clock.now_ms(), self.clock.monotonic_ns()
        return [
            self._give_back(consumer_id, part, ReturnReason.RELEASED, now_ms + wait_ms if wait_ms else 0)
            for wait_ms, part in self._brake.waits(held, now_ns)
        ]

    def _return(
        self,
        consumer_id: str | None,
        entries: Entries,
        reason: ReturnReason,
        not_before_ms: int,
        text: str,
    ) -> asyncio.Future[None]:
        keeps_place = self.type.by_key and reason is not ReturnReason.NACKED
        try:
            done = self._services.submit(
                GivenBack(self.topic_id, self.subscription_id, reason, not_before_ms, entries, text)
            )
        except Unavailable:
            # The broker writes no more. What came back may still be sent to others; the attempt is forgotten with
            # the process.
            self.states.taken_back(consumer_id, entries, not_before_ms, keeps_place=keeps_place)
            raise
        self.states.returning(consumer_id, entries, keeps_place=keeps_place)
        return forget_result(done)

    def _give_back_unasked(self, consumer_id: str, entries: Entries, reason: ReturnReason) -> None:
        """Give back at once what no consumer asked to give back; nobody waits for it."""
        with contextlib.suppress(Unavailable):
            if reason is ReturnReason.RELEASED:
                self._release(consumer_id, entries)
                return
            if dead := self._worn_out(entries):
                self.give_up(dead, TOO_OFTEN, consumer_id=consumer_id)
            if rest := without_entries(entries, dead):
                self._give_back(consumer_id, rest, reason, 0)

    def _worn_out(self, held: Entries) -> Entries:
        return worn_out(held, self.attempts, self.policy.max_delivery_attempts or 0)
