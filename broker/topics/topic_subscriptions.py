"""The subscriptions of one topic: created and deleted, told what becomes of messages, served by dispatchers.

Names are reserved when a creation is submitted and count once it is applied. A dispatcher runs while a subscription
has consumers, or leases that Receive took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence, ValuesView
from dataclasses import replace
from typing import Protocol

from pyroaring import BitMap

from broker.config import BrokerConfig
from broker.delayed.due_rows import DueRows
from broker.errors import AlreadyExists, LimitReached, NotFound
from broker.model import Entries, Position
from broker.policy import EffectiveSubscriptionPolicy, SubscriptionPolicy, effective
from broker.runtime.supervise import Spawn
from broker.storage.changes import Cancelled, Moved
from broker.storage.log import TopicLog
from broker.storage.manifest import CursorImage, SubscriptionImage, TopicImage
from broker.storage.records import (
    GivenBack,
    LedgersDropped,
    Produced,
    Record,
    Replaced,
    Seeked,
    Settled,
    SettleReason,
    SubscriptionChanged,
    SubscriptionCreated,
    SubscriptionDeleted,
    Transferred,
)
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.cursor import Cursor
from broker.subscriptions.dispatcher import Dispatcher
from broker.subscriptions.services import SubscriptionServices
from broker.subscriptions.subscription import Subscription
from broker.topics.component import Capture, NewFile, not_applied
from broker.topics.dead_letter_frames import check_dead_letter_topic
from broker.topics.policies import check_subscription_policy
from broker.topics.refusals import subscription_not_found, topic_not_found

EARLIEST = 2


class SubscribedTopic(Protocol):
    """A topic as its subscriptions need it."""

    topic_id: int
    name: str
    deleted: bool

    @property
    def frontier_ms(self) -> int:
        """Time of the index's frontier; 0 before the start."""

    def latest_position(self) -> Position:
        """The position after every message submitted so far."""

    def submit_record(self, record: Record) -> asyncio.Future[None]: ...


