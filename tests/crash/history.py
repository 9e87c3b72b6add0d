"""A rich history of a broker on a recording disk, and what its records mean to the reference.

The model is a fold over the records in the order in which they were submitted, one entry at a time: nothing of it is
shared with the broker's own `apply`. A crash leaves a broker that must equal the model after some
number of records: at least all that were answered by then, at most all that were submitted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from broker.config import BrokerConfig
from broker.model import CANCELLED_MS, START, Entries, Position, ids_of
from broker.storage.amendments import NONE
from broker.storage.changes import Cancelled, Changed, Moved
from broker.storage.records import (
    BulkStepped,
    GivenBack,
    LedgersDropped,
    Produced,
    Record,
    Recurred,
    Replaced,
    ReturnReason,
    Seeked,
    Settled,
    SubscriptionChanged,
    SubscriptionCreated,
    SubscriptionDeleted,
    TopicCreated,
    TopicDeleted,
)
from broker.subscriptions import subscription as subscriptions
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import control
from broker.topics.topic import Topic
from tests.harness import EARLIEST, Node, Outgoing, small_config
from tests.reference import Entry, Message, Subscription, cancel, honors_delay

LONGEST_DELAY_MS = 20_000


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TopicModel:
    name: str
    messages: dict[Position, Message] = field(default_factory=dict)
    subscriptions: dict[int, Subscription[Position]] = field(default_factory=dict)

    def store(self, message: Message) -> None:
        self.messages[message.position] = message
        for subscription in self.subscriptions.values():
            if message.position >= subscription.start:
                subscription.add(message.position, message)

    def drop(self, ledger_id: int) -> None:
        """A ledger goes unless anybody is owed anything of it by then."""
        gone = {position for position in self.messages if position.ledger_id == ledger_id}
        if all(gone.isdisjoint(each.open) for each in self.subscriptions.values()):
            for position in gone:
                del self.messages[position]
                for each in self.subscriptions.values():
                    each.forget(position)


Model = dict[int, TopicModel]


def fold(records: list[Record]) -> Model:
    """Apply records one after the other."""
    model: Model = {}
    for record in records:
        match record:
            case TopicCreated():
                model[record.topic_id] = TopicModel(record.name)
            case TopicDeleted():
                model.pop(record.topic_id, None)
            case _ if record.topic_id in model:  # or its topic is gone
                _fold_record(model[record.topic_id], record)
    return model


def _fold_record(topic: TopicModel, record: Record) -> None:
    match record:
        case Produced():
            _fold_produced(topic, record)
        case SubscriptionCreated(subscription=image):
            honors = honors_delay(image.type, image.policy.honor_delay)
            made = topic.subscriptions[image.subscription_id] = Subscription(image.name, image.type, honors)
            made.seek(image.start, topic.messages)
        case SubscriptionDeleted():
            topic.subscriptions.pop(record.subscription_id, None)
        case LedgersDropped():
            for ledger_id in record.ledger_ids:
                topic.drop(ledger_id)
        case Cancelled() | Moved():
            _fold_changed(topic, record.ledgers)
        case Replaced():
            _fold_produced(topic, record.produced)
            _fold_changed(topic, record.cancelled.ledgers)
        case BulkStepped() | Recurred():
            if record.change is not None:
                _fold_record(topic, record.change)
        case Seeked() | SubscriptionChanged() | Settled() | GivenBack():
            if subscription := topic.subscriptions.get(record.subscription_id):
                _fold_into(subscription, record, topic)


def _fold_produced(topic: TopicModel, record: Produced) -> None:
    frames, at = bytes(record.frames), 0
    for index, row in enumerate(record.rows):
        position = Position(record.ledger_id, record.first_entry_id + index)
        frame = frames[at : at + int(row["length"])]
        at += len(frame)
        topic.store(_message_of(position, frame, row, int(record.times[index])))


def _message_of(position: Position, frame: bytes, row: Any, time_ms: int) -> Message:
    """Return the message of an entry. Of a cancelled one its times are the same whatever they were."""
    publish_ms, expire_ms = int(row["publish_time_ms"]), int(row["expire_at_ms"])
    if time_ms == CANCELLED_MS:
        return Message(position, frame, publish_ms, cancelled_ns=0)
    ttl_ms = expire_ms and expire_ms - max(publish_ms, time_ms)
    return Message(position, frame, publish_ms, time_ms, ttl_ms)


def _fold_changed(topic: TopicModel, ledgers: dict[int, Changed]) -> None:
    for ledger_id, changed in ledgers.items():
        new_ms = itertools.repeat(CANCELLED_MS) if changed.new_ms is None else changed.new_ms.tolist()
        for entry_id, time_ms in zip(changed.entry_ids.tolist(), new_ms, strict=False):
            position = Position(ledger_id, entry_id)
            message = topic.messages.get(position)
            if message is None:
                continue  # its ledger is gone
            if time_ms == CANCELLED_MS:
                cancel(message, position, topic.subscriptions.values(), 0)
                message.due_ms = message.ttl_ms = 0
            else:
                message.move(time_ms)


def _fold_into(
    subscription: Subscription[Position],
    record: Settled | GivenBack | Seeked | SubscriptionChanged,
    topic: TopicModel,
) -> None:
    match record:
        case Seeked():
            subscription.seek(record.start, topic.messages)
        case SubscriptionChanged():
            subscription.paused_ns = 0 if record.paused else None
            subscription.honors_delay = honors_delay(subscription.type, record.policy.honor_delay)
        case Settled():
            for position in positions_in(record.entries):
                subscription.settle(position, 0)
        case GivenBack():
            for position in positions_in(record.entries):
                if not subscription.entries[position].is_settled:
                    _fold_given_back(subscription.entries[position], record)


def _fold_given_back(entry: Entry, record: GivenBack) -> None:
    if record.reason is ReturnReason.RELEASED:
        entry.hand_back(0)
    else:
        entry.give_back(durable=True)
    entry.wait(record.not_before_ms, record.not_before_ms, durable=True)
    entry.reason = record.text or entry.reason


def positions_in(entries: Entries) -> Iterator[Position]:
    return (
        Position(ledger_id, entry_id)
        for ledger_id, bitmap in sorted(entries.items())
        for entry_id in ids_of(bitmap).tolist()
    )


async def observe(node: Node) -> Model:
    """The durable state of a recovered broker, in the model's words; reads every stored byte."""
    return {topic.topic_id: await _observe_topic(topic) for topic in node.broker.registry.topics.values()}


