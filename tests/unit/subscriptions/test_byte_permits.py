"""Permits in bytes: a message larger than what is left goes to a consumer that holds nothing, however that came about."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from broker.policy import SubscriptionPolicy
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import Delivered, Inbox, Node, Outgoing, small_config

SMALL, LARGE = b"s" * 60, b"l" * 500
LEASE_MS = 30_000


async def _acknowledge(inbox: Inbox, held: Delivered) -> None:
    await inbox.ack([held.position])


async def _give_back(inbox: Inbox, held: Delivered) -> None:
    await inbox.nack([held.position], after_ms=LEASE_MS)


async def _let_its_lease_end(inbox: Inbox, held: Delivered) -> None:
    await asyncio.sleep(LEASE_MS / 1000)


WAYS = {
    "acknowledged": (_acknowledge, 0, {LARGE}),
    "given back": (_give_back, 0, {LARGE}),
    "given up when its lease ends": (_let_its_lease_end, 1, {LARGE}),
    "back when its lease ends": (_let_its_lease_end, 0, {LARGE, SMALL}),
}
"""Ways in which the one message that is held goes, how often it may be delivered, and what may come then."""


@pytest.mark.parametrize(
    "type_", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED], ids=["shared", "key_shared"]
)
@pytest.mark.parametrize(("let_go", "attempts_max", "expected"), WAYS.values(), ids=WAYS)
def test_who_waits_for_bytes_is_given_a_large_message_once_it_holds_nothing(
    let_go: Callable[[Inbox, Delivered], Awaitable[None]], attempts_max: int, expected: set[bytes], type_: int
):
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        # Nothing but the event itself may wake the dispatcher.
        node = Node(MemVfs(), clock, small_config(clock_recheck_ms=60_000, lease_ms=LEASE_MS)).open()
        policy = SubscriptionPolicy(max_delivery_attempts=attempts_max or None)
        subscription = await node.create_subscription("t", "s", type_=type_, policy=policy)
        inbox = node.attach(node.topic("t"), subscription)
        inbox.consumer.grant(0, len(SMALL) + 50)
        await node.produce("t", [Outgoing(SMALL, key="k")])
        await asyncio.sleep(0.1)
        (held,) = _taken(inbox)
        await node.produce("t", [Outgoing(LARGE, key="k")])
        await asyncio.sleep(0.1)
        assert not _taken(inbox), "it holds something, and has not as many bytes"
        await let_go(inbox, held)
        await asyncio.sleep(0.1)
        (came,) = _taken(inbox)
        assert came.payload in expected
        assert node.failures == []

    run_sim(scenario, seed=1)


def _taken(inbox: Inbox) -> list[Delivered]:
    """Return what arrived, without the permits that `Inbox.poll` grants for it."""
    inbox.attached = False
    try:
        return inbox.poll()
    finally:
        inbox.attached = True
