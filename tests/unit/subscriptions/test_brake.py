"""Messages that are taken and given back at once, for ever: every way to do that, for every type of subscription.

The broker's work for them is bounded, others go on, and what comes back a few times comes at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest
from pyroaring import BitMap

from broker.model import Position
from broker.policy import SubscriptionPolicy
from broker.subscriptions.brake import AT_ONCE_MAX, SPAN_NS, WAIT_MS, Brake
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.depth import at_depth
from tests.harness import Inbox, Node, Outgoing, small_config

NO_BACK_OFF = SubscriptionPolicy(initial_backoff_ms=0, max_backoff_ms=0)
SPAN_SECONDS = SPAN_NS / 1e9
ROUNDS_MAX = AT_ONCE_MAX + SPAN_NS // (WAIT_MS * 1_000_000)
"""In one span; as one may begin in the middle of what is looked at, twice as many are allowed for the first."""

Return = Callable[[Inbox, list[Position]], Awaitable[bool]]


async def releases(inbox: Inbox, positions: list[Position]) -> bool:
    """Return whether the consumer stays."""
    assert await inbox.release(positions) == []
    return True


async def nacks(inbox: Inbox, positions: list[Position]) -> bool:
    assert await inbox.nack(positions) == []
    return True


async def leaves(inbox: Inbox, positions: list[Position]) -> bool:
    """Drained and half-closed, and back at once."""
    inbox.detach(hands_back=True)
    return False


WAYS = pytest.mark.parametrize("give_back", [releases, nacks, leaves])
TYPES = pytest.mark.parametrize(
    "type_",
    list(SubscriptionType),
)


async def go_round(node: Node, give_back: Return, seconds: float) -> int:
    """Take whatever comes and give it back at once; how many came."""
    end_ms, count = node.clock.now_ms() + seconds * 1000, 0
    inbox: Inbox | None = None
    while node.clock.now_ms() < end_ms:
        if inbox is None:
            inbox = await node.subscribe("orders", "billing")
        await asyncio.sleep(0.002)
        if found := inbox.poll():
            count += len(found)
            if not await give_back(inbox, [each.position for each in found]):
                inbox = None
    if inbox is not None:
        inbox.detach(hands_back=True)
    return count


def run(scenario: Callable[[Node], Coroutine[None, None, None]]) -> None:
    async def whole(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config()).open()
        await scenario(node)
        await node.stop()

    run_sim(whole, 1)


@pytest.mark.slow
@TYPES
@WAYS
def test_what_goes_round_is_slowed_down_and_comes_to_who_works(give_back: Return, type_: int) -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", "billing", type_=type_, policy=NO_BACK_OFF)
        positions = await node.produce("orders", [Outgoing(b"%d" % n, key="k") for n in range(5)])
        lsn = node.broker.journal.next_lsn
        spans = at_depth(change=1, deep=6)
        count = await go_round(node, give_back, spans * SPAN_SECONDS)
        assert AT_ONCE_MAX * len(positions) < count <= (spans + 1) * ROUNDS_MAX * len(positions)
        assert node.broker.journal.next_lsn - lsn <= 2 * (spans + 1) * ROUNDS_MAX
        inbox = await node.subscribe("orders", "billing")
        found = await inbox.wait(len(positions), seconds=2)
        assert {each.position for each in found} == set(positions)
        if give_back is not nacks:
            assert {each.attempt for each in found} == {1}
        await inbox.ack(positions)

    run(scenario)


@TYPES
def test_what_each_of_ten_workers_hands_back_in_turn_never_waits_and_keeps_its_order(type_: int) -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", "billing", type_=type_)
        positions = await node.produce("orders", [Outgoing(b"%d" % n, key="k") for n in range(5)])
        for _ in range(AT_ONCE_MAX + 1):
            inbox = await node.subscribe("orders", "billing")
            assert [each.position for each in await inbox.wait(5, seconds=0.1)] == positions
            inbox.detach(hands_back=True)

    run(scenario)


def test_it_waits_for_a_second_and_after_the_span_not_at_all() -> None:
    brake = Brake()
    few, many = {1: BitMap([3, 5])}, {1: BitMap([3, 4, 5]), 2: BitMap([7])}
    now_ns = 5 * SPAN_NS
    for _ in range(AT_ONCE_MAX):
        assert list(brake.waits(few, now_ns)) == [(0, few)]
    now_ns += SPAN_NS - 1
    fresh = {1: BitMap([4]), 2: BitMap([7])}
    assert list(brake.waits(many, now_ns)) == [(0, fresh), (WAIT_MS, few)]
    assert list(brake.waits(few, now_ns)) == [(WAIT_MS, few)]
    assert list(brake.waits(many, now_ns + 1)) == [(0, many)]
