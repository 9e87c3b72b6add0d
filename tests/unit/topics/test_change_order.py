"""Cancels and moves beside each other, beside seeks, beside subscriptions that come and go, and ledgers that go; and the
time to live of what was moved (P3, P5; CHANGE-1 to CHANGE-4).
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.model import START, Position
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy
from broker.topics import control
from broker.topics.changing import Changing
from broker.topics.schedule_values import ChangeResult
from tests.harness import EARLIEST, Node
from tests.unit.topics.change_world import (
    DELIVERED,
    DONE,
    HOUR_MS,
    TOPIC,
    after,
    apply,
    cancel,
    check_came,
    counted,
    messages,
    move,
    run,
    step,
)

CANCELLED, MISSING = ChangeResult.ALREADY_CANCELLED, ChangeResult.NOT_FOUND
CHANGES = pytest.mark.parametrize("kind", ["cancel", "later", "now"])


@pytest.mark.parametrize(
    "kinds", [("cancel", "cancel"), ("cancel", "later"), ("later", "cancel"), ("later", "now")]
)
def test_two_changes_of_one_message_at_once(kinds: tuple[str, str]):
    """The second one waits for the first, and sees what it did."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        inbox = await node.subscribe(TOPIC, "one")
        positions = await node.produce(TOPIC, messages(2, deliver_after_ms=HOUR_MS // 2))
        results = await asyncio.gather(*(apply(topic, positions, kind) for kind in kinds))
        second = [CANCELLED] * 2 if kinds[0] == "cancel" else [DONE] * 2
        assert results == [[DONE] * 2, second]
        assert topic.log.under_way.changing == {}
        await check_came(node, inbox, positions, "cancel" if "cancel" in kinds else "now")
        return node

    run(scenario)


def test_one_change_of_many_waits_for_another_of_one_of_them():
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        positions = await node.produce(TOPIC, messages(4, deliver_after_ms=HOUR_MS))
        results = await asyncio.gather(
            cancel(topic, positions[:1]), move(topic, positions, shift_ms=5), cancel(topic, positions[3:])
        )
        assert results[0] == [DONE]
        assert results[1] == [CANCELLED, DONE, DONE, results[1][3]]
        assert results[2] == [DONE]
        assert await counted(topic) == 2
        return node

    run(scenario)


@CHANGES
@pytest.mark.parametrize("where", [START, None])
@pytest.mark.parametrize("first", ["seek", "change"])
def test_a_change_and_a_seek(kind: str, where: Position | None, first: str):
    """Whichever record comes first: what was cancelled is owed to nobody, what was moved comes once."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        await node.create_subscription(TOPIC, "other", position=EARLIEST)
        positions = await node.produce(TOPIC, messages(3, deliver_after_ms=HOUR_MS // 2))
        subscription = topic.subscription("one")
        seeking = control.seek(topic, subscription, topic.latest_position() if where is None else where)
        changing = apply(topic, positions, kind)
        order = [seeking, changing] if first == "seek" else [changing, seeking]
        found = await asyncio.gather(*order)
        assert found[first == "seek"] == [DONE] * 3
        inbox, other = await node.subscribe(TOPIC, "one"), await node.subscribe(TOPIC, "other")
        await asyncio.sleep(2)
        counts = topic.subscription_counts(subscription)
        waits = 3 if kind == "later" and where == START else 0
        assert counts.scheduled == waits
        await check_came(node, other, positions, kind)
        inbox.poll()
        expected = [] if kind == "cancel" or where is None else positions
        assert sorted(each.position for each in inbox.received) == expected
        return node

    run(scenario)


@CHANGES
def test_a_change_and_a_subscription_that_goes(kind: str):
    """It was the only one that was sent the messages."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "other")
        inbox = await node.subscribe(TOPIC, "one")
        positions = await node.produce(TOPIC, messages(2, deliver_after_ms=50))
        await asyncio.sleep(1)
        assert len(inbox.poll()) == 2
        assert await apply(topic, positions, kind) == [DELIVERED] * 2
        gone = asyncio.ensure_future(topic.subscriptions.delete("one"))
        results = await apply(topic, positions, kind)
        await gone
        assert results in ([DELIVERED] * 2, [DONE] * 2)
        if results[0] is DELIVERED:
            assert await apply(topic, positions, kind) == [DONE] * 2
        await check_came(node, await node.subscribe(TOPIC, "other"), positions, kind)
        return node

    run(scenario)


@pytest.mark.parametrize("first", ["create", "cancel"])
def test_a_cancel_and_a_subscription_that_comes(first: str):
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        positions = await node.produce(TOPIC, messages(2, deliver_after_ms=50))
        await asyncio.sleep(1)
        creating = node.create_subscription(TOPIC, "new", position=EARLIEST)
        order = [creating, cancel(topic, positions)]
        await asyncio.gather(*(order if first == "create" else reversed(order)))
        new = topic.subscription("new")
        assert new.unsettled_count() == 0
        inbox = node.attach(topic, new)
        await asyncio.sleep(2)
        assert inbox.poll() == []
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        assert node.topic(TOPIC).subscription("new").unsettled_count() == 0
        return node

    run(scenario)


@CHANGES
def test_a_change_and_the_drop_of_its_ledger(kind: str, monkeypatch: pytest.MonkeyPatch):
    """The ledger goes between the look at the times and the decision."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one", type_=SubscriptionType.EXCLUSIVE)
        inbox = node.attach(topic, topic.subscription("one"))
        positions = await node.produce(TOPIC, messages(4, deliver_after_ms=50))
        kept = await node.produce(TOPIC, messages(1, deliver_after_ms=HOUR_MS))
        await asyncio.sleep(1)
        assert len(inbox.poll()) == 5
        await inbox.ack(positions)

        async def drop() -> None:
            ledger_id = positions[0].ledger_id
            await topic.drop_ledgers([ledger_id], topic.ledgers.facts[ledger_id].last_due_ms)
            assert topic.log.entry_count(ledger_id) is None

        after(monkeypatch, topic.log, "times_of", drop)
        assert await apply(topic, positions + kept, kind) == [MISSING] * 4 + [DONE]
        assert topic.log.under_way.changing == {}
        return node

    run(scenario)


@pytest.mark.parametrize("kind", ["cancel", "later"])
def test_a_change_whose_ledger_goes_before_it_is_durable(kind: str):
    """Nobody was sent the messages by a subscription that honours delays, and there is none: the ledger may go."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one", type_=SubscriptionType.EXCLUSIVE)
        inbox = node.attach(topic, topic.subscription("one"))
        positions = await node.produce(TOPIC, messages(4, deliver_after_ms=50))
        await node.produce(TOPIC, messages(1))
        await asyncio.sleep(1)
        assert len(inbox.poll()) == 5
        await inbox.ack(positions)
        ledger_id = positions[0].ledger_id
        dropped = topic.drop_ledgers([ledger_id], topic.ledgers.facts[ledger_id].last_due_ms)
        await apply(topic, positions, kind)
        await dropped
        await asyncio.sleep(3)
        assert topic.log.entry_count(ledger_id) is None
        assert topic.log.under_way.changing == {}
        assert await counted(topic) == 0
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        await asyncio.sleep(1)
        assert await counted(node.topic(TOPIC)) == 0
        return node

    run(scenario)


def test_a_decision_is_one_step(monkeypatch: pytest.MonkeyPatch):
    """CHANGE-1: between the last read and the submission nothing is awaited."""
    decided: list[int] = []
    decide = Changing._decide

    def noted(self: Changing, *arguments: Any, **named: Any) -> Any:
        decided.append(self._topic.topic_id)
        return decide(self, *arguments, **named)

    monkeypatch.setattr(Changing, "_decide", noted)

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        positions = await node.produce(TOPIC, messages(4, deliver_after_ms=HOUR_MS))
        await asyncio.gather(*(move(topic, [each], shift_ms=1) for each in positions))
        assert len(decided) == 4
        return node

    run(scenario)


# -- the time to live ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_time_to_live_counts_from_the_new_time(restarts: bool, checkpointed: bool):
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        later, sooner = await node.produce(TOPIC, messages(2, deliver_after_ms=60_000, ttl_ms=10_000))
        start_ms = node.clock.now_ms()
        assert await move(topic, [later], deliver_at_ms=start_ms + 100_000) == [DONE]
        assert await move(topic, [sooner], deliver_at_ms=start_ms + 20_000) == [DONE]
        if checkpointed:
            await node.checkpoint()
        if restarts:
            node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        step(node, start_ms + 35_000 - node.clock.now_ms())  # the sooner one has expired by then
        await asyncio.sleep(1)
        inbox = await node.subscribe(TOPIC, "one")
        await asyncio.sleep(1)
        step(node, start_ms + 105_000 - node.clock.now_ms())  # the later one has not
        await asyncio.sleep(2)
        assert [each.position for each in inbox.poll()] == [later]
        assert node.topic(TOPIC).subscription("one").cursor.is_settled(sooner)
        return node

    run(scenario)
