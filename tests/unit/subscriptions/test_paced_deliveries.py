"""Deliveries of a subscription with a pacing policy, of every type and from every source."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import pytest

from broker.policy import SubscriptionPolicy
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import control
from tests.depth import deep_but
from tests.harness import EARLIEST, Delivered, Inbox, Node, Outgoing, small_config
from tests.unit.owners import HeldOwner

TYPES = list(SubscriptionType)
SOURCES = ["undelayed", "due", "catch-up", "returned"]
RATE = 50.0


def _messages(count: int, after_ms: int = 0) -> list[Outgoing]:
    return [Outgoing(b"%d" % i, key=f"k{i % 5}", deliver_after_ms=after_ms) for i in range(count)]


def _node(clock: SimClock, **settings: object) -> Node:
    # Nothing but the right timer may wake the dispatcher.
    return Node(MemVfs(), clock, small_config(clock_recheck_ms=3_600_000, **settings)).open()


async def _herd(node: Node, type_: SubscriptionType, source: str, policy: SubscriptionPolicy) -> Inbox:
    """A subscription that is owed much from a moment on, which is now."""
    count = 600
    subscription = await node.create_subscription("t", "s", type_=type_, position=EARLIEST, policy=policy)
    topic = node.topic("t")
    if source == "returned":
        await _change(node, 0)
        inbox = node.attach(topic, subscription)
        await node.produce("t", _messages(count))
        held = await inbox.wait(count)
        await inbox.nack((each.position for each in held), after_ms=5_000)
        await _change(node, RATE)
        await asyncio.sleep(5)
        return inbox
    if source == "catch-up":
        await node.produce("t", _messages(count))
        return node.attach(topic, subscription)
    inbox = node.attach(topic, subscription)
    await node.produce("t", _messages(count, after_ms=2_000 if source == "due" else 0))
    if source == "due":
        await asyncio.sleep(2)
    return inbox


async def _change(node: Node, rate: float) -> None:
    await _update(node, SubscriptionPolicy(max_delivery_rate=rate), {"max_delivery_rate"})


async def _update(node: Node, policy: SubscriptionPolicy, named: set[str]) -> None:
    topic = node.topic("t")
    await control.update_policy(topic, topic.subscription("s"), policy, named)


def _sent_ns(came: Iterable[Delivered]) -> list[int]:
    return [each.sent_ns for each in came]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("type_", "source"),
    deep_but(
        [*itertools.product(TYPES[::2], SOURCES[::2]), *itertools.product(TYPES[1::2], SOURCES[1::2])],
        itertools.product(TYPES, SOURCES),
    ),
)
def test_a_herd_goes_at_the_rate(type_: SubscriptionType, source: str) -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = _node(clock)
        policy = SubscriptionPolicy(max_delivery_rate=RATE, honor_delay=True, max_backoff_ms=60_000)
        inbox = await _herd(node, type_, source, policy)
        inbox.received.clear()
        begun_ns = clock.monotonic_ns()
        for _tenth in range(100):
            await asyncio.sleep(0.1)
            inbox.poll()
        came = inbox.received
        assert 475 <= len(came) <= 525
        assert max(_sent_ns(came)) - begun_ns <= 10_000_000_000
        for first, last in zip(came, came[50:], strict=False):
            assert last.sent_ns - first.sent_ns >= 850_000_000, "51 messages within a second, burst and all"
        keys: dict[int, list[int]] = {}
        for each in came:
            keys.setdefault(int(each.payload) % 5 if type_.by_key else 0, []).append(int(each.payload))
        assert all(numbers == sorted(numbers) for numbers in keys.values()), "in their order"
        assert inbox.subscription.counters.early_deliveries == 0
        assert node.failures == []
        await node.stop()

    run_sim(scenario, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("type_", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])
def test_consumers_share_the_rate(type_: SubscriptionType) -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = _node(clock)
        subscription = await node.create_subscription(
            "t", "s", type_=type_, position=EARLIEST, policy=SubscriptionPolicy(max_delivery_rate=RATE)
        )
        inboxes = [node.attach(node.topic("t"), subscription) for _ in range(3)]
        messages = [Outgoing(b"x", key=f"k{i}") for i in range(1_000)]
        await node.produce("t", messages)
        await asyncio.sleep(10)
        counts = [len(inbox.poll()) for inbox in inboxes]
        assert 475 <= sum(counts) <= 525
        assert min(counts) > 100
        await node.stop()

    run_sim(scenario, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("type_", TYPES)
def test_a_change_counts_at_once_while_messages_wait(type_: SubscriptionType) -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = _node(clock)
        policy = SubscriptionPolicy(max_delivery_rate=0.001, lease_ms=3_600_000)
        inbox = await _herd(node, type_, "undelayed", policy)
        await asyncio.sleep(60)
        assert len(inbox.poll()) == 1
        await _change(node, RATE)
        await asyncio.sleep(5)
        assert 238 <= len(inbox.poll()) <= 262
        await _change(node, 0.001)
        inbox.poll()
        await asyncio.sleep(60)
        assert len(inbox.poll()) <= 1
        await _change(node, 0)
        await asyncio.sleep(0.1)
        inbox.poll()
        assert len(inbox.received) == 600
        await node.stop()

    run_sim(scenario, seed=1)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(
    "policy",
    [
        SubscriptionPolicy(max_delivery_rate=0.01, lease_ms=3_600_000),
        SubscriptionPolicy(max_leased_messages=1, lease_ms=3_600_000),
    ],
    ids=["rate", "leased"],
)
def test_a_dispatcher_that_is_held_back_does_not_poll(
    type_: SubscriptionType, policy: SubscriptionPolicy
) -> None:
    """Another message is ready again meanwhile, and more arrive."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        owner = HeldOwner()
        config = small_config(clock_recheck_ms=3_600_000)
        node = Node(MemVfs(), clock, config, ownership=owner).open()
        inbox = await _herd(node, type_, "undelayed", policy)
        (first,) = await inbox.wait(1)
        if policy.max_delivery_rate:
            await inbox.nack([first.position], after_ms=50)
        await asyncio.sleep(1)
        owner.looks = 0
        await asyncio.sleep(60)
        assert inbox.poll() == []
        assert owner.looks <= 2
        await node.stop()

    run_sim(scenario, seed=1)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("end", ["ack", "nack", "release", "lost", "expired"])
