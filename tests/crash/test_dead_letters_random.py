"""Random histories of messages that are given up, requeued, purged and acknowledged, by lives that end anyhow.

Whatever happens, a message that was produced is in one place for each subscription: owed, or a dead letter of its own;
and in none once it was acknowledged or purged. Nothing of one subscription reaches another.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from broker.model import Position
from broker.policy import SubscriptionPolicy
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.depth import at_depth, sampled
from tests.harness import Inbox, Node, Outgoing, entries_of, payload_of, small_config
from tests.unit.topics.letters import held, nack_dead, owed, positions_in, stored, subscription_of

T = TypeVar("T")

STEPS = 100
NAMES = ("a", "b")
CONFIG = small_config(reclaim_interval_ms=2_000, ledger_max_entries=4)


@dataclass(slots=True)
class Known:
    """Facts of one message on one subscription that must hold."""

    may_be_there: bool = True
    must_be_there: bool = False
    history: list[str] = field(default_factory=list)


def begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A call that perhaps nobody waits for, and that fails when the life ends."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class Walk:
    """Random calls, and what they promised."""

    def __init__(self, node: Node, rng: random.Random) -> None:
        self.node = node
        self.rng = rng
        self.known: dict[tuple[str, bytes], Known] = {}
        self.inboxes: dict[str, list[Inbox]] = {name: [] for name in NAMES}
        self.made = 0
        self.count: Counter[str] = Counter()

    async def run(self) -> None:
        rng = self.rng
        shared = rng.random() < 0.5
        for name in NAMES:
            policy = SubscriptionPolicy(
                max_delivery_attempts=rng.choice((0, 1, 2)),
                initial_backoff_ms=rng.choice((0, 300)),
                dead_letter_topic="dead" if shared else None,
            )
            type_ = rng.choice(
                (
                    SubscriptionType.SHARED,
                    SubscriptionType.SHARED,
                    SubscriptionType.KEY_SHARED,
                    SubscriptionType.FAILOVER,
                )
            )
            await self.node.create_subscription("orders", name, type_=type_, policy=policy)
        steps = {
            self.produce: 5,
            self.ack: 4,
            self.nack: 3,
            self.give_up: 3,
            self.requeue: 2,
            self.purge: 1,
            self.attach: 4,
            self.detach: 2,
            self.wait: 4,
            self.end_life: 1,
        }
        for _ in range(STEPS):
            step = rng.choices(list(steps), list(steps.values()))[0]
            self.count[step.__name__] += 1
            await step()
        await self.end_life()

    async def produce(self) -> None:
        messages = []
        for _ in range(self.rng.randint(1, 4)):
            self.made += 1
            delay_ms = self.rng.choice((0, 0, 500))
            payload = b"%d" % self.made
            messages.append(Outgoing(payload, deliver_after_ms=delay_ms, key=self.rng.choice("xyz")))
        for each in messages:
            for name in NAMES:
                self.known[name, each.payload] = Known()
        if self.rng.random() < 0.2:
            await self.node.submit("orders", messages)  # perhaps never answered
            return
        await self.node.produce("orders", messages)
        for each in messages:
            for name in NAMES:
                self.known[name, each.payload].must_be_there = True

    async def ack(self) -> None:
        if (chosen := self.choose()) is None:
            return
        name, inbox, mine = chosen
        for payload in mine:
            self.note(name, payload, "ack asked").must_be_there = False
        waiting = begun(inbox.ack(mine.values()))
        if self.rng.random() < 0.2:
            await asyncio.sleep(0)
            return  # perhaps never answered
        assert await waiting == []
        for payload in mine:
            self.note(name, payload, "acked").may_be_there = False

    async def nack(self) -> None:
        if (chosen := self.choose()) is not None:
            name, inbox, mine = chosen
            for payload in mine:
                self.note(name, payload, "nack")
            assert await inbox.nack(mine.values(), self.rng.choice((0, 0, 400))) == []

    async def give_up(self) -> None:
        if (chosen := self.choose()) is not None:
            name, inbox, mine = chosen
            for payload in mine:
                self.note(name, payload, "dead letter")
            waiting = begun(nack_dead(inbox, mine.values()))
            await asyncio.sleep(0)
            if self.rng.random() < 0.8:
                await waiting

    async def requeue(self) -> None:
        name = self.rng.choice(NAMES)
        ids = [position for position in held(self.node, name=name) if self.rng.random() < 0.7]
        work = self.node.broker.dead_letters.requeue(
            subscription_of(self.node, name=name), entries_of(ids), self.rng.choice((0, 600))
        )
        waiting = begun(work)
        await asyncio.sleep(0)
        if self.rng.random() < 0.8:
            await waiting
            await asyncio.sleep(1)  # so that many are delivered, and some are acknowledged
            await self.ack()

    async def purge(self) -> None:
        name = self.rng.choice(NAMES)
        office, subscription = self.node.broker.dead_letters, subscription_of(self.node, name=name)
        ids = [position for position in held(self.node, name=name) if self.rng.random() < 0.3]
        payloads = await self.letters(name)
        for position in ids:
            self.note(name, payloads[position], "purge asked").must_be_there = False
        for position in positions_in(await office.purge(subscription, entries_of(ids))):
            self.note(name, payloads[position], "purged").may_be_there = False

    async def attach(self) -> None:
        name = self.rng.choice(NAMES)
        if len(self.inboxes[name]) < 3:
            permits = self.rng.choice((1, 3, 100))
            self.inboxes[name].append(await self.node.subscribe("orders", name, permits=permits))

    async def detach(self) -> None:
        name = self.rng.choice(NAMES)
        if self.inboxes[name]:
            self.inboxes[name].pop(self.rng.randrange(len(self.inboxes[name]))).detach()

    async def wait(self) -> None:
        await asyncio.sleep(self.rng.choice((0, 0.01, 1, 3)))
        if self.rng.random() < 0.2:
            await self.node.checkpoint()

    async def end_life(self) -> None:
        self.inboxes = {name: [] for name in NAMES}
        match self.rng.randrange(3):
            case 0:
                await self.node.stop()
                self.node = Node(self.node.vfs, self.node.clock, self.node.config)
            case 1:
                self.node.abandon()
                self.node.broker._lock.close()  # type: ignore[union-attr]
                await asyncio.sleep(1)
                self.node = Node(self.node.vfs, self.node.clock, self.node.config)
            case 2:
                policy = self.rng.choice([CrashPolicy.LOSE_UNSYNCED, CrashPolicy.MIXED, CrashPolicy.TORN])
                self.node = self.node.crash(policy, self.rng)
        self.node.open()
        await asyncio.sleep(0.1)
        await self.check()

    async def check(self) -> None:
        for name in NAMES:
            places = Counter(await owed(self.node, "orders", name))
            places.update((await self.letters(name)).values())
            for (subscription, payload), known in self.known.items():
                if subscription == name:
                    found = places[payload]
                    told = f"{payload!r} of {name} is in {found} places: {known}"
                    assert found <= known.may_be_there, told
                    assert found >= known.must_be_there, told
        assert self.node.failures == []

    async def letters(self, name: str) -> dict[Position, bytes]:
        """The dead letters of a subscription: their payloads by their ids."""
        found: dict[Position, bytes] = {}
        for place in self.node.broker.dead_letters.places(subscription_of(self.node, name=name)):
            frames = await stored(self.node, place.topic.name)
            found |= {position: payload_of(frames[position]) for position in positions_in(place.entries)}
        return found

    def choose(self) -> tuple[str, Inbox, dict[bytes, Position]] | None:
        """Some of what a consumer holds."""
        free = [(name, inbox) for name, inboxes in self.inboxes.items() for inbox in inboxes]
        if not free:
            return None
        name, inbox = self.rng.choice(free)
        inbox.poll()
        holds = set(positions_in(inbox.subscription.states.leases.held(inbox.consumer.consumer_id)))
        mine = {each.payload: each.position for each in inbox.received if each.position in holds}
        some = {payload: position for payload, position in mine.items() if self.rng.random() < 0.6}
        return (name, inbox, some) if some else None

    def note(self, name: str, payload: bytes, what: str) -> Known:
        known = self.known[name, payload]
        known.history.append(what)
        return known


def walk(seed: int) -> Counter[str]:
    async def scenario(loop: SimLoop, clock: SimClock) -> Counter[str]:
        rng = loop.rng("walk")
        story = Walk(Node(MemVfs(), clock, CONFIG, rng=rng).open(), rng)
        await story.run()
        histories = [" ".join(known.history) for known in story.known.values()]
        story.count["given up"] = sum("dead letter" in each for each in histories)
        story.count["acked again"] = sum("dead letter ack" in each for each in histories)
        story.count["purged"] = sum("purged" in each for each in histories)
        story.node.abandon()
        return story.count

    return run_sim(scenario, seed)


@pytest.mark.parametrize("seed", list(sampled(range(25), at_depth(change=6, deep=1))))
def test_a_random_history_keeps_every_message_in_one_place(seed):
    walk(seed)


def test_the_histories_are_rich_enough_to_mean_something():
    total: Counter[str] = sum((walk(seed) for seed in range(100, 110)), Counter())
    assert total["given up"] > 50
    assert total["acked again"] > 2, "messages that were requeued are acknowledged"
    assert total["purged"] > 5
    assert total["end_life"] > 15
