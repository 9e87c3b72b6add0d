"""A broker whose own timers do nothing while a test injects changes where it wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from broker.errors import NotFound
from broker.jobs.verify import verify_data_dir
from broker.model import Position
from broker.policy import TRACKER_MEMORY, TopicPolicy
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import Latency, SimLoop, run_sim
from broker.topics.schedule_values import Cancel, Change, ChangeResult, DueRange, Move, Outcome
from broker.topics.topic import Topic
from tests.harness import DATA_DIR, DAY_MS, Inbox, Node, Outgoing, small_config

TOPIC = "orders"
NEVER_MS = DAY_MS
DONE, DELIVERED = ChangeResult.DONE, ChangeResult.ALREADY_DELIVERED
BUCKETS, MEMORY = "buckets", "memory"
TRACKERS = pytest.mark.parametrize("tracker", [BUCKETS, MEMORY])
HOUR_MS = 3_600_000


def run(scenario: Callable[[Node], Awaitable[Node]], *, tracker: str = BUCKETS, **changes: Any) -> None:
    """Run a scenario on a topic `orders`; what is on the disk at its end must be clean."""

    async def whole(_: SimLoop, clock: SimClock) -> Node:
        settings = {"ledger_max_entries": 4, "reclaim_interval_ms": NEVER_MS, "clock_recheck_ms": 1_000}
        node = Node(MemVfs(), clock, small_config(**{**settings, **changes})).open()
        policy = TopicPolicy(tracker=TRACKER_MEMORY) if tracker == MEMORY else TopicPolicy()
        await node.broker.registry.create_topic(TOPIC, policy)
        node = await scenario(node)
        await node.stop()
        return node

    node = run_sim(whole, seed=3, latency=Latency(max_ms=1.0, slow_every=0))
    assert node.failures == []
    assert verify_data_dir(node.vfs, DATA_DIR).problems == []


def messages(count: int, **options: Any) -> list[Outgoing]:
    return [Outgoing(b"m%d" % number, **options) for number in range(count)]


async def change(topic: Topic, positions: list[Position], wanted: Change) -> Sequence[Outcome]:
    return await topic.schedule.change(positions, wanted, dry_run=False)


async def cancel(topic: Topic, positions: list[Position]) -> list[ChangeResult]:
    return [outcome.result for outcome in await change(topic, positions, Cancel())]


async def move(topic: Topic, positions: list[Position], **to: int) -> list[ChangeResult]:
    return [outcome.result for outcome in await change(topic, positions, Move(**to))]


async def counted(topic: Topic) -> int:
    """Return the index's count of waiting messages, which must be exact."""
    counts = await topic.schedule.count(DueRange(), 0)
    assert counts.is_exact
    total = sum(count for _, count in counts.bars) + counts.before + counts.after
    assert total == topic.index.scheduled_count()
    return total


async def is_pending(topic: Topic, position: Position) -> bool:
    try:
        await topic.schedule.get(position)
    except NotFound:
        return False
    return True


def step(node: Node, ms: int) -> None:
    """Step the wall clock."""
    assert isinstance(node.clock, SimClock)
    node.clock.step(ms)


def times_of(inbox: Inbox) -> list[tuple[Position, int]]:
    """Return position and time of everything that came."""
    inbox.poll()
    return [(each.position, each.deliver_at_ms) for each in inbox.received]


def before(
    patch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], Awaitable[Any]], nth: int = 1
) -> list[int]:
    """Let something happen before a method's nth call goes on; the list says how often it was called."""
    inner = getattr(owner, name)
    calls: list[int] = []

    async def call(*arguments: Any, **named: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] == nth:
            await act()
        return await inner(*arguments, **named)

    patch.setattr(owner, name, call)
    return calls


def after(
    patch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], Awaitable[Any]], nth: int = 1
) -> list[int]:
    """Let something happen between the end of a method's nth call and whoever awaits it."""
    inner = getattr(owner, name)
    calls: list[int] = []

    async def call(*arguments: Any, **named: Any) -> Any:
        calls.append(number := len(calls) + 1)
        result = await inner(*arguments, **named)
        if number == nth:
            await act()
        return result

    patch.setattr(owner, name, call)
    return calls


async def apply(topic: Topic, positions: list[Position], kind: str) -> list[ChangeResult]:
    if kind == "cancel":
        return await cancel(topic, positions)
    return await move(topic, positions, deliver_after_ms=HOUR_MS if kind == "later" else 0)


async def check_came(node: Node, inbox: Inbox, positions: list[Position], kind: str) -> None:
    """After a change that was done: nobody, or once and not before the new time."""
    await asyncio.sleep(5)
    if kind != "now":
        assert times_of(inbox) == []
        step(node, HOUR_MS)
        await asyncio.sleep(5)
    found = times_of(inbox)
    assert sorted(p for p, _ in found) == ([] if kind == "cancel" else positions)
    assert all(each.sent_ms >= each.deliver_at_ms for each in inbox.received)
    assert all(each.attempt == 1 for each in inbox.received)
