"""One topic: the list of its components, and the table of which record changes which of them. Decides what becomes of a
batch.

    produce: plan (ids, ledger, times) -> journal -> apply -> answer

Durable state changes only in `apply`, which the journal calls in lsn order and recovery calls through the same
door: it passes a record to the components that `APPLIED_BY` names, each the only writer of its state.

Invariants:
  TOPIC-1  `applied_lsn` is the greatest lsn applied; a record at or below it changes nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from pyroaring import BitMap64

from broker.config import BrokerConfig
from broker.delayed.bucket_values import BucketImage
from broker.delayed.due_rows import DueRows
from broker.delayed.index_pump import IndexPump
from broker.model import Batch, IdRange, Int64Column, Position
from broker.observe.logs import get_logger
from broker.observe.metrics import TopicCounters
from broker.policy import EffectiveTopicPolicy, TopicPolicy
from broker.runtime.clock import Clock
from broker.runtime.foreground import Foreground
from broker.runtime.ownership import Ownership
from broker.runtime.supervise import Spawn
from broker.storage.amendments import Amendments
from broker.storage.bulk import BulkImage
from broker.storage.changes import Cancelled, Changed, Moved
from broker.storage.compacted import LedgersCompacted
from broker.storage.ledger import Ledger
from broker.storage.log import DroppedLedger, TopicLog
from broker.storage.manifest import CursorImage, TopicImage
from broker.storage.producers_file import ProducersImage
from broker.storage.records import (
    BulkStepped,
    GivenBack,
    LedgersDropped,
    Produced,
    Record,
    Recurred,
    Replaced,
    Seeked,
    Settled,
    SubscriptionChanged,
    SubscriptionCreated,
    SubscriptionDeleted,
    TopicPolicyChanged,
    Transferred,
)
from broker.storage.recurring import RecurringImage, RecurringStep
from broker.subscriptions.giving_up import DeadLetterSink
from broker.subscriptions.reasons import ReasonsMemory
from broker.subscriptions.services import SubscriptionServices
from broker.subscriptions.subscription import Subscription
from broker.topics.bulk import TopicBulkChanges
from broker.topics.component import Applier, Capture, Component
from broker.topics.counts import SubscriptionCounts, TopicCounts
from broker.topics.intake import Accepted, Intake, is_examined
from broker.topics.key_services import KeyServices
from broker.topics.keyed_intake import KeyedIntake
from broker.topics.ledgers import Ledgers
from broker.topics.plan import must_roll, plan_produced
from broker.topics.policies import subscription_services, without_delay_limits
from broker.topics.producers import DedupMemory, Producers
from broker.topics.recurring import TopicRecurring
from broker.topics.refusals import topic_not_found
from broker.topics.schedule import Schedule
from broker.topics.topic_index import IndexServices, TopicIndex
from broker.topics.topic_keys import TopicKeys
from broker.topics.topic_policies import TopicPolicies
from broker.topics.topic_subscriptions import Subscriptions

log = get_logger(__name__)

APPLIED_BY: dict[type, tuple[str, ...]] = {
    Produced: ("ledgers", "index", "keys", "producers", "subscriptions"),
    Replaced: ("ledgers", "index", "keys", "producers", "subscriptions", "counts"),
    Transferred: ("ledgers", "index", "keys", "subscriptions", "counts"),
    Cancelled: ("ledgers", "index", "subscriptions", "counts"),
    Moved: ("ledgers", "index", "keys", "subscriptions", "counts"),
    LedgersDropped: ("ledgers", "index", "keys", "subscriptions", "counts"),
    LedgersCompacted: ("ledgers",),
    Settled: ("subscriptions",),
    GivenBack: ("subscriptions", "counts"),
    Seeked: ("subscriptions", "counts"),
    SubscriptionChanged: ("subscriptions", "counts"),
    SubscriptionCreated: ("subscriptions", "counts"),
    SubscriptionDeleted: ("subscriptions", "counts"),
    TopicPolicyChanged: ("policies", "index"),
    Recurred: ("recurring",),
    BulkStepped: ("bulk",),
}
"""The components that apply a record, in this order; the later ones find the earlier ones as the record says. What a
`Recurred` or a `BulkStepped` stores and changes is applied before as the record that says so alone.

