"""Lists of what is owed, on virtual time and whatever happened before: they hold what the counts say, once each."""

from __future__ import annotations

import asyncio
import random

import pytest

from broker.model import Position
from broker.policy import SubscriptionPolicy
from broker.subscriptions.entry_states import IN_COLUMNS, State
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import control, owed_list
from broker.topics.owed_list import LISTED, OwedList, OwedMessage, OwedState
from broker.topics.schedule_values import Cancel, DueRange
from broker.topics.topic import Topic
from tests.depth import at_depth
from tests.harness import EARLIEST, Inbox, Node, Outgoing, small_config


async def listed(topic: Topic, name: str, count: int, *states: OwedState) -> list[OwedMessage]:
    """All pages of a list."""
    found: list[OwedMessage] = []
    after: Position | None = Position(0, 0)
    while after is not None:
        page = await OwedList(topic, topic.subscription(name), states).page(after, count, 1 << 20)
        assert len(page.messages) <= count
        found += page.messages
        after = page.last
    return found


def moment_of(topic: Topic, subscription: Subscription) -> tuple[object, ...]:
    """All that tells whether anything happened."""
    subscription.consumers.expire_leases()
    counters, states = subscription.counters, subscription.states
    back = counters.lease_expired_messages, counters.nacked_messages, counters.delivered_messages
    waiting = states.redelivery.count_after(subscription.clock.now_ms())
    return topic.applied_lsn, back, waiting, *(states.count(state) for state in IN_COLUMNS), topic.frontier_ms


async def check(topic: Topic, name: str, count: int) -> bool:
    """Compare; False if something happened while the lists were read."""
    subscription = topic.subscription(name)
    await topic.counts.wait_exact(60.0)
    before, now_ms = moment_of(topic, subscription), subscription.clock.now_ms()
    both = await listed(topic, name, count, *LISTED)
    by_state = {state: await listed(topic, name, count, state) for state in LISTED}
    if before != moment_of(topic, subscription):
        return False
    assert [each.position for each in both] == sorted({each.position for each in both})
    for state, each in by_state.items():
        assert [message.position for message in each] == [
            message.position for message in both if message.state is state
        ]
    counts = topic.subscription_counts(subscription)
    assert len(by_state[OwedState.READY]) == counts.ready
    assert len(by_state[OwedState.LEASED]) == counts.leased
    assert len(by_state[OwedState.RETRYING]) == subscription.states.redelivery.count_after(now_ms)
    for message in both:
        is_leased = subscription.states.state_of(message.position) is State.LEASED
        assert (message.state is OwedState.LEASED) == is_leased == bool(message.consumer_name)
        assert (message.lease_end_ms > now_ms) == is_leased
        assert (message.next_attempt_ms > now_ms) == (message.state is OwedState.RETRYING)
        assert message.attempts == subscription.attempts.count(message.position)
        assert message.deliver_at_ms <= now_ms or not subscription.honors_delay
    return True


async def act(node: Node, inbox: Inbox, rng: random.Random) -> None:
    """One of the things that change what is owed."""
    topic, held = inbox.topic, inbox.received
    inbox.poll()
    some = [held.pop(rng.randrange(len(held))).position for _ in range(min(len(held), rng.randint(1, 6)))]
    match rng.choice(["produce", "produce", "ack", "nack", "nack", "release", "wait", "cancel", "seek"]):
        case "produce":
            after = rng.choice([0, 0, 500, 5_000, 100_000])
            payload = rng.choice([b"x", b""])
            await node.produce("t", [Outgoing(payload, deliver_after_ms=after)] * rng.randint(1, 12))
        case "ack":
            await inbox.ack(some)
        case "nack":
            await inbox.nack(some, rng.choice([0, 1, 3_000, 50_000]), "no stock")
        case "release":
            await inbox.release(some)
        case "wait":
            await asyncio.sleep(rng.choice([0.1, 2, 40]))
        case "cancel":
            waiting = await topic.schedule.page(DueRange(), "", None, 3)
            await topic.schedule.change(
                [each.position for each in waiting.scheduled], Cancel(), dry_run=False
            )
        case _ if rng.random() < 0.2:
            await control.skip_all(topic, inbox.subscription)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(at_depth(change=1, deep=40)))
@pytest.mark.parametrize(
    "type_", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED, SubscriptionType.EXCLUSIVE]
)
def test_lists_hold_what_the_counts_say(seed: int, type_: int, monkeypatch: pytest.MonkeyPatch):
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        rng, checks = random.Random(seed), list[bool]()
        node = Node(MemVfs(), clock, small_config()).open()
        policy = SubscriptionPolicy(initial_backoff_ms=1_000, max_delivery_attempts=0)
        subscription = await node.create_subscription("t", "s", type_=type_, position=EARLIEST, policy=policy)
        inbox = node.attach(node.topic("t"), subscription, permits=rng.choice([5, 1_000]), lease_ms=20_000)
        for step in range(60):
            await act(node, inbox, rng)
            if step % 4 == 0:
                await asyncio.sleep(0.01)
                monkeypatch.setattr(owed_list, "_STEP", rng.choice([3, 16, 1 << 14]))
                monkeypatch.setattr(owed_list, "LOOKED_MAX", rng.choice([3, 50, 1 << 18]))
                checks.append(await check(inbox.topic, "s", rng.choice([1, 4, 1_000])))
            if rng.random() < 0.04:
                inbox.detach()
                inbox = node.attach(node.topic("t"), subscription, lease_ms=20_000)
        assert sum(checks) > len(checks) / 2
        await node.stop()

    run_sim(scenario, seed=seed)
