"""Limits of callers: what is taken, refused and given back, how exact rates are, and what is remembered."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import pytest

from broker.errors import LimitReached, OutOfRange
from broker.observe.metrics import BrokerCounters
from broker.policy import TopicPolicy
from broker.rpc import limiter as module
from broker.rpc.access_limits import parse_limits
from broker.rpc.limiter import Limiter, TakenBatch
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import Node, Outgoing, small_config

SECOND_NS = 1_000_000_000


@dataclass
class HandClock:
    ns: int = 5 * SECOND_NS

    def monotonic_ns(self) -> int:
        return self.ns

    def now_ms(self) -> int:
        raise AssertionError("the wall clock is nobody's measure of time passed")


class World:
    """A limiter on a clock that only its test moves."""

    def __init__(self, text: str) -> None:
        self.clock = HandClock()
        self.counters = BrokerCounters()
        self.limiter = Limiter(parse_limits(text), cast(Any, self.clock), self.counters)

    def take(
        self, count: int = 1, bytes_: int = 0, *, principal: str = "token:a", topic: str = "t"
    ) -> TakenBatch | None:
        return self.limiter.take(principal, topic, count, bytes_)

    def refusal(self, count: int = 1, bytes_: int = 0, **of: str) -> LimitReached | None:
        """Return what a batch would be refused with now."""
        try:
            taken = self.take(count, bytes_, **of)
        except LimitReached as error:
            return error
        assert taken is not None
        taken.refused()
        return None

    def accepted_in(self, seconds: float, batch: int, producers: int = 1) -> int:
        """Messages that producers get in, who send without end and wait as they are told."""
        end_ns, count = self.clock.ns + int(seconds * SECOND_NS), 0
        wakes = [self.clock.ns] * producers
        while (now_ns := min(wakes)) < end_ns:
            self.clock.ns, who = now_ns, wakes.index(now_ns)
            try:
                self.take(batch)
                count += batch
            except LimitReached as error:
                wakes[who] += max(1, error.retry_after_ms) * 1_000_000
        self.clock.ns = end_ns
        return count


def rate(messages: int, burst_ms: int = 1_000, name: str = "x", **texts: str) -> str:
    lines = [f"{key} = {value}" for key, value in texts.items()]
    return "\n".join(
        [
            "[[limit]]",
            f'name = "{name}"',
            f"messages_per_second = {messages}",
            f"burst_ms = {burst_ms}",
            *lines,
            "",
        ]
    )


# -- rates -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("per_second", [10, 333, 50_000])
@pytest.mark.parametrize("producers", [1, 7])
def test_a_rate_is_exact_within_5_percent_over_ten_seconds(per_second: int, producers: int) -> None:
    world = World(rate(per_second, burst_ms=200))
    batch = max(1, per_second // 100)
    assert abs(world.accepted_in(10, batch, producers) / (per_second * 10) - 1) <= 0.05  # from rest
    assert abs(world.accepted_in(10, batch, producers) / (per_second * 10) - 1) <= 0.05


def test_batches_larger_than_the_burst_are_taken_whole_and_the_rate_holds() -> None:
    world = World(rate(100, burst_ms=100))
    assert 1_000 <= world.accepted_in(20, 500) <= 2_500
    assert abs(world.accepted_in(100, 500) / 10_000 - 1) <= 0.05


def test_bytes_are_limited_as_messages_are_and_the_one_that_is_used_up_counts() -> None:
    world = World('[[limit]]\nname = "x"\nmessages_per_second = 10\nbytes_per_second = 1000\n')
    world.take(1, 1_000)
    refusal = world.refusal(1, 100)
    assert refusal is not None
    assert (refusal.reason, refusal.facts, refusal.retry_after_ms) == (
        "LIMIT_RATE_EXCEEDED",
        {"limit": "x", "exceeded": "bytes_per_second", "allowed": 1_000, "left": 0},
        100,
    )
    world.clock.ns += SECOND_NS // 10
    world.take(10, 10)
    refusal = world.refusal(1, 1)
    assert refusal is not None and refusal.retry_after_ms == 100
    assert refusal.facts == {"limit": "x", "exceeded": "messages_per_second", "allowed": 10, "left": 0}
    world.clock.ns += SECOND_NS
    world.take(10, 1_000)
    for bytes_, key, wait_ms in ((90, "messages_per_second", 100), (500, "bytes_per_second", 500)):
        refusal = world.refusal(1, bytes_)  # both are used up: the one that is awaited longer is told
        assert refusal is not None
        assert (refusal.facts["exceeded"], refusal.retry_after_ms) == (key, wait_ms)


def test_a_refusal_says_which_bound_it_was_how_much_is_left_and_how_much_was_asked_for() -> None:
    world = World(rate(1, principals='["*"]') + '[[limit]]\nname = "y"\nbytes_per_second = 100\n')
    world.take(1, 60)
    refusal = world.refusal(1, 90)
    assert refusal is not None
    assert refusal.message == (
        "Limit 'x' allows each of its principals 1 message per second: this batch has 1, and 0 may be sent now"
    )
    world.clock.ns += SECOND_NS
    world.take(1, 70)
    world.clock.ns += SECOND_NS // 10
    refusal = world.refusal(1, 500)  # more than the burst, and of both it waits longer for the message
    assert refusal is not None and (refusal.facts["limit"], refusal.retry_after_ms) == ("x", 900)
    world.clock.ns += SECOND_NS - SECOND_NS // 10
    world.take(0, 30)
    refusal = world.refusal(1, 500)
    assert refusal is not None
    assert refusal.message == (
        "Limit 'y' allows all callers together 100 bytes per second: this batch has 500, and 70 may be sent now"
    )
    assert refusal.facts == {"limit": "y", "exceeded": "bytes_per_second", "allowed": 100, "left": 70}
    world.limiter.count("token:a", "t", 0, 1_000)  # what is owed is nothing left, and not less
    refusal = world.refusal(1, 1)
    assert refusal is not None and (refusal.facts["limit"], refusal.facts["left"]) == ("y", 0)


def test_each_principal_has_a_rate_for_itself_and_without_principals_all_have_it_together() -> None:
    apart = World(rate(10, principals='["token:*"]'))
    together = World(rate(10))
    for world in (apart, together):
        world.take(10, principal="token:a")
    assert apart.refusal(1, principal="token:a") and not apart.refusal(10, principal="token:b")
    assert together.refusal(1, principal="token:a") and together.refusal(1, principal="token:b")
    assert apart.take(1_000, principal="cert:c") is None


def test_topics_that_match_share_a_rate_and_others_have_none() -> None:
    world = World(rate(10, topics='["orders*"]'))
    world.take(10, topic="orders-1")
    assert world.refusal(1, topic="orders-2")
    assert world.take(1_000, topic="payroll") is None


def test_a_batch_that_one_limit_refuses_counts_against_none_and_the_longest_wait_is_told() -> None:
    world = World(rate(100, name="fast") + rate(1, name="slow") + rate(50, name="middle"))
    world.take(1)
    refusal = world.refusal(50)
    assert refusal is not None
    assert (refusal.facts["limit"], refusal.retry_after_ms) == ("slow", 1_000)
    assert world.counters.limit_refusals == {
        (name, "messages_per_second"): count for name, count in (("fast", 0), ("slow", 1), ("middle", 0))
    }
    world.clock.ns += SECOND_NS
    assert world.refusal(50) is None
    assert world.refusal(99) is None


def test_what_the_topic_refuses_is_given_back() -> None:
    world = World(rate(10))
    taken = world.take(10)
    assert taken is not None
    assert world.refusal(1)
    taken.refused()
    assert not world.refusal(10)


def test_what_a_call_stored_by_itself_is_owed() -> None:
    world = World(rate(10))
    world.limiter.count("token:a", "t", 30, 0)
    refusal = world.refusal(1)
    assert refusal is not None and refusal.retry_after_ms == 2_100


def test_a_refusal_is_counted_always_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    world = World(rate(1))
    world.take(1)
    for _ in range(3):
        assert world.refusal(1)
    assert world.counters.limit_refusals == {("x", "messages_per_second"): 3}
    assert len(caplog.records) == 1
    assert caplog.records[0].__dict__["fields"]["limit"] == "x"
    world.clock.ns += 60 * SECOND_NS
    world.take(1)
    assert world.refusal(1)
    assert len(caplog.records) == 2


# -- another file ------------------------------------------------------------------------------------------------------


def test_another_rate_holds_at_once_and_what_was_used_stays_used() -> None:
    world = World(rate(10))
    world.take(10)
    world.limiter.adopt(parse_limits(rate(10)))  # the file was touched
    assert world.refusal(1)
    world.limiter.adopt(parse_limits(rate(100)))
    refusal = world.refusal(1)
    assert refusal is not None and refusal.retry_after_ms == 10
    world.limiter.adopt(parse_limits(rate(100) + "bytes_per_second = 1\n"))
    refusals = {("x", "messages_per_second"): 2, ("x", "bytes_per_second"): 0}
    assert world.counters.limit_refusals == refusals  # the ones above stay counted
    world.limiter.adopt(parse_limits(""))
    assert world.take(1_000) is None
    assert world.counters.limit_refusals == {}


def test_a_limit_of_another_kind_under_the_same_name_begins_anew() -> None:
    world = World(rate(10))
    world.take(10)
    world.limiter.adopt(parse_limits(rate(10, topics='["t"]')))
    assert not world.refusal(10)


def test_what_was_taken_under_the_old_file_is_given_back_without_harm() -> None:
    world = World('[[limit]]\nname = "x"\nmessages_per_second = 10\npending_messages = 5\n')
    taken = world.take(5)
    assert taken is not None
    world.limiter.adopt(parse_limits(rate(10, name="y")))
    taken.refused()
    assert not world.refusal(10)


@pytest.mark.slow
def test_a_flood_of_principals_is_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("broker.rpc.limiter._USED_MAX", "broker.rpc.access_limits._CACHED"):
        monkeypatch.setattr(bound, 1_000)
    world = World(rate(1, principals='["jwt:*"]'))
    tracemalloc.start()
    try:
        for number in range(2 * module._USED_MAX):
            world.take(1, principal=f"jwt:{number}")
        before = tracemalloc.get_traced_memory()[0]
        for number in range(4 * module._USED_MAX):
            world.take(1, principal=f"jwt:again-{number}")
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(world.limiter._used) == module._USED_MAX
    assert world.limiter._limits._of_principal.cache_info().currsize <= 1_000
    assert after < before * 1.2
    assert world.refusal(1, principal=f"jwt:again-{number}")


def test_one_who_goes_on_sending_is_not_forgotten_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_USED_MAX", 10)
    world = World(rate(1, principals='["jwt:*"]'))
    world.take(1, principal="jwt:busy")
    for number in range(100):
        world.take(1, principal=f"jwt:{number}")
        assert world.refusal(1, principal="jwt:busy")


# -- what there is of the topics ---------------------------------------------------------------------------------------

PENDING = '[[limit]]\nname = "a"\ntopics = ["a-*"]\npending_messages = 100\n'


class Served:
    """A limiter beside a broker that serves, on virtual time."""

    def __init__(self, node: Node, text: str) -> None:
        self.node = node
        self.limiter = Limiter(parse_limits(text), node.clock, BrokerCounters())
        self._task = asyncio.ensure_future(self.limiter.run(node.broker.registry))

    async def produce(self, topic: str, count: int) -> None:
        taken = self.limiter.take("token:a", topic, count, count * 50)
        accepted = await self.node.submit(topic, [Outgoing(b"x")] * count)
        if taken is not None:
            taken.accepted(accepted)
        await accepted.durable

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def served(text: str, play: Any) -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config()).open()
        world = Served(node, text)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(3_600):
            await play(world)
        await world.close()
        await node.stop()

    run_sim(scenario, seed=1)


def test_pending_messages_of_topics_are_counted_together_and_what_is_settled_makes_room() -> None:
    async def play(world: Served) -> None:
        inbox = await world.node.subscribe("a-1", "s")
        await world.produce("a-1", 60)
        await world.produce("a-2", 40)
        await world.produce("b", 1_000)
        for seconds in (0, 1, 5):
            await asyncio.sleep(seconds)
            with pytest.raises(LimitReached) as caught:
                await world.produce("a-3", 1)
            assert caught.value.reason == "LIMIT_PENDING_EXCEEDED"
            assert caught.value.message == (
                "Limit 'a' allows its topics 100 pending messages: there are 100, and this batch has 1"
            )
        got = await inbox.wait(60)
        await inbox.ack([each.position for each in got[:25]])
        await asyncio.sleep(2)
        await world.produce("a-2", 25)
        with pytest.raises(LimitReached):
            await world.produce("a-2", 1)

    served(PENDING, play)


def test_a_burst_between_two_sums_gets_no_more_in_than_the_limit() -> None:
    async def play(world: Served) -> None:
        stored = 0
        for _ in range(300):
            await asyncio.sleep(0.03)
            try:
                await world.produce("a-1", 7)
                stored += 7
            except LimitReached:
                pass
        assert stored == 98

    served(PENDING, play)


def test_what_is_on_its_way_while_the_topics_are_added_up_is_counted() -> None:
    async def play(world: Served) -> None:
        await world.produce("a-1", 10)
        go_on = world.node.hold_up_groups()
        producing = asyncio.ensure_future(world.produce("a-1", 90))
        await asyncio.sleep(5)  # several sums, none of which sees it
        with pytest.raises(LimitReached):
            await world.produce("a-1", 1)
        go_on.set()
        await producing
        await asyncio.sleep(5)
        with pytest.raises(LimitReached):
            await world.produce("a-1", 1)

    served(PENDING, play)


def test_a_batch_that_alone_is_too_much_is_never_taken() -> None:
    world = World('[[limit]]\nname = "x"\npending_messages = 10\npending_bytes = 100\n')
    for count, size in ((11, 1), (1, 101)):
        with pytest.raises(OutOfRange) as caught:
            world.take(count, size)
        assert (caught.value.reason, caught.value.field) == ("BATCH_OVER_LIMIT", "messages")


def test_pending_bytes_are_those_of_the_topics() -> None:
    async def play(world: Served) -> None:
        await world.produce("a", 10)
        await asyncio.sleep(2)
        stored = world.node.topic("a").log.data_bytes
        world.limiter.adopt(parse_limits(f'[[limit]]\nname = "y"\npending_bytes = {stored + 60}\n'))
        await asyncio.sleep(2)
        await world.produce("a", 1)
        with pytest.raises(LimitReached, match="pending bytes: there are") as caught:
            await world.produce("a", 1)
        assert caught.value.facts["exceeded"] == "pending_bytes"
        assert caught.value.facts["left"] == 10

    served('[[limit]]\nname = "x"\npending_bytes = 100000\n', play)


def test_topics_may_be_created_up_to_the_limit_and_deleted_ones_make_room() -> None:
    async def play(world: Served) -> None:
        registry = world.node.broker.registry

        async def create(name: str) -> None:
            with world.limiter.creating("token:a", name, lambda: name in registry.by_name):
                await registry.create_topic(name, TopicPolicy())

        await create("a-1")
        created = await asyncio.gather(*(create(f"a-{n}") for n in range(2, 9)), return_exceptions=True)
        refusals = [each for each in created if isinstance(each, LimitReached)]
        assert len(refusals) == 5
        assert {each.reason for each in refusals} == {"LIMIT_TOPICS_EXCEEDED"}
        assert refusals[0].message == "Limit 'a' allows 3 topics, and there are 3"
        assert refusals[0].facts == {"limit": "a", "exceeded": "topics_max", "allowed": 3, "left": 0}
        await create("b")
        await asyncio.sleep(2)
        with pytest.raises(LimitReached):
            await create("a-9")
        await registry.delete_topic("a-1")
        await asyncio.sleep(2)
        await create("a-9")
        assert sorted(registry.by_name) == ["a-2", "a-3", "a-9", "b"]

    served('[[limit]]\nname = "a"\ntopics = ["a-*"]\ntopics_max = 3\n', play)


def test_sums_that_take_long_are_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    async def add_up(self: Limiter, registry: object) -> None:
        begun.append(self._clock.monotonic_ns())
        await asyncio.sleep(0.5)

    monkeypatch.setattr(Limiter, "_add_up", add_up)

    async def play(world: Served) -> None:
        await asyncio.sleep(60)

    served(PENDING, play)
    assert [round((second - first) / SECOND_NS, 1) for first, second in pairwise(begun)] == [10.5] * (
        len(begun) - 1
    )
    assert len(begun) == 6