def test_no_more_are_leased_than_may_be_and_the_end_of_a_lease_lets_the_next_go(
    type_: SubscriptionType, end: str
) -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = _node(clock)
        policy = SubscriptionPolicy(max_leased_messages=7, lease_ms=2_000 if end == "expired" else 600_000)
        inbox = await _herd(node, type_, "undelayed", policy)
        others = 0 if type_ is SubscriptionType.EXCLUSIVE else 2
        inboxes = [inbox, *(node.attach(inbox.topic, inbox.subscription) for _ in range(others))]
        await asyncio.sleep(1)
        held = [(each, inbox) for inbox in inboxes for each in inbox.poll()]
        assert len(held) == 7
        assert inbox.subscription.states.leases.count() == 7
        (first, holder), came = held[0], 1
        match end:
            case "ack":
                await holder.ack([first.position])
            case "nack":
                await holder.nack([first.position], after_ms=60_000)
            case "release":
                await holder.release([first.position])
            case "lost":
                inbox.detach()
                came = sum(holder is inbox for _, holder in held)
                inboxes.remove(inbox)
                if not inboxes:
                    inboxes.append(node.attach(inbox.topic, inbox.subscription))
            case "expired":
                await asyncio.sleep(1.5)
                came = 7
        await asyncio.sleep(0.1)
        assert sum(len(inbox.poll()) for inbox in inboxes) == came
        assert inbox.subscription.states.leases.count() == 7
        await node.stop()

    run_sim(scenario, seed=1)


def test_what_is_leased_without_a_consumer_counts() -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = _node(clock)
        inbox = await _herd(
            node, SubscriptionType.SHARED, "undelayed", SubscriptionPolicy(max_leased_messages=3)
        )
        taken = await inbox.wait(3)
        inbox.attached = False
        inbox.topic.subscriptions.detach(inbox.subscription, inbox.consumer, keep_leases=True)
        other = node.attach(inbox.topic, inbox.subscription)
        await asyncio.sleep(1)
        assert other.poll() == []
        await inbox.ack([taken[0].position])
        await other.wait(1)
        await node.stop()

    run_sim(scenario, seed=1)


