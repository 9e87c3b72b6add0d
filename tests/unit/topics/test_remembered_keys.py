"""Answers of keys whose message is neither in the lookup nor in a ledger: what became of it, for a while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from broker.errors import Corrupt, Unavailable
from broker.model import KeySpans, Position, UInt64Column
from broker.policy import TopicPolicy
from broker.storage import schedule_hash
from broker.testing.mem_vfs import CrashPolicy
from broker.topics.schedule_values import Cancel, Change, ChangeResult, Move, Outcome
from tests.configs import changed
from tests.depth import every_pair
from tests.harness import Node, Outgoing
from tests.unit.folder import compaction_world
from tests.unit.topics import change_world
from tests.unit.topics.change_world import HOUR_MS, TOPIC, cancel, move

DONE, DELIVERED = ChangeResult.DONE, ChangeResult.ALREADY_DELIVERED
MISSING, CANCELLED = ChangeResult.NOT_FOUND, ChangeResult.ALREADY_CANCELLED
KEY = "order-17"
SOON_MS = 2_000
KEEP_MS = 2 * HOUR_MS
SLOWLY = {"reclaim_interval_ms": 10_000, "checkpoint_interval_ms": 10_000, "clock_recheck_ms": 10_000}
"""For hours in which little happens."""
FORGOTTEN = Outcome(None, KEY, MISSING, 0)

World = Callable[[Node], Awaitable[Node]]


def run(scenario: World, **changes: Any) -> None:
    """Ledgers go as soon as they can, and the lookup is written every few seconds."""
    quick = {
        "reclaim_interval_ms": 1_000,
        "checkpoint_interval_ms": 2_000,
        "seal_after_ms": 5_000,
        "settled_key_retention_ms": KEEP_MS,
    }
    change_world.run(scenario, **{**quick, **changes})


async def send(node: Node, after_ms: int = SOON_MS, key: str = KEY, **options: Any) -> Position:
    replace = options.pop("replace", False)
    message = Outgoing(b"close", deliver_after_ms=after_ms, schedule_key=key, **options)
    [position] = await node.produce(TOPIC, [message], replace=replace)
    return position


async def by_key(node: Node, change: Change | None = None, key: str = KEY) -> Outcome:
    [outcome] = await node.topic(TOPIC).schedule.change([key], change or Cancel(), dry_run=False)
    assert outcome.schedule_key == key
    return outcome


async def wait_gone(node: Node, *positions: Position) -> None:
    """Until the ledgers are gone."""
    for position in positions:
        async with asyncio.timeout(60):
            while node.topic(TOPIC).log.entry_count(position.ledger_id) is not None:
                await asyncio.sleep(0.1)


async def acknowledged(node: Node) -> Position:
    inbox = await node.subscribe(TOPIC, "one")
    position = await send(node)
    await inbox.wait(1)
    assert await inbox.ack([position]) == []
    inbox.detach()
    return position


async def acknowledged_after_a_seal(node: Node) -> Position:
    inbox = await node.subscribe(TOPIC, "one")
    position = await send(node, 60_000)
    await asyncio.sleep(10)
    assert node.topic(TOPIC).keys.stats().runs == 1
    await inbox.wait(1)
    assert await inbox.ack([position]) == []
    inbox.detach()
    return position


async def expired(node: Node) -> Position:
    await node.create_subscription(TOPIC, "one")
    return await send(node, ttl_ms=1)


async def cancelled(node: Node) -> Position:
    await node.create_subscription(TOPIC, "one")
    position = await send(node, HOUR_MS)
    assert (await by_key(node)).result is DONE
    return position


async def cancelled_when_due(node: Node) -> Position:
    """By id, after its key had been found to be that of a message that waits no longer."""
    await node.create_subscription(TOPIC, "one")
    position = await send(node)
    await asyncio.sleep(20)
    assert node.topic(TOPIC).keys.stats().settled == 1
    assert await cancel(node.topic(TOPIC), [position]) == [DONE]
    return position


async def delivered_under_its_new_time(node: Node) -> Position:
    inbox = await node.subscribe(TOPIC, "one")
    position = await send(node, HOUR_MS)
    assert await move(node.topic(TOPIC), [position], deliver_after_ms=SOON_MS) == [DONE]
    await inbox.wait(1)
    assert await inbox.ack([position]) == []
    inbox.detach()
    return position


async def delivered_after_others_were_replaced(node: Node) -> Position:
    for _ in range(3):
        await send(node, HOUR_MS, replace=True)
    inbox = await node.subscribe(TOPIC, "one")
    position = await send(node, replace=True)
    await inbox.wait(1)
    assert await inbox.ack([position]) == []
    inbox.detach()
    return position


async def cancelled_after_another_was_delivered(node: Node) -> Position:
    await wait_gone(node, await acknowledged(node))
    position = await send(node, HOUR_MS)
    assert (await by_key(node)).position == position
    return position


ENDS: dict[Callable[[Node], Awaitable[Position]], ChangeResult] = {
    acknowledged: DELIVERED,
    acknowledged_after_a_seal: DELIVERED,
    expired: DELIVERED,
    cancelled: CANCELLED,
    cancelled_when_due: CANCELLED,
    delivered_under_its_new_time: DELIVERED,
    delivered_after_others_were_replaced: DELIVERED,
    cancelled_after_another_was_delivered: CANCELLED,
}


async def next_life(node: Node, life: str) -> Node:
    """Another life of the broker, or the same; what was checkpointed is there."""
    if life == "live":
        return node
    if life == "stopped":
        await node.stop()
    else:
        await node.checkpoint()
    return node.crash(CrashPolicy.LOSE_UNSYNCED).open()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "life", "change"),
    every_pair(ENDS, ["live", "stopped", "killed"], [Cancel(), Move(deliver_after_ms=HOUR_MS)]),
)
def test_a_key_says_what_became_of_its_message_when_its_ledger_is_gone(
    end: Callable[[Node], Awaitable[Position]], life: str, change: Change
):
    async def scenario(node: Node) -> Node:
        position = await end(node)
        await wait_gone(node, position)
        node = await next_life(node, life)
        assert await by_key(node, change) == Outcome(position, KEY, ENDS[end], 0)
        assert await by_key(node, key="never") == Outcome(None, "never", MISSING, 0)
        # The key is as free as ever, what waits under it comes first, and is the last word when it is cancelled.
        newer = await send(node, HOUR_MS)
        assert (await by_key(node, change))[:3] == (newer, KEY, DONE)
        await by_key(node)
        await wait_gone(node, newer)
        node = await next_life(node, life)
        assert await by_key(node) == Outcome(newer, KEY, CANCELLED, 0)
        return node

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("life", ["live", "stopped", "killed"])
def test_a_key_is_remembered_for_as_long_as_it_should_be(life: str):
    async def scenario(node: Node) -> Node:
        position = await acknowledged(node)
        await wait_gone(node, position)
        node = await next_life(node, life)
        await asyncio.sleep(KEEP_MS / 1000 - 60)
        assert (await by_key(node)).result is DELIVERED
        await asyncio.sleep(KEEP_MS / 4000 + 60)
        assert await by_key(node) == FORGOTTEN
        await node.checkpoint()
        assert node.topic(TOPIC).keys.stats().disk_bytes == 0
        assert not [name for name in node.vfs.snapshot() if name.endswith(".keys")]
        return node

    run(scenario, **SLOWLY)


@pytest.mark.slow
def test_what_expires_goes_without_anybody_asking():
    async def scenario(node: Node) -> Node:
        await wait_gone(node, await acknowledged(node))
        assert node.topic(TOPIC).keys.stats().settled
        await asyncio.sleep(2 * KEEP_MS / 1000)
        assert node.topic(TOPIC).keys.stats().settled == 0
        return node

    run(scenario, **SLOWLY)


@pytest.mark.slow
def test_a_merge_of_the_lookup_remembers_what_it_leaves_out():
    """While the ledger is there the message's row has the last word, also when it was moved back."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        inbox = await node.subscribe(TOPIC, "one")
        position = await send(node, 20_000)
        await send(node, HOUR_MS, "keeps the ledger")
        await asyncio.sleep(5)
        for number in range(40):
            await send(node, HOUR_MS, f"other {number}")
            await asyncio.sleep(3)
        await inbox.wait(1)
        assert await topic.keys.find([KEY]) == [None]
        named = await by_key(node)
        assert (named.position, named.result, named.delivered_to) == (position, DELIVERED, ("one",))
        inbox.detach()
        assert await topic.keys.find([KEY, "keeps the ledger"]) != [None, None]
        return node

    run(scenario, ledger_max_entries=100)


