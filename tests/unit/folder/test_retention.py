"""Ledgers that are dropped (RETENTION-1 to RETENTION-3), as a table; and what becomes of a topic then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from broker.config import BrokerConfig
from broker.folder.retention import LedgerState, ReclaimRule, plan_reclaim
from broker.jobs.verify import verify_data_dir
from broker.model import START, Position
from broker.policy import TopicPolicy
from broker.storage.ledger_facts import LedgerFacts
from broker.subscriptions.types import SubscriptionType
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import DATA_DIR, EARLIEST, LATEST, Node, Outgoing, small_config

NOW = 1_000_000
RULE = ReclaimRule(retention_ms=0, retention_bytes=0, idle_ms=60_000)
DONE = LedgerState(
    ledger_id=3,
    data_bytes=100,
    facts=LedgerFacts(
        first_publish_ms=NOW - 90_000,
        last_due_ms=NOW - 10,
        last_expire_ms=0,
        last_publish_ms=NOW - 80_000,
    ),
    is_settled=True,
    is_indexed=True,
    takes_entries=False,
    awaits_entries=False,
)
OPEN = replace(DONE, takes_entries=True)


def published(state: LedgerState, ago_ms: int) -> LedgerState:
    return replace(state, facts=replace(state.facts, last_publish_ms=NOW - ago_ms))


def due(state: LedgerState, in_ms: int) -> LedgerState:
    return replace(state, facts=replace(state.facts, last_due_ms=NOW + in_ms))


@pytest.mark.parametrize(
    ("state", "goes"),
    [
        pytest.param(DONE, True, id="done"),
        pytest.param(due(DONE, 0), True, id="due just now"),
        pytest.param(due(DONE, 1), False, id="due in a millisecond"),
        pytest.param(replace(DONE, is_settled=False), False, id="owed"),
        pytest.param(replace(DONE, is_indexed=False), False, id="not indexed yet"),
        pytest.param(replace(DONE, awaits_entries=True), False, id="a batch is on its way"),
        pytest.param(OPEN, True, id="takes entries, and rests"),
        pytest.param(published(OPEN, 60_000), True, id="has rested just long enough"),
        pytest.param(published(OPEN, 59_999), False, id="does not rest yet"),
        pytest.param(published(OPEN, -1), True, id="the clock stepped back"),
        pytest.param(published(DONE, 0), True, id="a sealed one need not rest"),
    ],
)
def test_a_ledger_goes_when_every_condition_holds(state: LedgerState, goes: bool):
    assert plan_reclaim([state], RULE, NOW, NOW) == [3] * goes


def test_a_ledger_stays_while_the_index_may_yield_its_entries():
    assert plan_reclaim([DONE], RULE, NOW, NOW - 10) == [3]
    assert plan_reclaim([DONE], RULE, NOW, NOW - 11) == []


YEARS = [replace(published(DONE, 10_000 * (9 - i)), ledger_id=i) for i in (1, 2, 3, 4, 5)]
"""Published 80, 70, 60, 50 and 40 seconds ago, of 100 bytes each."""


@pytest.mark.parametrize(
    ("retention", "gone"),
    [
        pytest.param({}, [1, 2, 3, 4, 5], id="nothing is retained"),
        pytest.param({"retention_ms": 60_001}, [1, 2], id="by time"),
        pytest.param({"retention_ms": 60_000}, [1, 2, 3], id="by time, to the millisecond"),
        pytest.param({"retention_bytes": 200}, [1, 2, 3], id="by size"),
        pytest.param({"retention_bytes": 199}, [1, 2, 3, 4], id="by size, to the byte"),
        pytest.param({"retention_bytes": 99}, [1, 2, 3, 4, 5], id="not one fits"),
        pytest.param({"retention_ms": 60_001, "retention_bytes": 200}, [1, 2, 3], id="both, size decides"),
        pytest.param({"retention_ms": 45_000, "retention_bytes": 400}, [1, 2, 3, 4], id="both, time decides"),
    ],
)
def test_what_is_done_is_retained_by_time_and_size(retention: dict[str, int], gone: list[int]):
    assert plan_reclaim(YEARS, replace(RULE, **retention), NOW, NOW) == gone


def test_once_a_ledger_does_not_fit_older_ones_go_too():
    sizes = [10, 500, 100]
    ledgers = [
        replace(DONE, ledger_id=i, data_bytes=bytes_) for i, bytes_ in zip((1, 2, 3), sizes, strict=True)
    ]
    assert plan_reclaim(ledgers, replace(RULE, retention_bytes=120), NOW, NOW) == [1, 2]


def test_what_is_live_takes_no_room_of_what_is_retained():
    ledgers = [YEARS[0], YEARS[1], replace(YEARS[2], is_settled=False), YEARS[3]]
    assert plan_reclaim(ledgers, replace(RULE, retention_bytes=200), NOW, NOW) == [1]


def test_ledgers_go_in_the_middle_and_at_the_end():
    ledgers = [due(YEARS[0], 1), YEARS[1], due(YEARS[2], 1), YEARS[3]]
    assert plan_reclaim(ledgers, RULE, NOW, NOW) == [2, 4]


# -- a topic whose ledgers go --------------------------------------------------------------------------------------

SECOND_MS = 1_000
YEAR_MS = 365 * 86_400_000


def config(**changes: Any) -> BrokerConfig:
    return small_config(**{"ledger_max_entries": 4, "reclaim_interval_ms": SECOND_MS, **changes})


def run(scenario: Callable[[Node], Awaitable[Node]], **changes: Any) -> None:
    """Run a scenario on a node; what is on the disk at its end must be clean."""

    async def whole(_: SimLoop, clock: SimClock) -> Node:
        node = await scenario(Node(MemVfs(), clock, config(**changes)).open())
        await node.stop()
        return node

    node = run_sim(whole, seed=5)
    assert node.failures == []
    assert verify_data_dir(node.vfs, DATA_DIR).problems == []


def restarted(node: Node) -> Node:
    return node.crash(CrashPolicy.LOSE_UNSYNCED).open()


def ledgers_of(node: Node, topic: str = "orders") -> list[int]:
    return [ledger.name.ledger_id for ledger in node.topic(topic).log]


def files_of(node: Node, topic_id: int = 1, folder: str = "ledgers") -> list[str]:
    return sorted(node.vfs.list_dir(f"{DATA_DIR}/topics/{topic_id}/{folder}"))


def messages(count: int, **options: Any) -> list[Outgoing]:
    return [Outgoing(b"m%d" % number, **options) for number in range(count)]


async def consume(node: Node, topic: str, name: str, count: int) -> list[Position]:
    inbox = await node.subscribe(topic, name)
    found = [each.position for each in await inbox.wait(count)]
    assert await inbox.ack(found) == []
    inbox.detach()
    return found


async def reclaimed(node: Node) -> None:
    """Several visits, and a checkpoint that removes the files."""
    await asyncio.sleep(3 * SECOND_MS / 1000)
    await node.checkpoint()


def test_what_every_subscription_has_settled_goes_from_memory_and_disk():
    async def scenario(node: Node) -> Node:
        for name in ("one", "two"):
            await node.create_subscription("orders", name)
        for _ in range(3):
            await node.produce("orders", messages(4))
        await consume(node, "orders", "one", 12)
        await reclaimed(node)
        assert len(ledgers_of(node)) == 3, "R1: the other one is owed all of it"
        await consume(node, "orders", "two", 12)
        data_bytes = node.topic("orders").log.data_bytes
        await reclaimed(node)
        assert ledgers_of(node) == []
        assert files_of(node) == []
        assert node.broker.counters.removed_ledgers == 3
        assert node.broker.counters.reclaimed_bytes == data_bytes + 52 * 12
        return node

    run(scenario)


def test_what_waits_for_the_first_subscription_stays():
    async def scenario(node: Node) -> Node:
        for _ in range(2):
            await node.produce("orders", messages(4, ttl_ms=100))
        await reclaimed(node)
        assert len(ledgers_of(node)) == 2
        return node

    run(scenario)


def test_without_subscriptions_left_everything_goes_whose_time_has_come():
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        await node.produce("orders", messages(4))
        await node.produce("orders", messages(4, deliver_after_ms=10_000))
        await node.topic("orders").subscriptions.delete("one")
        await reclaimed(node)
        assert len(ledgers_of(node)) == 1, "P8: its time has not come"
        await asyncio.sleep(10)
        await reclaimed(node)
        assert ledgers_of(node) == []
        return node

    run(scenario)


def test_a_message_due_next_year_holds_its_own_ledger_only():
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        await node.produce("orders", messages(4))
        await node.produce("orders", [*messages(3), Outgoing(b"later", deliver_after_ms=YEAR_MS)])
        held = ledgers_of(node)[1]
        for _ in range(3):
            await node.produce("orders", messages(4))
        await consume(node, "orders", "one", 19)
        await reclaimed(node)
        assert ledgers_of(node) == [held]
        assert {name.partition(".")[0] for name in files_of(node)} == {str(held)}
        node = restarted(node)
        assert ledgers_of(node) == [held]
        # The log goes on behind the ledgers that went at its end.
        first = (await node.produce("orders", messages(2)))[0]
        assert first.ledger_id > held + 3
        assert await consume(node, "orders", "one", 2) == [first, Position(first.ledger_id, 1)]
        subscription = node.topic("orders").subscription("one")
        assert subscription.unsettled_count() == 1
        node.clock.step(YEAR_MS)  # type: ignore[attr-defined]
        assert await consume(node, "orders", "one", 1) == [Position(held, 3)]
        await reclaimed(node)
        assert ledgers_of(node) == []
        return node

    run(scenario)


def test_exclusive_readers_settle_before_the_time_and_the_ledger_stays_until_then():
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "in order", type_=SubscriptionType.EXCLUSIVE)
        await node.produce("orders", messages(4, deliver_after_ms=20_000))
        await consume(node, "orders", "in order", 4)
        await reclaimed(node)
        assert len(ledgers_of(node)) == 1, "its time has not come"
        assert node.topic("orders").index.scheduled_count() == 4
        await asyncio.sleep(20)
        await reclaimed(node)
        assert ledgers_of(node) == []
        assert node.topic("orders").index.scheduled_count() == 0
        return node

    run(scenario)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_topic_goes_on_after_its_last_ledger_went(restarts: bool):
    """RETENTION-4: the next batch, and a subscription that begins at either end, at positions that are gone."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "old")
        old = await node.produce("orders", messages(2))
        await consume(node, "orders", "old", 2)
        await reclaimed(node)
        assert ledgers_of(node) == []
        topic = node.topic("orders")
        assert topic.log.end == Position(old[-1].ledger_id, 2)
        if restarts:
            node = restarted(node)
            topic = node.topic("orders")
        assert topic.log.end == Position(old[-1].ledger_id, 2)
        for name, position in (("latest", LATEST), ("earliest", EARLIEST)):
            await node.create_subscription("orders", name, position=position)
        assert topic.subscription("latest").image.start == topic.log.end
        attached = await node.subscribe("orders", "latest")
        new = await node.produce("orders", messages(1) + messages(1, deliver_after_ms=300))
        assert new[0].ledger_id > old[0].ledger_id
        assert [each.position for each in await attached.wait(2)] == new
        await attached.ack(new)
        for name in ("old", "earliest"):
            assert await consume(node, "orders", name, 2) == new
        await reclaimed(node)
        assert ledgers_of(node) == []
        return node

    run(scenario)


