"""Deliveries of a broker that may lose its state to another one: they pause while it does not own it (CLUSTER-10), and
what is due later than its last group allows waits (CLUSTER-11)."""

from __future__ import annotations

import asyncio

import pytest

from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import EARLIEST, Node, Outgoing
from tests.unit.owners import HeldOwner

TYPES = [SubscriptionType.SHARED, SubscriptionType.FAILOVER, SubscriptionType.KEY_SHARED]
WAYS = ["undelayed", "due", "catch-up", "returned"]


async def _message_on_its_way(node: Node, owner: HeldOwner, type_: int, way: str) -> list[bytes]:
    """One message that would be delivered within a second, if the lease held; the payloads delivered so far."""
    await node.create_subscription("t", "s", type_=type_, position=EARLIEST)
    delay_ms = {"due": 500, "catch-up": 1}.get(way, 0)
    if way == "catch-up":
        await node.produce("t", [Outgoing(b"x", deliver_after_ms=delay_ms)])
        await asyncio.sleep(1)
        owner.is_held = False
        inbox = await node.subscribe("t", "s")
    else:
        inbox = await node.subscribe("t", "s")
        owner.is_held = way == "returned"
        await node.produce("t", [Outgoing(b"x", deliver_after_ms=delay_ms)])
    if way == "returned":
        (first,) = await inbox.wait(1)
        await inbox.nack([first.position], after_ms=500)
        owner.is_held = False
    await asyncio.sleep(2)
    assert inbox.poll() == [], "delivered without the lease"
    owner.regain()
    await asyncio.sleep(0.01)
    return [each.payload for each in inbox.poll()]


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_handed_out_without_the_lease_and_all_at_once_with_it(type_: int, way: str) -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        owner = HeldOwner()
        node = Node(MemVfs(), clock, ownership=owner).open()
        assert await _message_on_its_way(node, owner, type_, way) == [b"x"]
        await node.stop()
        assert node.failures == []

    run_sim(scenario, seed=1)


@pytest.mark.parametrize("type_", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])
@pytest.mark.parametrize("way", ["due", "catch-up", "returned"])
def test_what_is_due_after_the_last_group_allows_waits(type_: int, way: str) -> None:
    """The clock was set ahead since: it may run ahead of every other node's."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        owner = HeldOwner()
        node = Node(MemVfs(), clock, ownership=owner).open()
        await node.create_subscription("t", "s", type_=type_, position=EARLIEST)
        inbox = None if way == "catch-up" else await node.subscribe("t", "s")
        due_ms = clock.now_ms() + 1_000
        await node.produce("t", [Outgoing(b"x", deliver_at_ms=0 if way == "returned" else due_ms)])
        if inbox is not None and way == "returned":
            (first,) = await inbox.wait(1)
            due_ms = clock.now_ms() + 1_000
            await inbox.nack([first.position], after_ms=1_000)
        owner.until_ms = due_ms - 1
        if inbox is None:
            await asyncio.sleep(2)
            inbox = await node.subscribe("t", "s")
        await asyncio.sleep(3)
        assert inbox.poll() == [], "handed out beyond until_ms"
        owner.until_ms = due_ms
        await asyncio.sleep(1.5)  # at the next look at the clocks, or earlier
        assert [each.payload for each in inbox.poll()] == [b"x"]
        await node.stop()
        assert node.failures == []

    run_sim(scenario, seed=1)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("is_held", [False, True])
def test_a_dispatcher_that_may_hand_out_nothing_looks_no_more_often_than_the_clock_is_looked_at(
    type_: int, is_held: bool
) -> None:
    """It has something of each kind to hand out, and has no lease, or a lease whose last group is too long ago."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        owner = HeldOwner()
        node = Node(MemVfs(), clock, ownership=owner).open()
        await node.create_subscription("t", "s", type_=type_, position=EARLIEST)
        inbox = await node.subscribe("t", "s")
        await node.produce("t", [Outgoing(b"x"), Outgoing(b"y")])
        first, second = await inbox.wait(2)
        await node.produce(
            "t", [Outgoing(b"due", deliver_after_ms=50), Outgoing(b"later", deliver_after_ms=30_000)]
        )
        owner.until_ms = clock.now_ms()
        await inbox.nack([first.position], after_ms=50)
        await inbox.release([second.position])
        owner.is_held = is_held
        await asyncio.sleep(1)
        inbox.poll()
        owner.looks = 0
        await asyncio.sleep(60)
        rechecks = 60_000 // node.config.tuning.clock_recheck_ms
        assert owner.looks <= 4 * rechecks
        await node.stop()

    run_sim(scenario, seed=1)


@pytest.mark.parametrize("type_", [SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER])
def test_a_dispatcher_whose_returning_messages_wait_for_a_slow_disk_does_not_poll(type_: int) -> None:
    """Another message is ready again meanwhile, and may not go before them."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        owner = HeldOwner()
        node = Node(MemVfs(), clock, ownership=owner).open()
        await node.create_subscription("t", "s", type_=type_, position=EARLIEST)
        inbox = await node.subscribe("t", "s")
        await node.produce("t", [Outgoing(b"x"), Outgoing(b"y")])
        first, second = await inbox.wait(2)
        await inbox.nack([second.position], after_ms=50)
        is_stored = node.hold_up_groups()
        releasing = asyncio.create_task(inbox.release([first.position]))
        await asyncio.sleep(1)
        owner.looks = 0
        await asyncio.sleep(60)
        assert inbox.poll() == []
        assert owner.looks <= 4 * 60_000 // node.config.tuning.clock_recheck_ms
        is_stored.set()
        await releasing
        assert [each.payload for each in await inbox.wait(2)] == [b"x", b"y"]
        await node.stop()

    run_sim(scenario, seed=1)
