"""Seek, pause and settings on virtual time: what is on its way while they are, and where a time lies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from broker.errors import NotFound
from broker.model import START, Position
from broker.policy import SubscriptionPolicy
from broker.subscriptions.consumers import Consumers
from broker.subscriptions.entry_states import PROMISED
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import Latency, SimLoop, run_sim
from broker.topics import control
from tests.depth import at_depth, every_pair
from tests.harness import EARLIEST, Inbox, Node, Outgoing, small_config

Scenario = Callable[[Node, SimClock], Coroutine[Any, Any, None]]
TYPES = pytest.mark.parametrize(
    "type_",
    list(SubscriptionType),
)


def run(scenario: Scenario, seed: int = 1, **config: object) -> None:
    async def whole(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config(**config)).open()
        await scenario(node, clock)
        assert node.failures == []

    run_sim(whole, seed)


async def all_of(inbox: Inbox, seconds: float = 5.0) -> list[Position]:
    """Return what comes within a while."""
    await asyncio.sleep(seconds)
    return [each.position for each in inbox.poll()]


# -- positions ---------------------------------------------------------------------------------------------------------


def test_a_time_is_found_in_any_ledger_and_between_them():
    async def scenario(node: Node, clock: SimClock) -> None:
        await node.create_subscription("t", "s", position=EARLIEST)
        topic = node.topic("t")
        assert await control.position_of_time(topic, 5) == START
        stored: list[tuple[int, Position]] = []
        for size in (3, 1, 3, 3, 2, 8, 1):
            now_ms = clock.now_ms()
            stored += [(now_ms, each) for each in await node.produce("t", [Outgoing(b"x")] * size)]
            await asyncio.sleep(0.25)
        await node.checkpoint()
        assert topic.log.ledger_count > 2
        for time_ms in range(stored[0][0] - 50, clock.now_ms() + 50, 50):
            expected = next((each for at_ms, each in stored if at_ms >= time_ms), topic.log.end)
            assert await control.position_of_time(topic, time_ms) == expected

    run(scenario)


def test_ids_are_resolved_to_the_next_message_that_is_there():
    async def scenario(node: Node, _: SimClock) -> None:
        await node.create_subscription("t", "s", position=EARLIEST)
        topic = node.topic("t")
        assert control.position_of_id(topic, Position(9, 9)) == START, "nothing was ever stored"
        first = await node.produce("t", [Outgoing(b"x")] * 8)
        await node.produce("other", [Outgoing(b"x")])
        second = await node.produce("t", [Outgoing(b"x")] * 2)
        assert second[0].ledger_id == first[0].ledger_id + 2
        assert control.position_of_id(topic, first[3]) == first[3]
        for behind in Position(first[0].ledger_id, 8), Position(first[0].ledger_id + 1, 0):
            assert control.position_of_id(topic, behind) == second[0]
        end = Position(second[0].ledger_id, 2)
        assert control.position_of_id(topic, end) == end
        with pytest.raises(NotFound):
            control.position_of_id(topic, Position(second[0].ledger_id, 3))
        on_its_way = node.submit("t", [Outgoing(b"x")] * 2)
        accepted = await on_its_way
        assert control.position_of_id(topic, Position(end.ledger_id, 3)) == Position(end.ledger_id, 3)
        await accepted.durable

    run(scenario)


# -- what is on its way ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "what", "seed"), every_pair(SubscriptionType, ["acks", "nacks", "leaves", "produces"], range(4))
)
def test_what_is_on_its_way_around_a_seek_is_neither_lost_nor_doubled(type_, what, seed):
    """Calls before the seek, in the time that its record takes, and after it; a new consumer comes at once."""

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config()).open()
        subscription = await node.create_subscription("t", "s", type_=type_, position=EARLIEST)
        ids = await node.produce("t", [Outgoing(b"%d" % i, key=str(i)) for i in range(8)])
        topic = node.topic("t")
        old = await node.subscribe("t", "s")
        await old.wait(8)

        async def act(position: Position) -> None:
            match what:
                case "acks":
                    await old.ack([position])
                case "nacks":
                    await old.nack([position], 5)
                case "leaves" if old.attached:
                    old.detach()
                case "produces":
                    ids.extend(await node.produce("t", [Outgoing(b"new")]))

        before = asyncio.gather(*(act(position) for position in ids[:3]))
        seeking = asyncio.ensure_future(control.seek(topic, subscription, ids[2]))
        await asyncio.sleep(0.003)  # its group is on its way to the disk
        on_its_way = set(ids[3:6]) if what in ("acks", "nacks") and not seeking.done() else set()
        during = asyncio.gather(*(act(position) for position in ids[3:6]))
        await before
        await seeking
        assert old.consumer.ended or not old.attached
        new = await node.subscribe("t", "s")
        while on_its_way and not during.done():
            await asyncio.sleep(0.0005)
            assert during.done() or not on_its_way & {each.position for each in new.poll()}, "STATES-1"
        await during
        await asyncio.sleep(5)
        new.poll()
        got = [each.position for each in new.received]
        assert len(got) == len(set(got)), "one consumer holds nothing twice"
        start = ids.index(ids[2])
        settled = {p for p in ids if subscription.cursor.is_settled(p)}
        assert set(ids[start:]) - settled <= set(got)
        assert all(position >= ids[2] for position in got)
        assert subscription.states.count(*PROMISED) == 0
        assert await new.ack(got) == []
        assert subscription.unsettled_count() == 0
        assert subscription.states.leases.count() == 0

    run_with_latency(scenario, seed)


@TYPES
@pytest.mark.parametrize("after_ms", range(0, 24, at_depth(change=6, deep=3)))
def test_a_seek_while_the_dispatcher_reads_hands_out_nothing_from_before(type_, after_ms):
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config(read_batch_entries=2)).open()
        subscription = await node.create_subscription(
            "t", "s", type_=type_, position=EARLIEST, policy=SubscriptionPolicy(honor_delay=True)
        )
        for _ in range(3):
            await node.produce("t", [Outgoing(b"x", deliver_after_ms=300), Outgoing(b"y"), Outgoing(b"z")])
        await node.checkpoint()  # what is read next is on disk
        topic = node.topic("t")
        old = await node.subscribe("t", "s")
        await asyncio.sleep(after_ms / 1000)
        await control.skip_all(topic, subscription)
        sent = len(old.poll())
        new = await node.subscribe("t", "s")
        await asyncio.sleep(1)
        assert old.poll() == [], f"{sent} were sent before"
        assert new.poll() == []
        ids = await node.produce("t", [Outgoing(b"later")])
        assert [each.position for each in await new.wait(1)] == ids

    run_with_latency(scenario)


@TYPES
@pytest.mark.parametrize("after_ms", range(0, 24, 6))
def test_a_pause_while_the_dispatcher_reads_hands_out_nothing_more(type_, after_ms):
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config(read_batch_entries=2)).open()
        subscription = await node.create_subscription("t", "s", type_=type_, position=EARLIEST)
        ids = [p for _ in range(5) for p in await node.produce("t", [Outgoing(b"x")] * 3)]
        await node.checkpoint()
        topic = node.topic("t")
        inbox = await node.subscribe("t", "s")
        await asyncio.sleep(after_ms / 1000)
        await control.pause(topic, subscription, paused=True)
        got = [each.position for each in inbox.poll()]
        assert await all_of(inbox) == []
        await control.pause(topic, subscription, paused=False)
        got += await all_of(inbox)
        assert sorted(got) == ids

    run_with_latency(scenario)


def run_with_latency(
    scenario: Callable[[SimLoop, SimClock], Coroutine[Any, Any, None]], seed: int = 3
) -> None:
    """Every read and write takes a while, so that there is something to come in between."""
    loop = SimLoop(seed, latency=Latency(max_ms=8.0, slow_every=0))
    try:
        loop.run_until_complete(scenario(loop, SimClock(loop)))
    finally:
        loop.cancel_leftovers()
        loop.close()


# -- pause -------------------------------------------------------------------------------------------------------------


def test_a_paused_subscription_with_something_ready_does_not_keep_the_loop_busy(
    monkeypatch: pytest.MonkeyPatch,
):
    async def scenario(node: Node, clock: SimClock) -> None:
        subscription = await node.create_subscription("t", "s", position=EARLIEST)
        (position,) = await node.produce("t", [Outgoing(b"x")])
        inbox = await node.subscribe("t", "s")
        await inbox.wait(1)
        topic = node.topic("t")
        await control.pause(topic, subscription, paused=True)
        await inbox.nack([position], 1)
        steps = 0
        expire = Consumers.expire_leases

        def counted(consumers: Consumers) -> None:
            nonlocal steps
            steps += 1
            expire(consumers)

        monkeypatch.setattr(Consumers, "expire_leases", counted)
        await asyncio.sleep(10)
        assert steps < 100, "only as often as the clock is looked at"
        assert inbox.poll() == []

    run(scenario, clock_recheck_ms=1_000)


def test_an_overflow_of_the_replay_queue_while_paused_loses_nothing():
    async def scenario(node: Node, _: SimClock) -> None:
        subscription = await node.create_subscription("t", "s", position=EARLIEST)
        inbox = await node.subscribe("t", "s")
        topic = node.topic("t")
        await control.pause(topic, subscription, paused=True)
        ids = [
            position
            for i in range(6)
            for position in await node.produce("t", [Outgoing(b"x", deliver_after_ms=50 + i)] * 7)
        ]
        assert await all_of(inbox) == []
        await control.pause(topic, subscription, paused=False)
        assert sorted(await all_of(inbox)) == ids

    run(scenario, replay_entries_max=5, due_batch_entries=3)
