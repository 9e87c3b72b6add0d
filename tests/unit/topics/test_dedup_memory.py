"""Memory of sequence ids: one bound for all topics, and it is given back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from broker.errors import LimitReached, Refused
from broker.policy import TopicPolicy
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import deduplication, producers
from broker.topics.producers import PRODUCER_BYTES, RUN_BYTES
from tests.depth import at_depth, deep_but
from tests.harness import Node, Outgoing, small_config

MINUTE_MS = 60_000
BOUND = 64 << 10


def run(scenario: Callable[[Node], Awaitable[None]], **changes: Any) -> None:
    config = {"dedup_memory_bytes_max": BOUND, "dedup_entries": 1_000} | changes

    async def whole(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config(**config)).open()
        await scenario(node)

    run_sim(whole, seed=5)


async def send(node: Node, topic: str, producer: str, *sequence_ids: int) -> bool:
    """Return whether nothing was stored, as all of it was known."""
    accepted = await node.submit(topic, [Outgoing(b"x", sequence_id=each) for each in sequence_ids], producer)
    await accepted.durable
    return all(each.duplicate for each in accepted.ids)


async def refused(node: Node, topic: str, producer: str, *sequence_ids: int) -> LimitReached:
    with pytest.raises(LimitReached) as caught:
        await send(node, topic, producer, *sequence_ids)
    assert caught.value.reason == "DEDUP_MEMORY_FULL"
    return caught.value


async def fill(node: Node, topics: str = "abc", producer: str = "p", first: int = 2) -> int:
    """Gapped ids, two a batch, on topics in turn, until one is refused; returns the first id of that."""
    for number in range(10_000):
        at = first + 4 * number
        try:
            await send(node, topics[number % len(topics)], producer, at, at + 2)
        except LimitReached:
            error = await refused(node, topics[number % len(topics)], producer, at, at + 2)
            assert error.facts == {"dedup_memory_bytes_max": node.config.dedup_memory_bytes_max}
            return at
    raise AssertionError("nothing was refused")


def used(node: Node) -> int:
    """Return the counted memory, which has to be the real one; nothing is on its way."""
    topics = node.broker.registry.topics.values()
    held = sum(each.memory_bytes for topic in topics for each in topic.producers.by_name.values())
    assert node.broker.dedup_memory.used_bytes == held
    return held


async def pass_ms(node: Node, duration_ms: int) -> None:
    await asyncio.sleep(duration_ms / 1000)


@pytest.mark.slow
def test_the_bound_is_one_for_all_topics() -> None:
    async def scenario(node: Node) -> None:
        at = await fill(node)
        assert BOUND - 2 * RUN_BYTES <= used(node) <= BOUND
        stored = [node.topic(name).counters.produced_messages for name in "abc"]
        for name in "abc":
            error = await refused(node, name, "p", at, at + 2)
            assert 0 < error.retry_after_ms <= node.config.tuning.reclaim_interval_ms
            await refused(node, name, "another", 1)
            assert await send(
                node, name, "p", *((2, 4) if name == "a" else (6, 8) if name == "b" else (10, 12))
            )
        with pytest.raises(LimitReached):  # known and new ones in one batch: nothing of it is stored
            await send(node, "a", "p", 2, at, at + 2)
        assert [node.topic(name).counters.produced_messages for name in "abc"] == stored
        assert used(node) <= BOUND
        await node.produce("a", [Outgoing(b"x")], "another")  # no sequence id: nobody looks
        await node.stop()

    run(scenario)


def test_what_is_on_its_way_counts() -> None:
    async def scenario(node: Node) -> None:
        calls = [send(node, f"t{n % 3}", f"p{n}", *range(2, 60, 2)) for n in range(100)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in answers} == {bool, LimitReached}
        assert BOUND // 2 < used(node) <= BOUND
        await node.stop()

    run(scenario)


def test_who_sends_on_with_as_much_remembered_as_before_is_not_refused() -> None:
    async def scenario(node: Node) -> None:
        await send(node, "a", "steady", *range(2, 22, 2))
        with pytest.raises(LimitReached):
            for number in range(1_000):
                await send(node, "abc"[number % 3], f"p{number}", *range(2, 22, 2))
        for sequence_id in range(22, 200, 2):
            await send(node, "a", "steady", sequence_id)
        assert used(node) <= BOUND
        await node.stop()

    run(scenario, dedup_entries=10)


@pytest.mark.slow
def test_a_topic_that_is_deleted_gives_back_what_it_held() -> None:
    async def scenario(node: Node) -> None:
        at = await fill(node)
        before = used(node)
        under_way = asyncio.gather(
            send(node, "a", "p", 2), node.broker.registry.delete_topic("a"), return_exceptions=True
        )
        await under_way
        assert used(node) < before * 3 // 4
        await send(node, "b", "p", at, at + 2)
        for name in "bc":
            await node.broker.registry.delete_topic(name)
        assert used(node) == 0
        await node.stop()

    run(scenario)


@pytest.mark.slow
def test_a_name_that_is_forgotten_gives_back_what_it_held() -> None:
    async def scenario(node: Node) -> None:
        await send(node, "a", "old", *range(2, 1_000, 2))
        await fill(node, "b")
        await refused(node, "a", "new", 1, 3)
        await pass_ms(node, 20_000)  # beyond the window, before anybody looks for what has expired
        await send(node, "a", "new", 1, 3)
        assert set(node.topic("a").producers.by_name) == {"new"}
        assert used(node) < BOUND
        await node.stop()

    run(scenario, dedup_window_ms=10_000)


@pytest.mark.slow
@pytest.mark.parametrize("window_ms", [0, 1])
def test_a_window_that_is_made_shorter_gives_back(window_ms: int) -> None:
    async def scenario(node: Node) -> None:
        at = await fill(node, "ab")
        await node.topic("a").change_policy(TopicPolicy(dedup_window_ms=window_ms))
        await pass_ms(node, 2 * MINUTE_MS)
        assert PRODUCER_BYTES < used(node) < BOUND * 3 // 4
        await send(node, "b", "p", at, at + 2)
        await node.stop()

    run(scenario)


@pytest.mark.slow
def test_what_has_expired_gives_way_to_other_topics() -> None:
    async def scenario(node: Node) -> None:
        at = await fill(node, "ab")
        await node.checkpoint()
        await pass_ms(node, 12 * MINUTE_MS)
        assert used(node) == 2 * PRODUCER_BYTES
        assert await send(node, "a", "p", at, at + 2) is False
        await fill(node, "c")
        now = {name: node.topic(name).producers.content(1).encode() for name in "ac"}
        # What went without a record comes back with a crash; from whom there is a record since, it went again.
        again = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        assert {name: again.topic(name).producers.content(1).encode() for name in "ac"} == now
        assert used(again) > BOUND
        await pass_ms(again, 2 * MINUTE_MS)
        assert used(again) <= BOUND
        with pytest.raises(Refused):
            await send(again, "b", "p", 6, 8)
        await again.stop()

    run(scenario)


@pytest.mark.slow
def test_a_folder_with_more_than_the_bound_starts_and_shrinks() -> None:
    async def scenario(node: Node) -> None:
        at = await fill(node, "ab")
        await node.stop()
        again = Node(node.vfs, node.clock, replace(node.config, dedup_memory_bytes_max=BOUND)).open()
        assert used(again) > BOUND
        await refused(again, "a", "p", at, at + 2)
        assert await send(again, "a", "p", 2, 4)
        await pass_ms(again, 12 * MINUTE_MS)
        await send(again, "a", "p", at, at + 2)
        assert used(again) < BOUND
        await again.stop()

    run(scenario, dedup_memory_bytes_max=2 * BOUND)


@pytest.mark.slow
def test_a_random_history_is_counted_exactly() -> None:
    async def scenario(node: Node) -> None:
        rng = random.Random(11)
        highest: dict[tuple[str, str], int] = {}
        refusals = 0
        for _ in range(40):
            calls: list[Coroutine[Any, Any, object]] = []
            for _ in range(12):
                topic, name = rng.choice("abc"), rng.choice("pqrstu")
                first = highest.get((topic, name), 0) + rng.randint(1, 3)
                ids = [first + each * rng.randint(1, 2) for each in range(rng.randint(1, 30))]
                ids = sorted(set(ids))
                highest[topic, name] = ids[-1]
                calls.append(send(node, topic, name, *ids))
            if rng.random() < 0.1 and (some := list(node.broker.registry.by_name)):
                calls.append(node.broker.registry.delete_topic(rng.choice(some)))
            if rng.random() < 0.3:
                calls.append(node.checkpoint())
            answers = await asyncio.gather(*calls, return_exceptions=True)
            refusals += sum(isinstance(each, LimitReached) for each in answers)
            assert used(node) <= BOUND
            if rng.random() < 0.3:
                await pass_ms(node, 2 * MINUTE_MS)
            if rng.random() < 0.2:
                node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
                used(node)  # perhaps more than the bound: what had expired came back
                await pass_ms(node, 2 * MINUTE_MS)
        assert refusals > 10
        await node.stop()

    run(scenario, dedup_window_ms=MINUTE_MS, dedup_entries=100)


@pytest.mark.slow
@pytest.mark.parametrize("dedup_entries", deep_but([1_000], [1_000, 300]))
def test_the_memory_is_what_is_counted(dedup_entries: int) -> None:
    """Producers of gapped ids, each with a state on its way: more than fit, and as many as fit, which forget as they go."""
    producer_count = at_depth(change=5, deep=30)

    async def scenario(node: Node) -> None:
        tracemalloc.start()
        try:
            for first in range(0, 4_000, 200):
                for number in range(producer_count):
                    with contextlib.suppress(LimitReached):
                        ids = range(2 * first + 2, 2 * first + 402, 2)
                        await send(node, f"t{number % 3}", f"producer {number}", *ids)
            found = tracemalloc.take_snapshot()
        finally:
            tracemalloc.stop()
        here = [tracemalloc.Filter(True, module.__file__ or "") for module in (producers, deduplication)]
        bytes_there = sum(each.size for each in found.filter_traces(here).statistics("filename"))
        assert (node.config.dedup_memory_bytes_max - used(node) < 200 * RUN_BYTES) == (dedup_entries == 1_000)
        assert used(node) * 2 // 3 < bytes_there <= used(node) <= node.config.dedup_memory_bytes_max
        await node.stop()

    run(
        scenario,
        dedup_memory_bytes_max=producer_count * (1 << 20) // 30,
        dedup_entries=dedup_entries,
        journal_segment_bytes=16 << 20,
        journal_group_bytes_max=1 << 20,
        ledger_max_entries=1 << 20,
    )
