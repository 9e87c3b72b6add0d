"""Decisions of one subscription about its entries: records that settle, give back or give up.

A decision is submitted and noted in the entries' states in one step; its record is applied once it is durable. A crash
in between takes the decision back, and nobody was answered.
"""

from __future__ import annotations

import asyncio
import contextlib

from broker.errors import Unavailable
from broker.model import Entries, count_entries, without_entries
from broker.observe.metrics import SubscriptionCounters
from broker.policy import EffectiveSubscriptionPolicy
from broker.runtime.signal import Signal
from broker.runtime.supervise import forget_result
from broker.storage.records import GivenBack, ReturnReason, Settled, SettleReason
from broker.subscriptions.attempts import Attempts
from broker.subscriptions.backoff import delays
from broker.subscriptions.brake import Brake
from broker.subscriptions.entry_states import EntryStates
from broker.subscriptions.giving_up import NACKED, TOO_OFTEN, worn_out
from broker.subscriptions.services import SubscriptionServices


class Decisions:
    """See the module's description. Owns the brake on what is given back again and again."""

    __slots__ = (
        "_attempts",
        "_brake",
        "_by_key",
        "_counters",
        "_ids",
        "_services",
        "_states",
        "_work",
        "policy",
    )

    def __init__(
        self,
        topic_id: int,
        subscription_id: int,
        states: EntryStates,
        attempts: Attempts,
        counters: SubscriptionCounters,
        work: Signal,
        services: SubscriptionServices,
        *,
        by_key: bool,
        policy: EffectiveSubscriptionPolicy,
    ) -> None:
        self.policy = policy
        """In force; its subscription sets it."""
        self._ids = topic_id, subscription_id
        self._states = states
        self._attempts = attempts
        self._counters = counters
        self._work = work
        self._services = services
        self._by_key = by_key
        self._brake = Brake()

    # -- settle ----------------------------------------------------------------------------------------------

    def settle(self, entries: Entries, reason: SettleReason) -> asyncio.Future[None]:
        """Settle entries that nobody has settled; done when that is durable."""
        done = self._services.submit(Settled(*self._ids, reason, entries))
        self.promise_settled(entries)
        return done

    def promise_settled(self, entries: Entries) -> None:
        """A record that settles entries was submitted just now."""
        self._states.settling(entries)
        if self._by_key:
            self._work.set()  # another consumer may be given the next ones of these keys now

    def expire(self, entries: Entries) -> None:
        """Settle entries whose time to live has passed; nobody waits for it."""
        with contextlib.suppress(Unavailable):  # they expire again after the restart
            forget_result(self.settle(entries, SettleReason.EXPIRED))

    # -- give back -------------------------------------------------------------------------------------------

    def nack(
        self, consumer_id: str, held: Entries, redeliver_after_ms: int, reason: str
    ) -> tuple[list[asyncio.Future[None]], Entries]:
        """Give back for a later delivery, or give up what was delivered as often as it may be.

        Returns what to wait for, and what comes again.
        """
        clock = self._services.clock
        now_ms, now_ns = clock.now_ms(), clock.monotonic_ns()
        waits = []
        if dead := self._worn_out(held):
            waits.append(self._give_up_nacked(consumer_id, dead, TOO_OFTEN, reason))
        rest = without_entries(held, dead)
        rng = self._services.rng
        for delay_ms, part in delays(rest, redeliver_after_ms, self._attempts, self.policy, rng):
            parts = ((delay_ms, part),) if delay_ms else self._brake.waits(part, now_ns)
            for wait_ms, some in parts:
                until_ms = now_ms + wait_ms
                waits.append(self._give_back(consumer_id, some, ReturnReason.NACKED, until_ms, reason))
        return waits, rest

    def release(self, consumer_id: str, held: Entries) -> list[asyncio.Future[None]]:
        """Give back unbegun: at once and uncounted, unless the same came back so again and again just now."""
        clock = self._services.clock
        now_ms, now_ns = clock.now_ms(), clock.monotonic_ns()
        return [
            self._give_back(consumer_id, part, ReturnReason.RELEASED, now_ms + wait_ms if wait_ms else 0)
            for wait_ms, part in self._brake.waits(held, now_ns)
        ]

    def give_back_unasked(self, consumer_id: str, held: Entries, reason: ReturnReason) -> None:
        """Give back at once what no consumer asked to give back; nobody waits for it."""
        with contextlib.suppress(Unavailable):
            if reason is ReturnReason.RELEASED:
                self.release(consumer_id, held)
                return
            if dead := self._worn_out(held):
                self.give_up(dead, TOO_OFTEN, consumer_id=consumer_id)
            if rest := without_entries(held, dead):
                self._give_back(consumer_id, rest, reason, 0)

    def _give_back(
        self, consumer_id: str, entries: Entries, reason: ReturnReason, not_before_ms: int, text: str = ""
    ) -> asyncio.Future[None]:
        self._counters.redelivered_messages += count_entries(entries)
        if reason is ReturnReason.NACKED:
            self._counters.nacked_messages += count_entries(entries)
        return self._return(consumer_id, entries, reason, not_before_ms, text)

    def _return(
        self,
        consumer_id: str | None,
        entries: Entries,
        reason: ReturnReason,
        not_before_ms: int,
        text: str,
    ) -> asyncio.Future[None]:
        keeps_place = self._by_key and reason is not ReturnReason.NACKED
        memory = self._services.reasons_memory
        room = memory.take(count_entries(entries), text) if text else 0
        try:
            done = self._services.submit(
                GivenBack(*self._ids, reason, not_before_ms, entries, text if room else "")
            )
        except Unavailable:
            memory.give_back(room)
            # The broker writes no more. What came back may still be sent to others; the attempt is forgotten with
            # the process.
            self._states.taken_back(consumer_id, entries, not_before_ms, keeps_place=keeps_place)
            raise
        done.add_done_callback(lambda _: memory.give_back(room))
        self._states.returning(consumer_id, entries, keeps_place=keeps_place)
        return forget_result(done)

    # -- give up ---------------------------------------------------------------------------------------------

    def check_dead_letters(self) -> None:
        """Raise Refused if there is no place for dead letters."""
        self._services.dead_letter_sink.check_place(*self._ids)

    def reject(self, consumer_id: str, held: Entries, reason: str) -> list[asyncio.Future[None]]:
        """Give up what a consumer does not want."""
        return [self._give_up_nacked(consumer_id, held, reason or NACKED, reason)] if held else []

    def give_up(
        self, entries: Entries, reason: str, last_reason: str = "", *, consumer_id: str | None = None
    ) -> asyncio.Future[None]:
        """Make dead letters of entries that a consumer holds, or (None) nobody; done when that is durable.

        `last_reason` is of the nack that did it; empty: what was said before counts.
        """
        self._states.given_up(consumer_id, entries)
        if self._by_key:
            self._work.set()  # as when they are settled: they do not come back
        return self._services.dead_letter_sink.give_up(*self._ids, entries, reason, last_reason)

    def keep_given_up(
        self, entries: Entries, not_before_ms: int, last_reason: str, *, was_sent: bool
    ) -> asyncio.Future[None] | None:
        """Entries cannot become dead letters and wait for redelivery; None if no record says so."""
        if was_sent:
            return self._return(None, entries, ReturnReason.NACKED, not_before_ms, last_reason)
        self._states.taken_back(None, entries, not_before_ms)
        return None

    def _give_up_nacked(
        self, consumer_id: str, entries: Entries, reason: str, last_reason: str
    ) -> asyncio.Future[None]:
        self._counters.nacked_messages += count_entries(entries)
        return self.give_up(entries, reason, last_reason, consumer_id=consumer_id)

    def _worn_out(self, held: Entries) -> Entries:
        return worn_out(held, self._attempts, self.policy.max_delivery_attempts)