def test_redeliveries_count() -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = _node(clock, initial_backoff_ms=0)
        subscription = await node.create_subscription(
            "t", "s", position=EARLIEST, policy=SubscriptionPolicy(max_delivery_rate=10)
        )
        inbox = node.attach(node.topic("t"), subscription)
        await node.produce("t", [Outgoing(b"x")])
        came: list[Delivered] = []
        async with asyncio.timeout(60):
            while len(came) < 50:
                came += await inbox.wait(1)
                await inbox.nack([came[-1].position], after_ms=1)
        assert 4_700_000_000 <= came[-1].sent_ns - came[0].sent_ns <= 5_300_000_000
        await node.stop()

    run_sim(scenario, seed=1)


@pytest.mark.slow
def test_what_is_dropped_costs_nothing() -> None:
    """Expired ones are settled on the way, and take no other's place."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = _node(clock)
        subscription = await node.create_subscription(
            "t", "s", position=EARLIEST, policy=SubscriptionPolicy(max_delivery_rate=1)
        )
        await node.produce("t", [Outgoing(b"old", ttl_ms=10)] * 300)
        await node.produce("t", [Outgoing(b"new")])
        await asyncio.sleep(1)
        inbox = node.attach(node.topic("t"), subscription)
        assert [each.payload for each in await inbox.wait(1, seconds=1)] == [b"new"]
        await node.stop()

    run_sim(scenario, seed=1)


@pytest.mark.slow
def test_lateness_is_counted_apart_for_what_was_held_back() -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = _node(clock)
        inbox = await _herd(node, SubscriptionType.SHARED, "due", SubscriptionPolicy(max_delivery_rate=RATE))
        await asyncio.sleep(5)
        counters = inbox.subscription.counters
        prompt, paced = counters.lateness.stats(), counters.paced_lateness.stats()
        assert prompt.count == 5, "the burst"
        assert prompt.max_seconds < 0.1
        assert paced.count + prompt.count == counters.delivered_messages
        assert 4.9 < paced.max_seconds <= 5
        inbox.poll()
        await asyncio.sleep(15)  # they are through
        before = counters.paced_lateness.stats().count
        await node.produce("t", _messages(3, after_ms=500))
        await asyncio.sleep(2)
        assert counters.paced_lateness.stats().count == before
        assert counters.lateness.stats().count == 8
        await node.stop()

    run_sim(scenario, seed=1)


@pytest.mark.slow
def test_pause_and_pacing_go_together() -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = _node(clock)
        policy = SubscriptionPolicy(max_delivery_rate=RATE, lease_ms=600_000)
        inbox = await _herd(node, SubscriptionType.SHARED, "undelayed", policy)
        await asyncio.sleep(2)
        await control.pause(inbox.topic, inbox.subscription, paused=True)
        inbox.poll()
        await asyncio.sleep(60)
        assert inbox.poll() == []
        await control.pause(inbox.topic, inbox.subscription, paused=False)
        await asyncio.sleep(2)
        assert 95 <= len(inbox.poll()) <= 110, "no more than a burst was saved up"
        await node.stop()

    run_sim(scenario, seed=1)


def test_the_policy_and_its_effect_outlive_a_restart() -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = _node(clock)
        inbox = await _herd(node, SubscriptionType.SHARED, "undelayed", SubscriptionPolicy())
        await inbox.wait(600)
        policy = SubscriptionPolicy(max_delivery_rate=RATE, max_delivery_burst=3, max_leased_messages=1_000)
        await _update(node, policy, {"max_delivery_rate", "max_delivery_burst", "max_leased_messages"})
        vfs = node.vfs
        await node.stop()
        node = Node(vfs, clock, node.config).open()
        subscription = node.topic("t").subscription("s")
        assert (subscription.policy.max_delivery_burst, subscription.policy.max_leased_messages) == (3, 1_000)
        inbox = node.attach(node.topic("t"), subscription)
        await asyncio.sleep(2)
        assert 95 <= len(inbox.poll()) <= 105
        await node.stop()

    run_sim(scenario, seed=1)
