"""A count of very many messages that match lets other work in between."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import scheduled
from broker.topics.schedule_values import DueRange
from tests.harness import Node, Outgoing, small_config

COUNT, STEP = 2_000, 100
HOUR_MS = 3_600_000


def test_a_count_of_what_is_in_memory_lets_others_run_between_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are due in one millisecond, in the mutable bucket, and each look at the clock takes a millisecond."""
    monkeypatch.setattr(scheduled, "LOOKED_MAX", STEP)
    turns = itertools.count()
    run_once = vars(asyncio.BaseEventLoop)["_run_once"]

    def count_turn(loop: SimLoop) -> None:
        next(turns)
        run_once(loop)

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        config = small_config(
            seal_after_ms=HOUR_MS, min_index_count=10 * COUNT, ledger_max_entries=10 * COUNT
        )
        node = Node(MemVfs(), clock, config).open()
        due_ms = clock.now_ms() + HOUR_MS
        await node.create_subscription("orders", "one")
        await node.produce("orders", [Outgoing(b"x", deliver_at_ms=due_ms)] * COUNT)
        topic = node.topic("orders")
        await topic.index.caught_up()
        assert not topic.index.tracker.stats().bucket_count
        ticks = itertools.count(clock.monotonic_ns(), 1_000_000)
        with monkeypatch.context() as slow:
            slow.setattr(SimClock, "monotonic_ns", lambda _: next(ticks))
            slow.setattr(SimLoop, "_run_once", count_turn)
            assert await topic.schedule.count_matching(DueRange(due_ms, due_ms + 1), "") == COUNT
        assert next(turns) >= COUNT // STEP // 4

    run_sim(scenario, 1)
