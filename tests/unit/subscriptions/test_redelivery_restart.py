"""Entries given back with a delay: after a restart they come neither early nor late, and keep their attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from broker.storage.records import GivenBack, ReturnReason
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import DAY_MS, EARLIEST, Node, Outgoing, entries_of

COUNT = 200


async def stopped(node: Node) -> Node:
    await node.stop()
    return Node(node.vfs, node.clock, node.config)


async def replayed(node: Node) -> Node:
    return node.crash(CrashPolicy.LOSE_UNSYNCED)


async def from_a_checkpoint(node: Node) -> Node:
    await node.checkpoint()
    return node.crash(CrashPolicy.LOSE_UNSYNCED)


@pytest.mark.slow
@pytest.mark.parametrize("end", [stopped, replayed, from_a_checkpoint])
def test_delays_and_attempts_outlive_the_broker(end: Callable[[Node], Awaitable[Node]]):
    async def scenario(loop, clock):
        node = Node(MemVfs(), clock).open()
        await node.create_subscription("orders", "billing", position=EARLIEST)
        await node.produce("orders", [Outgoing(str(i).encode()) for i in range(COUNT)])
        inbox = await node.subscribe("orders", "billing", lease_ms=2 * DAY_MS)
        first = [each.position for each in await inbox.wait(COUNT)]
        not_before_ms = {}
        for i, position in enumerate(first):
            delay_ms = 1 + i * 7_919 % 60_000
            not_before_ms[position] = clock.now_ms() + delay_ms
            await inbox.nack([position], delay_ms)
        # Some come back before the restart, and again with another delay; some of them are done meanwhile.
        await asyncio.sleep(10)
        again = inbox.poll()
        assert COUNT // 50 < len(again) < COUNT // 2
        for i, each in enumerate(again):
            if i % 3:
                not_before_ms[each.position] = clock.now_ms() + 70_000 + i
                await inbox.nack([each.position], 70_000 + i)
            else:
                await inbox.ack([each.position])
                del not_before_ms[each.position]

        node = (await end(node)).open()
        subscription = node.topic("orders").subscriptions.find("billing")
        assert subscription is not None and subscription.states.redelivery.queued == entries_of(not_before_ms)
        inbox = await node.subscribe("orders", "billing", lease_ms=2 * DAY_MS)
        found = await inbox.wait(len(not_before_ms), seconds=100)
        attempts = {each.position: each.attempt for each in found}
        assert attempts == {p: 3 if p in {each.position for each in again} else 2 for p in not_before_ms}
        for each in found:
            assert 0 <= each.sent_ms - not_before_ms[each.position] < 5
        await node.stop()

    run_sim(scenario, seed=7)


def test_nothing_is_kept_of_what_was_settled_before_or_after_it_came_back() -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock).open()
        subscription = await node.create_subscription("orders", "billing")
        inbox = await node.subscribe("orders", "billing")
        positions = await node.produce("orders", [Outgoing(b"x"), Outgoing(b"y")])
        await inbox.wait(2)
        returned = asyncio.create_task(inbox.nack(positions, 60_000))
        await asyncio.sleep(0)
        await inbox.ack(positions[:1])  # its record follows that of the nack
        await returned
        await inbox.ack(positions[1:])
        entries = entries_of(positions)
        subscription.apply_given_back(
            GivenBack(subscription.topic_id, subscription.subscription_id, ReturnReason.NACKED, 0, entries)
        )
        assert subscription.attempts.digits == {}
        assert subscription.states.redelivery.queued == {}
        node.abandon()

    run_sim(scenario, 1)