class Subscriptions(Mapping[int, Subscription]):
    """See the module's description. Maps ids to subscriptions."""

    def __init__(
        self,
        topic: SubscribedTopic,
        image: TopicImage,
        cursors: Mapping[int, CursorImage],
        *,
        log: TopicLog,
        services: SubscriptionServices,
        config: BrokerConfig,
        spawn: Spawn,
    ) -> None:
        self._topic = topic
        self._log = log
        self._services = services
        self._config = config
        self._spawn = spawn
        self._by_id: dict[int, Subscription] = {}
        self._ceiling_ms = 0  # of those who owned the topic before
        self._next_id = self._next_reserved_id = image.next_subscription_id
        self._creating: dict[str, asyncio.Future[None]] = {}
        self._dispatchers: dict[int, asyncio.Task[None]] = {}
        self._unnamed_files: list[str] = []  # of deleted subscriptions, since the last capture
        for subscription in image.subscriptions:
            self._add(subscription, cursors.get(subscription.subscription_id))

    def __getitem__(self, subscription_id: int) -> Subscription:
        return self._by_id[subscription_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def values(self) -> ValuesView[Subscription]:
        return self._by_id.values()

    # -- life ------------------------------------------------------------------------------------------------

    def start(self, ceiling_ms: int) -> None:
        """Called once, after recovery; the index has a frontier. `ceiling_ms`: see `Topic.start`."""
        self._ceiling_ms = ceiling_ms
        for subscription in self._by_id.values():
            subscription.start(max(self._topic.frontier_ms, ceiling_ms))

    def clock_set_back(self) -> None:
        """Find by position what has come due by now, as after a start."""
        frontier_ms = self._topic.frontier_ms
        for subscription in self._by_id.values():
            unknown_ms = max(min(subscription.unknown_through_ms, frontier_ms), self._ceiling_ms)
            subscription.note_unknown_through(unknown_ms)
            if subscription.consumers:
                subscription.begin_catchup(frontier_ms)

    def stop(self) -> None:
        """End the dispatchers; durable state stays as it is."""
        for task in self._dispatchers.values():
            task.cancel()
        self._dispatchers.clear()

    def close(self) -> None:
        """The topic is deleted: all streams end."""
        for subscription in self._by_id.values():
            _end(subscription, topic_not_found(self._topic.name))

    def on_due(self, chunk: DueRows) -> None:
        """Hand a chunk to all who have consumers."""
        frontier_ms = self._topic.frontier_ms
        for subscription in self._by_id.values():
            if subscription.consumers:
                subscription.on_due(chunk, frontier_ms)

    # -- durable state: called by the topic, in lsn order ----------------------------------------------------

    def apply(self, record: Record, lsn: int) -> None:
        """See `Applier`."""
        match record:
            case Produced():
                self._wake(record)
            case Settled() | GivenBack() | Seeked() | SubscriptionChanged():
                self._apply_to_one(record)
            case Cancelled():
                self._cancel(record)
            case Replaced():
                self._wake(record.produced)
                self._cancel(record.cancelled)
            case Moved():
                self._move(record)
            case Transferred():
                self._transfer(record)
            case LedgersDropped():
                self._drop(record)
            case SubscriptionCreated():
                self._create(record.subscription)
            case SubscriptionDeleted():
                self._delete(record.subscription_id)
            case _:
                not_applied(self, record)

    def _apply_to_one(self, record: Settled | GivenBack | Seeked | SubscriptionChanged) -> None:
        subscription = self._by_id.get(record.subscription_id)
        if subscription is None:
            return
        subscription.apply(record)
        if isinstance(record, Seeked):
            settle_cancelled(self._log, subscription)
            subscription.note_unknown_through(max(self._topic.frontier_ms, self._ceiling_ms))

    def _wake(self, record: Produced) -> None:
        """Rows that are not delayed are read by position."""
        attached = [subscription for subscription in self._by_id.values() if subscription.consumers]
        if attached:
            undelayed = record.due.row_count < len(record.times)
            for subscription in attached:
                if undelayed or not subscription.honors_delay:
                    subscription.work.set()

    def _cancel(self, record: Cancelled) -> None:
        """Nobody gets the entries any more: for every subscription they are done."""
        for subscription in self._by_id.values():
            _settle_cancelled(subscription, record.entries)

    def _move(self, record: Moved) -> None:
        entries = record.entries
        for subscription in self._by_id.values():
            subscription.apply_moved(entries)

    def _drop(self, record: LedgersDropped) -> None:
        dropped = [ledger_id for ledger_id in record.ledger_ids if self._log.entry_count(ledger_id) is None]
        for subscription in self._by_id.values():
            subscription.apply_dropped(dropped)

    def _create(self, image: SubscriptionImage) -> None:
        settle_cancelled(self._log, self._add(image, None))
        self._next_id = image.subscription_id + 1
        self._next_reserved_id = max(self._next_reserved_id, self._next_id)

    def _transfer(self, record: Transferred) -> None:
        """Messages left a subscription of this topic, or were stored in it."""
        produced, settled = record.produced, record.settled
        ids = range(produced.first_entry_id, produced.first_entry_id + len(produced.times))
        entries: Entries = {produced.ledger_id: BitMap(ids)}
        if settled.topic_id == self._topic.topic_id:
            if subscription := self._by_id.get(settled.subscription_id):
                subscription.apply_settled(settled)
                if settled.reason is SettleReason.DEAD_LETTERED:
                    subscription.apply_dead_letters(entries)  # given up here: their new places are remembered
            return
        self._wake(produced)
        if record.subscription_id:  # for that one alone
            for subscription in self._by_id.values():
                if subscription.subscription_id != record.subscription_id:
                    subscription.apply_not_for(entries)

    def _add(self, image: SubscriptionImage, cursor: CursorImage | None) -> Subscription:
        subscription = Subscription(
            self._topic.topic_id, image, cursor, log=self._log, services=self._services
        )
        self._by_id[image.subscription_id] = subscription
        return subscription

    def _delete(self, subscription_id: int) -> None:
        subscription = self._by_id.pop(subscription_id, None)
        if subscription is None:
            return
        if subscription.cursor_file:
            self._unnamed_files.append(_path(subscription.cursor_file))
        _end(subscription, subscription_not_found(self._topic.name, subscription.name))
        if task := self._dispatchers.pop(subscription_id, None):
            task.cancel()

    def capture(self, image: TopicImage) -> Capture:
        """See `Component`."""
        replaced, self._unnamed_files = self._unnamed_files, []
        files, images = [], []
        for subscription in self._by_id.values():
            before = subscription.cursor_file
            if (cursor := subscription.capture(image.applied_lsn)) is not None:
                files.append(NewFile(_path(subscription.cursor_file), cursor.encode))
                if before and before != subscription.cursor_file:
                    replaced.append(_path(before))
            images.append(
                replace(
                    subscription.image, cursor_file=subscription.cursor_file, mark=subscription.cursor.mark
                )
            )
        return Capture(
            replace(image, subscriptions=tuple(images), next_subscription_id=self._next_id),
            files=tuple(files),
            replaced=tuple(replaced),
        )

    # -- facts -----------------------------------------------------------------------------------------------

    def named(self, name: str) -> Subscription:
        """The subscription of that name, or NotFound."""
        if (subscription := self.find(name)) is None:
            raise subscription_not_found(self._topic.name, name)
        return subscription

    def find(self, name: str) -> Subscription | None:
        return next(
            (subscription for subscription in self._by_id.values() if subscription.name == name), None
        )

    def cursors(self) -> Sequence[Cursor]:
        return [subscription.cursor for subscription in self._by_id.values()]

    @property
    def had_any(self) -> bool:
        """Return whether there ever was one: what is there waits for the first."""
        return self._next_id > 1

    def effective(self, policy: SubscriptionPolicy) -> EffectiveSubscriptionPolicy:
        return effective(policy, self._services.defaults)

    def check_dead_letters(self, name: str, policy: SubscriptionPolicy) -> None:
        """Refuse settings with which a subscription of that name would have no place for its dead letters."""
        check_dead_letter_topic(self._topic.name, name, self.effective(policy), self._services.topic_shard)

    # -- calls -----------------------------------------------------------------------------------------------

    async def create(
        self, name: str, type_: int, initial_position: int, policy: SubscriptionPolicy
    ) -> Subscription:
        """Create a subscription; AlreadyExists if there is one, or one on its way."""
        topic = self._topic
        if topic.deleted:
            raise topic_not_found(topic.name)
        if self.find(name) is not None or name in self._creating:
            raise AlreadyExists(
                f"Subscription {name!r} of topic {topic.name!r} already exists",
                reason="SUBSCRIPTION_ALREADY_EXISTS",
                topic=topic.name,
                subscription=name,
            )
        taken = {subscription.name for subscription in self._by_id.values()} | self._creating.keys()
        if len(taken) >= self._config.subscriptions_per_topic_max:
            told = f"Topic {topic.name!r} has as many subscriptions as are allowed"
            raise LimitReached(told, reason="TOO_MANY_SUBSCRIPTIONS")
        check_subscription_policy(type_, policy, self.effective(policy))
        self.check_dead_letters(name, policy)
        start = self._start_position(initial_position)
        image = SubscriptionImage(
            subscription_id=self._next_reserved_id,
            name=name,
            type=type_,
            create_time_ms=self._services.clock.now_ms(),
            start=start,
            policy=policy,
            mark=start,
        )
        self._creating[name] = done = topic.submit_record(SubscriptionCreated(topic.topic_id, image))
        self._next_reserved_id += 1
        done.add_done_callback(lambda _: self._creating.pop(name, None))
        await asyncio.shield(done)
        return self.named(name)

    def _start_position(self, initial_position: int) -> Position:
        # The first one gets what waited for it: to produce before anybody subscribes must not lose a message.
        if initial_position == EARLIEST or self._next_reserved_id == 1:
            return Position(0, 0)
        return self._topic.latest_position()

    async def find_created(self, name: str) -> Subscription | None:
        """As `find`, once no creation of that name is on its way: None may create it in the same step."""
        while done := self._creating.get(name):
            await asyncio.wait([done])
        return self.find(name)

    async def delete(self, name: str) -> None:
        """Delete a subscription; its consumers' streams end."""
        record = SubscriptionDeleted(self._topic.topic_id, self.named(name).subscription_id)
        await asyncio.shield(self._topic.submit_record(record))

    async def change(self, record: SubscriptionChanged) -> None:
        """Change the settings of a subscription, or pause it; returns when that is durable."""
        done = self._topic.submit_record(record)
        self._by_id[record.subscription_id].decided = record
        await asyncio.shield(done)

    def attach(self, subscription: Subscription, consumer: Consumer) -> None:
        """Take in a consumer, and run a dispatcher if it is the first."""
        if subscription.deleted or self._topic.deleted:
            raise subscription_not_found(self._topic.name, subscription.name)
        subscription.attach(consumer, self._topic.frontier_ms)
        running = self._dispatchers.get(subscription.subscription_id)
        if running is None or running.done():
            dispatcher = Dispatcher(
                subscription,
                clock=self._services.clock,
                ownership=self._services.ownership,
                clock_recheck_ms=self._config.tuning.clock_recheck_ms,
            )
            name = f"dispatcher of subscription {self._topic.topic_id}/{subscription.subscription_id}"
            self._dispatchers[subscription.subscription_id] = self._spawn(name, dispatcher.run())

    def wake(self) -> None:
        """Let deliveries go on: what was handed out, and what is owed."""
        for subscription in self._by_id.values():
            for consumer in subscription.consumers:
                consumer.wakeup.set()
            subscription.work.set()

    def detach(self, subscription: Subscription, consumer: Consumer, *, keep_leases: bool = False) -> None:
        """Let a consumer go; the last one takes the dispatcher with it.

        What it holds goes to others; or, with `keep_leases`, when its leases end (Receive).
        """
        subscription.detach(consumer, keep_leases=keep_leases)
        if subscription.consumers or subscription.states.leases.count():
            return  # what Receive took ends with its lease: the dispatcher sees to it, and then stops by itself
        if task := self._dispatchers.pop(subscription.subscription_id, None):
            task.cancel()


def settle_cancelled(log: TopicLog, subscription: Subscription) -> None:
    """A subscription is new, or begins elsewhere: what was cancelled before it is not owed."""
    for ledger_id, amendments in log.amendments.items():
        if amendments.cancelled:
            _settle_cancelled(subscription, {ledger_id: amendments.cancelled})


def _settle_cancelled(subscription: Subscription, entries: Entries) -> None:
    subscription.apply_settled(
        Settled(subscription.topic_id, subscription.subscription_id, SettleReason.CANCELLED, entries)
    )


def _end(subscription: Subscription, gone: NotFound) -> None:
    subscription.deleted = True
    subscription.reasons.clear()
    for consumer in subscription.consumers:
        consumer.close(gone)


def _path(cursor_file: str) -> str:
    return f"cursors/{cursor_file}"
