"""Counters of all topics and subscriptions, noted once a minute: pages tell from it what the last hour was like."""

from __future__ import annotations

import asyncio

from broker.observe.last_hour import HourOfCounter, LastHour
from broker.runtime.clock import Clock
from broker.runtime.supervise import YieldBudget
from broker.subscriptions.subscription import Subscription
from broker.topics.registry import Registry
from broker.topics.topic import Topic

_MINUTE_NS = 60 * 10**9
_NOTE_SECONDS = 60


class RatesOfLastHour:
    """See the module's description."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._hour = LastHour(self._minute())

    async def run(self) -> None:
        """Note all, again and again, until cancelled."""
        self._hour = LastHour(self._minute())
        budget = YieldBudget(self._clock)
        while True:
            await asyncio.sleep(_NOTE_SECONDS)
            await self.note_all(budget)

    async def note_all(self, budget: YieldBudget) -> None:
        """Note how the counters stand."""
        minute = self._minute()
        for topic in list(self._registry.topics.values()):
            self._hour.note(topic.topic_id, (topic.counters.produced_messages,), minute)
            for subscription in list(topic.subscriptions.values()):
                counters = subscription.counters
                counted = (counters.delivered_messages, counters.acked_messages)
                self._hour.note((topic.topic_id, subscription.subscription_id), counted, minute)
                await budget.spent()
            await budget.spent()
        self._hour.forget_unseen()

    def produced(self, topic: Topic) -> HourOfCounter:
        """Messages that were produced to a topic."""
        (produced,) = self._hour.of(topic.topic_id, 1)
        return produced

    def delivered_and_acked(
        self, topic: Topic, subscription: Subscription
    ) -> tuple[HourOfCounter, HourOfCounter]:
        """Messages that a subscription delivered, and that were acknowledged on it."""
        delivered, acked = self._hour.of((topic.topic_id, subscription.subscription_id), 2)
        return delivered, acked

    def _minute(self) -> int:
        return self._clock.monotonic_ns() // _MINUTE_NS
