"""A cancel or a move comes in between: hand-out, catch-up, the index, other changes, seeks, drops (P2, P3, P5; CHANGE-1 to CHANGE-3).

Each test lets the change happen at one place, by a hook and not by chance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from broker.delayed import index_feed
from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.bucket_upkeep import BucketUpkeep
from broker.model import Position
from broker.storage.log import RecordsUnderWay
from broker.subscriptions.handout import HandOut
from broker.subscriptions.key_shared import Parked
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy
from broker.topics.schedule_values import ChangeResult
from broker.topics.topic import Topic
from tests.harness import Node
from tests.unit.topics.change_world import (
    DELIVERED,
    DONE,
    HOUR_MS,
    MEMORY,
    TOPIC,
    TRACKERS,
    after,
    apply,
    before,
    cancel,
    check_came,
    counted,
    messages,
    run,
    times_of,
)

CANCELLED, MISSING = ChangeResult.ALREADY_CANCELLED, ChangeResult.NOT_FOUND
TYPES = pytest.mark.parametrize("type_", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])
CHANGES = pytest.mark.parametrize("kind", ["cancel", "later", "now"])

Act = Callable[[], Awaitable[Any]]


async def due_and_unsent(node: Node, type_: int, count: int = 3) -> list[Position]:
    """Messages whose time has come while nobody was there."""
    await node.create_subscription(TOPIC, "one", type_=type_)
    positions = await node.produce(TOPIC, messages(count, deliver_after_ms=50, key="k"))
    await asyncio.sleep(1)
    return positions


# -- hand-out ------------------------------------------------------------------------------------------------------


@TYPES
@TRACKERS
@CHANGES
@pytest.mark.parametrize("source", ["catch-up", "chunk"])
def test_a_change_while_the_dispatcher_has_frames_in_hand(
    type_: int, tracker: str, kind: str, source: str, monkeypatch: pytest.MonkeyPatch
):
    """It was decided after the read and before the last look: nobody gets the message under its old schedule."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        results: list[list[ChangeResult]] = []
        positions: list[Position] = []

        async def act() -> None:
            results.append(await apply(topic, positions, kind))

        if source == "catch-up":
            positions += await due_and_unsent(node, type_)
            calls = after(monkeypatch, topic.log, "read", act)
            inbox = node.attach(topic, topic.subscription("one"))
        else:
            await node.create_subscription(TOPIC, "one", type_=type_)
            inbox = node.attach(topic, topic.subscription("one"))
            positions += await node.produce(TOPIC, messages(3, deliver_after_ms=50, key="k"))
            calls = after(monkeypatch, topic.log, "read", act)
        await asyncio.sleep(1)
        assert calls
        # `Changing` reads times by another method: the only read so far was the dispatcher's.
        assert results == [[DONE] * 3]
        await check_came(node, inbox, positions, kind)
        return node

    run(scenario, tracker=tracker)


