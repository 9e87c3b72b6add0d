"""Checks of a simulated broker against the reference: for each message and subscription, what happened so far.

Clients tell the model what they asked and what they were answered; `SimConsumer` tells it of every hand-out, at
the moment of the hand-out. What was asked and not answered when a life ended may go either way; `recovered`
settles which, by what the next life holds. There is no cleverness in here: no order but that of events, no index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from broker.model import IdRange, Position
from broker.policy import effective
from broker.subscriptions.consumer import DeliveryBatch
from broker.subscriptions.types import SubscriptionType
from broker.topics.policies import default_subscription_policy
from broker.topics.topic import Topic
from tests.harness import Outgoing, RefusedId
from tests.reference import Violation, require
from tests.sim.facts import (
    NEVER_US,
    Creation,
    Fact,
    Message,
    Recovered,
    SentBatch,
    SubscriptionModel,
    TopicModel,
)
from tests.sim.keys import check_key
from tests.sim.pacing import check_pace, end_paces, pace_of
from tests.sim.reclaim import note_ledgers
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.traffic import SimConsumer

_CALM_LATENESS_US = 150_000
"""A few calls to executors, and the time that a herd takes in batches of one."""


class Model:
    """All that clients know, and the checks of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.topics: dict[int, TopicModel] = {}
        self.by_frame: dict[bytes, Message] = {}
        self.asked: dict[SentBatch, None] = {}  # not answered yet
        self.creating: dict[Creation, None] = {}
        self._events = 0

    def tick(self) -> int:
        """The number of an event: events are ordered by it."""
        self._events += 1
        return self._events

    def subscriptions(self) -> Iterable[SubscriptionModel]:
        return (each for topic in self.topics.values() for each in topic.subscriptions if each.is_live)

    def topic(self, topic_id: int, name: str) -> TopicModel:
        """The topic that the broker says it has under this id."""
        topic = self.topics.get(topic_id)
        if topic is None:
            topic = self.topics[topic_id] = TopicModel(topic_id, name)
        require(topic.name == name, "P1", f"topic {topic_id} was {topic.name!r} and is {name!r}")
        require(topic.state != "deleted", "P1", f"topic {topic_id} {name!r} is back after its deletion")
        return topic

    # -- producing -------------------------------------------------------------------------------------------------

    def produce_asked(self, topic_name: str, asks: Sequence[Outgoing], frames: Sequence[bytes]) -> SentBatch:
        batch = SentBatch(topic_name, self.tick())
        for ask, frame in zip(asks, frames, strict=True):
            message = Message(Position(0, 0), frame, key=ask.key, ask=ask, batch=batch)
            batch.messages.append(message)
            assert frame not in self.by_frame, "payloads must differ"
            self.by_frame[frame] = message
        self.asked[batch] = None
        return batch

    def produce_refused(self, batch: SentBatch) -> None:
        """Refused before it was handed to the journal: it must never appear."""
        batch.state = "refused"
        del self.asked[batch]

    def produce_accepted(
        self, batch: SentBatch, topic: TopicModel, ids: IdRange, publish_ms: int, default_ttl_ms: int
    ) -> None:
        require(ids.count == len(batch.messages), "P1", "a batch was given another number of ids")
        require(publish_ms == self.world.wall.now_ms(), "P9", "the publish time is not the broker's")
        for message in batch.messages:
            message.publish_ms = publish_ms
            message.accepted_us = self.world.loop.now_us()
            asked_ms = message.ask.deliver_at_ms or (
                message.ask.deliver_after_ms and publish_ms + message.ask.deliver_after_ms
            )
            message.due_ms = asked_ms if asked_ms > publish_ms else 0
            message.ttl_ms = message.ask.ttl_ms or default_ttl_ms
        batch.state = "accepted"
        self._place(batch, topic, Position(ids.ledger_id, ids.first_entry_id))

    def produce_answered(self, batch: SentBatch) -> None:
        batch.state = "stored"
        batch.answered = self.tick()
        batch.stored_us = self.world.loop.now_us()
        assert batch.topic is not None
        batch.topic.confirmed = True
        del self.asked[batch]

    def _place(self, batch: SentBatch, topic: TopicModel, first: Position) -> None:
        batch.topic = topic
        topic.batches.append(batch)
        for index, message in enumerate(batch.messages):
            message.position = Position(first.ledger_id, first.entry_id + index)
            other = topic.by_position.get(message.position)
            require(other is None, "P1", f"the id {message.position} was given twice")
            topic.by_position[message.position] = message
            for subscription in topic.subscriptions:
                if message.position >= subscription.start:
                    subscription.add(message, message)
                elif batch.invoked > subscription.created:
                    raise Violation("P3", f"{subscription} begins after {message.position}, which came later")

    def _displace(self, batch: SentBatch) -> None:
        assert batch.topic is not None
        for message in batch.messages:
            batch.topic.by_position.pop(message.position, None)
            for subscription in batch.topic.subscriptions:
                subscription.forget(message)
        batch.topic.batches.remove(batch)

    # -- subscriptions ---------------------------------------------------------------------------------------------

    def creation_asked(self, creation: Creation) -> None:
        self.creating[creation] = None

    def created(self, creation: Creation, subscription_id: int, start: Position) -> SubscriptionModel:
        """The broker has it: check where it starts, and from now on what it is owed."""
        del self.creating[creation]
        topic = creation.topic
        topic.confirmed = True
        is_first, topic.had_subscription = not topic.had_subscription, True
        who = f"subscription {topic.name}/{creation.name}"
        known = [each.subscription_id for each in topic.subscriptions]
        require(subscription_id not in known, "P3", f"{who}: the id {subscription_id} is used again")
        if is_first or creation.earliest:
            require(start == (0, 0), "P3", f"{who} must begin at the beginning, and begins at {start}")
        else:
            for batch in topic.batches:
                # What was asked for while the creation was on its way may come before or after it.
                if batch.answered is not None and batch.answered < creation.invoked:
                    first = batch.messages[0].position
                    require(first < start, "P3", f"{who} is LATEST and begins before {first}")
        subscription = SubscriptionModel(
            creation.name,
            creation.type,
            creation.honors,
            topic=topic,
            subscription_id=subscription_id,
            policy=creation.policy,
            created=self.tick(),
            paces=[pace_of(creation.policy)],
        )
        subscription.seek(start, {message: message for message in topic.by_position.values()})
        topic.subscriptions.append(subscription)
        return subscription

    def deleted(self, subscription: SubscriptionModel) -> None:
        subscription.state = "deleted"

    # -- consumers -------------------------------------------------------------------------------------------------

    def handed_out(
        self, subscription: SubscriptionModel, consumer: SimConsumer, batch: DeliveryBatch
    ) -> None:
        """A batch was put into a consumer's outbox, now."""
        self._check_taker(subscription, consumer, batch)
        self.look_at_index(subscription.topic, consumer.topic)
        check_pace(self.world, subscription, len(batch))
        columns = zip(
            batch.ledger_ids.tolist(),
            batch.entry_ids.tolist(),
            batch.deliver_at_ms.tolist(),
            batch.attempts.tolist(),
            batch.frames,
            strict=True,
        )
        now_us, now_ms = self.world.loop.now_us(), self.world.wall.now_ms()
        last_us, subscription.progress_us, subscription.stalled_us = subscription.progress_us, now_us, None
        last_key = (0, Position(0, 0))
        for ledger_id, entry_id, deliver_at_ms, attempt, frame in columns:
            position = Position(ledger_id, entry_id)
            where = f"{subscription} {position}"
            message = self._check_message(subscription, where, position, frame)
            fact = subscription.entries.get(message)
            if fact is None:
                raise Violation("P3", f"{where} lies before the start {subscription.start}")
            subscription.check_sent(fact, now_ms, now_us * 1000, deliver_at_ms)
            is_shared_by_key = subscription.type == SubscriptionType.KEY_SHARED
            if is_shared_by_key:
                check_key(self.world, subscription, consumer, message, fact)
            lane = message.key if is_shared_by_key else ""
            is_in_order = bool(lane) or not is_shared_by_key
            if is_in_order and not fact.sent_count and consumer.sees_live(message):
                key = (message.due_ms, position)
                if (
                    not is_shared_by_key
                ):  # there a batch may be of many chunks, which were parked in their order
                    require(last_key < key, "order", f"{where} follows {last_key} in a batch")
                last_key = key
                self.check_order(subscription, lane, message)
            is_paced = not all(pace.is_free for pace in subscription.paces)
            if (
                self.world.is_calm and not is_paced and not is_shared_by_key
            ):  # a key may wait for its former consumer
                self.check_prompt(subscription, consumer, message, fact, last_us)
            self._note_causes(fact)
            subscription.send(fact, consumer, attempt, now_ms, now_us * 1000, consumer.lease_ms)
            fact.lost_us = None
        self.world.count["handed out"] += len(batch)

    def _check_taker(
        self, subscription: SubscriptionModel, consumer: SimConsumer, batch: DeliveryBatch
    ) -> None:
        who = f"{subscription} {consumer.consumer_id}"
        require(subscription.state != "deleted", "H9", f"{who}: a delivery after the subscription's deletion")
        require(subscription.topic.state != "deleted", "H9", f"{who}: a delivery after the topic's deletion")
        require(consumer in subscription.attached, "H9", f"{who} has left and is handed messages")
        if subscription.type == SubscriptionType.FAILOVER:
            require(subscription.attached[0] is consumer, "H9", f"{who} is not the active consumer")
        require(len(batch) <= consumer.left, "permits", f"{who}: {len(batch)} of {consumer.left} permits")
        require(len(batch) == len(batch.frames) == len(batch.entry_ids), "P8", f"{who}: columns differ")
        if consumer.left_bytes is not None and batch.frames_bytes > consumer.left_bytes:
            alone = len(batch) == 1 and consumer.left_bytes > 0 and not self._certainly_holds(consumer)
            require(alone, "permits", f"{who}: {batch.frames_bytes} of {consumer.left_bytes} bytes")
            self.world.count["greater than the bytes left"] += 1

    def _certainly_holds(self, consumer: SimConsumer) -> bool:
        now_ns = self.world.wall.monotonic_ns()
        return any(
            fact.holder is consumer
            and now_ns < fact.deadline_ns
            and not (fact.acking or fact.perhaps_acked)  # its lease ended when the ack was submitted
            for fact in consumer.model.open.values()
        )

    def _check_message(
        self,
        subscription: SubscriptionModel,
        where: str,
        position: Position,
        frame: bytes,
    ) -> Message:
        """Check that a message is whole and in its place; returns the model's."""
        message = self.by_frame.get(frame)
        if message is None:
            raise Violation("H8", f"{where}: nobody sent these {len(frame)} bytes")
        batch = message.batch
        require(batch.state in ("accepted", "stored"), "H3", f"{where}: its produce call was {batch.state}")
        require(batch.topic is subscription.topic, "H9", f"{where}: it belongs to another topic")
        require(message.position == position, "P1", f"{where}: its id was {message.position}")
        return message

    def look_at_index(self, mine: TopicModel, topic: Topic) -> None:
        """Take note of whether all that a topic holds is in its index, as it is not while that is built."""
        index = topic.index
        if index.is_rebuilding or index.rebuilds != mine.rebuilds:
            mine.indexed_us = NEVER_US
        elif index.position >= topic.log.end:
            mine.indexed_us = min(mine.indexed_us, self.world.loop.now_us())
        mine.rebuilds = index.rebuilds

    def check_order(self, subscription: SubscriptionModel, lane: str, message: Message) -> None:
        """Check that what was in the index before the last one came due is not handed out behind it.

        An index that is built, as at each start, has the rows of one ledger after those of another: what comes due
        meanwhile is handed out as it is found, with nothing to wait for.
        """
        world, key = self.world, (message.due_ms, message.position)
        now_us, now_ms = world.loop.now_us(), world.wall.now_ms()
        undisturbed = world.wall.disturbed_us < subscription.last_live_us.get(lane, 0)
        last = subscription.last_live.get(lane, key) if undisturbed else key
        if last > key:
            last_due_us = now_us - (now_ms - last[0]) * 1000
            indexed_us = max(message.batch.stored_us + world.slack_us, subscription.topic.indexed_us)
            is_excused = indexed_us >= last_due_us or now_us <= world.slow_until_us
            what = f"{subscription} {message.position} due at {message.due_ms} follows {last}"
            require(is_excused, "order", what)
        subscription.last_live[lane], subscription.last_live_us[lane] = max(last, key), now_us

    def check_prompt(
        self,
        subscription: SubscriptionModel,
        consumer: SimConsumer,
        message: Message,
        fact: Fact,
        last_us: int,
    ) -> None:
        """Check that nothing waits in a calm run while its subscription, which handed out last then, does nothing else.

        Catch-up looks at the times of each ledger on its way, a call for each; with ledgers of one entry, and beside a
        dozen others that do the same, that takes longer than anything else here, and nobody can say how long but those
        who count it: the task that hands out is the one that waited.
        """
        wall, now_us = self.world.wall, self.world.loop.now_us()
        due_us = now_us - (wall.now_ms() - max(message.due_ms, fact.wait_high_ms)) * 1000
        lease_end_us = fact.deadline_ns // 1000 if fact.holder else 0
        ready_us = max(last_us, consumer.attached_us, subscription.paced_us, due_us, lease_end_us)
        if message.batch.state == "stored":
            ready_us = max(ready_us, message.batch.stored_us)
            late_us = now_us - ready_us
            if consumer.catches_up(message) and not fact.sent_count:
                task = asyncio.current_task(self.world.loop)
                assert task is not None, "a dispatcher hands out"
                late_us -= self.world.loop.waited_us(task, ready_us)
            what = f"{subscription} {message.position} is {late_us / 1000} ms late"
            require(late_us <= _CALM_LATENESS_US, "lateness", what)
            self.world.count["lateness checks"] += 1

    def _note_causes(self, fact: Fact) -> None:
        """Take note of what a delivery that follows has for its cause, and of what may be told of it no more."""
        now_ns = self.world.wall.monotonic_ns()
        if fact.holder is not None and not fact.is_held(now_ns):
            fact.give_back()
            self.world.count["redelivered: lease expired"] += 1
        elif fact.holder is None and fact.sent_count:
            self.world.count["redelivered: other causes"] += 1
        # What was taken when its time had come may go out though the clock stepped back meanwhile.
        if self.world.wall.reached(fact.wait_low_ms, fact.nacked_us):
            fact.wait_low_ms = 0
        if self.world.writing_failed:
            # A broker that cannot write any more still delivers, and forgets those attempts with the process.
            fact.returns_low = fact.returns_durable

    # -- what consumers say ----------------------------------------------------------------------------------------

    def ack_asked(self, subscription: SubscriptionModel, messages: Iterable[Message]) -> None:
        for message in messages:
            subscription.entries[message].acking += 1

    def ack_answered(
        self, subscription: SubscriptionModel, messages: Iterable[Message], failures: list[RefusedId]
    ) -> None:
        failed = {(each.position, each.reason) for each in failures}
        for message in messages:
            fact = subscription.entries.get(message)
            if fact is None:
                continue
            fact.acking -= 1
            if (message.position, "NOT_FOUND") in failed:
                is_future = subscription.honors_delay and message.due_ms > self.world.wall.now_ms()
                sent = fact.sent_count > 0 or fact.is_settled
                what = f"{subscription} {message.position}: NOT_FOUND for what was sent"
                require(not sent or is_future, "ack", what)
                self.world.count["acks refused after a step back"] += sent
            else:
                self.world.count["acks confirmed"] += not fact.is_settled
                subscription.settle(message, self.world.wall.monotonic_ns())
        require(len(failed) == len(failures), "ack", f"{subscription}: failures are told twice")

    def ack_lost(self, subscription: SubscriptionModel, messages: Iterable[Message]) -> None:
        """No answer, or one that leaves it open."""
        for message in messages:
            if fact := subscription.entries.get(message):
                fact.acking -= 1
                fact.perhaps_acked = True

    def nack_asked(
        self,
        subscription: SubscriptionModel,
        consumer: SimConsumer,
        messages: Iterable[Message],
        delay_ms: int,
    ) -> dict[Message, int]:
        """Returns those that the consumer certainly holds, with how often they came back by then."""
        certain: dict[Message, int] = {}
        now_ms, now_ns = self.world.wall.now_ms(), self.world.wall.monotonic_ns()
        for message in messages:
            fact = subscription.entries[message]
            if fact.holder is not consumer:
                continue
            held = fact.is_held(now_ns) and not fact.acking
            low, high = self._delays(subscription, fact, delay_ms)
            fact.give_back(certain=not fact.acking)
            fact.wait(now_ms + low, now_ms + high, certain=held)
            if held:
                fact.nacked_us = self.world.loop.now_us()
                certain[message] = fact.returns_low
        return certain

    def _delays(self, subscription: SubscriptionModel, fact: Fact, delay_ms: int) -> tuple[int, int]:
        """The shortest and the longest wait that a nack may mean."""
        if delay_ms:
            return delay_ms, delay_ms
        policy = effective(subscription.policy, default_subscription_policy(self.world.config))
        assert policy.backoff_multiplier is not None
        assert policy.initial_backoff_ms is not None
        assert policy.max_backoff_ms is not None
        low, high = (
            min(
                policy.initial_backoff_ms * policy.backoff_multiplier ** min(count, 40), policy.max_backoff_ms
            )
            for count in (fact.returns_low, fact.returns_high)
        )
        return int(low / 2), int(high) + 1

    def nack_answered(
        self, subscription: SubscriptionModel, certain: dict[Message, int], failures: list[RefusedId]
    ) -> None:
        failed = {each.position: each.reason for each in failures}
        for message, returns in certain.items():
            fact = subscription.entries.get(message)
            if fact is None:
                continue
            position = message.position
            require(position not in failed, "nack", f"{subscription} {position}: {failed.get(position)}")
            fact.returns_durable = max(fact.returns_durable, returns)
            fact.is_wait_durable = True
            self.world.count["nacks confirmed"] += 1

    def extended(
        self,
        subscription: SubscriptionModel,
        consumer: SimConsumer,
        messages: Iterable[Message],
        lease_ms: int,
        failures: list[RefusedId],
    ) -> None:
        """Leases were extended, or refused, in the same moment."""
        failed = {each.position: each.reason for each in failures}
        now_ns = self.world.wall.monotonic_ns()
        for message in messages:
            fact = subscription.entries[message]
            held = fact.holder is consumer and fact.is_held(now_ns) and not fact.acking
            if message.position not in failed:
                fact.deadline_ns = now_ns + lease_ms * 1_000_000
                self.world.count["leases extended"] += 1
            elif held:
                raise Violation("lease", f"{subscription} {message.position}: {failed[message.position]}")

    def handed_back(self, consumer: SimConsumer, messages: Iterable[Message]) -> None:
        """Note that a consumer's messages go to others unbegun."""
        for message in messages:
            fact = consumer.model.entries.get(message)
            if fact is not None and fact.holder is consumer:
                fact.hand_back(self.world.wall.monotonic_ns())
                fact.lost_us = self.world.loop.now_us()
                self.world.count["handed back unbegun"] += 1

    def left(self, consumer: SimConsumer, *, keeps_leases: bool = False) -> None:
        """A consumer was detached."""
        subscription = consumer.model
        if consumer in subscription.attached:
            subscription.attached.remove(consumer)
        if consumer.hands_back and not keeps_leases:
            self.handed_back(consumer, list(subscription.open))
        if keeps_leases:
            return
        for fact in subscription.open.values():
            if fact.holder is consumer:
                fact.give_back(certain=not fact.acking)
                fact.lost_us = self.world.loop.now_us()

    # -- lives -----------------------------------------------------------------------------------------------------

    def life_ended(self, *, cleanly: bool) -> None:
        """Nobody will be answered any more; what is out is owed again."""
        now_ns = self.world.wall.monotonic_ns()
        for topic in self.topics.values():
            topic.indexed_us, topic.rebuilds = NEVER_US, 0
            for subscription in topic.subscriptions:
                subscription.attached.clear()
                subscription.stalled_us = None
                end_paces(subscription)
                for fact in subscription.entries.values():
                    fact.end_life(now_ns, cleanly=cleanly)
                    fact.lost_us = None

    def recovered(self, found: Recovered) -> None:
        """Settle what was left open by what the broker holds now; what was answered must be there (P1)."""
        for topic_id, (name, _, _) in found.items():
            topic = self.topic(topic_id, name)
            topic.state = "live"  # a deletion that was asked for did not happen
        for topic in self.topics.values():
            if topic.topic_id in found:
                continue
            answered = topic.confirmed and topic.state == "live"
            require(not answered, "P1", f"topic {topic.name}#{topic.topic_id} is gone")
            topic.state = "deleted"
        for topic_id, (_, subscriptions, frames) in found.items():
            self._recover_entries(self.topics[topic_id], frames)
            self._recover_subscriptions(self.topics[topic_id], subscriptions)
        self.creating.clear()
        for batch in self.asked:
            self.world.count["batches lost unanswered"] += batch.state == "accepted"
            if batch.state == "accepted":
                self._displace(batch)
            batch.state = "lost"
        self.asked.clear()

    def _recover_entries(self, topic: TopicModel, frames: dict[Position, bytes]) -> None:
        note_ledgers(self, topic, {position.ledger_id for position in frames})
        seen: dict[SentBatch, None] = {}
        for position, frame in frames.items():
            where = f"topic {topic.name}#{topic.topic_id} {position}"
            message = self.by_frame.get(frame)
            if message is None:
                raise Violation("H8", f"{where}: recovery found bytes that nobody sent")
            batch = message.batch
            require(batch.state in ("accepted", "stored"), "H3", f"{where}: its call was {batch.state}")
            require(batch.topic is topic, "H9", f"{where}: it belongs to another topic")
            require(message.position == position, "P1", f"{where}: its id was {message.position}")
            seen[batch] = None
        for batch in topic.batches:
            whole = [message.position in frames or message.gone for message in batch.messages]
            if batch.state == "stored":
                lost = len(whole) - sum(whole)
                first = batch.messages[0].position
                require(not lost, "P1", f"{topic.name}: {lost} answered messages from {first} on are gone")
            require(all(whole) or not any(whole), "P1", f"{topic.name}: a part of a batch survived")
        for batch in seen:
            if batch.state == "accepted":
                batch.state = "stored"
                batch.answered = self.tick()
                del self.asked[batch]
                self.world.count["batches recovered unanswered"] += 1

    def _recover_subscriptions(self, topic: TopicModel, found: dict[int, tuple[str, Position]]) -> None:
        for subscription in topic.subscriptions:
            if subscription.subscription_id not in found:
                require(subscription.state != "live", "P3", f"{subscription} is gone")
                subscription.state = "deleted"
                continue
            require(subscription.state != "deleted", "P3", f"{subscription} is back after its deletion")
            _, start = found[subscription.subscription_id]
            require(start == subscription.start, "P3", f"{subscription} begins at {start} now")
            subscription.state = "live"
        known = {each.subscription_id for each in topic.subscriptions}
        for subscription_id, (name, start) in sorted(found.items()):
            if subscription_id not in known:
                asked = [each for each in self.creating if each.topic is topic and each.name == name]
                require(bool(asked), "P3", f"nobody asked for the subscription {topic.name}/{name}")
                self.created(asked[0], subscription_id, start)
                self.world.count["subscriptions recovered unanswered"] += 1

    # -- liveness --------------------------------------------------------------------------------------------------

    def is_deliverable(self, subscription: SubscriptionModel, message: Message, fact: Fact) -> bool:
        """Return whether a message could be handed out now, if somebody can take it. In doubt, no."""
        wall = self.world.wall
        is_due = subscription.must_have_come(fact, wall.now_ms(), wall.monotonic_ns())
        return message.batch.state == "stored" and is_due and not self.may_have_expired(message)

    def may_have_expired(self, message: Message) -> bool:
        return bool(message.expire_ms) and self.world.wall.reached(message.expire_ms, message.accepted_us)

    def missing(self, subscription: SubscriptionModel) -> list[Message]:
        """Return what this subscription is still owed."""
        return [
            message
            for message, fact in subscription.open.items()
            if message.batch.state == "stored"
            and not fact.perhaps_acked
            and not self.may_have_expired(message)
        ]