@pytest.mark.slow
def test_a_ledger_that_takes_entries_stays_while_it_does():
    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe("orders", "one")
        for _ in range(20):
            found = await node.produce("orders", messages(1))
            await inbox.wait(1)
            await inbox.ack(found)
            await asyncio.sleep(0.7)
        assert {each.position.ledger_id for each in inbox.received} == {found[0].ledger_id}
        await asyncio.sleep(3)
        assert ledgers_of(node) == []
        return node

    run(scenario, ledger_max_entries=1_000)


def test_a_batch_that_meets_the_drop_begins_another_ledger():
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        old = await node.produce("orders", messages(2))
        await consume(node, "orders", "one", 2)
        topic = node.topic("orders")
        dropping = topic.drop_ledgers([old[0].ledger_id], topic.ledgers.facts[old[0].ledger_id].last_due_ms)
        submitted = [await node.submit("orders", messages(1)) for _ in range(2)]
        await dropping
        for each in submitted:
            await each.durable
        (new,) = ledgers_of(node)
        assert new > old[0].ledger_id
        assert await consume(node, "orders", "one", 2) == [Position(new, 0), Position(new, 1)]
        return node

    run(scenario)


def test_a_subscription_from_the_beginning_keeps_what_is_about_to_go():
    """RETENTION-1: its record was on its way when the drop was decided."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        old = await node.produce("orders", messages(2))
        await consume(node, "orders", "one", 2)
        topic = node.topic("orders")
        async with asyncio.TaskGroup() as group:
            group.create_task(node.create_subscription("orders", "two", position=EARLIEST))
            await asyncio.sleep(0)
            await topic.drop_ledgers([old[0].ledger_id], topic.ledgers.facts[old[0].ledger_id].last_due_ms)
        assert ledgers_of(node) == [old[0].ledger_id]
        new = await node.produce("orders", messages(1))
        assert new[0].ledger_id > old[0].ledger_id, "the ledger was closed when the drop was decided"
        node = restarted(node)
        assert await consume(node, "orders", "two", 3) == old + new
        return node

    run(scenario)


def test_retention_keeps_what_is_settled_for_who_begins_at_the_beginning():
    async def scenario(node: Node) -> Node:
        policy = TopicPolicy(retention_ms=30_000)
        topic = await node.broker.registry.create_topic("orders", policy)
        await node.create_subscription("orders", "one")
        old = await node.produce("orders", messages(4))
        await asyncio.sleep(20)
        young = await node.produce("orders", messages(4))
        await consume(node, "orders", "one", 8)
        await reclaimed(node)
        assert len(ledgers_of(node)) == 2
        await asyncio.sleep(8)
        assert ledgers_of(node) == [young[0].ledger_id], "the first has been there for 30 s"
        node = restarted(node)
        topic = node.topic("orders")
        await node.create_subscription("orders", "two", position=EARLIEST)
        assert await consume(node, "orders", "two", 4) == young
        assert topic.subscription("two").unsettled_count() == 0
        assert topic.subscription("two").cursor.start == START < old[0]
        await asyncio.sleep(20)
        assert ledgers_of(node) == []
        return node

    run(scenario)


def test_retention_by_size_keeps_the_youngest():
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        for _ in range(5):
            await node.produce("orders", messages(4))
        per_ledger = node.topic("orders").log.data_bytes // 5
        await node.topic("orders").change_policy(TopicPolicy(retention_bytes=2 * per_ledger + 1))
        all_ids = ledgers_of(node)
        await consume(node, "orders", "one", 20)
        await reclaimed(node)
        assert ledgers_of(node) == all_ids[-2:]
        return node

    run(scenario)


def test_a_ledger_of_expired_messages_goes_without_a_consumer():
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        await node.create_subscription("orders", "two")
        await node.produce("orders", messages(4, ttl_ms=5_000))
        await node.produce("orders", messages(3, ttl_ms=5_000) + messages(1))
        await node.produce("orders", messages(4, ttl_ms=5_000, deliver_after_ms=6_000))
        mixed, delayed = ledgers_of(node)[1:]
        await reclaimed(node)
        assert len(ledgers_of(node)) == 3
        await asyncio.sleep(4)
        assert ledgers_of(node) == [mixed, delayed], "one of the mixed ledger never expires"
        subscription = node.topic("orders").subscription("one")
        assert subscription.counters.expired_messages == 4
        await asyncio.sleep(8)
        assert ledgers_of(node) == [mixed]
        assert await consume(node, "orders", "two", 1) == [Position(mixed, 3)]
        return node

    run(scenario)


def test_who_holds_an_expired_message_may_acknowledge_it():
    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe("orders", "one")
        found = await node.produce("orders", messages(4, ttl_ms=2_000))
        await inbox.wait(4)
        await asyncio.sleep(6)
        assert len(ledgers_of(node)) == 1
        assert await inbox.ack(found) == []
        await reclaimed(node)
        assert ledgers_of(node) == []
        assert inbox.subscription.counters.expired_messages == 0
        return node

    run(scenario)


def test_what_is_said_of_messages_that_went_is_answered():
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "late")
        inbox = await node.subscribe("orders", "one")
        held = await node.produce("orders", [Outgoing(b"x", deliver_after_ms=YEAR_MS), *messages(3)])
        gone = await node.produce("orders", messages(4))
        await consume(node, "orders", "late", 7)
        await inbox.wait(7)
        await inbox.ack(held[1:] + gone)
        last = await node.produce("orders", messages(1))
        await reclaimed(node)
        for _ in range(2):
            assert ledgers_of(node) == [held[0].ledger_id, last[0].ledger_id]
            subscription = node.topic("orders").subscription("one")
            inbox = node.attach(node.topic("orders"), subscription)
            assert await inbox.ack(gone) == [], "an acknowledgement that is repeated is confirmed"
            assert {each.reason for each in await inbox.nack(gone)} == {"LEASE_LOST"}
            never = [Position(last[0].ledger_id + 7, 0), Position(last[0].ledger_id, 9)]
            assert {each.position for each in await inbox.ack(never)} == set(never)
            node = restarted(node)
        return node

    run(scenario)


def test_a_deleted_topic_or_subscription_leaves_nothing_on_disk():
    async def scenario(node: Node) -> Node:
        for name in ("one", "two"):
            await node.create_subscription("orders", name)
        await node.produce("orders", messages(6) + messages(2, deliver_after_ms=YEAR_MS))
        for name in ("one", "two"):
            inbox = await node.subscribe("orders", name)
            await inbox.ack([each.position for each in await inbox.wait(6)][::2])
            inbox.detach()
        await node.checkpoint()
        assert {name.partition(".")[0] for name in files_of(node, 1, "cursors")} == {"1", "2"}
        await node.topic("orders").subscriptions.delete("one")
        await node.checkpoint()
        assert {name.partition(".")[0] for name in files_of(node, 1, "cursors")} == {"2"}
        await node.broker.registry.delete_topic("orders")
        await node.checkpoint()
        assert node.vfs.list_dir(f"{DATA_DIR}/topics") == []
        assert len(node.broker._open_files) == 0, "a file that is open takes space until it is closed"
        return node

    run(scenario, ledger_max_entries=100)


def test_a_ledger_whose_removal_fails_is_removed_by_the_next_checkpoint():
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        await node.produce("orders", messages(4))
        await consume(node, "orders", "one", 4)
        fault = node.vfs.faults.add(Fault("remove", "*/ledgers/*"))
        await reclaimed(node)
        assert fault.hit_count == 1 and ledgers_of(node) == [] and files_of(node)
        node.broker.checkpointer.changed(node.topic("orders"))
        await node.checkpoint()
        assert files_of(node) == []
        assert node.broker.counters.removed_ledgers == 1
        return node

    run(scenario)