def test_a_message_that_is_moved_back_holds_its_key_again():
    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        position = await send(node)
        await send(node, HOUR_MS, "keeps the ledger")
        await asyncio.sleep(10)
        assert await node.topic(TOPIC).keys.find([KEY]) == [None]
        assert await by_key(node) == Outcome(position, KEY, MISSING, 0)  # due, and nobody was sent it
        assert await move(node.topic(TOPIC), [position], deliver_after_ms=HOUR_MS) == [DONE]
        assert (await by_key(node)).result is DONE
        return node

    run(scenario)


@pytest.mark.slow
def test_keys_are_remembered_a_day_where_nothing_is_set():
    async def scenario(node: Node) -> Node:
        position = await acknowledged(node)
        ended_s = asyncio.get_running_loop().time()
        await wait_gone(node, position)
        assert await by_key(node) == Outcome(position, KEY, DELIVERED, 0)
        await node.stop()
        slow = {
            "reclaim_interval_ms": 600_000,
            "checkpoint_interval_ms": 600_000,
            "clock_recheck_ms": 600_000,
        }
        node = Node(node.vfs, node.clock, changed(node.config, **slow)).open()
        for hours, known in ((23.9, True), (24.2, False)):
            await asyncio.sleep(ended_s + hours * 3_600 - asyncio.get_running_loop().time())
            # What is too old goes when the lookup is written again.
            await send(node, HOUR_MS, f"at {hours}")
            await asyncio.sleep(60)
            outcome = await by_key(node)
            assert outcome == (Outcome(position, KEY, DELIVERED, 0) if known else FORGOTTEN)
        return node

    change_world.run(scenario, reclaim_interval_ms=1_000, checkpoint_interval_ms=2_000, seal_after_ms=5_000)


