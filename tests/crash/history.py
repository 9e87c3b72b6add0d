"""A rich history of a broker on a recording disk, and the plainest model of what its records mean.

The model is a fold over the records in the order in which they were submitted: dicts and sets, one entry at a
time, nothing shared with the broker's own `apply`. A crash leaves a broker that must equal the model after some
number of records: at least all that were answered by then, at most all that were submitted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from broker.config import BrokerConfig
from broker.model import CANCELLED_MS, START, Entries, Position, ids_of
from broker.storage.amendments import NONE
from broker.storage.changes import Cancelled, Changed, Moved
from broker.storage.records import (
    GivenBack,
    LedgersDropped,
    Produced,
    Record,
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
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import control
from broker.topics.topic import Topic
from tests.harness import EARLIEST, Node, Outgoing, small_config

LONGEST_DELAY_MS = 20_000


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One entry, as it must be after any crash."""

    frame: bytes
    deliver_at_ms: int  # effective; 0: at once
    publish_ms: int
    expire_at_ms: int
    revision: int = 0


@dataclass(slots=True)
class SubscriptionModel:
    name: str
    start: Position
    settled: set[Position] = field(default_factory=set)
    attempts: dict[Position, int] = field(default_factory=dict)
    waiting: dict[Position, int] = field(default_factory=dict)
    reasons: dict[Position, str] = field(default_factory=dict)
    paused: bool = False

    def settle(self, position: Position) -> None:
        self.settled.add(position)
        self.attempts.pop(position, None)
        self.waiting.pop(position, None)
        self.reasons.pop(position, None)


@dataclass(slots=True)
class TopicModel:
    name: str
    messages: dict[Position, StoredMessage] = field(default_factory=dict)
    subscriptions: dict[int, SubscriptionModel] = field(default_factory=dict)

    def owed(self, subscription: SubscriptionModel) -> dict[Position, StoredMessage]:
        """Return what a subscription has yet to settle."""
        return {
            position: message
            for position, message in self.messages.items()
            if position >= subscription.start and position not in subscription.settled
        }


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
            case _ if record.topic_id not in model:
                pass  # of a topic that is gone
            case Produced():
                model[record.topic_id].messages.update(_messages(record))
            case SubscriptionCreated(subscription=image):
                made = SubscriptionModel(image.name, image.start)
                model[record.topic_id].subscriptions[image.subscription_id] = made
                _fold_cancelled_before(model[record.topic_id], made)
            case SubscriptionDeleted():
                model[record.topic_id].subscriptions.pop(record.subscription_id, None)
            case LedgersDropped():
                _fold_dropped(model[record.topic_id], record)
            case Cancelled() | Moved() | Replaced():
                _fold_changes(model[record.topic_id], record)
            case Settled() | GivenBack() | Seeked() | SubscriptionChanged():
                if found := model[record.topic_id].subscriptions.get(record.subscription_id):
                    _fold_into(found, record)
                    if isinstance(record, Seeked):
                        _fold_cancelled_before(model[record.topic_id], found)
    return model


def _messages(record: Produced) -> Iterator[tuple[Position, StoredMessage]]:
    frames, at = bytes(record.frames), 0
    for index, row in enumerate(record.rows):
        frame = frames[at : at + int(row["length"])]
        at += len(frame)
        yield (
            Position(record.ledger_id, record.first_entry_id + index),
            StoredMessage(
                frame, int(record.times[index]), int(row["publish_time_ms"]), int(row["expire_at_ms"])
            ),
        )


def _fold_changes(topic: TopicModel, record: Cancelled | Moved | Replaced) -> None:
    if isinstance(record, Replaced):
        topic.messages.update(_messages(record.produced))
        record = record.cancelled
    _fold_changed(topic, record.ledgers)