async def _observe_topic(topic: Topic) -> TopicModel:
    model = TopicModel(topic.name)
    for ledger in topic.log:
        ledger_id, ids = ledger.name.ledger_id, np.arange(ledger.entry_count, dtype=np.uint32)
        times, rows, frames = await topic.log.read(ledger_id, ids, 1 << 40)
        revisions = topic.log.amendments.get(ledger_id, NONE).revisions_of(ids)
        columns = zip(times.tolist(), rows, frames, revisions.tolist(), strict=True)
        for entry_id, (time_ms, row, frame, revision) in enumerate(columns):
            position = Position(ledger_id, entry_id)
            message = model.messages[position] = _message_of(position, frame, row, time_ms)
            message.revision = revision
    for subscription in topic.subscriptions.values():
        model.subscriptions[subscription.subscription_id] = _observe_subscription(subscription, model)
    return model


def _observe_subscription(
    subscription: subscriptions.Subscription, topic: TopicModel
) -> Subscription[Position]:
    cursor = subscription.cursor
    model = Subscription[Position](
        subscription.name,
        subscription.image.type,
        subscription.honors_delay,
        cursor.start,
        paused_ns=0 if subscription.paused else None,
    )
    for position, message in topic.messages.items():
        if position >= cursor.start:
            model.entries[position] = Entry(message, settled_ns=0 if cursor.is_settled(position) else None)
    for ledger_id, bitmaps in subscription.attempts.digits.items():
        for bit, bitmap in enumerate(bitmaps):
            for position in positions_in({ledger_id: bitmap}):
                for _ in range(1 << bit):
                    model.entries[position].give_back(durable=True)
    for ledger_id, each in subscription.states.redelivery.capture().by_ledger().items():
        for entry_id, not_before_ms in zip(each.entries, each.column.tolist(), strict=True):
            model.entries[Position(ledger_id, entry_id)].wait(not_before_ms, not_before_ms, durable=True)
    for position, text in subscription.reasons.texts.items():
        model.entries[position].reason = text
    return model


# -- recording -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Submitted:
    """A record, and the moments at which it was submitted and answered, as counts of the disk's operations."""

    record: Record
    submitted_at: int
    answered_at: int | None = None


