"""Looks at a running broker from time to time: is what can be delivered being delivered, and is memory bounded?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.model import count_entries, without_entries
from broker.subscriptions.entry_states import State
from broker.subscriptions.types import SubscriptionType
from broker.topics.topic import Topic
from tests.harness import entries_of
from tests.reference import Violation, require
from tests.sim.model import Model, SubscriptionModel
from tests.sim.pacing import is_full, longest_wait_us
from tests.sim.reclaim import note_ledgers
from tests.sim.traffic import PAYLOAD_BYTES_MAX, SimConsumer
from tests.sim.world import Life, World

_EVERY_SECONDS = 0.5
_ENDS_US = 10_000_000
_WAITING = (State.UNSENT, State.QUEUED, State.PARKED)
_TURNS_PER_SECOND_MAX = 20_000
"""A loop of 0.2 ms timers makes 5,000; the busiest honest second makes some thousand."""


class Probe:
    """Liveness: while something is due, permits are there and a consumer is attached, it is delivered."""

    def __init__(self, world: World, model: Model, life: Callable[[], Life]) -> None:
        self._world = world
        self._model = model
        self._life = life
        self._turns = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            life = self._life()
            self._check_turns()
            if not life.serves or life.is_stopping or life.has_met_fault:
                self._check_failed(life)
                continue
            for mine in self._model.subscriptions():
                self._check_progress(mine)
                if mine.type == SubscriptionType.KEY_SHARED:
                    self._check_places(mine, life)
            self._check_broker(life)

    def _check_turns(self) -> None:
        turns, self._turns = self._world.loop.jump_count - self._turns, self._world.loop.jump_count
        limit = round(_TURNS_PER_SECOND_MAX * _EVERY_SECONDS)
        require(turns <= limit, "polling", f"the loop turned {turns} times in {_EVERY_SECONDS} s")
        self._world.count["most turns"] = max(self._world.count["most turns"], turns)

    def _check_failed(self, life: Life) -> None:
        """After a write or sync that failed, the broker must ask for its end: neither is tried again."""
        refused_us = life.faults.refused_us
        if life.serves and not life.is_stopping and refused_us is not None:
            waited_us = self._world.loop.now_us() - max(refused_us, self._world.slow_until_us)
            require(waited_us < _ENDS_US, "writing", "the broker goes on after a write or sync that failed")

    def _check_progress(self, mine: SubscriptionModel) -> None:
        world = self._world
        now_us = world.loop.now_us()
        if now_us < world.slow_until_us or not self._somebody_can_take(mine) or is_full(world, mine):
            mine.stalled_us = None
            return
        held_keys = mine.held_keys()
        waiting = next(
            (
                message
                for message, fact in mine.open.items()
                if message.key not in held_keys and self._model.is_deliverable(mine, message, fact)
            ),
            None,
        )
        if waiting is None:
            mine.stalled_us = None
            return
        world.count["liveness checks"] += 1
        if mine.stalled_us is None:
            mine.stalled_us = now_us
        # A timer that ran when the clock was stepped need not notice before it ends.
        limit_us = max(mine.stalled_us, world.wall.disturbed_us + world.config.tuning.clock_recheck_ms * 1000)
        if now_us > limit_us + world.slack_us + longest_wait_us(mine):
            seconds = (now_us - mine.stalled_us) / 1e6
            raise Violation("I11", f"{mine} {waiting.position} could be delivered for {seconds:.1f} s")

    def _somebody_can_take(self, mine: SubscriptionModel) -> bool:
        if mine.type == SubscriptionType.KEY_SHARED:  # whose a message is only the broker knows
            taking = [each for each in mine.attached if not each.draining]
            return bool(taking) and all(self._can_take(each) for each in taking)
        consumers = mine.attached[:1] if mine.type == SubscriptionType.FAILOVER else mine.attached
        return any(self._can_take(consumer) for consumer in consumers)

    def _can_take(self, consumer: SimConsumer) -> bool:
        if consumer.left <= 0 or consumer.closed_because is not None or consumer.draining:
            return False
        if consumer._waiting is not None:
            return False
        if consumer.left_bytes is None or consumer.left_bytes > 2 * PAYLOAD_BYTES_MAX:
            return True
        return consumer.left_bytes > 0 and not any(
            fact.holder is consumer for fact in consumer.model.open.values()
        )

    def _check_places(self, mine: SubscriptionModel, life: Life) -> None:
        """Check that the broker tells what came back, and goes first, from what is new, wherever it waits.

        Whether a consumer sees a wrong order depends on what else is due, and most seeds never show it.
        """
        states = life.broker.registry.topics[mine.topic.topic_id].subscriptions[mine.subscription_id].states
        waiting = entries_of(
            message.position
            for message in self._model.missing(mine)
            if (mine.open[message].holder is not None or mine.open[message].lost_us is not None)
            and states.state_of(message.position) in _WAITING
        )
        mistaken = without_entries(waiting, states.came_back(waiting))
        require(not mistaken, "key order", f"{mine}: {mistaken} came back, and would go as what is new")
        self._world.count["places checked"] += count_entries(waiting)

    def _check_broker(self, life: Life) -> None:
        for topic in life.broker.registry.topics.values():
            if topic._index.pump is None:
                continue
            if mine := self._model.topics.get(topic.topic_id):
                note_ledgers(self._model, mine, {ledger.name.ledger_id for ledger in topic.log})
                self._model.look_at_index(mine, topic)
            check_rebuilds(self._world, topic)
            for subscription in topic.subscriptions.values():
                queued = len(subscription.replay)
                require(bool(subscription.consumers) or not queued, "P6", "a replay queue without a consumer")
                require(subscription.counters.early_deliveries == 0, "P2", "early deliveries were counted")
                for consumer in subscription.consumers:
                    held = not consumer.starved or subscription.states.leases.held(consumer.consumer_id)
                    require(bool(held), "D4", f"{consumer.consumer_id} waits for bytes and holds nothing")


def check_rebuilds(world: World, topic: Topic) -> None:
    """Check that the index was not built again but for a reason.

    A clock that was far ahead or was set back far is one. Another is a folder of buckets that failed a sync in a life
    before: no later sync of it vouches for a name (MEMVFS-6), so a bucket that a manifest names may be missing. Nothing
    is lost by that, as the ledgers have it all; to end writing would cost more (seed 910304). Each life finds it
    missing until the manifest of one that lived long enough names others (seed 985003).
    """
    allowed = (
        int(topic._index.clock_was_ahead) + topic.index.set_backs + (topic.topic_id in world.lost_buckets)
    )
    rebuilds = topic.index.rebuilds
    require(rebuilds <= allowed, "watchdog", f"the index of {topic.name} was rebuilt {rebuilds} times")
