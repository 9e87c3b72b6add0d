"""All topics: who has which name and id, and which record goes where.

Names are reserved when a record is submitted and count once it is applied; ids of topics and ledgers come from
broker-wide counters and are never reused.
"""

from __future__ import annotations

import asyncio

from broker.config import BrokerConfig
from broker.errors import AlreadyExists, LimitReached
from broker.policy import TopicPolicy
from broker.runtime.clock import Clock
from broker.storage.manifest import TopicImage
from broker.storage.records import (
    Produced,
    Record,
    Recurred,
    Replaced,
    TopicCreated,
    TopicDeleted,
    Transferred,
)
from broker.topics.refusals import topic_not_found
from broker.topics.topic import Topic, TopicServices


class Registry:
    """The topics of one broker."""

    def __init__(self, config: BrokerConfig, next_topic_id: int = 1, next_ledger_id: int = 1) -> None:
        self.topics: dict[int, Topic] = {}
        self.by_name: dict[str, Topic] = {}
        self.next_topic_id = next_topic_id
        self.next_ledger_id = next_ledger_id
        self.last_publish_ms = 0
        """The greatest publish time of a record applied so far: somebody was there to accept it."""
        self.deleted_ids: set[int] = set()
        """Topics deleted since the last checkpoint: their folders go once the root no longer names them."""
        self._config = config
        self._services: TopicServices | None = None
        self._creating: dict[str, asyncio.Future[None]] = {}
        self._started = False

    async def watch_clock(self, clock: Clock) -> None:
        """Tell every index when the wall clock was set back, until cancelled: one that holds nothing does not look."""
        last_ms = clock.now_ms()
        while True:
            await asyncio.sleep(self._config.tuning.clock_recheck_ms / 1000)
            now_ms = clock.now_ms()
            if now_ms < last_ms:
                for topic in self.topics.values():
                    topic.index.wake()
            last_ms = now_ms

    def bind(self, services: TopicServices) -> None:
        """Say what topics are made with; called once, before any topic is there."""
        self._services = services

    def new_ledger_id(self) -> int:
        ledger_id = self.next_ledger_id
        self.next_ledger_id += 1
        return ledger_id

    def add(self, topic: Topic) -> None:
        """Take in a topic: from a manifest, or created."""
        self.topics[topic.topic_id] = topic
        self.by_name[topic.name] = topic

    def start(self, ceiling_ms: int = 0) -> None:
        """Let all topics index and deliver. `ceiling_ms`: see `Topic.start`."""
        self._started = True
        for topic in self.topics.values():
            topic.intake.start()
            topic.start(ceiling_ms)

    def wake(self) -> None:
        """Let deliveries go on that had paused."""
        for topic in self.topics.values():
            topic.subscriptions.wake()

    def stop(self) -> None:
        self._started = False
        for topic in self.topics.values():
            topic.stop()

    # -- durable state: called by the journal, in lsn order --------------------------------------------------

    def apply(self, record: Record, lsn: int) -> None:
        """Apply a record wherever it belongs. Records of topics that are not there belong to deleted ones."""
        match record:
            case TopicCreated():
                self._apply_created(record, lsn)
            case TopicDeleted():
                self._apply_deleted(record)
            case Transferred():
                self._note_ledger(record.produced)
                for topic_id in (record.produced.topic_id, record.settled.topic_id):
                    if topic := self.topics.get(topic_id):
                        topic.apply(record, lsn)
            case _:
                produced = record if isinstance(record, Produced) else None
                if isinstance(record, Replaced | Recurred):
                    produced = record.produced
                if produced is not None:
                    self._note_ledger(produced)
                if topic := self.topics.get(record.topic_id):
                    topic.apply(record, lsn)

    def _note_ledger(self, record: Produced) -> None:
        self.next_ledger_id = max(self.next_ledger_id, record.ledger_id + 1)
        self.last_publish_ms = max(self.last_publish_ms, record.publish_time_ms)

    def _apply_created(self, record: TopicCreated, lsn: int) -> None:
        self.next_topic_id = max(self.next_topic_id, record.topic_id + 1)
        if record.topic_id in self.topics:
            return
        assert self._services is not None
        image = TopicImage(
            topic_id=record.topic_id,
            name=record.name,
            create_time_ms=record.create_time_ms,
            policy=record.policy,
            applied_lsn=lsn,
        )
        topic = Topic(image, [], {}, {}, self._services)
        self.add(topic)
        self._services.changed(topic)
        if self._started:
            topic.start()

    def _apply_deleted(self, record: TopicDeleted) -> None:
        topic = self.topics.pop(record.topic_id, None)
        if topic is None:
            return
        del self.by_name[topic.name]
        self.deleted_ids.add(topic.topic_id)
        topic.close()

    # -- calls -----------------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """The topic of that name, or NotFound; NOT_OWNER for one of another shard."""
        topic = self.by_name.get(name)
        if topic is None:
            self._config.topic_shard.check(name)
            raise topic_not_found(name)
        return topic

    async def topic_or_create(self, name: str, *, always: bool = False) -> Topic:
        """The topic of that name; created if the broker is configured to do that, or `always`."""
        while True:
            if topic := self.by_name.get(name):
                return topic
            if not (always or self._config.auto_create_topics):
                self._config.topic_shard.check(name)
                raise topic_not_found(name)
            if creating := self._creating.get(name):
                await asyncio.wait([creating])
                creating.exception()  # the one who creates it is told; a second look says what came of it
                continue
            return await self.create_topic(name, TopicPolicy())

    async def create_topic(self, name: str, policy: TopicPolicy) -> Topic:
        """Create a topic; AlreadyExists if there is one, or one on its way."""
        assert self._services is not None
        if name in self.by_name or name in self._creating:
            raise AlreadyExists(f"There is a topic {name!r}", reason="TOPIC_ALREADY_EXISTS", topic=name)
        self._config.topic_shard.check(name)
        under_way = sum(creating not in self.by_name for creating in self._creating)
        if len(self.topics) + under_way >= self._config.topics_max:
            raise LimitReached(
                f"The broker has {self._config.topics_max} topics, the limit (topics_max)",
                reason="TOO_MANY_TOPICS",
            )
        record = TopicCreated(self.next_topic_id, name, self._services.clock.now_ms(), policy)
        self._creating[name] = done = self._services.submit(record, lambda lsn: self.apply(record, lsn))
        self.next_topic_id += 1
        done.add_done_callback(lambda _: self._creating.pop(name, None))
        await asyncio.shield(done)
        return self.topic(name)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic with everything in it; its streams end."""
        assert self._services is not None
        record = TopicDeleted(self.topic(name).topic_id)
        await asyncio.shield(self._services.submit(record, lambda lsn: self.apply(record, lsn)))
