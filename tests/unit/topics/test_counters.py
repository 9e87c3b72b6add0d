"""Counters that nothing wrote for a while: each is seen to move, by its name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.errors import InvalidRequest, LimitReached, NotFound
from broker.model import Position
from broker.policy import SubscriptionPolicy
from broker.subscriptions.handout import HandOut
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.control import position_of_time
from broker.topics.schedule_values import Move
from tests.harness import Node, Outgoing, small_config
from tests.moving import moves


def on_node(scenario: Any, **changes: Any) -> None:
    async def run(_: SimLoop, clock: SimClock) -> None:
        await scenario(Node(MemVfs(), clock, small_config(**changes)).open())

    run_sim(run, 1)


def test_repeats_and_refusals_are_counted() -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", "one")
        counters = node.topic("orders").counters
        batch = [Outgoing(b"a", sequence_id=1)]
        stored = await node.produce("orders", batch, "p")
        with moves(node.broker, "postdate_duplicate_batches"):
            assert await node.produce("orders", batch, "p") == stored
        assert (counters.duplicate_batches, counters.produced_batches) == (1, 1)
        with moves(node.broker, "postdate_refused_batches"), pytest.raises((InvalidRequest, LimitReached)):
            await node.produce("orders", [Outgoing(b"a", schedule_key="k", deliver_after_ms=9_000)] * 2)
        assert counters.refused_batches == 1

    on_node(scenario)


def test_what_pacing_holds_back_is_shown_and_counted_apart() -> None:
    async def scenario(node: Node) -> None:
        policy = SubscriptionPolicy(max_delivery_rate=0.5)
        subscription = await node.create_subscription("orders", "one", policy=policy)
        inbox = node.attach(node.topic("orders"), subscription)
        with moves(node.broker, "postdate_subscription_paced", "postdate_delivery_lateness_seconds"):
            await node.produce("orders", [Outgoing(b"a"), Outgoing(b"b")])
            await inbox.wait(1)
        assert subscription.counters.paced_lateness.stats().count == 0, "the first one was not held back"
        with moves(node.broker, "postdate_subscription_paced", "postdate_paced_delivery_lateness_seconds"):
            await inbox.wait(1)
        assert subscription.counters.lateness.stats().count == 1
        assert subscription.counters.paced_lateness.stats().max_seconds == pytest.approx(2, abs=0.01)

    on_node(scenario)


def test_what_the_last_look_drops_is_counted_by_reason() -> None:
    async def scenario(node: Node) -> None:
        inbox = await node.subscribe("orders", "one")
        counters = inbox.subscription.counters
        log = inbox.subscription.log
        first, second = await node.produce("orders", [Outgoing(b"a"), Outgoing(b"b")])
        await inbox.ack([each.position for each in await inbox.wait(2)])
        inner = log.read

        async def acked_meanwhile(*arguments: Any) -> Any:
            found = await inner(*arguments)
            for act in acts:
                await act()
            acts.clear()
            return found

        log.read = acked_meanwhile  # type: ignore[method-assign,assignment]
        acts: list[Any] = [lambda: inbox.ack([Position(first.ledger_id, 2)])]
        await node.produce("orders", [Outgoing(b"c")])
        await asyncio.sleep(1)
        assert counters.dropped_settled_messages == 1
        (moved,) = await node.produce("orders", [Outgoing(b"d", deliver_after_ms=1_000)])
        topic = node.topic("orders")
        await topic.index.caught_up()
        entry = (moved.ledger_id, moved.entry_id)
        acts.append(lambda: _step(node, -5_000))  # due a moment ago, and early again
        await asyncio.sleep(2)
        assert entry
        assert counters.dropped_early_messages == 1
        await inbox.wait(1, seconds=20)
        assert second

    async def _step(node: Node, by_ms: int) -> None:
        node.clock.step(by_ms)  # type: ignore[attr-defined]

    on_node(scenario)


def test_a_message_that_is_moved_while_it_is_read_is_counted_as_moved() -> None:
    async def scenario(node: Node) -> None:
        inbox = await node.subscribe("orders", "one")
        (position,) = await node.produce("orders", [Outgoing(b"d", deliver_after_ms=1_000)])
        inner, log = inbox.subscription.log.read, inbox.subscription.log

        async def moved_meanwhile(*arguments: Any) -> Any:
            log.read = inner  # type: ignore[method-assign]
            found = await inner(*arguments)
            outcomes = await node.topic("orders").schedule.change(
                [position], Move(deliver_after_ms=9_000), dry_run=False
            )
            assert [each.result.name for each in outcomes] == ["DONE"]
            return found

        log.read = moved_meanwhile  # type: ignore[method-assign,assignment]
        await inbox.wait(1, seconds=30)
        assert inbox.subscription.counters.dropped_moved_messages == 1

    on_node(scenario)


def test_a_message_that_leaves_early_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the last look has gone blind: nothing else lets one through."""
    look = HandOut.last_look
    monkeypatch.setattr(
        HandOut, "last_look", lambda this, taken, read, now_ms: look(this, taken, read, now_ms + 60_000)
    )

    async def scenario(node: Node) -> None:
        inbox = await node.subscribe("orders", "one")
        inner, log = inbox.subscription.log.read, inbox.subscription.log

        async def read_and_step(*arguments: Any) -> Any:
            node.clock.step(-5_000)  # type: ignore[attr-defined]
            return await inner(*arguments)

        log.read = read_and_step  # type: ignore[method-assign,assignment]
        with moves(node.broker, "postdate_early_deliveries"):
            await node.produce("orders", [Outgoing(b"d", deliver_after_ms=1_000)])
            await inbox.wait(1, seconds=30)

    on_node(scenario)


def test_a_checkpoint_that_fails_is_counted() -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", "one")
        node.vfs.faults.add(Fault("sync", "*manifest*"))
        with moves(node.broker, "postdate_checkpoint_failures"), pytest.raises(OSError, match="Errno"):
            await node.checkpoint()
        assert node.broker.counters.checkpoint_failures == 1
        assert node.broker.counters.checkpoints == 0

    on_node(scenario)


def test_a_seek_by_time_reads_the_generation_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", "one")
        times = []
        for _ in range(6):
            times.append(node.clock.now_ms())
            await node.produce("orders", [Outgoing(b"a")])
            await asyncio.sleep(1)
        topic = node.topic("orders")
        (ledger,) = topic.log
        inner = topic.log.read_rows
        failed: list[int] = []

        async def read_rows(*arguments: Any) -> Any:
            if not failed:
                failed.append(1)
                raise NotFound("the ledger is gone")
            return await inner(*arguments)

        monkeypatch.setattr(topic.log, "read_rows", read_rows)
        monkeypatch.setattr(ledger, "read_rows", ledger.read_rows)
        assert await position_of_time(topic, times[3]) == Position(ledger.name.ledger_id, 3)
        assert failed

    on_node(scenario)
