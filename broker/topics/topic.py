"""One topic: its log, its index, its subscriptions. Decides what becomes of a batch, and applies what was decided.

    produce: plan (ids, ledger, times) -> journal -> apply -> answer

Durable state changes only in `apply`, which the journal calls in lsn order and recovery calls through the same
door. What a submitted record promises (its ids, its place in a ledger) is reserved at once in `_end`, so that the
next record is planned after it.

Invariants:
  O1  `applied_lsn` is the greatest lsn applied; a record at or below it changes nothing.
  O2  `_end` is the log's end plus every batch submitted and not applied yet, in submission order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyroaring import BitMap64

from broker.config import BrokerConfig
from broker.delayed.bucket_values import BucketImage
from broker.delayed.index_pump import IndexPump
from broker.delayed.tracker import DueChunk
from broker.errors import AlreadyExists, LimitReached
from broker.model import Batch, IdRange, Int64Column, Position
from broker.observe.metrics import TopicCounters
from broker.runtime.clock import Clock
from broker.storage.amendments import Amendments
from broker.storage.changes import Cancelled, Changed, Moved
from broker.storage.compacted import LedgersCompacted
from broker.storage.ledger import Ledger
from broker.storage.log import TopicLog
from broker.storage.manifest import CursorImage, SubscriptionImage, TopicImage
from broker.storage.policy import SubscriptionPolicy, TopicPolicy, effective
from broker.storage.producers_file import ProducersImage
from broker.storage.records import (
    GivenBack,
    LedgersDropped,
    Produced,
    Record,
    Replaced,
    Seeked,
    Settled,
    SubscriptionChanged,
    SubscriptionCreated,
    SubscriptionDeleted,
    TopicPolicyChanged,
    Transferred,
)
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.dispatcher import Dispatcher
from broker.subscriptions.giving_up import DeadLetterSink
from broker.subscriptions.subscription import Subscription
from broker.topics.amending import apply_cancelled, apply_moved, settle_cancelled
from broker.topics.counts import SubscriptionCounts, TopicCounts
from broker.topics.dead_letter_frames import check_dead_letter_topic
from broker.topics.generations import apply_compacted
from broker.topics.intake import Accepted, Intake, is_examined
from broker.topics.key_upkeep import KeyServices
from broker.topics.keyed_intake import KeyedIntake
from broker.topics.ledger_facts import facts_of, first_facts, log_end
from broker.topics.plan import LedgerEnd, plan_produced
from broker.topics.policies import (
    check_subscription_policy,
    default_topic_policy,
    subscription_services,
)
from broker.topics.producers import DedupMemory, Producers
from broker.topics.refusals import subscription_not_found, topic_not_found
from broker.topics.schedule import Schedule
from broker.topics.topic_index import IndexServices, TopicIndex
from broker.topics.topic_keys import TopicKeys
from broker.topics.transferred import apply_produced_part, apply_settled_part

EARLIEST = 2

Spawn = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(frozen=True, slots=True)
class TopicServices:
    """What every topic shares with the others."""

    config: BrokerConfig
    clock: Clock
    rng: random.Random
    submit: Callable[[Record, Callable[[int], None]], asyncio.Future[None]]
    new_ledger_id: Callable[[], int]
    open_ledger: Callable[[int, int], Ledger]  # (topic_id, ledger_id)
    live_ledger_ids: BitMap64  # of all topics
    spawn: Spawn
    appended: Callable[[Topic, int], None]  # (topic, bytes): an unwritten tail grew
    changed: Callable[[Topic], None]  # there is something for the next checkpoint
    make_folders: Callable[[int], Awaitable[None]]
    index: IndexServices
    note_rebuild: Callable[[], None]
    dead_letter_sink: DeadLetterSink
    keys: KeyServices
    dedup_memory: DedupMemory


class Topic:
    """See the module's description."""

    def __init__(
        self,
        image: TopicImage,
        ledgers: list[Ledger],
        cursors: dict[int, CursorImage],
        amendments: dict[int, Amendments],
        services: TopicServices,
        producers: ProducersImage | None = None,
    ) -> None:
        self.topic_id = image.topic_id
        self.name = image.name
        self.create_time_ms = image.create_time_ms
        self.own_policy = self.decided_policy = image.policy
        """What was set for the topic: applied, and as the last record says that was submitted."""
        self.policy = effective(image.policy, default_topic_policy(services.config))
        self.applied_lsn = image.applied_lsn
        self.counters, self.deleted = TopicCounters(), False
        self.log = TopicLog(
            lambda ledger_id: services.open_ledger(image.topic_id, ledger_id), services.live_ledger_ids
        )
        self.log.restore(ledgers, amendments, image.log_end)
        self.amendments_files = {
            ledger.ledger_id: ledger.amendments_file for ledger in image.ledgers if ledger.amendments_file
        }
        self.gone_ledgers = dict(image.gone_ledgers)  # see TopicImage
        self.ledger_facts = {ledger.ledger_id: facts_of(ledger) for ledger in image.ledgers}
        self.keys = TopicKeys(self, services.keys, image)
        self._keyed: KeyedIntake | None = None
        self.producers = Producers(producers)
        self.producers_file = image.producers_file
        self._services = services
        self._has_folders = bool(ledgers)
        self._index = TopicIndex(image, self.log, services.index)
        self._tasks: list[asyncio.Task[None]] = []
        self._dispatchers: dict[int, asyncio.Task[None]] = {}
        self.next_subscription_id = self._next_subscription_id = image.next_subscription_id  # and reserved
        self._creating: dict[str, asyncio.Future[None]] = {}
        self.subscriptions: dict[int, Subscription] = {}
        self.intake = Intake(
            self.producers,
            self.log,
            self.subscriptions.values(),
            clock=services.clock,
            memory=services.dedup_memory,
        )
        self.counts = TopicCounts(
            self.log,
            self.ledger_facts,
            self.subscriptions,
            clock=services.clock,
            spawn=services.spawn,
            name=f"topic {self.topic_id}",
        )
        self._for_subscriptions = subscription_services(
            services.config, services.clock, services.rng, self.submit_record, services.dead_letter_sink
        )
        for subscription in image.subscriptions:
            self._add_subscription(subscription, cursors.get(subscription.subscription_id))
        self._end = log_end(self.log, self.ledger_facts)

    # -- life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to index and deliver; called once, after recovery."""
        self._end = log_end(self.log, self.ledger_facts)
        self.counters = TopicCounters()
        pump = self._index.start(
            self.policy,
            on_due=self._on_due,
            on_rebuild=self._index_begins_anew,
            on_set_back=self._clock_set_back,
            prepare_folders=self.prepare_folders,
            changed=lambda: self._services.changed(self),
        )
        for subscription in self.subscriptions.values():
            subscription.start(pump.tracker.frontier.deliver_at_ms)
        self.counts.start(pump)
        self.keys.start(anew=self._index.begins_anew)
        self._tasks.append(self._services.index.spawn_lasting(f"index of topic {self.topic_id}", pump.run()))

    def _index_begins_anew(self) -> None:
        self._services.note_rebuild()
        self.counts.recount_all()

    def _clock_set_back(self) -> None:
        """What has come due by now is found by position, as after a start, and the rest comes once more."""
        for subscription in self.subscriptions.values():
            subscription.begins_anew(min(subscription.unknown_through_ms, self.frontier_ms))
            if subscription.consumers:
                subscription.begin_catchup(self.frontier_ms)
        self.keys.begin_anew()
        self._services.changed(self)

    def stop(self) -> None:
        """End the topic's tasks; durable state stays as it is."""
        self._index.stop()
        self.counts.stop()
        self.keys.stop()
        for task in (*self._tasks, *self._dispatchers.values()):
            task.cancel()
        self._tasks.clear()
        self._dispatchers.clear()

    async def prepare_folders(self) -> None:
        """Make the topic's folders before anything is written into them."""
        if not self._has_folders:
            await self._services.make_folders(self.topic_id)
            self._has_folders = True

    # -- producing -------------------------------------------------------------------------------------------

    @property
    def keyed(self) -> KeyedIntake:
        """For batches with schedule keys, in the place of `submit`."""
        if self._keyed is None:
            self._keyed = KeyedIntake(self)
        return self._keyed

    def submit(self, batch: Batch, replacing: dict[int, Changed] | None = None) -> Accepted:
        """Accept a batch: decide everything about it and hand it to the journal. Nothing is stored if this raises.

        `replacing`: what waits under the schedule keys of these messages, and gives way to them in the same step.
        """
        if self.deleted:
            raise topic_not_found(self.name)
        services = self._services
        now_ms = services.clock.now_ms()
        policy = self.policy
        examined = is_examined(batch, policy)
        look = self.intake.look(batch, now_ms, policy, self.applied_lsn) if examined else None
        if look is not None and look.durable is not None:  # a repeat, all of it
            self.counters.duplicate_batches += 1
            return Accepted(look.ids(None), look.publish_time_ms, look.durable)
        plan = plan_produced if look is None else look.plan
        record = plan(batch, self.topic_id, self._end, services.new_ledger_id, now_ms, policy)
        if replacing:
            cancelled = Cancelled(self.topic_id, replacing)
            durable = self.submit_record(Replaced(record, cancelled))
            self.log.hold(cancelled.entries)
        else:
            durable = services.submit(record, lambda lsn: self.apply(record, lsn))
        self.reserve(record)
        ids: tuple[IdRange, ...] = (IdRange(record.ledger_id, record.first_entry_id, len(record.times)),)
        if examined:
            self.intake.reserve(record, policy, durable)
            ids = ids if look is None else look.ids(ids[0])
        return Accepted(ids, now_ms, durable)

    def fresh_part(self, batch: Batch) -> tuple[Batch | None, Int64Column | None]:
        """See `TakingTopic`."""
        if self.deleted:
            raise topic_not_found(self.name)
        if not is_examined(batch, self.policy):
            return batch, None
        look = self.intake.look(batch, self._services.clock.now_ms(), self.policy, self.applied_lsn)
        return (batch, None) if look is None else (look.fresh, look.fresh_at)

    def plan(self, batch: Batch, policy: TopicPolicy) -> Produced:
        """What a batch becomes that is no producer's. Whoever submits that calls `reserve` in the same step."""
        services = self._services
        now_ms = services.clock.now_ms()
        return plan_produced(batch, self.topic_id, self._end, services.new_ledger_id, now_ms, policy)

    def reserve(self, record: Produced) -> None:
        begins = record.ledger_id != self._end.ledger_id
        self._end = LedgerEnd(
            ledger_id=record.ledger_id,
            entry_count=record.first_entry_id + len(record.times),
            data_bytes=int(record.rows["offset"][-1]) + int(record.rows["length"][-1]),
            first_publish_ms=record.publish_time_ms if begins else self._end.first_publish_ms,
        )

    # -- durable state: called by the journal, in lsn order --------------------------------------------------

    def apply(self, record: Record, lsn: int) -> None:
        """Change durable state as a record says. The same function serves today and recovery."""
        if lsn <= self.applied_lsn:
            return
        match record:
            case Produced():
                self._apply_produced(record)
            case Cancelled() | Moved() | Replaced():
                self._apply_changed(record, lsn)
            case Settled() | GivenBack() | Seeked() | SubscriptionChanged():
                if subscription := self.subscriptions.get(record.subscription_id):
                    subscription.apply(record)
                    if isinstance(record, Seeked):
                        self._sought(subscription)
                    self.counts.applied(subscription, record)
            case SubscriptionCreated():
                self._apply_subscription_created(record.subscription)
            case TopicPolicyChanged():
                self._apply_policy(record.policy)
            case SubscriptionDeleted():
                self._remove_subscription(record.subscription_id)
            case LedgersDropped() | LedgersCompacted():
                self._apply_reclaimed(record)
            case Transferred():
                self._apply_transferred(record)
            case _:
                raise AssertionError(f"not a record of a topic: {record}")
        self.applied_lsn = lsn
        self._services.changed(self)

    def _apply_transferred(self, record: Transferred) -> None:
        if record.settled.topic_id == self.topic_id:
            apply_settled_part(self.subscriptions, record)
            return
        self._apply_produced(record.produced)
        for subscription in apply_produced_part(self.subscriptions, record):
            self.counts.stored_for_another(subscription, record.produced)

    def _apply_changed(self, record: Cancelled | Moved | Replaced, lsn: int) -> None:
        if isinstance(record, Moved):
            apply_moved(self, record, lsn)
            self._index.changed(record.ledgers, lsn)
            self.counts.moved(record.ledgers)
            return
        cancelled = record.cancelled if isinstance(record, Replaced) else record
        if isinstance(record, Replaced):
            self._apply_produced(record.produced)
            self.keys.replaced(record.produced, cancelled.entries)
        apply_cancelled(self, cancelled)
        self._index.changed(cancelled.ledgers, lsn)

    def _apply_reclaimed(self, record: LedgersDropped | LedgersCompacted) -> None:
        if isinstance(record, LedgersDropped):
            self._apply_dropped(record)
        else:
            apply_compacted(record, self)

    def _apply_dropped(self, record: LedgersDropped) -> None:
        """Forget ledgers, but for those that a record before this one made owed again: a seek, a new subscription."""
        cursors = [subscription.cursor for subscription in self.subscriptions.values()]
        dropped = []
        self.log.going.difference_update(record.ledger_ids)
        for ledger_id in record.ledger_ids:
            count = self.log.entry_count(ledger_id)
            if count is None or not all(cursor.has_settled(ledger_id, count) for cursor in cursors):
                continue
            self.log.drop(ledger_id, self.amendments_files.pop(ledger_id, ""))
            last_due_ms = self.ledger_facts.pop(ledger_id).last_due_ms
            if last_due_ms > record.came_due_ms:
                self.gone_ledgers[ledger_id] = last_due_ms
            dropped.append(ledger_id)
        for subscription in self.subscriptions.values():
            subscription.apply_dropped(dropped)
        if dropped:
            self.counts.dropped(held=self._index.dropped(dropped, record.came_due_ms))
            self.keys.dropped()

    def _apply_policy(self, policy: TopicPolicy) -> None:
        self.own_policy = policy
        self.policy = effective(policy, default_topic_policy(self._services.config))
        self._index.set_policy(self.policy)

    def _apply_produced(self, record: Produced) -> None:
        self.log.append(record)
        self.keys.applied(record)
        self.producers.apply(record)
        facts = self.ledger_facts.get(record.ledger_id)
        self.ledger_facts[record.ledger_id] = facts.after(record) if facts else first_facts(record)
        self.counters.produced_messages += len(record.times)
        self.counters.produced_bytes += len(record.frames)
        self.counters.produced_batches += 1
        self._services.appended(self, len(record.frames))
        pump = self._index.pump
        if pump is None:
            return
        undelayed = not record.times.all()
        delayed = record.times[record.times > 0] if undelayed else record.times
        if len(delayed):
            pump.appended(delayed)
        else:
            pump.appended_undelayed()
        for subscription in self.subscriptions.values():
            if subscription.consumers and (undelayed or not subscription.honors_delay):
                subscription.work.set()

    def _apply_subscription_created(self, image: SubscriptionImage) -> None:
        subscription = self._add_subscription(image, None)
        settle_cancelled(self.log, subscription)
        self.counts.recount(subscription)
        self.next_subscription_id = image.subscription_id + 1
        self._next_subscription_id = max(self._next_subscription_id, self.next_subscription_id)

    def _sought(self, subscription: Subscription) -> None:
        settle_cancelled(self.log, subscription)
        if self._index.pump is not None:
            subscription.begins_anew(self._index.pump.tracker.frontier.deliver_at_ms)

    def _add_subscription(self, image: SubscriptionImage, cursor: CursorImage | None) -> Subscription:
        subscription = Subscription(
            self.topic_id, image, cursor, log=self.log, services=self._for_subscriptions
        )
        self.subscriptions[image.subscription_id] = subscription
        return subscription

    def _remove_subscription(self, subscription_id: int) -> None:
        subscription = self.subscriptions.pop(subscription_id, None)
        if subscription is None:
            return
        subscription.deleted = True
        self.counts.forget(subscription_id)
        gone = subscription_not_found(self.name, subscription.name)
        for consumer in subscription.consumers:
            consumer.close(gone)
        if task := self._dispatchers.pop(subscription_id, None):
            task.cancel()

    # -- subscriptions ---------------------------------------------------------------------------------------

    def subscription(self, name: str) -> Subscription:
        """The subscription of that name, or NotFound."""
        found = self.find_subscription(name)
        if found is None:
            raise subscription_not_found(self.name, name)
        return found

    def find_subscription(self, name: str) -> Subscription | None:
        return next((s for s in self.subscriptions.values() if s.name == name), None)

    async def create_subscription(
        self, name: str, type_: int, initial_position: int, policy: SubscriptionPolicy
    ) -> Subscription:
        """Create a subscription; AlreadyExists if there is one, or one on its way."""
        if self.deleted:
            raise topic_not_found(self.name)
        if self.find_subscription(name) is not None or name in self._creating:
            raise AlreadyExists(
                f"Topic {self.name!r} has a subscription {name!r}",
                reason="SUBSCRIPTION_ALREADY_EXISTS",
                topic=self.name,
                subscription=name,
            )
        taken = {each.name for each in self.subscriptions.values()} | self._creating.keys()
        if len(taken) >= self._services.config.subscriptions_per_topic_max:
            told = f"Topic {self.name!r} has as many subscriptions as are allowed"
            raise LimitReached(told, reason="TOO_MANY_SUBSCRIPTIONS")
        check_subscription_policy(type_, policy, self.in_force(policy))
        self.check_dead_letters(name, policy)
        image = SubscriptionImage(
            subscription_id=self._next_subscription_id,
            name=name,
            type=type_,
            create_time_ms=self._services.clock.now_ms(),
            start=self._start_position(initial_position),
            policy=policy,
        )
        record = SubscriptionCreated(self.topic_id, replace(image, mark=image.start))
        self._creating[name] = done = self._services.submit(record, lambda lsn: self.apply(record, lsn))
        self._next_subscription_id += 1
        done.add_done_callback(lambda _: self._creating.pop(name, None))
        await asyncio.shield(done)
        return self.subscription(name)

    def in_force(self, policy: SubscriptionPolicy) -> SubscriptionPolicy:
        return effective(policy, self._for_subscriptions.defaults)

    def check_dead_letters(self, name: str, policy: SubscriptionPolicy) -> None:
        """Refuse settings with which a subscription of that name would have no place for its dead letters."""
        check_dead_letter_topic(self.name, name, policy, self.in_force(policy))

    def is_creating(self, name: str) -> bool:
        """Return whether a subscription of that name is on its way."""
        return name in self._creating

    async def wait_created(self, name: str) -> None:
        """Return once a creation of that name that is on its way has ended."""
        if done := self._creating.get(name):
            await asyncio.wait([done])

    async def delete_subscription(self, name: str) -> None:
        """Delete a subscription; its consumers' streams end."""
        record = SubscriptionDeleted(self.topic_id, self.subscription(name).subscription_id)
        await asyncio.shield(self._services.submit(record, lambda lsn: self.apply(record, lsn)))

    async def change_policy(self, policy: TopicPolicy) -> None:
        """Set what is set for the topic, all of it; returns when that is durable.

        Limits count from the next batch, seal or merge on; another tracker or tick from the next start on.
        """
        if self.deleted:
            raise topic_not_found(self.name)
        record = TopicPolicyChanged(self.topic_id, policy)
        self.decided_policy = policy
        await asyncio.shield(self._services.submit(record, lambda lsn: self.apply(record, lsn)))

    def attach(self, subscription: Subscription, consumer: Consumer) -> None:
        """Take in a consumer, and run a dispatcher if it is the first."""
        if subscription.deleted or self.deleted:
            raise subscription_not_found(self.name, subscription.name)
        subscription.attach(consumer, self.index.tracker.frontier.deliver_at_ms)
        running = self._dispatchers.get(subscription.subscription_id)
        if running is None or running.done():
            dispatcher = Dispatcher(
                subscription,
                clock=self._services.clock,
                clock_recheck_ms=self._services.config.clock_recheck_ms,
            )
            name = f"dispatcher of subscription {self.topic_id}/{subscription.subscription_id}"
            self._dispatchers[subscription.subscription_id] = self._services.spawn(name, dispatcher.run())

    def detach(self, subscription: Subscription, consumer: Consumer) -> None:
        """Let a consumer go; what it holds goes to others, and the last one takes the dispatcher with it."""
        subscription.detach(consumer)
        self._stop_idle_dispatcher(subscription)

    def detach_keeping_leases(self, subscription: Subscription, consumer: Consumer) -> None:
        """Let a consumer go that holds what it received until its leases end (Receive)."""
        subscription.detach(consumer, keep_leases=True)
        self._stop_idle_dispatcher(subscription)

    def _stop_idle_dispatcher(self, subscription: Subscription) -> None:
        if subscription.consumers or subscription.leases.count():
            return  # what Receive took ends with its lease: the dispatcher sees to it, and then stops by itself
        if task := self._dispatchers.pop(subscription.subscription_id, None):
            task.cancel()

    # -- ledgers ---------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Return whether every batch that was accepted is stored."""
        return (self._end.ledger_id, self._end.entry_count) == self.log.end

    def drop_ledgers(self, ledger_ids: Sequence[int], came_due_ms: int) -> asyncio.Future[None]:
        """Let ledgers go that nobody is owed anything of; see `retention`. The last one only while `is_idle`."""
        record = LedgersDropped(self.topic_id, tuple(ledger_ids), came_due_ms)
        durable = self._services.submit(record, lambda lsn: self.apply(record, lsn))
        self.log.going.update(ledger_ids)
        if self._end.ledger_id in ledger_ids:
            self._end = replace(self._end, is_sealed=True)
        return durable

    # -- facts -----------------------------------------------------------------------------------------------

    @property
    def index(self) -> IndexPump:
        assert self._index.pump is not None, "the topic was not started"
        return self._index.pump

    @property
    def schedule(self) -> Schedule:
        """What its messages wait for, shown and changed."""
        return Schedule(self, self._services.clock)

    def index_image(self) -> BucketImage:
        """What the manifest says of the index."""
        return self._index.image()

    async def index_image_durable(self, image: BucketImage) -> None:
        """A manifest with this image is durable: files that it does not name can go."""
        await self._index.image_durable(image)

    @property
    def frontier_ms(self) -> int:
        """Entries due at or before it do not wait any more."""
        pump = self._index.pump
        return 0 if pump is None else pump.tracker.frontier.deliver_at_ms

    def note_change(self) -> None:
        self._services.changed(self)

    def subscription_counts(self, subscription: Subscription) -> SubscriptionCounts:
        """What a subscription is owed, by state."""
        return self.counts.of(subscription)

    def latest_position(self) -> Position:
        """The position after every message submitted so far."""
        return Position(self._end.ledger_id, self._end.entry_count)

    def _start_position(self, initial_position: int) -> Position:
        # The first one gets what waited for it: to produce before anybody subscribes must not lose a message.
        if initial_position == EARLIEST or self._next_subscription_id == 1:
            return Position(0, 0)
        return self.latest_position()

    def submit_record(
        self, record: Record, apply: Callable[[int], None] | None = None
    ) -> asyncio.Future[None]:
        """Hand a record of this topic to the journal; `apply` is called with its lsn, in place of the topic's own."""
        return self._services.submit(record, apply or (lambda lsn: self.apply(record, lsn)))

    def _on_due(self, chunk: DueChunk) -> None:
        self.counts.took(chunk)
        catchup_ms = self.index.tracker.frontier.deliver_at_ms
        for subscription in self.subscriptions.values():
            if subscription.consumers:
                subscription.on_due(chunk, catchup_ms)
