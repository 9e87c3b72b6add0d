"""Limits of what the judges of the simulation know: what excuses a broker, and what does not. Each was a seed once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.model import Position
from broker.policy import SubscriptionPolicy
from broker.testing.sim_loop import Latency
from tests.harness import Outgoing
from tests.reference import Violation
from tests.sim.facts import Fact, Message, SentBatch, SubscriptionModel, TopicModel
from tests.sim.keys import check_key
from tests.sim.model import Model
from tests.sim.pacing import Pace, answer_pace, ask_pace, check_pace
from tests.sim.world import World

SLOW_SECONDS = 0.3
"""More than a calm run allows."""


class _Disk:
    """A thread of a life."""

    def run(self, func: Callable[..., Any], *args: Any) -> Any:
        return func(*args)


class Bench:
    """A calm world with one subscription, which owes one message that was stored at the beginning."""

    def __init__(self) -> None:
        self.world = World(1)
        self.world.is_calm = True
        self.world.loop.latency = Latency(
            min_ms=SLOW_SECONDS * 1_000, max_ms=SLOW_SECONDS * 1_000, slow_every=0
        )
        self.model = Model(self.world)
        batch = SentBatch("t", 0, state="stored", stored_us=0)
        self.message = Message(Position(1, 0), b"", ask=Outgoing(b""), batch=batch)
        self.fact = Fact(self.message)
        self.subscription = SubscriptionModel(
            "s", topic=TopicModel(1, "t"), subscription_id=1, policy=SubscriptionPolicy(), created=0
        )

    def now_us(self) -> int:
        return self.world.loop.now_us()

    def hand_out(self, *, catches_up: bool) -> None:
        consumer = SimpleNamespace(attached_us=0, catches_up=lambda _: catches_up)
        self.model.check_prompt(self.subscription, cast(Any, consumer), self.message, self.fact, 0)

    async def read(self) -> None:
        await self.world.loop.run_in_executor(cast(Executor, _Disk()), lambda: None)

    async def wait(self) -> None:
        await asyncio.sleep(SLOW_SECONDS)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await scenario()

        self.world.run(whole())


@pytest.mark.parametrize("catches_up", [True, False])
@pytest.mark.parametrize("waits_for_disk", [True, False])
def test_only_catch_up_may_be_late_and_only_for_as_long_as_it_waited_for_the_disk(
    catches_up: bool, waits_for_disk: bool
):
    """Seed 1003284: fifty ledgers of one entry were looked at, beside seven subscriptions that did the same."""
    bench = Bench()

    async def scenario() -> None:
        await (bench.read() if waits_for_disk else bench.wait())
        if catches_up and waits_for_disk:
            bench.hand_out(catches_up=True)
            await bench.wait()
        with pytest.raises(Violation, match=r"lateness: t#1/s#1 .* is 300\.0 ms late"):
            bench.hand_out(catches_up=catches_up)

    bench.run(scenario)


def test_what_another_task_waits_for_excuses_nobody():
    bench = Bench()

    async def scenario() -> None:
        await asyncio.create_task(bench.read())
        with pytest.raises(Violation, match="lateness"):
            bench.hand_out(catches_up=True)

    bench.run(scenario)


@pytest.mark.parametrize("had_expired", [True, False])
def test_what_had_expired_before_the_clock_stepped_back_is_outside_the_order_of_its_key(had_expired: bool):
    """Seed 1007862: it was passed over, the clock stepped back by an hour, and after a crash it came."""
    bench = Bench()
    wall = bench.world.wall
    earlier = Message(
        Position(1, 0), b"", wall.now_ms(), ttl_ms=500, key="a", ask=Outgoing(b""), batch=bench.message.batch
    )
    later = Message(Position(1, 1), b"", wall.now_ms(), key="a", ask=Outgoing(b""), batch=bench.message.batch)
    for message in (earlier, later):
        bench.subscription.add(message, message)
    consumer = cast(Any, SimpleNamespace(life=SimpleNamespace(has_met_fault=False)))
    for by_ms in (1_000, -1_000) if had_expired else ():
        wall.step(by_ms)

    check_key(bench.world, bench.subscription, consumer, later, bench.subscription.entries[later])
    with nullcontext() if had_expired else pytest.raises(Violation, match="key order"):
        check_key(bench.world, bench.subscription, consumer, earlier, bench.subscription.entries[earlier])


def test_what_was_sent_before_is_not_found_by_catch_up():
    bench = Bench()
    bench.fact.sent_count = 1

    async def scenario() -> None:
        await bench.read()
        with pytest.raises(Violation, match="lateness"):
            bench.hand_out(catches_up=True)

    bench.run(scenario)


@pytest.mark.parametrize("built", ["before", "behind", "meanwhile"])
def test_what_comes_due_while_the_index_is_built_has_the_order_in_which_it_is_found(built: str):
    """Seed 1007132: the rows of each ledger took up to a second to be read, after a start with the memory tracker.

    Two messages that were stored long before come due, the one in the second ledger first, and come the other way round.
    The index is built before that; or it is, but for rows at its end; or between the one and the other.
    """
    bench = Bench()
    bench.world.slack_us = 0
    index = SimpleNamespace(is_rebuilding=built == "meanwhile", rebuilds=0, position=Position(3, 0))
    topic = cast(Any, SimpleNamespace(index=index, log=SimpleNamespace(end=Position(3, built == "behind"))))
    now_ms = bench.world.wall.now_ms()
    first, second = (
        Message(
            Position(ledger_id, 0), b"", due_ms=now_ms + due_ms, ask=Outgoing(b""), batch=bench.message.batch
        )
        for ledger_id, due_ms in ((1, 2_000), (2, 1_000))
    )

    async def scenario() -> None:
        mine = bench.subscription
        await asyncio.sleep(0.5)
        bench.model.look_at_index(mine.topic, topic)
        await asyncio.sleep(2)
        bench.model.check_order(mine, "", first)
        index.is_rebuilding = False
        bench.model.look_at_index(mine.topic, topic)
        if built != "before":
            bench.model.check_order(mine, "", second)
        if built == "meanwhile":
            second.due_ms, first.due_ms = (bench.world.wall.now_ms() + ms for ms in (100, 200))
            await asyncio.sleep(1)
            bench.model.check_order(mine, "", first)
        if built != "behind":
            with pytest.raises(Violation, match="order: "):
                bench.model.check_order(mine, "", second)

    bench.run(scenario)


@pytest.mark.parametrize("held_back", [True, False])
def test_what_a_pace_held_back_is_late_from_the_moment_it_is_free(held_back: bool):
    """Seed 1003406: two messages were leased, as many as might be, until the policy said no bound."""
    bench = Bench()
    bench.subscription.paces = [Pace(leased=2 if held_back else 0)]

    async def scenario() -> None:
        ask_pace(bench.subscription, SubscriptionPolicy(), bench.now_us())
        await bench.wait()
        answer_pace(bench.subscription, bench.now_us())
        if held_back:
            bench.hand_out(catches_up=False)
            await bench.wait()
        with pytest.raises(Violation, match=r"lateness: t#1/s#1 .* is 300\.0 ms late"):
            bench.hand_out(catches_up=False)

    bench.run(scenario)


@pytest.mark.parametrize("is_in_force", [True, False])
def test_a_new_pace_goes_on_with_the_bucket_of_any_that_may_be_in_force(is_in_force: bool):
    """Seed 1004150: a change was never answered as the broker died, and the next one was judged as if it had been made.

    The new one is in force before three more are handed out, which both others forbid, or only when it is answered.
    """
    bench = Bench()
    leased = 1 if is_in_force else 0
    bench.subscription.paces = [
        Pace(rate=8.0, burst=4, leased=leased),
        Pace(rate=8.0, burst=1, leased=leased),
    ]

    async def scenario() -> None:
        check_pace(bench.world, bench.subscription, 1)
        bench.subscription.add(bench.message, bench.message)
        bench.subscription.send(bench.subscription.open[bench.message], "c", 1, 0, 0, lease_ms=1_000)
        given = SubscriptionPolicy(max_delivery_rate=8.0, max_delivery_burst=4 if is_in_force else 2)
        ask_pace(bench.subscription, given, bench.now_us())
        check_pace(bench.world, bench.subscription, 3)
        answer_pace(bench.subscription, bench.now_us())
        check_pace(bench.world, bench.subscription, 1)
        with pytest.raises(Violation, match="pacing"):
            check_pace(bench.world, bench.subscription, 1)

    bench.run(scenario)