@dataclass(frozen=True, slots=True)
class Life:
    """One process: what the journal held when it opened, and what it submitted since; from an operation on."""

    from_op: int
    submitted: list[Submitted]


class Recorder:
    """Notes every record of every life of a broker on one disk."""

    def __init__(self, vfs: MemVfs, clock: SimClock, config: BrokerConfig) -> None:
        self.vfs = vfs
        self.clock = clock
        self.config = config
        self.lives: list[Life] = [Life(0, [])]
        self.moments: list[tuple[int, int]] = []  # (operations so far, wall clock), at every record

    def open(self) -> Node:
        """The next life. Before it the journal may have lost what was not answered; then so has the history."""
        node = Node(self.vfs, self.clock, self.config)
        inner = node.broker._submit
        node.broker._submit = lambda record, apply: self._submit(inner, record, apply)  # type: ignore[method-assign]
        node.open(start=False)
        kept = node.broker.journal.durable_lsn
        self.lives.append(Life(self.vfs.op_count, self.lives[-1].submitted[:kept]))
        node.broker.start()
        return node

    def kill(self, node: Node) -> None:
        """The process ends without a word; the machine and its page cache live on."""
        node.abandon()
        node.broker._lock.close()  # type: ignore[union-attr]

    def life_at(self, at: int) -> int:
        """Return the life of an operation; a recovery still belongs to the one before."""
        return max(index for index, life in enumerate(self.lives) if life.from_op <= at)

    def bounds(self, at: int) -> tuple[int, int]:
        """Return how many records must exist after a crash at an operation, and how many may."""
        submitted = self.lives[self.life_at(at)].submitted
        answered = sum(each.answered_at is not None and each.answered_at <= at for each in submitted)
        possible = sum(each.submitted_at <= at for each in submitted)
        return answered, possible

    def clock_at(self, at: int) -> int:
        """The wall clock around an operation."""
        earlier = [now_ms for op, now_ms in self.moments if op <= at]
        return earlier[-1] if earlier else self.moments[0][1]

    def _submit(
        self,
        inner: Callable[[Record, Callable[[int], None]], asyncio.Future[None]],
        record: Record,
        apply: Callable[[int], None],
    ) -> asyncio.Future[None]:
        entry = Submitted(record, self.vfs.op_count)
        history = self.lives[-1].submitted
        self._note()

        def applied(lsn: int) -> None:
            assert history[lsn - 1] is entry, "lsns follow the order of submission"
            apply(lsn)
            # The journal completes the future next, without an await in between.
            entry.answered_at = self.vfs.op_count
            self._note()

        done = inner(record, applied)
        history.append(entry)
        return done

    def _note(self) -> None:
        self.moments.append((self.vfs.op_count, self.clock.now_ms()))


# -- the history ---------------------------------------------------------------------------------------------------


def crash_config(**changes: object) -> BrokerConfig:
    """Limits under which the history below rolls everything that can be rolled."""
    return small_config(
        ledger_max_entries=6, journal_group_bytes_max=1024, clock_recheck_ms=60_000, **changes
    )


async def play(recorder: Recorder) -> None:
    """Three lives: two topics and one that comes and goes twice; stopped, killed, stopped."""
    node = recorder.open()
    await _first_life(node)
    await node.stop()
    node = recorder.open()
    await _second_life(node)
    recorder.kill(node)
    await asyncio.sleep(1)  # what the dead process's threads had begun has ended
    node = recorder.open()
    await _third_life(node)
    await node.stop()


