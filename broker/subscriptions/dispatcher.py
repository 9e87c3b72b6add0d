"""The loop that matches what a subscription is owed to its consumers' permits.

    redelivery, replay queue, reader --take--> read --> last look --> consumer's outbox

One dispatcher runs per subscription that has consumers, and nothing else hands out its messages. What a step does
depends on the subscription's type: `TakeTurns` is here, that of KEY_SHARED has a module of its own; the last look and
the hand-out, with their invariants, are the same for all (`handout`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from broker.errors import Corrupt, Unavailable
from broker.model import Array
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.ownership import Ownership, hand_out_clock
from broker.runtime.supervise import YieldBudget
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.damage import read_on
from broker.subscriptions.entry_states import State
from broker.subscriptions.handout import DueWindows, HandOut, Read, Taken, Window, taken_from_ledger
from broker.subscriptions.key_dispatch import KeyDispatch
from broker.subscriptions.subscription import Subscription

log = get_logger(__name__)


class Steps(Protocol):
    """Dispatch of a subscription of some type."""

    async def step(self) -> bool:
        """Hand out one batch, or look for one; False when there is nothing to do."""

    @property
    def has_taker(self) -> bool:
        """Return whether there is a consumer that would be given a message now."""


class Dispatcher:
    """Delivers for one subscription until cancelled."""

    def __init__(
        self,
        subscription: Subscription,
        *,
        clock: Clock,
        ownership: Ownership,
        clock_recheck_ms: int,
    ) -> None:
        self._subscription = subscription
        self._clock = clock
        self._ownership = ownership
        self._clock_recheck_ms = clock_recheck_ms
        self._budget = YieldBudget(clock)
        steps = KeyDispatch if subscription.type.by_key else TakeTurns
        self._hand_out_clock = hand_out_clock(clock, ownership)
        self._steps: Steps = steps(subscription, self._hand_out_clock)

    async def run(self) -> None:
        """Deliver until cancelled, or until nobody is there and nothing is held. Nothing else sends its messages."""
        work = self._subscription.work
        while True:
            work.clear()
            try:
                while await self._step():
                    await self._budget.spent()  # a herd must not starve the loop
            except (Corrupt, Unavailable) as damage:
                # An operator decides. This subscription stops, loudly, at each attempt; other topics go on.
                log.error(
                    "Delivery of a subscription has stopped because its messages cannot be read",
                    subscription=self._subscription.name,
                    error=str(damage),
                )
                for consumer in self._subscription.consumers:
                    consumer.close(damage)
            if not work.is_set():
                if not self._subscription.consumers and not self._subscription.states.leases.count():
                    return
                for consumer in self._subscription.consumers:
                    if consumer.polls and not consumer.lacks_room:
                        consumer.tell_nothing_found()
                    if consumer.reserves_room:
                        consumer.give_up_room()
                timer = asyncio.get_running_loop().call_later(self._idle_seconds(), work.set)
                try:
                    await work.wait()
                finally:
                    timer.cancel()

    async def _step(self) -> bool:
        subscription = self._subscription
        subscription.consumers.expire_leases()
        if not self._ownership.holds():  # nobody would be sent it; `Registry.wake` tells when they would
            return False
        policy, leases = subscription.policy, subscription.states.leases
        leased_count = leases.count() if policy.max_leased_messages else 0
        subscription.pacing.look(policy, leased_count, self._clock.monotonic_ns(), self._clock.now_ms())
        return await self._steps.step()

    def _idle_seconds(self) -> float:
        """Until when nothing can become deliverable by itself; never long, so that a stepped clock is noticed."""
        subscription = self._subscription
        wait_ms = float(self._clock_recheck_ms)
        next_ms = self._until_next_ms()
        # Only who may take: a timer for a FAILOVER consumer that is not active would fire again and again.
        if next_ms is not None and self._steps.has_taker:
            wait_ms = min(wait_ms, next_ms)
        deadline_ns = subscription.states.leases.next_deadline_ns()
        if deadline_ns is not None:
            wait_ms = min(wait_ms, (deadline_ns - self._clock.monotonic_ns()) / 1e6)
        return max(wait_ms, 0.0) / 1000 + 0.0002  # timers may fire a little early; do not come back in vain

    def _until_next_ms(self) -> float | None:
        """Return the time until a consumer that may take could be given a message; None if no time brings one."""
        pacing = self._subscription.pacing
        if not pacing.room:  # whatever else comes waits for it
            return None if pacing.next_ns is None else (pacing.next_ns - self._clock.monotonic_ns()) / 1e6
        not_before_ms = self._subscription.states.redelivery.next_ms()
        if not_before_ms is None or self._is_held_up(not_before_ms):
            return None
        return not_before_ms - self._clock.now_ms()

    def _is_held_up(self, due_ms: int) -> bool:
        """Return whether what is due at a time waits for the ownership and not for that time."""
        if not self._ownership.holds():
            return True
        return self._hand_out_clock.now_ms() < due_ms <= self._clock.now_ms()


class TakeTurns:
    """Dispatch in which each batch goes to one consumer, and those that may be given something take turns."""

    def __init__(self, subscription: Subscription, clock: Clock) -> None:
        self._subscription = subscription
        self._clock = clock
        self._out = HandOut(subscription, clock)
        self._windows = DueWindows(subscription, self._out)
        self._turn = 0

    async def step(self) -> bool:
        """Hand out one batch, or look for one; False when there is nothing to do."""
        subscription = self._subscription
        consumer = self._next_consumer()
        if consumer is None or not subscription.pacing.room:
            return False
        limit = self._limit(consumer)
        if returned := subscription.states.take(self._clock.now_ms(), limit):
            await self._read_and_hand_out(consumer, taken_from_ledger(*returned, from_redelivery=True))
        elif window := await self._windows.next():
            self._hand_out_window(consumer, window, limit)
        elif unread := subscription.reader.take(limit):
            await self._read_and_hand_out(consumer, taken_from_ledger(*unread, from_redelivery=False))
        elif subscription.reader.is_behind:
            await read_on(subscription)
        else:
            return False
        return True

    @property
    def has_taker(self) -> bool:
        """Return whether there is a consumer that would be given a message now."""
        return not self._awaits_returning and any(consumer.can_take for consumer in self._candidates())

    @property
    def _awaits_returning(self) -> bool:
        """Return whether what the last consumer held comes first: the next one would get it out of order."""
        subscription = self._subscription
        return subscription.type.in_order and bool(subscription.states.column(State.RETURNING))

    def _next_consumer(self) -> Consumer | None:
        """Next consumer, in turn, of those that may be given something and can take it."""
        if self._awaits_returning:
            return None
        candidates = self._candidates()
        for _ in range(len(candidates)):
            self._turn = (self._turn + 1) % len(candidates)
            if candidates[self._turn].can_take:
                return candidates[self._turn]
        return None

    def _candidates(self) -> Sequence[Consumer]:
        return self._subscription.type.candidates(self._subscription.consumers.takers())

    def _limit(self, consumer: Consumer) -> int:
        """Return how many messages one step hands out at most."""
        limits = self._subscription.limits
        room = self._subscription.pacing.room
        return min(consumer.permits, limits.batch_entries, self._out.fitting_frame(), room)

    async def _read_and_hand_out(self, consumer: Consumer, taken: Taken) -> None:
        read = await self._read_taken(taken)
        self._put_back(taken, self._hand_out(consumer, taken, read))

    async def _read_taken(self, taken: Taken) -> Read:
        try:
            return await self._out.read(taken)
        except BaseException:
            self._put_back(taken, slice(None))
            raise

    def _hand_out(self, consumer: Consumer, taken: Taken, read: Read) -> Array:
        """The last look, and the hand-out; what could be sent and is left, rising. No await in here (HANDOUT-1)."""
        now_ms = self._clock.now_ms()
        wanted = np.flatnonzero(self._out.last_look(taken, read, now_ms))
        chosen = wanted[wanted < len(read.frames)]
        if consumer not in self._subscription.consumers or not consumer.can_take:
            chosen = chosen[:0]  # it left, or its permits went, while the log was read
        chosen = chosen[: self._out.fitting(consumer, read.rows["length"][chosen])]
        if len(chosen):
            self._out.deliver(consumer, taken, read, chosen, now_ms)
        return wanted[len(chosen) :]

    def _hand_out_window(self, consumer: Consumer, window: Window, limit: int) -> None:
        """Hand out the first rows of a window; the rest stays in front. No await in here (HANDOUT-1)."""
        count = min(limit, len(window.taken.entry_ids))
        left = self._hand_out(consumer, *window.first(count))
        self._windows.rest = window.after(int(left[0]) if len(left) else count)
        if consumer.lacks_room:
            self._windows.put_back()

    def _put_back(self, taken: Taken, at: Array | slice) -> None:
        self._out.put_back(taken, at)