def test_where_keys_are_not_remembered_nothing_is_written():
    async def scenario(node: Node) -> Node:
        await wait_gone(node, await acknowledged(node))
        assert await by_key(node) == FORGOTTEN
        assert node.topic(TOPIC).keys.stats().settled == 0
        return node

    run(scenario, settled_key_retention_ms=0)


def test_what_is_remembered_goes_when_it_is_turned_off():
    async def scenario(node: Node) -> Node:
        await wait_gone(node, await acknowledged(node))
        await node.stop()
        node = node.crash(CrashPolicy.LOSE_UNSYNCED)
        node = Node(node.vfs, node.clock, changed(node.config, settled_key_retention_ms=0)).open()
        assert await by_key(node) == FORGOTTEN
        await node.checkpoint()
        assert not [name for name in node.vfs.snapshot() if name.endswith(".keys")]
        return node

    run(scenario)


@pytest.mark.slow
def test_the_oldest_keys_go_beyond_the_limit():
    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe(TOPIC, "one")
        for number in range(40):
            await send(node, key=f"k{number}")
            [came] = await inbox.wait(1)
            await inbox.ack([came.position])
            await asyncio.sleep(2)
        await asyncio.sleep(10)
        known = [(await by_key(node, key=f"k{number}")).result for number in range(40)]
        assert known[:20] == [MISSING] * 20
        assert known[-5:] == [DELIVERED] * 5
        assert node.topic(TOPIC).keys.stats().settled <= 10
        inbox.detach()
        return node

    run(scenario, settled_keys_per_topic_max=10)


def test_a_damaged_run_of_settled_keys_is_forgotten_and_nothing_else():
    async def scenario(node: Node) -> Node:
        await wait_gone(node, await acknowledged(node))
        waits = await send(node, HOUR_MS, "waits")
        await asyncio.sleep(5)
        await node.checkpoint()
        node.abandon()
        vfs = node.vfs
        [settled] = [name for name, data in vfs.snapshot().items() if name.endswith(".keys") and data[5] == 1]
        file = vfs.open(settled)
        file.pwrite([b"\xff" * 8], 96 + 20)
        file.sync()
        file.close()
        node = node.crash(CrashPolicy.KEEP_ALL).open()
        assert await by_key(node) == FORGOTTEN
        assert (await by_key(node, key="waits")).position == waits
        assert node.broker.counters.schedule_key_rebuilds == 0
        return node

    run(scenario)