`TopicCreated` and `TopicDeleted` are of the registry.
"""


@dataclass(frozen=True, slots=True)
class TopicServices:
    """Services that all topics share."""

    config: BrokerConfig
    clock: Clock
    foreground: Foreground
    ownership: Ownership
    rng: random.Random
    submit: Callable[[Record, Callable[[int], None]], asyncio.Future[None]]
    new_ledger_id: Callable[[], int]
    open_ledger: Callable[[int, int], Ledger]  # (topic_id, ledger_id)
    remove_ledger: Callable[[DroppedLedger], Awaitable[None]]  # its files; raises OSError
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
    reasons_memory: ReasonsMemory

    def of_subscriptions(
        self, topic_name: str, submit: Callable[[Record], asyncio.Future[None]]
    ) -> SubscriptionServices:
        """Return those that the subscriptions of a topic share."""
        return subscription_services(
            topic_name,
            self.config,
            self.clock,
            self.ownership,
            self.rng,
            submit,
            self.dead_letter_sink,
            self.reasons_memory,
        )


@dataclass(frozen=True, slots=True)
class TopicFiles:
    """Content of the files that a manifest names, each of one component."""

    producers: ProducersImage | None = None
    recurring: RecurringImage | None = None
    bulk: BulkImage | None = None


@dataclass(frozen=True, slots=True)
class TopicCapture:
    """One topic at one moment."""

    image: TopicImage
    parts: tuple[Capture, ...]  # of its components


class Topic:
    """See the module's description."""

    def __init__(
        self,
        image: TopicImage,
        ledgers: list[Ledger],
        cursors: dict[int, CursorImage],
        amendments: dict[int, Amendments],
        services: TopicServices,
        files: TopicFiles | None = None,
    ) -> None:
        files = files or TopicFiles()
        self.topic_id = topic_id = image.topic_id
        self.name = image.name
        self.create_time_ms = image.create_time_ms
        self.applied_lsn = image.applied_lsn
        self.deleted = False
        self._services = services
        self._has_folders = bool(ledgers)
        self._task: asyncio.Task[None] | None = None
        self._keyed: KeyedIntake | None = None
        self.log = TopicLog(
            lambda ledger_id: services.open_ledger(topic_id, ledger_id), services.live_ledger_ids
        )
        self.log.restore(ledgers, amendments, image.log_end)
        self.policies = TopicPolicies(image, services.config)
        self._index = TopicIndex(image, self.log, self.policies, services.index)
        self.subscriptions = Subscriptions(
            self,
            image,
            cursors,
            log=self.log,
            services=services.of_subscriptions(self.name, self.submit_record),
            config=services.config,
            spawn=services.spawn,
        )
        self.ledgers = Ledgers(
            image,
            self.log,
            self.subscriptions,
            appended=partial(services.appended, self),
            remove_files=services.remove_ledger,
        )
        self.keys = TopicKeys(self, services.keys, image)
        self.producers = Producers(files.producers, image.producers_file)
        self.recurring = TopicRecurring(files.recurring, image.recurring_file)
        self.bulk = TopicBulkChanges(files.bulk, image.bulk_file)
        self.counts = TopicCounts(
            self.log,
            self.ledgers.facts,
            self.subscriptions,
            clock=services.clock,
            spawn=services.spawn,
            topic_id=topic_id,
        )
        self.intake = self._make_intake(services)
        durable: dict[str, Component] = {
            "policies": self.policies,
            "index": self._index,
            "ledgers": self.ledgers,
            "keys": self.keys,
            "producers": self.producers,
            "recurring": self.recurring,
            "bulk": self.bulk,
            "subscriptions": self.subscriptions,
        }
        self._captured = tuple(durable.values())
        self._appliers: dict[str, Applier] = {**durable, "counts": self.counts}

    def _make_intake(self, services: TopicServices) -> Intake:
        return Intake(
            self.producers,
            self.log,
            self.subscriptions.values(),
            clock=services.clock,
            memory=services.dedup_memory,
        )

    # -- life ------------------------------------------------------------------------------------------------

    def start(self, ceiling_ms: int = 0) -> None:
        """Begin to index and deliver; called once, after recovery.

        `ceiling_ms`: what is due by then another owner may have handed out, also if that is later than now: its clock
        was ahead of this one then. It is delivered at its time, and no change of it can be promised.
        """
        self.ledgers.start()
        pump = self._index.start(
            on_due=self._on_due,
            on_rebuild=self._on_rebuild,
            on_set_back=self._clock_set_back,
            on_discarded=self.counts.discarded,
            prepare_folders=self.prepare_folders,
            changed=self.note_change,
        )
        pump.reached_ms = ceiling_ms
        self.subscriptions.start(ceiling_ms)
        self.counts.start(pump)
        self.keys.start(anew=self._index.clock_was_ahead)
        self._task = self._services.index.spawn_lasting(f"index of topic {self.topic_id}", pump.run())

    def _on_due(self, chunk: DueRows) -> None:
        self.counts.took(chunk)
        self.subscriptions.on_due(chunk)

    def _on_rebuild(self) -> None:
        # The cause was logged by the index, which knows no names.
        log.warning("The delayed index of a topic is rebuilt", topic=self.name)
        self._services.note_rebuild()
        self.counts.recount_all()

    def _clock_set_back(self) -> None:
        """Begin catch-up: what is due by now is found by position, as after a start, and the rest comes once more."""
        self.subscriptions.clock_set_back()
        self.keys.clock_set_back()
        self.note_change()

    def stop(self) -> None:
        """End the topic's tasks; durable state stays as it is."""
        self._index.stop()
        self.counts.stop()
        self.keys.stop()
        self.subscriptions.stop()
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """The topic is deleted: its streams and tasks end, and nothing is kept for it."""
        self.deleted = True
        self.log.forget_all()
        self.intake.close()
        self.subscriptions.close()
        self.stop()

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

    def submit(
        self,
        batch: Batch,
        replacing: dict[int, Changed] | None = None,
        steps: tuple[RecurringStep, ...] = (),
    ) -> Accepted:
        """Accept a batch: decide everything about it and hand it to the journal. Nothing is stored if this raises.

        `replacing`: what waits under the schedule keys of these messages, and gives way to them in the same step.
        `steps`: of the recurring schedules that these messages are occurrences of, in the same step too.
        """
        if self.deleted:
            raise topic_not_found(self.name)
        services = self._services
        now_ms = services.clock.now_ms()
        policy = without_delay_limits(self.policy) if steps else self.policy
        examined = is_examined(batch, policy)
        look = self.intake.look(batch, now_ms, policy, self.applied_lsn) if examined else None
        if look is not None and look.durable is not None:  # a repeat, all of it
            self.ledgers.counters.duplicate_batches += 1
            return Accepted(look.ids(None), look.publish_time_ms, look.durable)
        plan = plan_produced if look is None else look.plan
        record = plan(batch, self.topic_id, self.ledgers.end, services.new_ledger_id, now_ms, policy)
        cancelled = Cancelled(self.topic_id, replacing) if replacing else None
        if steps:
            durable = self.submit_change(Recurred(self.topic_id, steps, record, cancelled))
        elif cancelled is not None:
            durable = self.submit_change(Replaced(record, cancelled))
        else:
            durable = self.submit_record(record)
        self.ledgers.reserve(record)
        ids: tuple[IdRange, ...] = (IdRange(record.ledger_id, record.first_entry_id, len(record.times)),)
        if examined:
            self.intake.reserve(record, policy, durable)
            ids = ids if look is None else look.ids(ids[0])
        return Accepted(ids, now_ms, durable)

    def begins_ledger(self, batch: Batch) -> bool:
        """Return whether a batch that is accepted now is the first of its ledger."""
        return must_roll(batch, self.ledgers.end, self._services.clock.now_ms(), self.policy)

    def fresh_part(self, batch: Batch) -> tuple[Batch | None, Int64Column | None]:
        """See `TakingTopic`."""
        if self.deleted:
            raise topic_not_found(self.name)
        if not is_examined(batch, self.policy):
            return batch, None
        look = self.intake.look(batch, self._services.clock.now_ms(), self.policy, self.applied_lsn)
        return (batch, None) if look is None else (look.fresh, look.fresh_at)

    def plan(self, batch: Batch, policy: EffectiveTopicPolicy) -> Produced:
        """Plan a batch without a producer. Whoever submits it calls `ledgers.reserve` in the same step."""
        services = self._services
        now_ms = services.clock.now_ms()
        return plan_produced(batch, self.topic_id, self.ledgers.end, services.new_ledger_id, now_ms, policy)

    # -- durable state ---------------------------------------------------------------------------------------

    def apply(self, record: Record, lsn: int) -> None:
        """Change durable state as a record says. The same function serves today and recovery."""
        if lsn <= self.applied_lsn:
            return
        if isinstance(record, Recurred | BulkStepped) and record.change is not None:
            self._apply(record.change, lsn)
        self._apply(record, lsn)
        self.applied_lsn = lsn
        self._services.changed(self)

    def _apply(self, record: Record, lsn: int) -> None:
        appliers = self._appliers
        for name in APPLIED_BY[type(record)]:
            appliers[name].apply(record, lsn)

    def capture(self) -> TopicCapture:
        """Take what a checkpoint writes: one step, without await."""
        if self.producers.changed:
            self.intake.let_go()
        image = TopicImage(self.topic_id, self.name, self.create_time_ms, self.policies.own, self.applied_lsn)
        parts = []
        for component in self._captured:
            parts.append(part := component.capture(image))
            image = part.image
        return TopicCapture(image, tuple(parts))

    def submit_record(
        self, record: Record, apply: Callable[[int], None] | None = None
    ) -> asyncio.Future[None]:
        """Hand a record of this topic to the journal; `apply` is called with its lsn, in place of the topic's own."""
        return self._services.submit(record, apply or (lambda lsn: self.apply(record, lsn)))

    def submit_change(
        self, record: Cancelled | Moved | Replaced | Recurred | BulkStepped
    ) -> asyncio.Future[None]:
        """Hand a record to the journal that may cancel or move entries: from now on nobody is sent them."""
        durable = self.submit_record(record)
        changed: Cancelled | Moved | None
        match record:
            case Replaced() | Recurred():
                changed = record.cancelled
            case BulkStepped():
                changed = record.change
            case Cancelled() | Moved():
                changed = record
            case _:
                assert_never(record)
        if changed is not None:
            self.log.under_way.hold(changed.entries)
        return durable

    def drop_ledgers(self, ledger_ids: Sequence[int], came_due_ms: int) -> asyncio.Future[None]:
        """Let ledgers go that nobody is owed anything of; see `retention`. The last one only while it rests."""
        durable = self.submit_record(LedgersDropped(self.topic_id, tuple(ledger_ids), came_due_ms))
        self.ledgers.reserve_drop(ledger_ids)
        return durable

    async def change_policy(self, policy: TopicPolicy) -> None:
        """Set what is set for the topic, all of it; returns when that is durable.

        Limits count from the next batch, seal or merge on; another tracker or tick from the next start on.
        """
        if self.deleted:
            raise topic_not_found(self.name)
        durable = self.submit_record(TopicPolicyChanged(self.topic_id, policy))
        self.policies.decided = policy
        await asyncio.shield(durable)

    def note_change(self) -> None:
        """There is something for the next checkpoint."""
        self._services.changed(self)

    # -- facts -----------------------------------------------------------------------------------------------

    @property
    def policy(self) -> EffectiveTopicPolicy:
        """In force; every field set."""
        return self.policies.effective

    @property
    def counters(self) -> TopicCounters:
        return self.ledgers.counters

    @property
    def index(self) -> IndexPump:
        assert self._index.pump is not None, "the topic was not started"
        return self._index.pump

    @property
    def schedule(self) -> Schedule:
        """Return the topic's schedule."""
        return Schedule(self, self._services.clock, self._services.foreground)

    def index_image(self) -> BucketImage:
        """Return the index's image for the manifest."""
        return self._index.image()

    @property
    def frontier_ms(self) -> int:
        """Entries due at or before it do not wait any more."""
        pump = self._index.pump
        return 0 if pump is None else pump.tracker.frontier.deliver_at_ms

    def subscription(self, name: str) -> Subscription:
        """The subscription of that name, or NotFound."""
        return self.subscriptions.named(name)

    def subscription_counts(self, subscription: Subscription) -> SubscriptionCounts:
        """Return the counts of a subscription, by state."""
        return self.counts.of(subscription)

    def latest_position(self) -> Position:
        """The position after every message submitted so far."""
        return self.ledgers.latest_position()