@TYPES
def test_without_the_last_look_at_times_the_test_above_fails(type_: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(HandOut, "_refresh", lambda self, taken, read: None)

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        positions = await due_and_unsent(node, type_)
        after(monkeypatch, topic.log, "read", lambda: apply(topic, positions, "later"))
        inbox = node.attach(topic, topic.subscription("one"))
        await check_came(node, inbox, positions, "later")
        return node

    with pytest.raises(AssertionError):
        run(scenario)


@TYPES
@pytest.mark.parametrize("kind", ["cancel", "later"])
@pytest.mark.parametrize("is_mutant", [False, True])
def test_what_is_on_its_way_is_held_back(
    type_: int, kind: str, is_mutant: bool, monkeypatch: pytest.MonkeyPatch
):
    """A consumer comes between the decision and the moment at which it is durable."""
    if is_mutant:
        monkeypatch.setattr(RecordsUnderWay, "hold", lambda self, entries: None)

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        positions = await due_and_unsent(node, type_)
        durable = asyncio.Event()
        submit = topic._services.submit

        def slowly(record: Any, apply_: Any) -> asyncio.Future[None]:
            async def wait() -> None:
                await durable.wait()
                await submit(record, apply_)

            return asyncio.ensure_future(wait())

        monkeypatch.setattr(
            topic, "submit_record", lambda record: slowly(record, lambda lsn: topic.apply(record, lsn))
        )
        changing = asyncio.ensure_future(apply(topic, positions, kind))
        await asyncio.sleep(0.5)
        inbox = node.attach(topic, topic.subscription("one"))
        await asyncio.sleep(0.5)
        durable.set()
        assert await changing == [DONE] * 3
        await check_came(node, inbox, positions, kind)
        return node

    if is_mutant:
        with pytest.raises(AssertionError):
            run(scenario)
    else:
        run(scenario)


@TYPES
@TRACKERS
@CHANGES
def test_a_change_while_entries_lie_in_the_replay_queue(type_: int, tracker: str, kind: str):
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one", type_=type_)
        inbox = node.attach(topic, topic.subscription("one"), permits=0)
        positions = await node.produce(TOPIC, messages(3, deliver_after_ms=50, key="k"))
        await asyncio.sleep(1)
        assert await apply(topic, positions, kind) == [DONE] * 3
        inbox.consumer.grant(10, 0)
        topic.subscription("one").work.set()
        await check_came(node, inbox, positions, kind)
        return node

    run(scenario, tracker=tracker)


@CHANGES
def test_a_change_while_entries_lie_in_the_readers_list(kind: str, monkeypatch: pytest.MonkeyPatch):
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        positions = await due_and_unsent(node, SubscriptionType.SHARED, count=4)
        subscription = topic.subscription("one")
        inbox = node.attach(topic, subscription, permits=1)
        for _ in range(1_000):
            if inbox.consumer.arrived:
                break
            await asyncio.sleep(0.001)
        assert subscription.reader._found, "it has found more than could be sent"
        rest = positions[1:]
        assert await apply(topic, rest, kind) == [DONE] * 3
        inbox.poll()
        inbox.received.clear()
        inbox.consumer.grant(10, 0)
        subscription.work.set()
        await check_came(node, inbox, rest, kind)
        return node

    run(scenario)


@CHANGES
def test_a_change_while_entries_are_parked(kind: str, monkeypatch: pytest.MonkeyPatch):
    """KEY_SHARED: the owner of the key has no permits left, another consumer has; the rest of the key is parked."""
    parked: list[int] = []
    park = Parked.park

    def noted(self: Parked, *columns: Any) -> None:
        parked.append(len(columns[0]))
        park(self, *columns)

    monkeypatch.setattr(Parked, "park", noted)

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one", type_=SubscriptionType.KEY_SHARED)
        subscription = topic.subscription("one")
        inboxes = [node.attach(topic, subscription, permits=3) for _ in range(2)]
        positions = await node.produce(TOPIC, messages(6, deliver_after_ms=50, key="k"))
        await asyncio.sleep(1)
        assert sum(parked), "nothing is parked"
        owner = next(inbox for inbox in inboxes if inbox.consumer.arrived)
        batch = owner.consumer.arrived[0][0]  # looked at, not taken: that would grant permits
        sent = [position for position in positions if position.entry_id in batch.entry_ids.tolist()]
        rest = [position for position in positions if position not in sent]
        results = await apply(topic, positions, kind)
        assert results == [DELIVERED if position in sent else DONE for position in positions]
        assert await owner.ack(sent) == []
        owner.consumer.arrived.clear()
        owner.consumer.grant(10, 0)
        subscription.work.set()
        await check_came(node, owner, rest, kind)
        return node

    run(scenario, ledger_max_entries=100)


@TYPES
def test_hand_out_first_and_then_the_change(type_: int):
    """Sent, returned and settled messages are not changed; the rest of the request is."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one", type_=type_)
        inbox = node.attach(topic, topic.subscription("one"), lease_ms=HOUR_MS)
        sent = await node.produce(TOPIC, messages(3, deliver_after_ms=50))
        waiting = await node.produce(TOPIC, messages(1, deliver_after_ms=HOUR_MS))
        await asyncio.sleep(1)
        assert len(inbox.poll()) == 3
        await inbox.ack(sent[:1])
        await inbox.nack(sent[1:2], 60_000)
        assert await cancel(topic, sent + waiting) == [DELIVERED] * 3 + [DONE]
        await asyncio.sleep(61)
        assert [each.position for each in inbox.poll()] == [sent[1]]
        return node

    run(scenario)


def writer_of(topic: Topic) -> Any:
    assert isinstance(topic.index.tracker, BucketTracker)
    return topic.index.tracker.buckets._writer


# -- the index -----------------------------------------------------------------------------------------------------


async def through_an_index(node: Node, topic: Topic, positions: list[Position], kind: str, act: Act) -> Node:
    """The change was done at some moment of the index's life: all that follows is right, in the next life too."""
    await act()
    waits = {"cancel": 0, "later": len(positions), "now": 0}[kind]
    await asyncio.sleep(3)
    assert await counted(topic) == waits
    await node.checkpoint()
    inbox = await node.subscribe(TOPIC, "one")
    if kind == "now":
        await asyncio.sleep(1)
        assert sorted(p for p, _ in times_of(inbox)) == positions
        return node
    node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
    await asyncio.sleep(1)
    assert await counted(node.topic(TOPIC)) == waits
    inbox = await node.subscribe(TOPIC, "one")
    await check_came(node, inbox, positions, kind)
    return node


@CHANGES
@TRACKERS
def test_a_change_while_the_index_loads_what_is_due_soon(
    kind: str, tracker: str, monkeypatch: pytest.MonkeyPatch
):
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        positions = await node.produce(TOPIC, messages(3, deliver_after_ms=12_000))
        await asyncio.sleep(7)  # sealed
        results: list[Any] = []

        async def change_it() -> None:
            results.append(await apply(topic, positions, kind))

        found = topic.index.tracker
        owner = found._storage if isinstance(found, BucketTracker) else found
        name = "_times_reader" if tracker == MEMORY else "read"
        calls = after(monkeypatch, owner, name, change_it)

        async def act() -> None:
            await asyncio.sleep(7)
            assert calls
            assert results == [[DONE] * 3]

        return await through_an_index(node, topic, positions, kind, act)

    run(scenario, tracker=tracker)


@CHANGES
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_change_while_a_bucket_is_sealed(kind: str, when: str, monkeypatch: pytest.MonkeyPatch):
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        results: list[Any] = []
        positions: list[Position] = []

        async def change_it() -> None:
            results.append(await apply(topic, positions, kind))

        hook = before if when == "before" else after
        calls = hook(monkeypatch, writer_of(topic), "seal", change_it)
        positions += await node.produce(TOPIC, messages(3, deliver_after_ms=HOUR_MS // 2))

        async def act() -> None:
            await asyncio.sleep(7)
            assert calls
            assert results == [[DONE] * 3]

        return await through_an_index(node, topic, positions, kind, act)

    run(scenario)


@CHANGES
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_change_while_buckets_are_merged(kind: str, when: str, monkeypatch: pytest.MonkeyPatch):
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        results: list[Any] = []
        positions: list[Position] = []

        async def change_it() -> None:
            results.append(await apply(topic, positions, kind))

        hook = before if when == "before" else after
        calls = hook(monkeypatch, writer_of(topic), "merge", change_it)
        for _ in range(3):  # more than `max_buckets`
            positions += await node.produce(TOPIC, messages(3, deliver_after_ms=HOUR_MS // 2))
            await asyncio.sleep(6)

        async def act() -> None:
            await asyncio.sleep(6)
            assert calls
            assert results
            assert set(results[0]) == {DONE}

        chosen = positions[:]
        return await through_an_index(node, topic, chosen, kind, act)

    run(scenario)


@CHANGES
@TRACKERS
def test_a_change_while_the_index_is_built_again(kind: str, tracker: str, monkeypatch: pytest.MonkeyPatch):
    """A part of the log was read when it comes."""
    monkeypatch.setattr(index_feed, "_INDEX_ROWS", 2)

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        positions = await node.produce(TOPIC, messages(4, deliver_after_ms=HOUR_MS // 2))
        positions += await node.produce(TOPIC, messages(4, deliver_after_ms=HOUR_MS // 2))
        await asyncio.sleep(7)
        pump = topic.index
        pump._rebuild(pump.tracker.frontier)
        results: list[Any] = []

        async def change_it() -> None:
            results.append(await apply(topic, positions, kind))

        calls = before(monkeypatch, pump._feed, "index_rows", change_it, nth=3)

        async def act() -> None:
            pump._work.set()
            await asyncio.sleep(7)
            assert calls
            assert results == [[DONE] * 8]

        return await through_an_index(node, topic, positions, kind, act)

    run(scenario, tracker=tracker)


@CHANGES
def test_a_change_while_the_index_takes_up_its_buckets(kind: str, monkeypatch: pytest.MonkeyPatch):
    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        positions = await node.produce(TOPIC, messages(4, deliver_after_ms=HOUR_MS // 2))
        await asyncio.sleep(7)
        await node.checkpoint()
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open(start=False)
        results: list[Any] = []

        async def change_it() -> None:
            results.append(await apply(node.topic(TOPIC), positions, kind))

        restore = BucketUpkeep.restore

        async def restore_and_change(self: Any) -> bool:
            found = await restore(self)
            await change_it()
            return found

        monkeypatch.setattr(BucketUpkeep, "restore", restore_and_change)
        node.broker.start()
        await asyncio.sleep(2)
        monkeypatch.undo()

        async def act() -> None:
            assert results == [[DONE] * 4]

        return await through_an_index(node, node.topic(TOPIC), positions, kind, act)

    run(scenario)