@pytest.fixture
def few_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of 3 bits: nearly every key meets another one with its hash."""
    whole = schedule_hash.hash_spans

    def hashed(keys: KeySpans) -> UInt64Column:
        hashes = whole(keys)
        return np.where(hashes == 0, hashes, hashes % np.uint64(8) + np.uint64(1))

    monkeypatch.setattr(schedule_hash, "hash_spans", hashed)


@pytest.mark.slow
@pytest.mark.usefixtures("few_hashes")
@pytest.mark.parametrize("seed", range(5))
def test_keys_of_one_hash_never_hide_a_message_that_waits(seed: int):
    """Waiting messages are found and cancelled, whatever is remembered of other keys with their hash; one with a row is never
    taken for another's."""

    async def scenario(node: Node) -> Node:
        rng = random.Random(seed)
        inbox = await node.subscribe(TOPIC, "one")
        for number in range(30):
            await send(node, 1 + rng.randrange(3_000), f"gone {number}")
        await inbox.wait(30)
        await inbox.ack([each.position for each in inbox.received])
        inbox.detach()
        await asyncio.sleep(30)
        waiting = {f"waits {number}": await send(node, HOUR_MS, f"waits {number}") for number in range(20)}
        node = await next_life(node, rng.choice(["live", "stopped", "killed"]))
        for key, position in waiting.items():
            assert (await by_key(node, key=key))[:3] == (position, key, DONE)
            named = await by_key(node, key=key)
            assert named.result is CANCELLED
            assert named.position == position
        return node

    run(scenario)


def test_a_compaction_forgets_no_key():
    """It leaves out what is settled, which counts as cancelled from then on: what was delivered is said to be so."""

    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe(compaction_world.TOPIC, "billing")
        for first in (0, 10):
            await node.produce(
                TOPIC,
                [
                    Outgoing(
                        b"x" * 100,
                        deliver_after_ms=SOON_MS if entry else HOUR_MS,
                        schedule_key=f"k{first + entry}",
                    )
                    for entry in range(10)
                ],
            )
        assert (await by_key(node, key="k9")).result is DONE
        await inbox.ack([each.position for each in await inbox.wait(17)])
        await node.produce(TOPIC, [Outgoing(b"last", deliver_after_ms=HOUR_MS)])
        await asyncio.sleep(3)
        await node.checkpoint()
        committed = await compaction_world.compact(node)
        assert committed.ledger_ids
        for life in ("live", "stopped"):
            node = await next_life(node, life)
            assert (await by_key(node, key="k3")).result is DELIVERED
            assert (await by_key(node, key="k9")).result is CANCELLED
            assert (await node.topic(TOPIC).schedule.get("k0")).schedule_key == "k0"
            assert (await by_key(node, key="none")).position is None
        return node

    compaction_world.run(scenario, settled_key_retention_ms=KEEP_MS)


def test_damaged_rows_are_not_remembered_and_their_ledger_goes(monkeypatch: pytest.MonkeyPatch):
    """And a disk that does not read for a while is waited for."""

    async def scenario(node: Node) -> Node:
        position = await acknowledged(node)
        upkeep = node.topic(TOPIC).keys._live
        assert upkeep is not None
        failures: list[Exception] = [Unavailable("the disk does not read"), Corrupt("damaged")]
        monkeypatch.setattr(upkeep.remembered, "_remember", lambda *_: failing(failures.pop(0)))
        await wait_gone(node, position)
        assert failures == []
        assert node.topic(TOPIC).name == TOPIC
        return node

    async def failing(error: Exception) -> int:
        raise error

    run(scenario)


def test_a_topic_that_is_deleted_meanwhile_stops_nothing(monkeypatch: pytest.MonkeyPatch):
    async def scenario(node: Node) -> Node:
        await node.broker.registry.create_topic("other", TopicPolicy())
        await acknowledged(node)
        upkeep = node.topic(TOPIC).keys._live
        assert upkeep is not None
        began = asyncio.Event()
        inner = upkeep.remembered._remember

        async def remember(*arguments: Any) -> int:
            began.set()
            await asyncio.sleep(3)
            return await inner(*arguments)

        monkeypatch.setattr(upkeep.remembered, "_remember", remember)
        await began.wait()
        await node.broker.registry.delete_topic(TOPIC)
        await asyncio.sleep(10)
        inbox = await node.subscribe("other", "s")
        await node.produce("other", [Outgoing(b"x")])
        await inbox.ack([each.position for each in await inbox.wait(1)])
        async with asyncio.timeout(60):
            while node.topic("other").log.entry_total:
                await asyncio.sleep(0.1)
        return node

    run(scenario)