async def _first_life(node: Node) -> None:
    await node.create_subscription("orders", "early")
    first = await node.produce("orders", [_message(1), _message(2, after_ms=400), _message(3)])
    await node.create_subscription("orders", "late")
    ignores = await node.create_subscription(
        "orders", "in order", type_=SubscriptionType.EXCLUSIVE, position=EARLIEST
    )
    early = await node.subscribe("orders", "early")
    await early.wait(2)
    await early.ack([first[2]])
    await _together(
        node.produce("orders", [_message(4, after_ms=300), _message(5, after_ms=LONGEST_DELAY_MS)]),
        node.produce("audit", [_message(6), _message(7, ttl_ms=50)]),
        early.nack([first[0]], 250, "boom"),
        node.produce("orders", [_message(8, ttl_ms=80), _message(9)]),
    )
    await _together(node.checkpoint(), node.produce("orders", [_message(10), _message(11, after_ms=200)]))
    await node.create_subscription("temporary", "only")
    temporary = await node.subscribe("temporary", "only")
    await node.produce("temporary", [_message(12), _message(13)])
    await temporary.ack([each.position for each in await temporary.wait(1)])
    # The checkpoint has noted which topics there are, when one of them goes.
    await _together(node.checkpoint(), _later(0.002, node.broker.registry.delete_topic("temporary")))
    await asyncio.sleep(1)
    arrived = early.poll()
    await _together(
        early.ack([each.position for each in arrived[1::2]]),
        early.ack([each.position for each in arrived[:1]]),
        node.produce("audit", [_message(14, bytes_=900), _message(15, after_ms=2_000)]),
    )
    reader = node.attach(node.topic("orders"), ignores)
    arrived = await reader.wait(5)
    await reader.ack([each.position for each in arrived[2:]])
    await reader.release([arrived[0].position])
    reader.detach()  # what it holds is given back
    await node.checkpoint()
    await node.produce("temporary", [_message(16)])
    late = await node.subscribe("orders", "late", lease_ms=200)
    await asyncio.sleep(0.5)  # expired messages are settled, leases end
    await late.ack([each.position for each in late.poll()[:2]])


async def _second_life(node: Node) -> None:
    audit = await node.subscribe("audit", "checker")
    got = await audit.wait(2)
    await _together(
        audit.ack([got[-1].position]),
        node.produce("audit", [_message(20 + index, bytes_=500) for index in range(5)]),
        node.produce("orders", [_message(30, after_ms=100), _message(31), _message(32, after_ms=700)]),
        node.topic("orders").subscriptions.delete("late"),
    )
    await node.create_subscription("orders", "late")
    for index in range(4):  # a segment of the journal each
        await node.produce("audit", [_message(40 + index, bytes_=1_900, after_ms=index * 150)])
    await _together(node.checkpoint(), node.broker.registry.delete_topic("temporary"))
    early = await node.subscribe("orders", "early")
    await asyncio.sleep(0.2)
    await early.nack([each.position for each in early.poll()[:2]], 3_000, "no answer")
    await node.checkpoint()
    await node.produce("orders", [_message(50)])
    await node.submit("orders", [_message(51), _message(52)])  # the kill comes before the answer
    await node.submit("audit", [_message(53)])


async def _third_life(node: Node) -> None:
    early = await node.subscribe("orders", "early")
    await asyncio.sleep(0.3)
    await _together(
        early.ack([each.position for each in early.poll()[1:]]),
        node.produce("orders", [_message(60, after_ms=50), _message(61)]),
    )
    await node.produce("fresh", [_message(62)])
    orders = node.topic("orders")
    subscription = early.subscription
    await _together(
        early.ack([each.position for each in early.poll()[:1]]),
        control.pause(orders, subscription, paused=True),
        control.seek(orders, subscription, START),
        node.produce("orders", [_message(63), _message(64, after_ms=100)]),
    )
    early = await node.subscribe("orders", "early")
    await control.pause(orders, subscription, paused=False)
    await _together(node.checkpoint(), early.ack([each.position for each in (await early.wait(3))[1:]]))
    await control.skip_all(orders, subscription)
    await node.produce("orders", [_message(65)])


LIVES = (_first_life, _second_life, _third_life)


def _message(number: int, *, after_ms: int = 0, ttl_ms: int = 0, bytes_: int = 20) -> Outgoing:
    payload = f"message {number} ".encode().ljust(bytes_, b".")
    return Outgoing(payload, deliver_after_ms=after_ms, ttl_ms=ttl_ms)


async def _later(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    await asyncio.sleep(seconds)
    await work


async def _together(*work: Coroutine[Any, Any, Any]) -> None:
    """Run them at once, and fail at the first failure."""
    async with asyncio.TaskGroup() as group:
        for each in work:
            group.create_task(each)


def record_history(seed: int = 1) -> Recorder:
    """Play the history once."""

    async def scenario(_: SimLoop, clock: SimClock) -> Recorder:
        recorder = Recorder(MemVfs(), clock, crash_config())
        await play(recorder)
        return recorder

    return run_sim(scenario, seed)
