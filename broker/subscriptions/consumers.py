"""Consumers of one subscription: who is attached, who may be sent something, and what becomes of what they held.

Invariant:
  CONSUMERS-1  A consumer that is starved of bytes holds something: what it waits for is to be rid of it, or to grant
      more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from broker.errors import LimitReached, Refused
from broker.model import count_entries
from broker.observe.metrics import SubscriptionCounters
from broker.runtime.clock import Clock
from broker.runtime.signal import Signal
from broker.storage.records import ReturnReason
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.decisions import Decisions
from broker.subscriptions.entry_states import EntryStates
from broker.subscriptions.leases import lease_end_ns
from broker.subscriptions.types import SubscriptionType


class Consumers(Collection[Consumer]):
    """See the module's description. In the order in which they attached, those that hang last."""

    __slots__ = ("_attached", "_by_key", "_clock", "_counters", "_decisions", "_states", "_work")

    def __init__(
        self,
        states: EntryStates,
        decisions: Decisions,
        counters: SubscriptionCounters,
        work: Signal,
        clock: Clock,
        *,
        by_key: bool,
    ) -> None:
        self._attached: list[Consumer] = []
        self._states = states
        self._decisions = decisions
        self._counters = counters
        self._work = work
        self._clock = clock
        self._by_key = by_key

    def __len__(self) -> int:
        return len(self._attached)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._attached)

    def __contains__(self, consumer: object) -> bool:
        return consumer in self._attached

    # -- coming and going ------------------------------------------------------------------------------------

    def check_room(self, name: str, type_: SubscriptionType, consumers_max: int) -> None:
        """Refuse one more consumer where there is no place for it."""
        count = len(self._attached)
        if not type_.admits(count):
            raise Refused(
                f"Subscription {name!r} is {type_.name} and has a consumer",
                reason="CONSUMER_ALREADY_CONNECTED",
            )
        if count >= consumers_max:
            raise LimitReached(f"Subscription {name!r} has {count} consumers", reason="TOO_MANY_CONSUMERS")

    def add(self, consumer: Consumer, *, paused: bool) -> None:
        consumer.paused = paused
        self._attached.append(consumer)

    def remove(self, consumer: Consumer) -> None:
        """Forget a consumer, unless it was let go before."""
        if consumer in self._attached:
            self._attached.remove(consumer)

    def give_back(self, consumer: Consumer, *, keep_leases: bool) -> None:
        """Let what a consumer holds go to others, or (`keep_leases`) only what was never sent to it.

        That counts as one attempt, but for what was never sent, and for what a consumer that `hands_back` leaves.
        """
        self._take_back_unsent(consumer)
        held = self._states.leases.held(consumer.consumer_id)
        if held and not keep_leases:
            reason = ReturnReason.RELEASED if consumer.hands_back else ReturnReason.CONSUMER_LOST
            self._decisions.give_back_unasked(consumer.consumer_id, held, reason)

    def drain(self, consumer: Consumer) -> None:
        """Send a consumer no more: also what was handed out and is not on its way yet goes to others."""
        consumer.draining = True
        self._take_back_unsent(consumer)
        self._work.set()  # another one may be the active consumer now

    def end_all(self) -> None:
        """Let all consumers go; what they hold is nobody's."""
        for consumer in self._attached:
            self._take_back_unsent(consumer)
            consumer.end()
        self._attached.clear()

    def pause(self, *, paused: bool) -> None:
        for consumer in self._attached:
            consumer.paused = paused

    def _take_back_unsent(self, consumer: Consumer) -> None:
        """As if it had never been handed out; by a record of it, it would count as sent, and could not be changed."""
        unsent = consumer.take_back()
        held = {} if unsent is None else self._states.leases.held_by(consumer.consumer_id, unsent.entries())
        if held:
            self._states.taken_back(consumer.consumer_id, held, 0, keeps_place=self._by_key)

    # -- those that hang -------------------------------------------------------------------------------------

    def takers(self) -> list[Consumer]:
        """The consumers that messages may go to: those that hang only if there is nobody else."""
        if not any(consumer.silent for consumer in self._attached):
            return self._attached
        lively = [consumer for consumer in self._attached if not consumer.silent and not consumer.draining]
        return lively or self._attached

    def heard(self, consumer: Consumer) -> None:
        """A consumer said something."""
        consumer.heard_ns = self._clock.monotonic_ns()
        if consumer.silent:
            consumer.silent = False
            self._work.set()

    def expire_leases(self) -> None:
        """Give back what is held beyond its deadline; of a consumer that hangs, all that it holds."""
        now_ns = self._clock.monotonic_ns()
        leases = self._states.leases
        for consumer_id, late in leases.expired(now_ns):
            consumer = next(
                (attached for attached in self._attached if attached.consumer_id == consumer_id), None
            )
            hung = consumer is not None and self._hung(consumer, now_ns)
            if consumer is not None and consumer.waits_with(late):
                self._take_back_unsent(consumer)  # its stream did not come to send it: no attempt was made
            entries = leases.held(consumer_id) if hung else leases.held_by(consumer_id, late)
            if entries:
                self._counters.lease_expired_messages += count_entries(entries)
                self._decisions.give_back_unasked(consumer_id, entries, ReturnReason.LEASE_EXPIRED)

    def lease_ended(self, consumer_id: str) -> None:
        """Wake the dispatcher for a consumer that waits for room for a large message (CONSUMERS-1)."""
        for consumer in self._attached:
            if consumer.starved and consumer.consumer_id == consumer_id:
                consumer.starved = False
                self._work.set()

    def _hung(self, consumer: Consumer, now_ns: int) -> bool:
        """Return whether nothing was heard of a consumer for as long as its lease: then others go before it."""
        if now_ns < lease_end_ns(consumer.heard_ns, consumer.lease_ms):
            return False
        consumer.silent = True
        self._attached.remove(consumer)
        self._attached.append(consumer)  # a FAILOVER subscription has another active one from now on
        return True
