"""A whole broker in one process, on virtual time and a disk in memory: what tests of its promises share.

async def scenario(loop, clock):
    node = Node(MemVfs(), clock)
    node.open()
    ids = await node.produce("orders", [Outgoing(b"hello", deliver_after_ms=500)])
    inbox = await node.subscribe("orders", "billing")
    await asyncio.sleep(1)
    await inbox.ack(each.position for each in inbox.poll())
    node = node.crash(CrashPolicy.TORN, random.Random(7))
run_sim(scenario, seed=7)
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple, cast

from broker.config import BrokerConfig
from broker.folder.broker import Broker
from broker.model import Batch, Entries, IdRange, Position, bitmap_of
from broker.policy import SubscriptionPolicy
from broker.rpc.decode import ProduceEnvelope, decode_produce
from broker.runtime.clock import Clock
from broker.runtime.ownership import Ownership
from broker.storage.group_log import NewRecord, StoredGroup
from broker.subscriptions import requests
from broker.subscriptions.consumer import Consumer, DeliveryBatch
from broker.subscriptions.requests import FailedIds
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.topics.intake import Accepted
from broker.topics.topic import Topic
from postdate_api.v1 import message_pb2, producer_pb2
from tests.configs import broker_config

DATA_DIR = "data"
LATEST, EARLIEST = 1, 2
DAY_MS = 86_400_000


class RefusedId(NamedTuple):
    """One id that a request names and that is refused."""

    position: Position
    reason: str


def refused_ids(failures: Iterable[FailedIds]) -> list[RefusedId]:
    """Return failures one by one."""
    return [
        RefusedId(Position(ledger_id, entry_id), each.reason)
        for each in failures
        for ledger_id, entry_id in zip(each.ledger_ids.tolist(), each.entry_ids.tolist(), strict=True)
    ]


# SimLoop queues calls by executor, and any object is one to it.
_EXECUTORS = [
    cast("Executor", name)
    for name in ("journal thread", "file thread", "read thread", "index", "sync threads")
]


def small_config(**changes: object) -> BrokerConfig:
    """Limits so small that a few messages roll ledgers and journal segments."""
    settings: dict[str, object] = {
        "data_dir": DATA_DIR,
        "journal_segment_bytes": 4096,
        "journal_spare_segments_max": 1,
        "journal_group_bytes_max": 2048,
        "ledger_max_entries": 8,
        "checkpoint_interval_ms": DAY_MS,
        "disk_reserve_bytes": 0,
        "initial_backoff_ms": 100,
        "lease_ms": 30_000,
        # Seals, merges and several segments in a history of twenty messages.
        "min_index_count": 3,
        "seal_after_ms": 5_000,
        "max_buckets": 2,
        "max_segment_entries": 2,
        "segment_time_step_ms": 500,
    }
    return broker_config(**{**settings, **changes})


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message as a producer asks for it."""

    payload: bytes
    deliver_at_ms: int = 0
    deliver_after_ms: int = 0
    ttl_ms: int = 0
    key: str = ""
    sequence_id: int = 0
    schedule_key: str = ""
    properties: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message as a consumer got it; `sent_ms` and `sent_ns` are the clocks at the moment of the hand-out."""

    position: Position
    payload: bytes
    deliver_at_ms: int
    attempt: int
    sent_ms: int
    sent_ns: int


def batch_of(topic: str, messages: Sequence[Outgoing], config: BrokerConfig, producer: str = "") -> Batch:
    """Return the batch that the rpc edge makes of a produce request."""
    request = producer_pb2.ProduceRequest(topic=topic, producer_name=producer)
    for each in messages:
        request.messages.add(
            payload=each.payload,
            deliver_at_ms=each.deliver_at_ms,
            deliver_after_ms=each.deliver_after_ms,
            ttl_ms=each.ttl_ms,
            key=each.key,
            sequence_id=each.sequence_id,
            schedule_key=each.schedule_key,
            properties=dict(each.properties),
        )
    return decode_produce(request.SerializeToString(), config).batch


def payload_of(frame: bytes) -> bytes:
    """The payload in a stored frame."""
    return message_pb2.Message.FromString(ProduceEnvelope.FromString(frame).messages[0]).payload


def positions_of(ids: Iterable[IdRange]) -> list[Position]:
    return [
        Position(each.ledger_id, each.first_entry_id + index) for each in ids for index in range(each.count)
    ]


def entries_of(positions: Iterable[Position]) -> Entries:
    by_ledger: dict[int, list[int]] = {}
    for position in sorted(positions):
        by_ledger.setdefault(position.ledger_id, []).append(position.entry_id)
    return {ledger_id: bitmap_of(entry_ids) for ledger_id, entry_ids in by_ledger.items()}  # type: ignore[arg-type]


class Node:
    """One life of a broker on one disk. After `stop` or `crash`, the next life is another Node."""

    def __init__(
        self,
        vfs: MemVfs,
        clock: Clock,
        config: BrokerConfig | None = None,
        *,
        rng: random.Random | None = None,
        ownership: Ownership | None = None,
        executors: Sequence[Executor] = (),
    ) -> None:
        self.vfs = vfs
        self.clock = clock
        self.config = config or small_config()
        self.failures: list[BaseException] = []  # what `on_failure` was told
        # Who gets which key hangs on the names of consumers: a seed must give the same again.
        self.consumer_numbers = itertools.count(1)
        self._rng = rng or random.Random(0)
        threads = executors or _EXECUTORS
        self.broker = Broker(
            self.config,
            vfs=vfs,
            clock=clock,
            rng=self._rng,
            journal_executor=threads[0],
            file_executor=threads[1],
            read_executor=threads[2],
            index_executor=threads[3],
            sync_executor=threads[4],
            on_failure=self.failures.append,
            ownership=ownership,
        )

    # -- life ----------------------------------------------------------------------------------------------------

    def open(self, *, start: bool = True) -> Node:
        """Recover; and begin to deliver, unless told not to."""
        self.broker.open()
        if start:
            self.broker.start()
        return self

    async def stop(self) -> None:
        """The graceful end: a last checkpoint, and the lock let go."""
        await self.broker.stop()

    def crash(self, policy: CrashPolicy, rng: random.Random | None = None, *, at: int | None = None) -> Node:
        """The power goes: the next life, not yet opened, on what the disk kept (`at` an operation, by default now)."""
        vfs = self.vfs.crashed(self.vfs.op_count if at is None else at, policy, rng)
        self.abandon()
        return Node(vfs, self.clock, self.config, rng=self._rng)

    def abandon(self) -> None:
        """End the tasks of a life that is over. What its threads still write goes to the old disk."""
        self.broker.registry.stop()
        for task in list(self.broker.supervisor._tasks):
            task.cancel()

    async def checkpoint(self) -> None:
        await self.broker.checkpointer.checkpoint()

    # -- topics and subscriptions ----------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        return self.broker.registry.topic(name)

    async def create_subscription(
        self,
        topic: str,
        name: str,
        *,
        type_: int = SubscriptionType.SHARED,
        position: int = LATEST,
        policy: SubscriptionPolicy | None = None,
    ) -> Subscription:
        """Create a subscription, and its topic if need be."""
        found = await self.broker.registry.topic_or_create(topic)
        return await found.subscriptions.create(name, type_, position, policy or SubscriptionPolicy())

    async def subscribe(self, topic: str, name: str, **options: int) -> Inbox:
        """Attach a consumer to a subscription, which is created if it is not there."""
        found = await self.broker.registry.topic_or_create(topic)
        subscription = found.subscriptions.find(name) or await self.create_subscription(topic, name)
        return self.attach(found, subscription, **options)

    def attach(self, topic: Topic, subscription: Subscription, **options: int) -> Inbox:
        """Attach a consumer; options are those of `Inbox`."""
        return Inbox(self, topic, subscription, **options)

    def hold_up_groups(self) -> asyncio.Event:
        """Let the journal wait, from now on, until the event is set: a disk that takes its time."""
        group_log, is_stored = self.broker.journal._log, asyncio.Event()
        append = group_log.append

        def append_later(index: int, records: Sequence[NewRecord]) -> asyncio.Future[StoredGroup]:
            async def work() -> StoredGroup:
                await is_stored.wait()
                return await append(index, records)

            return asyncio.ensure_future(work())

        group_log.append = append_later  # type: ignore[method-assign]
        return is_stored

    # -- producing -------------------------------------------------------------------------------------------------

    async def submit(
        self, topic: str, messages: Sequence[Outgoing], producer: str = "", *, replace: bool = False
    ) -> Accepted:
        """Hand over a batch; it is answered once `durable` is done."""
        batch = batch_of(topic, messages, self.config, producer)
        return await self.broker.submit_batch(topic, batch, replace=replace)

    async def produce(
        self, topic: str, messages: Sequence[Outgoing], producer: str = "", *, replace: bool = False
    ) -> list[Position]:
        """Produce a batch as a client does: returns when it is answered."""
        accepted = await self.submit(topic, messages, producer, replace=replace)
        await accepted.durable
        return positions_of(accepted.ids)


class _StampingConsumer(Consumer):
    """Takes each batch at once, and notes the clocks: a message that lies in a test's inbox grows no earlier or later."""

    def __init__(self, number: int, clock: Clock, lease_ms: int) -> None:
        super().__init__(f"test-{number}", f"test-{number}", lease_ms)
        self.arrived: deque[tuple[DeliveryBatch, int, int]] = deque()
        self._clock = clock

    def deliver(self, batch: DeliveryBatch) -> None:
        super().deliver(batch)
        assert self.next_nowait() is batch
        self.arrived.append((batch, self._clock.now_ms(), self._clock.monotonic_ns()))


