"""Limits that calls under way count for, names that are told apart, and figures that agree at every instant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from broker.errors import LimitReached
from broker.policy import TRACKER_MEMORY, EffectiveSubscriptionPolicy, SubscriptionPolicy, TopicPolicy
from broker.subscriptions.reasons import REASON_OVERHEAD_BYTES
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.dead_letter_frames import dead_letter_topic_name
from broker.topics.schedule_values import Cancel, Move
from tests.harness import Node, Outgoing, small_config

HOUR_MS = 3_600_000
LIMIT = 3


def run(scenario: Callable[[Node], Awaitable[None]], **changes: Any) -> None:
    async def whole(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config(**changes)).open()
        await scenario(node)
        await node.stop()
        assert node.failures == []

    run_sim(whole, seed=3)


async def topics(node: Node, number: int) -> None:
    await node.broker.registry.create_topic(f"t{number}", TopicPolicy())


async def subscriptions(node: Node, number: int) -> None:
    topic = await node.broker.registry.topic_or_create("t")
    await topic.subscriptions.create(f"s{number}", 1, 1, SubscriptionPolicy())


async def consumers(node: Node, number: int) -> None:
    await node.subscribe("t", "one")


async def producers(node: Node, number: int) -> None:
    await node.produce("t", [Outgoing(b"x", sequence_id=1)], f"p{number}")


@pytest.mark.parametrize(
    ("setting", "create"),
    [
        ("topics_max", topics),
        ("subscriptions_per_topic_max", subscriptions),
        ("consumers_per_subscription_max", consumers),
        ("producers_per_topic_max", producers),
    ],
)
def test_a_limit_counts_what_is_under_way(
    setting: str, create: Callable[[Node, int], Awaitable[None]]
) -> None:
    async def scenario(node: Node) -> None:
        if create is not topics:
            await node.create_subscription("t", "one")
        free = LIMIT - (create is subscriptions)
        answers = await asyncio.gather(
            *(create(node, number) for number in range(3 * LIMIT)), return_exceptions=True
        )
        refused = [each for each in answers if each is not None]
        assert all(isinstance(each, LimitReached) for each in refused), refused
        assert len(answers) - len(refused) == free
        with pytest.raises(LimitReached):
            await create(node, 3 * LIMIT)

    run(scenario, **{setting: LIMIT})


def test_reasons_of_nacks_of_all_subscriptions_are_bounded() -> None:
    """Also while many come at once; what is deleted or begins elsewhere gives its part back."""

    async def scenario(node: Node) -> None:
        memory = node.broker.reasons_memory
        memory._bytes_max = 14_000
        inboxes = [await node.subscribe("t", f"s{number}") for number in range(LIMIT)]
        await node.produce("t", [Outgoing(b"x")] * 20)
        for inbox in inboxes:
            await inbox.wait(20)
        await asyncio.gather(
            *(inbox.nack([each.position for each in inbox.received], 60_000, "boom") for inbox in inboxes)
        )
        kept = [len(inbox.subscription.reasons.texts) for inbox in inboxes]
        assert sorted(kept) == [0, 20, 20]
        assert memory._coming_bytes == 0
        assert memory.held_bytes == sum(kept) * (REASON_OVERHEAD_BYTES + len("boom"))
        topic = node.broker.registry.topic("t")
        for inbox in inboxes:
            await topic.subscriptions.delete(inbox.subscription.name)
        assert memory.held_bytes == 0

    run(scenario)


def test_what_was_appended_since_the_last_look_at_the_disk_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(node: Node) -> None:
        reserve = node.config.disk_reserve_bytes
        monkeypatch.setattr(node.vfs, "free_bytes", lambda path: reserve + 20_000)
        node.broker._check_disk()
        for number in range(10):  # of 20 kB there is room for two times 10 kB
            await node.produce("t", [Outgoing(bytes(900))])
            if number == 0:
                monkeypatch.setattr(node.broker, "_check_disk", lambda: None)  # it does not look again
        with pytest.raises(LimitReached) as caught:
            await node.produce("t", [Outgoing(bytes(900))])
        assert caught.value.reason == "DISK_RESERVE_REACHED"
        monkeypatch.undo()
        node.broker._check_disk()
        await node.produce("t", [Outgoing(bytes(900))])

    run(scenario, disk_reserve_bytes=1 << 20)


@pytest.mark.parametrize("where", ["in the journal's queue", "in the tails of ledgers"])
def test_what_was_accepted_and_is_not_on_the_disk_yet_counts(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred at once, while a disk writes nothing; or what the journal has and the ledgers' files have not."""

    async def scenario(node: Node) -> None:
        reserve = node.config.disk_reserve_bytes
        await node.produce("t", [Outgoing(b"first")])
        monkeypatch.setattr(node.vfs, "free_bytes", lambda path: reserve + 20_000)
        if where == "in the tails of ledgers":
            node.broker._tail_writer.appended(node.topic("t"), 18_000)
        node.broker._check_disk()
        accepted = []
        with pytest.raises(LimitReached) as caught:
            for _ in range(100):
                accepted += [(await node.submit("t", [Outgoing(bytes(900))])).durable]
        assert caught.value.reason == "DISK_RESERVE_REACHED"
        assert len(accepted) <= (10 if where == "in the journal's queue" else 1)
        await asyncio.gather(*accepted)

    run(scenario, disk_reserve_bytes=1 << 20)


def test_no_two_subscriptions_have_one_dead_letter_topic() -> None:
    parts = ["a", "b", "c", "a~b", "b~c", "a~", "a~~b", "1", "a~1", "1~b", "b~3"]
    found = [
        dead_letter_topic_name(one, two, EffectiveSubscriptionPolicy()) for one in parts for two in parts
    ]
    assert len(set(found)) == len(found)
    assert (
        dead_letter_topic_name("orders", "billing", EffectiveSubscriptionPolicy())
        == "orders~billing~dead-letters"
    )


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["buckets", "memory"])
def test_counts_and_due_times_agree_at_every_instant(tracker: str) -> None:
    looks = 0

    async def scenario(node: Node) -> None:
        policy = TopicPolicy(tracker=TRACKER_MEMORY) if tracker == "memory" else TopicPolicy()
        topic = await node.broker.registry.create_topic("t", policy)
        await node.create_subscription("t", "one")
        index = topic.index

        def look() -> None:
            nonlocal looks
            looks += 1
            count, first, last = index.scheduled_count(), index.next_due_ms(), index.last_due_ms()
            assert (count == 0) == (first is None) == (last is None), (count, first, last)
            if first is not None and last is not None:
                assert first <= last

        async def watch() -> None:
            while True:
                look()
                await asyncio.sleep(0.002)

        apply = topic.apply

        def applied(*arguments: Any) -> None:
            apply(*arguments)
            look()

        topic.apply = applied  # type: ignore[method-assign, assignment]
        watching = asyncio.create_task(watch())
        (position,) = await node.produce("t", [Outgoing(b"m", deliver_after_ms=HOUR_MS)])
        assert index.last_due_ms() is not None
        await asyncio.sleep(1)
        for change in (Move(deliver_after_ms=2 * HOUR_MS), Move(deliver_after_ms=HOUR_MS), Cancel()):
            await topic.schedule.change([position], change, dry_run=False)
            await asyncio.sleep(1)
        await node.produce("t", [Outgoing(b"m", deliver_after_ms=ms) for ms in (1, 300, 700, HOUR_MS)])
        await asyncio.sleep(7)
        watching.cancel()
        assert looks > 1_000

    run(scenario)
