"""KEY_SHARED on a whole broker on virtual time: what is parked, for how long, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from broker.delayed.due_rows import DueRows
from broker.model import Position
from broker.subscriptions import key_dispatch
from broker.subscriptions.entry_states import State
from broker.subscriptions.handout import HandOut, Read, Taken
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import Delivered, Inbox, Node, Outgoing, small_config

KEYS = [f"key-{i}" for i in range(16)]
SECONDS = 5.0
"""Virtual: longer than anything here takes that is not stuck."""


class World:
    """A broker with one KEY_SHARED subscription, and what was produced."""

    def __init__(self, clock: SimClock, **settings: object) -> None:
        config = small_config(ledger_max_entries=1000, clock_recheck_ms=60_000, **settings)
        self.node = Node(MemVfs(), clock, config).open()
        self.by_key: dict[str, list[bytes]] = defaultdict(list)
        self.key_of: dict[bytes, str] = {}

    async def start(self) -> Subscription:
        self.subscription = await self.node.create_subscription("t", "s", type_=SubscriptionType.KEY_SHARED)
        return self.subscription

    async def produce(self, keys: list[str], *, bytes_: int = 0, **fields: Any) -> None:
        messages = []
        for key in keys:
            payload = b"%d:" % len(self.key_of) + b"x" * bytes_
            self.by_key[key].append(payload)
            self.key_of[payload] = key
            messages.append(Outgoing(payload, key=key, **fields))
        await self.node.produce("t", messages)

    def attach(self, **options: int) -> Inbox:
        return self.node.attach(self.node.topic("t"), self.subscription, **options)

    def keys_in(self, inbox: Inbox) -> set[str]:
        return {self.key_of[each.payload] for each in inbox.received}

    def check_order(self, received: list[Delivered]) -> None:
        """All of some keys, in order."""
        for key in {self.key_of[each.payload] for each in received}:
            assert [each.payload for each in received if self.key_of[each.payload] == key] == self.by_key[key]


def run(scenario, **settings):
    async def with_world(loop: SimLoop, clock: SimClock) -> None:
        world = World(clock, **settings)
        await world.start()
        await scenario(world, clock)
        assert world.node.failures == []

    run_sim(with_world, seed=1)


def test_parked_messages_are_bounded_and_a_slow_consumer_holds_up_all_in_the_end(monkeypatch):
    monkeypatch.setattr(key_dispatch, "PARKED_MAX", 20)

    async def scenario(world: World, clock: SimClock) -> None:
        fast, stuck = world.attach(permits=1000), world.attach(permits=0)
        await world.produce(KEYS * 20)
        await asyncio.sleep(SECONDS)
        got = len(fast.poll())
        assert 0 < got < 300
        await asyncio.sleep(SECONDS)
        assert not fast.poll(), "no more is taken from the log"
        stuck.consumer.grant(1000, 0)
        world.subscription.work.set()
        await asyncio.sleep(SECONDS)
        fast.poll()
        stuck.poll()
        assert len(fast.received) + len(stuck.received) == 320
        assert world.keys_in(fast).isdisjoint(world.keys_in(stuck))
        world.check_order(fast.received)
        world.check_order(stuck.received)

    run(scenario, read_batch_entries=5)


def test_below_the_bound_nobody_waits_for_a_consumer_without_permits():
    async def scenario(world: World, clock: SimClock) -> None:
        fast, stuck = world.attach(permits=1000), world.attach(permits=0)
        await world.produce(KEYS * 20, deliver_after_ms=500)
        await world.produce(KEYS * 20)
        await asyncio.sleep(SECONDS)
        fast.poll()
        assert len(fast.received) == 40 * len(world.keys_in(fast))
        stuck.consumer.grant(1000, 0)
        world.subscription.work.set()
        assert len(await stuck.wait(640 - len(fast.received), seconds=SECONDS)) == 640 - len(fast.received)
        assert len({each.position for each in [*fast.received, *stuck.received]}) == 640

    run(scenario)


def test_permits_that_come_while_new_messages_are_read_do_not_let_them_overtake(monkeypatch):
    read = HandOut.read

    async def scenario(world: World, clock: SimClock) -> None:
        fast, stuck = world.attach(permits=1000), world.attach(permits=0)
        await world.produce(KEYS)
        await asyncio.sleep(0.2)

        async def read_and_grant(self: HandOut, taken: Taken) -> Read:
            stuck.consumer.grant(1000, 0)
            return await read(self, taken)

        monkeypatch.setattr(HandOut, "read", read_and_grant)
        await world.produce(KEYS)
        await asyncio.sleep(0.2)
        assert len(fast.poll()) + len(stuck.poll()) == 2 * len(KEYS)
        assert stuck.received
        world.check_order(stuck.received)

    run(scenario)


@pytest.mark.slow
def test_one_permit_at_a_time_gets_everything_in_order():
    async def scenario(world: World, clock: SimClock) -> None:
        inboxes = [world.attach(permits=1) for _ in range(3)]
        await world.produce(KEYS * 5)
        for _ in range(80):
            await asyncio.sleep(0.05)
            for inbox in inboxes:
                await inbox.ack(each.position for each in inbox.poll())
        assert sum(len(inbox.received) for inbox in inboxes) == 80
        for inbox in inboxes:
            world.check_order(inbox.received)

    run(scenario)


def test_an_overflow_of_the_replay_queue_loses_and_doubles_nothing_that_was_parked():
    async def scenario(world: World, clock: SimClock) -> None:
        fast, stuck = world.attach(permits=1000), world.attach(permits=0)
        for delay_ms in (100, 200, 300, 400):
            await world.produce(KEYS * 4, deliver_after_ms=delay_ms)
        clears = world.subscription.replay.clears
        await asyncio.sleep(SECONDS)
        assert world.subscription.replay.clears > clears
        stuck.consumer.grant(1000, 0)
        world.subscription.work.set()
        await asyncio.sleep(SECONDS)
        received = [*fast.poll(), *stuck.poll()]
        assert len(received) == len({each.position for each in received}) == 4 * 4 * len(KEYS)
        assert {each.attempt for each in received} == {1}
        assert world.keys_in(fast).isdisjoint(world.keys_in(stuck))

    run(scenario, replay_entries_max=30, due_batch_entries=64)


def test_what_comes_back_by_the_end_of_its_lease_goes_before_what_is_new():
    async def scenario(world: World, clock: SimClock) -> None:
        inbox = world.attach(permits=2, lease_ms=300)
        await world.produce(["k"] * 6)
        await asyncio.sleep(0.2)
        assert [each.payload for each in inbox.poll()] == world.by_key["k"][:2]
        inbox.consumer.permits = 0
        await asyncio.sleep(0.2)
        inbox.consumer.grant(6, 0)
        world.subscription.work.set()
        await asyncio.sleep(0.2)
        again = inbox.poll()
        assert [each.payload for each in again] == world.by_key["k"]
        assert [each.attempt for each in again] == [2, 2, 1, 1, 1, 1]

    run(scenario)


def test_what_came_back_and_is_parked_survives_the_last_consumer_and_keeps_its_place():
    async def scenario(world: World, clock: SimClock) -> None:
        first = world.attach(permits=3)
        await world.produce(["k"] * 5)
        await asyncio.sleep(0.2)
        assert len(first.poll()) == 3
        second = world.attach(permits=0)
        third = world.attach(permits=1000)
        first.detach()
        await world.produce([""])
        await asyncio.sleep(0.2)
        third_has_the_key = len(third.poll()) > 1
        second.detach()
        third.detach()
        last = world.attach(permits=1000)
        await asyncio.sleep(0.2)
        received = [each for each in last.poll() if world.key_of[each.payload] == "k"]
        assert [each.payload for each in received] == world.by_key["k"]
        assert [each.attempt for each in received] == (
            [3, 3, 3, 2, 2] if third_has_the_key else [2, 2, 2, 1, 1]
        )

    run(scenario)


def test_what_comes_back_over_a_slow_disk_goes_before_what_is_new_also_to_the_next_consumer_but_one():
    """Each consumer leaves as the last one, with the dispatcher, while the record of what came back is on its way."""

    async def scenario(world: World, clock: SimClock) -> None:
        first = world.attach(permits=1)
        await world.produce(["k"] * 2)
        assert [each.payload for each in await first.wait(1)] == world.by_key["k"][:1]
        is_stored = world.node.hold_up_groups()
        first.detach()
        second = world.attach(permits=0)
        await asyncio.sleep(0.2)
        second.detach()
        third = world.attach()
        await asyncio.sleep(0.2)
        assert not third.poll(), "the first of the key is not back yet"
        is_stored.set()
        received = await third.wait(2)
        assert [(each.payload, each.attempt) for each in received] == [
            (world.by_key["k"][0], 2),
            (world.by_key["k"][1], 1),
        ]

    run(scenario)


def test_an_acknowledgement_of_what_is_parked_takes_it_out():
    async def scenario(world: World, clock: SimClock) -> None:
        first = world.attach(permits=3)
        await world.produce(["k"] * 5)
        await asyncio.sleep(0.2)
        held = first.poll()
        second = world.attach(permits=0)
        first.detach()
        other = world.attach(permits=0)
        await asyncio.sleep(0.2)
        assert await second.ack([held[1].position]) == []
        for inbox in (second, other):
            inbox.consumer.grant(1000, 0)
        world.subscription.work.set()
        await asyncio.sleep(0.2)
        received = [*second.poll(), *other.poll()]
        expected = [payload for payload in world.by_key["k"] if payload != held[1].payload]
        assert [each.payload for each in received] == expected
        assert not world.subscription.states.column(State.PARKED)

    run(scenario)


def test_messages_that_fill_frames_and_byte_permits_keep_their_order():
    async def scenario(world: World, clock: SimClock) -> None:
        one, two = world.attach(permits=1000), world.attach(permits=1000)
        one.consumer.grant(0, 2_500)
        await world.produce(KEYS * 3, bytes_=700)
        await world.produce(KEYS * 3, bytes_=700, deliver_after_ms=1)
        for _ in range(120):
            await asyncio.sleep(0.05)
            for inbox in (one, two):
                found = inbox.poll()
                await inbox.ack(each.position for each in found)
                if inbox is one and found:
                    one.consumer.grant(0, sum(len(each.payload) for each in found) + 50)
                    world.subscription.work.set()
        received = [*one.received, *two.received]
        assert len(received) == len({each.position for each in received}) == 96
        for inbox in (one, two):
            for key in world.keys_in(inbox):
                mine = [each.payload for each in inbox.received if world.key_of[each.payload] == key]
                assert sorted(mine) == sorted(world.by_key[key])
        assert world.keys_in(one).isdisjoint(world.keys_in(two))

    run(scenario, frame_bytes_max=3_000)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["detach", "drain"])
def test_consumers_that_come_and_go_starve_nobody(how: str):
    async def scenario(world: World, clock: SimClock) -> None:
        steady = world.attach(permits=50)
        acked: set[Position] = set()

        async def ack(inbox: Inbox) -> int:
            found = [each.position for each in inbox.poll()]
            await inbox.ack(found)
            acked.update(found)
            return len(found)

        for _ in range(30):
            passing = world.attach(permits=5)
            await world.produce(KEYS)
            await asyncio.sleep(0.02)
            await ack(steady)
            await ack(passing)
            if how == "drain":
                passing.consumer.draining = True
                world.subscription.work.set()
                await asyncio.sleep(0.02)
                await ack(passing)
            passing.detach()
        await asyncio.sleep(SECONDS)
        while await ack(steady):
            await asyncio.sleep(SECONDS)
        assert len(acked) == 30 * len(KEYS)
        assert world.subscription.unsettled_count() == 0

    run(scenario)


# -- time that passes, or steps, while messages come back --------------------------------------------------------------


def before_the_next_read(monkeypatch, happens: Callable[[], Awaitable[None]]) -> None:
    """Let something happen before the log is read once."""
    read = HandOut.read

    async def read_later(self: HandOut, taken: Taken) -> Read:
        monkeypatch.setattr(HandOut, "read", read)
        await happens()
        return await read(self, taken)

    monkeypatch.setattr(HandOut, "read", read_later)


@pytest.mark.parametrize("source", ["log", "replay queue", "parked"])
def test_a_lease_that_ends_while_the_log_is_read_is_noticed_before_anything_new_goes(
    source: str, monkeypatch
):
    async def scenario(world: World, clock: SimClock) -> None:
        inbox = world.attach(permits=1, lease_ms=300)
        if source == "parked":
            world.attach(permits=1000)  # or nothing more would be taken
        await world.produce(KEYS * 2 if source == "parked" else ["k"])
        await asyncio.sleep(0.1)
        (held,) = inbox.poll()
        key = world.key_of[held.payload]
        before_the_next_read(monkeypatch, lambda: asyncio.sleep(0.4))
        inbox.consumer.grant(1000, 0)
        world.subscription.work.set()
        if source != "parked":
            await world.produce([key], deliver_after_ms=1 if source == "replay queue" else 0)
        await asyncio.sleep(0.6)
        received = [each for each in inbox.poll() if world.key_of[each.payload] == key]
        assert [(each.payload, each.attempt) for each in received[:2]] == [
            (world.by_key[key][0], 2),
            (world.by_key[key][1], 1),
        ]

    run(scenario)


def test_what_is_early_again_when_it_comes_back_holds_up_nothing_of_its_key():
    async def scenario(world: World, clock: SimClock) -> None:
        first = world.attach()
        await world.produce(["k"], deliver_after_ms=100)
        assert len(await first.wait(1, seconds=SECONDS)) == 1
        clock.step(-3_600_000)
        second = world.attach()
        first.detach()
        await asyncio.sleep(0.2)
        await world.produce(["k"])
        assert [each.payload for each in await second.wait(1, seconds=SECONDS)] == world.by_key["k"][1:]
        clock.step(3_600_000)
        world.subscription.work.set()
        again = await second.wait(1, seconds=SECONDS)
        assert [(each.payload, each.attempt) for each in again] == [(world.by_key["k"][0], 2)]

    run(scenario)


def test_what_was_never_sent_and_waited_for_its_time_goes_after_what_was_lost(monkeypatch):
    async def scenario(world: World, clock: SimClock) -> None:
        first = world.attach()
        await world.produce(["k"], deliver_after_ms=1_000)
        await world.produce(["k"])
        delayed, immediate = world.by_key["k"]
        assert [each.payload for each in await first.wait(1, seconds=0.5)] == [immediate]

        async def step_back() -> None:
            clock.step(-500)

        before_the_next_read(monkeypatch, step_back)
        await asyncio.sleep(1)
        assert world.subscription.states.redelivery.queued, "it was found to be early"
        first.detach()
        await asyncio.sleep(1)
        second = world.attach()
        received = await second.wait(2, seconds=SECONDS)
        assert [(each.payload, each.attempt) for each in received] == [(immediate, 2), (delayed, 1)]

    run(scenario)


def test_what_came_back_and_does_not_fit_yet_is_not_overtaken_by_what_came_back_after_it():
    async def scenario(world: World, clock: SimClock) -> None:
        first = world.attach()
        for bytes_ in (0, 2_000, 0):
            await world.produce(["k"], bytes_=bytes_)
        assert len(await first.wait(3, seconds=SECONDS)) == 3
        first.detach()
        await asyncio.sleep(0.1)
        second = world.attach(permits=0)
        second.consumer.grant(1000, 300)
        world.subscription.work.set()
        for _ in range(3):
            held = await second.wait(1, seconds=SECONDS)
            second.consumer.grant(0, 300)  # the second one goes when nothing else is held, and only then
            await asyncio.sleep(0.1)
            await second.ack(each.position for each in held)
        world.check_order(second.received)

    run(scenario, read_batch_entries=1)


def test_what_catch_up_found_and_the_index_gives_too_is_sent_once():
    async def scenario(world: World, clock: SimClock) -> None:
        await world.produce(KEYS, deliver_after_ms=100)
        await asyncio.sleep(0.2)
        fast, stuck = world.attach(permits=1000), world.attach(permits=0)
        await asyncio.sleep(0.2)
        positions = [Position(1, at) for at in range(len(KEYS))]
        times = await world.subscription.log.times_of(1, np.arange(len(KEYS), dtype=np.uint32))
        ledger_ids, entry_ids = np.array(positions, dtype=np.int64).T
        world.subscription.on_due(DueRows(times, ledger_ids, entry_ids.astype(np.uint32)), int(times[0]))
        await asyncio.sleep(0.2)
        stuck.consumer.grant(1000, 0)
        world.subscription.work.set()
        await asyncio.sleep(0.2)
        assert stuck.consumer.closed_because is None
        assert sorted(each.position for each in [*fast.poll(), *stuck.poll()]) == positions
        assert stuck.received

    run(scenario)