def _fold_changed(topic: TopicModel, ledgers: dict[int, Changed]) -> None:
    """A cancelled message is settled for everybody; a moved one lives on from its new time."""
    for ledger_id, changed in ledgers.items():
        new_ms = itertools.repeat(CANCELLED_MS) if changed.new_ms is None else changed.new_ms.tolist()
        for entry_id, time_ms in zip(changed.entry_ids.tolist(), new_ms, strict=False):
            position = Position(ledger_id, entry_id)
            message = topic.messages.get(position)
            if message is None:
                continue  # its ledger is gone
            is_cancelled = time_ms == CANCELLED_MS
            topic.messages[position] = replace(
                message,
                deliver_at_ms=time_ms,
                # Of a cancelled one it is the same whatever it was.
                expire_at_ms=message.expire_at_ms
                and (0 if is_cancelled else message.expire_at_ms + time_ms - message.deliver_at_ms),
                revision=message.revision + (not is_cancelled),
            )
    for subscription in topic.subscriptions.values():
        _fold_cancelled_before(topic, subscription)


def _fold_cancelled_before(topic: TopicModel, subscription: SubscriptionModel) -> None:
    for position, message in topic.messages.items():
        if message.deliver_at_ms == CANCELLED_MS and position >= subscription.start:
            subscription.settle(position)


def _fold_into(
    subscription: SubscriptionModel, record: Settled | GivenBack | Seeked | SubscriptionChanged
) -> None:
    match record:
        case Seeked():
            subscription.start = record.start
            subscription.settled.clear()
            subscription.attempts.clear()
            subscription.waiting.clear()
            subscription.reasons.clear()
        case SubscriptionChanged():
            subscription.paused = record.paused
        case _:
            _fold_entries(subscription, record)


def _fold_entries(subscription: SubscriptionModel, record: Settled | GivenBack) -> None:
    for position in positions_in(record.entries):
        if isinstance(record, Settled):
            subscription.settle(position)
        elif position not in subscription.settled:
            if record.reason is not ReturnReason.RELEASED:
                subscription.attempts[position] = subscription.attempts.get(position, 0) + 1
            subscription.waiting[position] = record.not_before_ms
            if record.text:
                subscription.reasons[position] = record.text


def _fold_dropped(topic: TopicModel, record: LedgersDropped) -> None:
    """Ledgers go unless anybody is owed anything of them by then."""
    for ledger_id in record.ledger_ids:
        gone = {position for position in topic.messages if position.ledger_id == ledger_id}
        if any(not gone.isdisjoint(topic.owed(each)) for each in topic.subscriptions.values()):
            continue
        for position in gone:
            del topic.messages[position]
        for each in topic.subscriptions.values():
            each.settled -= gone


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
            expire_at_ms = 0 if time_ms == CANCELLED_MS else int(row["expire_at_ms"])
            model.messages[Position(ledger_id, entry_id)] = StoredMessage(
                frame, time_ms, int(row["publish_time_ms"]), expire_at_ms, revision
            )
    for subscription in topic.subscriptions.values():
        model.subscriptions[subscription.subscription_id] = _observe_subscription(subscription, model)
    return model


def _observe_subscription(subscription: Subscription, topic: TopicModel) -> SubscriptionModel:
    cursor, digits = subscription.cursor, subscription.attempts.digits
    counts: dict[Position, int] = {}
    for ledger_id, bitmaps in digits.items():
        for bit, bitmap in enumerate(bitmaps):
            for position in positions_in({ledger_id: bitmap}):
                counts[position] = counts.get(position, 0) + (1 << bit)
    return SubscriptionModel(
        subscription.name,
        cursor.start,
        settled={p for p in topic.messages if p >= cursor.start and cursor.is_settled(p)},
        attempts=counts,
        waiting={
            Position(ledger_id, entry_id): not_before_ms
            for ledger_id, each in subscription.states.redelivery.capture().by_ledger().items()
            for entry_id, not_before_ms in zip(each.entries, each.column.tolist(), strict=True)
        },
        reasons=dict(subscription.reasons.texts),
        paused=subscription.paused,
    )


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
