"""Entries that became due go to each subscription that has consumers and honours delays, as one chunk that all share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.delayed.due_rows import DueRows
from broker.policy import SubscriptionPolicy
from broker.subscriptions.replay import ReplayQueue
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import EARLIEST, Node, Outgoing, small_config

TOPIC = "orders"
Pushed = list[tuple[ReplayQueue, DueRows]]


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> Pushed:
    """Each push to a replay queue."""
    pushes: Pushed = []
    push = ReplayQueue.push

    def spy(queue: ReplayQueue, chunk: DueRows) -> bool:
        pushes.append((queue, chunk))
        return push(queue, chunk)

    monkeypatch.setattr(ReplayQueue, "push", spy)
    return pushes


def on_node(scenario: Any, **changes: Any) -> None:
    async def run(_: SimLoop, clock: SimClock) -> None:
        await scenario(Node(MemVfs(), clock, small_config(**changes)).open())

    run_sim(run, 1)


async def produce_delayed(node: Node, count: int) -> None:
    await node.produce(TOPIC, [Outgoing(b"x", deliver_after_ms=500) for _ in range(count)])


def test_all_subscriptions_get_the_same_chunk(pushed: Pushed) -> None:
    async def scenario(node: Node) -> None:
        inboxes = [await node.subscribe(TOPIC, name) for name in ("billing", "shipping")]
        await produce_delayed(node, 3)
        await asyncio.sleep(1)
        assert [len(inbox.poll()) for inbox in inboxes] == [3, 3]
        queues = [queue for queue, _ in pushed]
        assert queues == [inbox.subscription.replay for inbox in inboxes]
        (_, first), (_, second) = pushed
        assert first is second and len(first) == 3

    on_node(scenario)


def test_a_subscription_without_consumers_or_that_ignores_delays_gets_none(pushed: Pushed) -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription(TOPIC, "absent")
        topic = node.topic(TOPIC)
        ignoring = await topic.subscriptions.create(
            "ignoring", SubscriptionType.EXCLUSIVE, EARLIEST, SubscriptionPolicy(honor_delay=False)
        )
        early, due = node.attach(topic, ignoring), await node.subscribe(TOPIC, "billing")
        await produce_delayed(node, 2)
        await asyncio.sleep(0.1)
        assert (len(early.poll()), len(due.poll())) == (2, 0)
        await asyncio.sleep(1)
        assert (len(early.poll()), len(due.poll())) == (0, 2)
        assert [queue for queue, _ in pushed] == [due.subscription.replay]

    on_node(scenario)


def test_a_queue_that_overflows_is_emptied_and_the_subscription_catches_up() -> None:
    async def scenario(node: Node) -> None:
        inbox = await node.subscribe(TOPIC, "billing", permits=1)
        for _ in range(4):
            await produce_delayed(node, 3)
        await asyncio.sleep(1)
        assert inbox.subscription.replay.clears
        received = 0
        while received < 12:
            received += len(await inbox.wait(1))
        assert len({message.position for message in inbox.received}) == 12

    on_node(scenario, replay_entries_max=4)
