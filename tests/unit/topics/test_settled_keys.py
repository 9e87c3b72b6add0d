"""Answers of keys whose message waits no longer: those of its id, while the lookup still has it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from broker.errors import NotFound
from broker.model import Position
from broker.testing.mem_vfs import CrashPolicy
from broker.topics.schedule_values import Cancel, Change, ChangeResult, Move, Outcome
from tests.depth import every_pair
from tests.harness import Node, Outgoing
from tests.unit.topics.change_world import HOUR_MS, TOPIC, cancel, move, run

DONE, DELIVERED = ChangeResult.DONE, ChangeResult.ALREADY_DELIVERED
MISSING, CANCELLED = ChangeResult.NOT_FOUND, ChangeResult.ALREADY_CANCELLED
KEY = "order-17"
SOON_MS = 2_000


async def send(node: Node, after_ms: int = SOON_MS, *, replace: bool = False, ttl_ms: int = 0) -> Position:
    message = Outgoing(b"close", deliver_after_ms=after_ms, schedule_key=KEY, ttl_ms=ttl_ms)
    [position] = await node.produce(TOPIC, [message], replace=replace)
    return position


async def by_key(node: Node, change: Change | None = None) -> Outcome:
    [outcome] = await node.topic(TOPIC).schedule.change([KEY], change or Cancel(), dry_run=False)
    assert outcome.schedule_key == KEY
    return outcome


async def delivered(node: Node) -> Position:
    inbox = await node.subscribe(TOPIC, "one")
    position = await send(node)
    await inbox.wait(1)
    return position


async def acknowledged(node: Node) -> Position:
    inbox = await node.subscribe(TOPIC, "one")
    position = await send(node)
    await inbox.wait(1)
    assert await inbox.ack([position]) == []
    return position


async def expired(node: Node) -> Position:
    await node.subscribe(TOPIC, "one")
    position = await send(node, ttl_ms=1)
    await asyncio.sleep(5)
    return position


async def sent_to_nobody(node: Node) -> Position:
    position = await send(node)
    await asyncio.sleep(5)
    return position


async def cancelled_by_id(node: Node) -> Position:
    position = await send(node)
    assert await cancel(node.topic(TOPIC), [position]) == [DONE]
    return position


async def cancelled_by_key(node: Node) -> Position:
    position = await send(node, HOUR_MS)
    assert (await by_key(node)).result is DONE
    return position


async def delivered_under_its_new_time(node: Node) -> Position:
    inbox = await node.subscribe(TOPIC, "one")
    position = await send(node, HOUR_MS)
    assert await move(node.topic(TOPIC), [position], deliver_after_ms=SOON_MS) == [DONE]
    await inbox.wait(1)
    return position


async def cancelled_after_another_was_delivered(node: Node) -> Position:
    await delivered(node)
    return await cancelled_by_id(node)


async def delivered_after_others_were_replaced(node: Node) -> Position:
    for _ in range(3):
        await send(node, HOUR_MS, replace=True)
    inbox = await node.subscribe(TOPIC, "one")
    position = await send(node, replace=True)
    await inbox.wait(1)
    return position


ENDS: dict[Callable[[Node], Awaitable[Position]], ChangeResult] = {
    delivered: DELIVERED,
    acknowledged: DELIVERED,
    expired: DELIVERED,  # it is settled for whoever it was for
    sent_to_nobody: MISSING,
    cancelled_by_id: CANCELLED,
    cancelled_by_key: CANCELLED,
    delivered_under_its_new_time: DELIVERED,
    cancelled_after_another_was_delivered: CANCELLED,
    delivered_after_others_were_replaced: DELIVERED,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "life", "change"),
    every_pair(ENDS, ["live", "stopped", "crashed"], [Cancel(), Move(deliver_after_ms=HOUR_MS)]),
)
def test_the_key_of_what_waits_no_longer_answers_what_the_id_does(
    end: Callable[[Node], Awaitable[Position]], life: str, change: Change
):
    """But for what is due and was sent to nobody: its id alone still changes it, and the key tells that id."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "nobody's")
        position = await end(node)
        if life == "stopped":
            await node.stop()
        if life != "live":
            node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        named = await by_key(node, change)
        may_have_been_sent = life != "live" and ENDS[end] is MISSING
        result_now = DELIVERED if may_have_been_sent else ENDS[end]
        assert (named.position, named.result, named.deliver_at_ms) == (position, result_now, 0)
        with pytest.raises(NotFound):
            await node.topic(TOPIC).schedule.get(KEY)
        [same] = await node.topic(TOPIC).schedule.change([position], change, dry_run=True)
        assert same.delivered_to == named.delivered_to
        assert same.result is (DONE if result_now is MISSING else result_now)
        # The key is as free as ever, and what waits under it comes first.
        newer = await send(node, HOUR_MS)
        assert (await by_key(node)).position == newer
        return node

    run(scenario, seal_after_ms=HOUR_MS)


def test_where_keys_are_not_remembered_one_goes_with_its_ledger():
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        position = await acknowledged(node)
        assert (await by_key(node)).position == position
        await cancel(topic, await node.produce(TOPIC, [Outgoing(b"x", deliver_after_ms=HOUR_MS)] * 4))
        await asyncio.sleep(10)
        assert topic.log.entry_count(position.ledger_id) is None
        assert await by_key(node) == Outcome(None, KEY, MISSING, 0)
        return node

    run(scenario, seal_after_ms=HOUR_MS, reclaim_interval_ms=1_000, settled_key_retention_ms=0)


def test_where_keys_are_not_remembered_a_seal_forgets_those_of_what_waits_no_longer():
    """Messages that wait at the seal are remembered in the run, also when their time has come since."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        inbox = await node.subscribe(TOPIC, "one")
        position = await send(node, 60_000)
        await node.produce(TOPIC, [Outgoing(b"x", deliver_after_ms=SOON_MS, schedule_key="other")])
        await inbox.wait(2)
        assert topic.keys.stats().runs == 1
        assert (await by_key(node)).position == position
        assert await topic.keys.find(["other"]) == [None]
        return node

    run(scenario, seal_after_ms=5_000, settled_key_retention_ms=0)


def test_the_files_of_runs_that_were_looked_into_are_closed_with_their_topic():
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.subscribe(TOPIC, "one")
        await send(node, HOUR_MS)
        await asyncio.sleep(60)
        live = topic.keys._live
        assert live is not None and topic.keys.stats().runs == 1
        assert await topic.keys.find([KEY]) != [None]
        readers = live.keys.lookup.cache._readers
        assert readers
        topic.close()
        assert not readers
        return node

    run(scenario, seal_after_ms=5_000)


def test_rows_that_are_read_again_name_a_key_once():
    """A key that replaced its own message again and again is not looked for among all of them after a restart."""

    async def scenario(node: Node) -> Node:
        for _ in range(20):
            position = await send(node, HOUR_MS, replace=True)
        assert (await by_key(node)).result is DONE
        await node.produce(TOPIC, [Outgoing(b"x", deliver_after_ms=HOUR_MS, schedule_key="kept")])
        await node.checkpoint()
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        again = await by_key(node)
        assert (again.position, again.result) == (position, CANCELLED)
        assert node.topic(TOPIC).keys.stats().entries == 2
        return node

    run(scenario, seal_after_ms=HOUR_MS, ledger_max_entries=40)
