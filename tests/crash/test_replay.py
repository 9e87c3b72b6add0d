"""`apply` is a pure function of record and applied state: replay gives the same bytes under any limits and any clock.

A random history runs with its journal kept whole. Then that journal is replayed by brokers with other limits and
clocks years away, from nothing and from checkpoints, and everything durable is compared byte for byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from broker.config import BrokerConfig
from broker.errors import LimitReached, Refused
from broker.model import START, Entries, Position
from broker.policy import SubscriptionPolicy, TopicPolicy
from broker.storage import records
from broker.storage.amendments import NONE, AmendmentsImage, encode_amendments
from broker.storage.manifest import BrokerImage, encode_broker, encode_topic
from broker.storage.records import Produced, Record, decode_record
from broker.subscriptions import requests
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import START_MS, SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import control
from broker.topics.schedule_values import Cancel, Move
from broker.topics.topic import Topic
from tests.depth import at_depth
from tests.harness import DAY_MS, EARLIEST, LATEST, Inbox, Node, Outgoing, entries_of, small_config

YEAR_MS = 365 * DAY_MS
STEPS = 75
SEEDS = range(at_depth(change=8, deep=12))

RECORDED = small_config(
    journal_segment_bytes=1 << 20,
    initial_backoff_ms=50,
    clock_recheck_ms=5_000,
    dedup_entries=6,
    dedup_window_ms=10_000,
    producers_per_topic_max=2,
)
OTHERS = {
    "ledgers of one entry, tiny leases": small_config(ledger_max_entries=1, lease_ms=1, read_batch_entries=1),
    "huge ledgers, long retries": small_config(
        ledger_max_entries=1_000_000,
        journal_segment_bytes=1 << 20,
        initial_backoff_ms=DAY_MS,
        max_backoff_ms=DAY_MS,
    ),
    "old ledgers, short lives": small_config(
        ledger_max_age_ms=1, default_ttl_ms=1, max_delay_ms=1, tick_ms=60_000, replay_entries_max=1
    ),
    "few of anything": small_config(
        dedup_entries=1,
        dedup_window_ms=1,
        producers_per_topic_max=1,
        max_pending_messages=1,
        max_produce_rate=1,
        delayed_delivery="disabled",
        topics_max=1,
        subscriptions_per_topic_max=1,
        batch_messages_max=1,
        payload_bytes_max=1,
        auto_create_topics=False,
    ),
}
START_TIMES = {"years ago": START_MS - 30 * YEAR_MS, "now": START_MS, "years ahead": START_MS + 200 * YEAR_MS}

State = dict[str, bytes]


async def durable_state(node: Node) -> State:
    """Everything that records decide, as the bytes that a checkpoint would write."""
    registry = node.broker.registry
    topics = {topic.topic_id: topic.name for topic in registry.topics.values()}
    # What is left out is no record's doing: when the broker last lived.
    root = BrokerImage(node.broker.broker_id, 0, topics, registry.next_topic_id, registry.next_ledger_id, 0)
    state = {"root": encode_broker(root)}
    for topic in registry.topics.values():
        await _topic_state(topic, state)
    return state


async def _topic_state(topic: Topic, state: State) -> None:
    for subscription in topic.subscriptions.values():
        subscription.changed = True  # so that the capture writes every cursor, and names it by the lsn
        name = f"cursor {topic.topic_id}/{subscription.subscription_id}"
        state[name] = subscription.capture_cursor().encode()
    topic.producers.changed = True  # as above
    state[f"producers {topic.topic_id}"] = topic.producers.content(topic.topic_id).encode()
    dirty, amended = dict(topic.log.dirty), set(topic.log.amendments.dirty)
    amendments_files = dict(topic.ledgers._amendments_files)
    # The frontier moves with the clock, buckets and runs of keys are sealed when there is time for it, and files of
    # amendments are named by the checkpoint that writes them: no record does any of it.
    captured = topic.capture().image
    image = replace(
        captured,
        ledgers=tuple(replace(each, amendments_file="") for each in captured.ledgers),
        key_run_ids=(),
        next_key_run_id=1,
        keys_through=None,
        frontier_ms=0,
        indexed_through=START,
        index_lsn=0,
        bucket_ids=(),
        next_bucket_id=1,
        gone_ledgers=(),
    )
    topic.log.amendments.dirty, topic.ledgers._amendments_files = amended, amendments_files
    topic.log.dirty = dirty  # nothing was written: whoever goes on with this broker still has to
    for subscription in topic.subscriptions.values():
        subscription.changed = True
    topic.producers.changed = True
    state[f"topic {topic.topic_id}"] = encode_topic(image)
    for ledger in topic.log:
        found = await ledger.read(np.arange(ledger.entry_count, dtype=np.uint32))
        ledger_id = ledger.name.ledger_id
        name = f"ledger {topic.topic_id}/{ledger_id}"
        state[name] = found.times.tobytes() + found.rows.tobytes() + b"".join(found.frames)
        amended = AmendmentsImage(topic.topic_id, ledger_id, topic.log.amendments.get(ledger_id, NONE))
        state[f"amendments {topic.topic_id}/{ledger_id}"] = encode_amendments(amended)


class RandomHistory:
    """Random calls on one broker."""

    def __init__(self, node: Node, clock: SimClock, rng: random.Random) -> None:
        self.node = node
        self.clock = clock
        self.rng = rng
        self.inboxes: list[Inbox] = []
        self.made = 0
        self.sequence_ids: Counter[str] = Counter()

    async def run(self) -> None:
        for name in ("a", "b"):
            await self.create_subscription(name)
        steps = (self.produce, self.consume, self.churn, self.control, self.wait, self.give_up, self.change)
        for _ in range(STEPS):
            await self.rng.choices(steps, (6, 5, 2, 1, 3, 2, 3))[0]()

    async def produce(self) -> None:
        rng = self.rng
        messages = [
            Outgoing(
                rng.randbytes(rng.choice((0, 1, 30, 400))),
                deliver_after_ms=rng.choice((0, 0, 1, 700, 60_000, DAY_MS)),
                ttl_ms=rng.choice((0, 0, 1, 5_000)),
                key=rng.choice(("", "k", "another key")),
            )
            for _ in range(rng.randint(1, 5))
        ]
        producer = rng.choice(("", "p", "q", "r"))
        # Steps back are repeats, and perhaps too old; steps ahead leave holes.
        number = self.sequence_ids[producer] + rng.choice((0, 0, 0, 3, -2))
        for place, each in enumerate(messages if number >= 0 else []):
            if rng.random() < 0.9:
                messages[place] = replace(each, sequence_id=number + place + 1)
        self.sequence_ids[producer] = max(self.sequence_ids[producer], number + len(messages))
        with contextlib.suppress(Refused, LimitReached):
            await self.node.produce(rng.choice("abc"), messages, producer)

    async def consume(self) -> None:
        self.inboxes = [inbox for inbox in self.inboxes if not inbox.subscription.deleted]
        if not self.inboxes or self.rng.random() < 0.3:
            await self.attach()
            return
        inbox = self.rng.choice(self.inboxes)
        inbox.poll()
        held = [each.position for each in inbox.received if self.rng.random() < 0.4]
        match self.rng.randrange(5):
            case 0 | 1:
                await inbox.ack(held)
            case 2 | 3:
                await inbox.nack(
                    held, self.rng.choice((0, 0, 300, 10_000)), self.rng.choice(("", "boom", "ü"))
                )
            case 4:
                self.inboxes.remove(inbox)
                inbox.detach()

    async def attach(self) -> None:
        name = self.rng.choice(sorted(self.node.broker.registry.by_name))
        topic = self.node.topic(name)
        free = [
            each
            for each in topic.subscriptions.values()
            if each.type != SubscriptionType.EXCLUSIVE or not each.consumers
        ]
        if free:
            chosen = self.rng.choice(free)
            lease_ms = self.rng.choice((200, 60_000))
            self.inboxes.append(self.node.attach(topic, chosen, lease_ms=lease_ms))

    async def change(self) -> None:
        """Cancel, move or replace what waits, and what does not."""
        topics = [topic for topic in self.node.broker.registry.topics.values() if topic.log.ledger_count]
        if not topics:
            return
        topic, rng = self.rng.choice(topics), self.rng
        if rng.random() < 0.4:
            keyed = [Outgoing(b"keyed", deliver_after_ms=DAY_MS, schedule_key=rng.choice("xy"))]
            with contextlib.suppress(Refused, LimitReached):
                await self.node.produce(topic.name, keyed, replace=True)
            return
        positions = [
            Position(ledger.name.ledger_id, entry_id)
            for ledger in topic.log
            for entry_id in range(ledger.entry_count)
            if rng.random() < 0.3
        ]
        moves = (Move(deliver_after_ms=rng.choice((0, 60_000))), Move(shift_ms=rng.choice((-500, DAY_MS))))
        wanted = rng.choice((Cancel(), *moves))
        with contextlib.suppress(Refused):
            await topic.schedule.change(positions, wanted, dry_run=False)

    async def give_up(self) -> None:
        office = self.node.broker.dead_letters
        subscriptions = [
            each
            for topic in self.node.broker.registry.topics.values()
            for each in topic.subscriptions.values()
        ]
        holding = [each for each in subscriptions if office.places(each)]
        if holding and self.rng.random() < 0.5:
            if self.rng.random() < 0.7:
                await office.requeue(self.rng.choice(holding), None, self.rng.choice((0, 700)))
            else:
                await office.purge(self.rng.choice(holding), None)
            return
        for inbox in [each for each in self.inboxes if not each.subscription.deleted][:1]:
            inbox.poll()
            held = entries_of(each.position for each in inbox.received if self.rng.random() < 0.5)
            consumer_id = inbox.consumer.consumer_id
            await requests.give_back(
                inbox.subscription, consumer_id, held, 0, dead_letter=True, reason="random"
            )

    async def churn(self) -> None:
        registry = self.node.broker.registry
        name = self.rng.choice("abc")
        topic = registry.by_name.get(name)
        subscriptions = list(topic.subscriptions.values()) if topic else []
        if topic is None:
            await registry.create_topic(name, TopicPolicy(ledger_max_entries=3, default_ttl_ms=20_000))
        elif self.rng.random() < 0.1:
            await registry.delete_topic(name)
        elif subscriptions and self.rng.random() < 0.3:
            await topic.subscriptions.delete(self.rng.choice(subscriptions).name)
        else:
            await self.create_subscription(name)

    async def control(self) -> None:
        topics = [topic for topic in self.node.broker.registry.topics.values() if topic.subscriptions]
        if not topics:
            return
        topic = self.rng.choice(topics)
        subscription = self.rng.choice(list(topic.subscriptions.values()))
        if self.rng.random() < 0.5:
            known = [Position(each.name.ledger_id, each.entry_count // 2) for each in topic.log]
            start = self.rng.choice([START, topic.latest_position(), *known])
            seeking = control.seek(topic, subscription, start)
            if self.inboxes and self.rng.random() < 0.5:  # acknowledged while it is on its way
                inbox = self.rng.choice(self.inboxes)
                await asyncio.gather(seeking, inbox.ack(each.position for each in inbox.received))
            else:
                await seeking
        else:
            await control.pause(topic, subscription, paused=self.rng.random() < 0.3)
            policy = SubscriptionPolicy(honor_delay=True, lease_ms=self.rng.choice((200, 5_000)))
            await control.update_policy(topic, subscription, policy, {"honor_delay", "lease_ms"})
        self.inboxes = [inbox for inbox in self.inboxes if not inbox.consumer.ended]

    async def create_subscription(self, topic: str) -> None:
        self.made += 1
        await self.node.create_subscription(
            topic,
            f"subscription-{self.made}",
            type_=self.rng.choice(
                (
                    SubscriptionType.SHARED,
                    SubscriptionType.SHARED,
                    SubscriptionType.EXCLUSIVE,
                    SubscriptionType.FAILOVER,
                )
            ),
            position=self.rng.choice((LATEST, EARLIEST)),
            policy=SubscriptionPolicy(
                initial_backoff_ms=self.rng.choice((None, 5)),
                max_delivery_attempts=self.rng.choice((None, 2)),
            ),
        )

    async def wait(self) -> None:
        await asyncio.sleep(self.rng.choice((0.001, 0.3, 5.0)))
        if self.rng.random() < 0.2:
            self.clock.step(self.rng.choice((-DAY_MS, -400, 400, DAY_MS)))


@cache
def record(seed: int) -> tuple[MemVfs, State]:
    """A disk with nothing but a journal, and the durable state of the broker that wrote it."""

    async def scenario(loop: SimLoop, clock: SimClock) -> tuple[MemVfs, State]:
        node = Node(MemVfs(), clock, RECORDED).open()
        await RandomHistory(node, clock, loop.rng("history")).run()
        node.broker.registry.stop()  # whatever gives back or expires by itself does so no more
        await asyncio.sleep(10)
        assert node.broker.journal.pending_bytes == 0
        state = await durable_state(node)
        vfs = node.vfs.crashed(node.vfs.op_count, CrashPolicy.KEEP_ALL)
        node.abandon()
        assert not any("topics/" in path and path.endswith("manifest") for path in vfs.snapshot())
        return vfs, state

    return run_sim(scenario, seed)


def reopen(vfs: MemVfs, config: BrokerConfig, start_ms: int, *, checkpointed: bool) -> tuple[MemVfs, State]:
    """Open a copy of a disk under other limits and another clock; returns it as a crash would leave it."""

    async def scenario(_: SimLoop, clock: SimClock) -> tuple[MemVfs, State]:
        node = Node(vfs.crashed(vfs.op_count, CrashPolicy.KEEP_ALL), clock, config).open(start=False)
        state = await durable_state(node)
        if checkpointed:
            await node.checkpoint()
        return node.vfs.crashed(node.vfs.op_count, CrashPolicy.LOSE_UNSYNCED), state

    return run_sim(scenario, seed=1, start_ms=start_ms)


def ledger_files(vfs: MemVfs) -> State:
    return {path: content for path, content in vfs.snapshot().items() if "/ledgers/" in path}


@pytest.mark.parametrize("seed", SEEDS)
def test_replay_under_other_limits_and_another_clock_gives_the_same_bytes(seed):
    vfs, state = record(seed)
    assert len(state) > 5
    written = []
    for config, start_ms in zip(OTHERS.values(), [*START_TIMES.values(), START_MS], strict=True):
        checkpointed, replayed = reopen(vfs, config, start_ms, checkpointed=True)
        assert replayed == state
        # From the checkpoint, which this configuration wrote, the next one goes on.
        _, again = reopen(checkpointed, RECORDED, start_ms + 7, checkpointed=False)
        assert again == state
        written.append(ledger_files(checkpointed))
    assert written[0]
    assert all(each == written[0] for each in written), "the files of the ledgers depend on the configuration"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_in_which_records_hold_their_ledgers_does_not_matter(seed, monkeypatch):
    """Whoever submits a record gathers its entries in any order, and replays read them in theirs."""

    def backwards(body: memoryview, set_count: int) -> Entries:
        return dict(reversed(decode_sets(body, set_count).items()))

    vfs, state = record(seed)
    decode_sets = records._decode_sets
    monkeypatch.setattr(records, "_decode_sets", backwards)
    _, replayed = reopen(vfs, RECORDED, START_MS, checkpointed=False)
    assert replayed == state


def test_the_histories_hold_every_kind_of_record():
    kinds = set().union(*(record_types(record(seed)[0]) for seed in SEEDS))
    assert kinds >= set(range(2, 12)) | {13, 15, 16}


def test_the_histories_hold_what_can_be_said_of_sequence_ids():
    found = [
        sequences
        for seed in SEEDS
        for each in records_of(record(seed)[0])
        if isinstance(each, Produced) and (sequences := each.sequences)
    ]
    assert sum(bool(each.forgotten_name) for each in found) > 5
    assert sum(each.floor > 0 for each in found) > 20
    assert any((each.sequence_ids == 0).any() for each in found)
    given = [each.sequence_ids[each.sequence_ids > 0].astype(np.int64) for each in found]
    assert any((np.diff(each) > 1).any() for each in given)


def record_types(vfs: MemVfs) -> set[int]:
    return {int(each.type) for each in records_of(vfs)}


def records_of(vfs: MemVfs) -> list[Record]:
    async def scenario(_: SimLoop, clock: SimClock) -> list[Record]:
        copy = vfs.crashed(vfs.op_count, CrashPolicy.KEEP_ALL)
        journal = Node(copy, clock, RECORDED).open(start=False).broker.journal
        return [decode_record(record_type, body) for _, record_type, body in journal.replay(1)]

    return run_sim(scenario, seed=1)