class Inbox:
    """A consumer, attached: collects what it is sent and grants a permit for each message it took."""

    def __init__(
        self, node: Node, topic: Topic, subscription: Subscription, *, permits: int = 1000, lease_ms: int = 0
    ) -> None:
        self.topic = topic
        self.subscription = subscription
        self.permits = permits  # as first granted
        self.received: list[Delivered] = []  # everything so far, in order
        self.attached = True
        lease_ms = lease_ms or subscription.policy.lease_ms or node.config.lease_ms
        self.consumer = _StampingConsumer(next(node.consumer_numbers), node.clock, lease_ms)
        self.consumer.grant(permits, 0)
        topic.subscriptions.attach(subscription, self.consumer)

    def poll(self) -> list[Delivered]:
        """Return what arrived since the last poll."""
        found: list[Delivered] = []
        while self.consumer.arrived:
            found += _delivered(*self.consumer.arrived.popleft())
        if found and self.attached:
            self.consumer.grant(len(found), 0)
            self.subscription.work.set()
        self.received += found
        return found

    async def wait(self, count: int, *, seconds: float = 3600.0) -> list[Delivered]:
        """Wait until `count` more messages arrived; TimeoutError says that they did not."""
        found = self.poll()
        async with asyncio.timeout(seconds):
            while len(found) < count:
                self.consumer.wakeup.clear()
                await self.consumer.wakeup.wait()
                found += self.poll()
        return found

    async def ack(self, positions: Iterable[Position]) -> list[RefusedId]:
        """Returns when the acknowledgement is confirmed."""
        return refused_ids((await requests.acknowledge(self.subscription, entries_of(positions))).failures)

    async def nack(
        self, positions: Iterable[Position], after_ms: int = 0, reason: str = ""
    ) -> list[RefusedId]:
        held_by = self.consumer.consumer_id
        nacked = await requests.give_back(
            self.subscription, held_by, entries_of(positions), after_ms, reason=reason
        )
        return refused_ids(nacked.failures)

    async def release(self, positions: Iterable[Position]) -> list[RefusedId]:
        """Hand back unbegun."""
        released = await requests.give_back(
            self.subscription, self.consumer.consumer_id, entries_of(positions), 0, release=True
        )
        return refused_ids(released.failures)

    def detach(self, *, hands_back: bool = False) -> None:
        self.attached = False
        self.consumer.hands_back = hands_back
        self.topic.subscriptions.detach(self.subscription, self.consumer)


def _delivered(batch: DeliveryBatch, sent_ms: int, sent_ns: int) -> list[Delivered]:
    columns = zip(
        batch.ledger_ids.tolist(),
        batch.entry_ids.tolist(),
        batch.deliver_at_ms.tolist(),
        batch.attempts.tolist(),
        batch.frames,
        strict=True,
    )
    return [
        Delivered(Position(ledger_id, entry_id), payload_of(frame), deliver_at_ms, attempt, sent_ms, sent_ns)
        for ledger_id, entry_id, deliver_at_ms, attempt, frame in columns
    ]
