"""Clients of a simulated broker: producers and consumers with habits, good and bad.

They call the broker as the rpc edge does, tell the model what they ask and what they are answered, and never
look at anything else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from broker.errors import LimitReached, NotFound, PostdateError, Refused, StorageFailed, Unavailable
from broker.model import Position
from broker.subscriptions import requests
from broker.subscriptions.consumer import Consumer, DeliveryBatch
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.topics.topic import Topic
from tests.harness import DAY_MS, Outgoing, batch_of, entries_of, refused_ids
from tests.reference import Violation, require
from tests.sim.model import Message, Model, SubscriptionModel
from tests.sim.world import Life

PAYLOAD_BYTES_MAX = 3_000
MOMENT_MS = 2_000
"""Many messages of many batches are due at multiples of this."""


class Payloads:
    """Payloads that are never twice the same."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._numbers = itertools.count(1)

    def next(self) -> bytes:
        length = self._rng.choices((0, 20, 300, PAYLOAD_BYTES_MAX), (20, 20, 4, 1))[0]
        return b"%d:" % next(self._numbers) + self._rng.randbytes(self._rng.randint(0, length))


def random_messages(rng: random.Random, payloads: Payloads, now_ms: int, *, long: bool) -> list[Outgoing]:
    """A batch with a mix of times; `long` allows delays of hours to years."""
    count = rng.choice((1, 1, 2, 3, rng.randint(1, 12)))
    kinds = rng.choice(
        (("none",), ("after",), ("soon",), ("at",), ("none", "after", "soon", "at", "past", "long"))
    )
    moment_ms = (now_ms // MOMENT_MS + rng.randint(1, 3)) * MOMENT_MS
    keys = rng.choice((("",), ("", "a", "b"), ("a",), ("a", "b", "c", "d", "e", "f")))
    messages = []
    for _ in range(count):
        kind = rng.choice(kinds)
        at_ms = after_ms = 0
        if kind == "after":
            after_ms = rng.choice((1, rng.randint(1, 50), rng.randint(1, 3_000), rng.randint(1, 20_000)))
        elif kind == "soon":
            at_ms = now_ms + rng.randint(-2, 400)
        elif kind == "at":
            at_ms = moment_ms
        elif kind == "past":
            at_ms = now_ms - rng.choice((1, 1_000, DAY_MS))
        elif kind == "long" and long:
            after_ms = rng.choice((60_000, 3_600_000, rng.randint(1, 3 * DAY_MS), 3_650 * DAY_MS))
        ttl_ms = rng.choice((1, 500, 10_000, DAY_MS)) if rng.random() < 0.06 else 0
        messages.append(
            Outgoing(
                payloads.next(),
                deliver_at_ms=max(at_ms, 0),
                deliver_after_ms=after_ms,
                ttl_ms=ttl_ms,
                key=rng.choice(keys),
            )
        )
    return messages


async def produce(life: Life, model: Model, topic_name: str, asks: Sequence[Outgoing]) -> None:
    """One produce call, from the question to the answer."""
    batch = batch_of(topic_name, asks, life.config)
    ends = batch.lengths.cumsum().tolist()
    frames = [
        batch.frames[end - length : end] for end, length in zip(ends, batch.lengths.tolist(), strict=True)
    ]
    sent = model.produce_asked(topic_name, asks, frames)
    broker, count = life.broker, life.world.count
    try:
        accepted = await broker.submit_batch(topic_name, batch)
    except (LimitReached, Unavailable, NotFound) as error:
        if not life.dead:
            model.produce_refused(sent)
            count[f"produce refused: {error.reason}"] += 1
        return
    if life.dead:
        return
    topic = model.topic(*identity(broker.registry.by_name[topic_name]))
    (ids,) = accepted.ids
    model.produce_accepted(sent, topic, ids, accepted.publish_time_ms, life.config.default_ttl_ms)
    try:
        await asyncio.shield(accepted.durable)
    except StorageFailed:
        return  # it may be stored or not; the next life will tell
    if life.dead:
        return
    model.produce_answered(sent)
    life.world.trace(f"stored {topic_name} {sent.messages[0].position} +{len(asks)}")
    count["batches produced"] += 1
    count["messages produced"] += len(asks)
    count["messages delayed"] += sum(message.due_ms > 0 for message in sent.messages)


def identity(topic: Topic) -> tuple[int, str]:
    return topic.topic_id, topic.name


@dataclass(frozen=True, slots=True)
class Habits:
    """Habits of one consumer."""

    permits: int
    permit_bytes: int  # 0: no limit
    lease_ms: int
    think_ms: int  # at most, for each batch
    ack_share: float
    nack_share: float
    extend_share: float
    ack_late_ms: int  # at most, for each ack
    regrants: bool
    pulls: bool  # takes one batch and leaves, and keeps its leases (Receive)
    stays_ms: int  # 0: until it is sent away
    reads: bool  # or lets its outbox fill


def random_habits(rng: random.Random, lease_ms: int) -> Habits:
    never_acks = rng.random() < 0.1
    return Habits(
        permits=rng.choice((1, 2, 5, 50, 1_000_000)),
        permit_bytes=rng.choice((0, 0, 0, 10, 100, 5_000)),
        lease_ms=rng.choice((lease_ms, lease_ms, 50, 500, 3_000)),
        think_ms=rng.choice((0, 0, 5, 100, 3_000)),
        ack_share=0.0 if never_acks else rng.choice((1.0, 1.0, 0.8, 0.4)),
        nack_share=0.0 if never_acks else rng.choice((0.0, 0.1, 0.5)),
        extend_share=rng.choice((0.0, 0.0, 0.2)),
        ack_late_ms=rng.choice((0, 0, 20, 2_000)),
        regrants=rng.random() < 0.85,
        pulls=rng.random() < 0.1,
        stays_ms=rng.choice((0, 0, 0, rng.randint(1, 5_000))),
        reads=rng.random() < 0.95,
    )


GREEDY = Habits(
    permits=1_000_000,
    permit_bytes=0,
    lease_ms=60_000,
    think_ms=0,
    ack_share=1.0,
    nack_share=0.0,
    extend_share=0.0,
    ack_late_ms=0,
    regrants=True,
    pulls=False,
    stays_ms=0,
    reads=True,
)
"""Takes and acknowledges everything: for the end of a run."""


def calm_habits(rng: random.Random) -> Habits:
    """Takes everything at once, and gives some of it back."""
    return dataclasses.replace(
        GREEDY, ack_share=0.8, nack_share=rng.random(), lease_ms=rng.choice((300, 5_000))
    )


class SimConsumer(Consumer):
    """A consumer that tells the model of each hand-out at its very moment, and keeps its own books of permits."""

    def __init__(
        self,
        life: Life,
        model: Model,
        topic: Topic,
        subscription: Subscription,
        mine: SubscriptionModel,
        habits: Habits,
        number: int,
    ) -> None:
        super().__init__(f"c{number}", f"c{number}", habits.lease_ms)
        self.model = mine
        self.habits = habits
        self.left = 0
        self.left_bytes: int | None = None
        self._last_bytes = 0  # what the last batch took of them
        self._handed_back: DeliveryBatch | None = None
        self.attached = False
        self.attached_us = 0
        self.life = self._life = life
        self._all = model
        self.topic = topic
        self._subscription = subscription
        self._rng = life.world.rng(f"consumer {number}")
        self._arrived: deque[list[Message]] = deque()

    # -- seen by the broker ----------------------------------------------------------------------------------------

    def grant(self, messages: int, bytes_: int) -> None:
        self.left += messages
        if bytes_:
            self.left_bytes = (self.left_bytes or 0) + bytes_
        elif messages:
            self.left_bytes = None
            self._last_bytes = 0
        super().grant(messages, bytes_)

    def deliver(self, batch: DeliveryBatch) -> None:
        if self._life.dead:
            return
        ids = zip(batch.ledger_ids.tolist(), batch.entry_ids.tolist(), batch.attempts.tolist(), strict=True)
        self._life.world.trace(
            f"{self.model} -> {self.consumer_id} " + " ".join(f"{l}.{e}x{a}" for l, e, a in ids)
        )
        limit = self._life.config.tuning.replay_entries_max
        limit += min(limit, self._life.config.tuning.read_batch_entries)  # for what was put back
        queued = len(self._subscription.replay)
        overflow_count = self._subscription.reader._run - self.model.catchup_count
        self.model.catchup_count += overflow_count
        self._life.world.count["replay queues overflowed"] += overflow_count
        try:
            require(queued <= limit, "P6", f"{queued} entries in the replay queue of {self.model}")
            self._all.handed_out(self.model, self, batch)
        except Violation as violation:
            self._life.world.fail(violation)
            return
        self.left -= len(batch)
        if self.left_bytes is not None:
            self._last_bytes = min(self.left_bytes, batch.frames_bytes)
            self.left_bytes -= self._last_bytes
        self._arrived.append([self._all.by_frame[frame] for frame in batch.frames])
        super().deliver(batch)

    def take_back(self) -> DeliveryBatch | None:
        if self._life.dead:
            return None
        self._hand_back_unsent()
        batch = super().take_back()
        if batch is not None:
            self.left += len(batch)
            if self.left_bytes is not None:
                self.left_bytes += self._last_bytes
        return batch

    def catches_up(self, message: Message) -> bool:
        """Return whether a message comes by position, behind all that lies between the mark and itself."""
        reader = self._subscription.reader
        return message.position < reader.catchup_end and message.due_ms <= reader.catchup_ms

    def sees_live(self, message: Message) -> bool:
        """Return whether a message comes to this consumer through the index, in due order, and not by position."""
        undisturbed = self._life.world.wall.disturbed_us < message.accepted_us
        is_live = message.due_ms > 0 and not self.catches_up(message)
        return self.model.honors_delay and is_live and undisturbed

    # -- its life --------------------------------------------------------------------------------------------------

    def attach(self) -> bool:
        """Attach; False if it was refused, as it must be on an EXCLUSIVE subscription with a consumer."""
        self.grant(self.habits.permits, self.habits.permit_bytes)
        is_second = self.model.type == SubscriptionType.EXCLUSIVE and bool(self.model.attached)
        self.model.attached.append(self)  # a delivery may follow at once
        self.attached = True
        self.attached_us = self._life.world.loop.now_us()
        try:
            self.topic.subscriptions.attach(self._subscription, self)
        except Refused:
            require(is_second, "H9", f"{self.model}: refused a consumer, and has none")
            self.model.attached.remove(self)
            self.attached = False
            self._life.world.count["second consumers refused"] += 1
            return False
        require(not is_second, "H9", f"{self.model}: an EXCLUSIVE subscription took a second consumer")
        self._life.world.count["consumers attached"] += 1
        self.model.catchup_count = self._subscription.reader._run
        return True

    def detach(self, *, keeps_leases: bool = False) -> None:
        if not self.attached or self._life.dead:
            return
        self.attached = False
        self._life.world.trace(f"{self.consumer_id} leaves")
        self._hand_back_unsent()
        self.hands_back = not keeps_leases and self._rng.random() < 0.5
        self._all.left(self, keeps_leases=keeps_leases)
        try:
            if keeps_leases:
                self.topic.subscriptions.detach(self._subscription, self, keep_leases=True)
            else:
                self.topic.subscriptions.detach(self._subscription, self)
        except StorageFailed:
            if self._life.failure is None:
                raise

    def drain(self) -> None:
        """Take no more; what it holds it may still settle."""
        self._life.world.trace(f"{self.consumer_id} drains")
        self._hand_back_unsent()
        self._subscription.consumers.drain(self)

    def _hand_back_unsent(self) -> None:
        if self._waiting is not None and self._waiting is not self._handed_back:
            self._handed_back = self._waiting
            self._all.handed_back(self, self._arrived.pop())

    async def run(self) -> None:
        """Take what arrives, and do with it what the habits say, until it leaves."""
        try:
            async with asyncio.timeout(self.habits.stays_ms / 1000 or None):
                while self.attached and self.closed_because is None:
                    self.wakeup.clear()
                    if not self.habits.reads or (batch := self.next_nowait()) is None:
                        await self.wakeup.wait()
                        continue
                    self._subscription.work.set()  # there is room in the outbox again
                    if self.habits.pulls:
                        self._life.spawn(self._use(self._arrived.popleft(), batch.frames_bytes))
                        break
                    await self._use(self._arrived.popleft(), batch.frames_bytes)
        except TimeoutError:
            self._life.world.count["consumers left by themselves"] += 1
        finally:
            self.detach(keeps_leases=self.habits.pulls)

    async def _use(self, messages: list[Message], frames_bytes: int) -> None:
        habits, rng = self.habits, self._rng
        if habits.think_ms:
            await asyncio.sleep(rng.randint(0, habits.think_ms) / 1000)
        messages = messages.copy()
        rng.shuffle(messages)
        extended = [each for each in messages if rng.random() < habits.extend_share]
        if extended:
            self.extend(extended, rng.choice((20, 1_000, 20_000)))
        acked, nacked, released = [], [], []
        for message in messages:
            if rng.random() < habits.ack_share:
                acked.append(message)
            elif rng.random() < habits.nack_share:
                (released if rng.random() < 0.2 else nacked).append(message)
        while acked:
            some = rng.randint(1, len(acked)) if habits is not GREEDY else len(acked)
            part, acked = acked[:some], acked[some:]
            self._life.spawn(self.ack(part, rng.randint(0, habits.ack_late_ms)))
        if nacked:
            self._life.spawn(self.nack(nacked, rng.choice((0, 0, 1, 300, 4_000))))
        if released:
            self._life.spawn(self.release(released))
        if habits.regrants and self.attached:
            self.grant(len(messages), frames_bytes if habits.permit_bytes else 0)
            self._subscription.work.set()

    # -- what it says ----------------------------------------------------------------------------------------------

    async def ack(self, messages: list[Message], late_ms: int = 0) -> None:
        if late_ms:
            await asyncio.sleep(late_ms / 1000)
        messages = [each for each in messages if each in self.model.entries]
        if not messages or self.model.state == "deleted" or self._life.dead:
            return
        self._all.ack_asked(self.model, messages)
        try:
            confirmation = await requests.acknowledge(
                self._subscription, entries_of(m.position for m in messages)
            )
        except (StorageFailed, Unavailable) as error:
            self._raise_unless_failing(error)
            self._all.ack_lost(self.model, messages)
            return
        if not self._life.dead:
            self._all.ack_answered(self.model, messages, refused_ids(confirmation.failures))

    async def nack(self, messages: list[Message], delay_ms: int) -> None:
        messages = [each for each in messages if each in self.model.entries]
        if not messages or self.model.state == "deleted" or self._life.dead:
            return
        certain = self._all.nack_asked(self.model, self, messages, delay_ms)
        try:
            confirmation = await requests.give_back(
                self._subscription, self.consumer_id, entries_of(m.position for m in messages), delay_ms
            )
        except (StorageFailed, Unavailable) as error:
            self._raise_unless_failing(error)
            return
        if not self._life.dead:
            self._all.nack_answered(self.model, certain, refused_ids(confirmation.failures))

    async def release(self, messages: list[Message]) -> None:
        messages = [each for each in messages if each in self.model.entries]
        if not messages or self.model.state == "deleted" or self._life.dead:
            return
        self._all.handed_back(self, messages)
        try:
            await requests.give_back(
                self._subscription,
                self.consumer_id,
                entries_of(m.position for m in messages),
                0,
                release=True,
            )
        except (StorageFailed, Unavailable) as error:
            self._raise_unless_failing(error)

    def extend(self, messages: list[Message], lease_ms: int) -> None:
        messages = [each for each in messages if each in self.model.entries]
        if self.model.state == "deleted":
            return
        entries = entries_of(m.position for m in messages)
        failures = refused_ids(requests.extend(self._subscription, self.consumer_id, entries, lease_ms))
        self._all.extended(self.model, self, messages, lease_ms, failures)

    def _raise_unless_failing(self, error: PostdateError) -> None:
        """Such errors are for a disk that failed and for a broker that stops."""
        if self._life.serves and not self._life.is_stopping and not self._life.has_met_fault:
            raise error


async def ack_unknown(
    life: Life, subscription: Subscription, mine: SubscriptionModel, rng: random.Random
) -> None:
    """Acknowledge ids that were never produced: each must be refused, and nothing else may happen."""
    last = max((m.position for m in mine.topic.by_position.values()), default=Position(1, 0))
    unknown = [
        Position(last.ledger_id + 1_000_000, rng.randint(0, 5)),
        Position(last.ledger_id, last.entry_id + 100_000 + rng.randint(0, 9)),
    ]
    if subscription.log.entry_count(last.ledger_id) is None:
        del unknown[1]  # how long a ledger was that is gone, nobody knows
    try:
        confirmation = await requests.acknowledge(subscription, entries_of(unknown))
    except PostdateError:
        return
    if life.dead:
        return
    refused = {each.position for each in refused_ids(confirmation.failures) if each.reason == "NOT_FOUND"}
    require(refused == set(unknown), "ack", f"{mine}: unknown ids were acknowledged: {unknown}")
    life.world.count["unknown acks refused"] += 1
