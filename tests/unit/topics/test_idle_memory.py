"""Memory of topics and subscriptions that are not used: a check that finds what each of them makes and does not need."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from broker.policy import TopicPolicy
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import Node, small_config

pytestmark = pytest.mark.slow

COUNT = 200
TOPIC_BYTES = 21_000
SUBSCRIPTION_BYTES = 5_500
"""A tenth more than they take today, with their records on a disk in memory; `make bench` has a real broker's."""


def test_idle_topics_and_subscriptions_take_little() -> None:
    taken: list[float] = []

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config()).open()
        await node.create_subscription("first", "s")
        tracemalloc.start()
        try:
            taken.append(traced())
            for i in range(COUNT):
                await node.broker.registry.create_topic(f"t-{i}", TopicPolicy())
            taken.append(traced())
            for i in range(COUNT):
                await node.create_subscription(f"t-{i}", "s")
            taken.append(traced())
        finally:
            tracemalloc.stop()

    run_sim(scenario, 1)
    empty, topics, subscriptions = taken
    assert (topics - empty) / COUNT < TOPIC_BYTES
    assert (subscriptions - topics) / COUNT < SUBSCRIPTION_BYTES


def traced() -> int:
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    return held
