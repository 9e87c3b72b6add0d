"""Ledgers that go while somebody is at work on them: readers, the index, a check, a clock that steps back (RETENTION-1, RETENTION-2)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from broker.errors import Corrupt, Unavailable
from broker.folder.retention import Reclaimer
from broker.jobs.verify import verify_data_dir
from broker.model import Position
from broker.storage.log import TopicLog
from broker.subscriptions import requests
from broker.subscriptions.entry_states import PROMISED
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.schedule_values import Cancel, ChangeResult
from broker.topics.topic import Topic
from tests.harness import DATA_DIR, DAY_MS, Node, Outgoing, entries_of, small_config

NEVER_MS = DAY_MS


def run(scenario: Callable[[Node], Awaitable[Node]], **changes: Any) -> None:
    """Run a scenario on a node that drops nothing by itself; what is on the disk at its end must be clean."""

    async def whole(_: SimLoop, clock: SimClock) -> Node:
        config = small_config(**{"ledger_max_entries": 4, "reclaim_interval_ms": NEVER_MS, **changes})
        node = await scenario(Node(MemVfs(), clock, config).open())
        await node.stop()
        return node

    node = run_sim(whole, seed=3)
    assert node.failures == []
    assert verify_data_dir(node.vfs, DATA_DIR).problems == []


def restarted(node: Node) -> Node:
    return node.crash(CrashPolicy.LOSE_UNSYNCED).open()


def messages(count: int, **options: Any) -> list[Outgoing]:
    return [Outgoing(b"m%d" % number, **options) for number in range(count)]


async def settle_and_drop(topic: Topic, subscription: Subscription, positions: list[Position]) -> None:
    assert (await requests.acknowledge(subscription, entries_of(positions))).failures == []
    await topic.drop_ledgers(
        [positions[0].ledger_id], topic.ledgers.facts[positions[0].ledger_id].last_due_ms
    )
    assert topic.log.entry_count(positions[0].ledger_id) is None


def before_first(
    monkeypatch: pytest.MonkeyPatch, log: TopicLog, name: str, of: int, act: Callable[[], Awaitable[None]]
) -> list[int]:
    """Let something happen in the middle of the first read of a ledger; the list says when it has."""
    inner = getattr(log, name)
    done: list[int] = []

    async def read(ledger_id: int, *arguments: Any) -> Any:
        if not done and ledger_id == of:
            done.append(ledger_id)
            await act()
        return await inner(ledger_id, *arguments)

    monkeypatch.setattr(log, name, read)
    return done


@pytest.mark.parametrize("read", ["read", "read_times"])
@pytest.mark.parametrize(
    "type_", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED, SubscriptionType.EXCLUSIVE]
)
def test_a_consumer_goes_on_when_a_ledger_goes_under_its_read(
    monkeypatch: pytest.MonkeyPatch, type_: int, read: str
):
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one", type_=type_)
        # One that waits for long holds the mark, so that it does not tell what of the others is settled.
        waits = await node.produce("orders", messages(1, deliver_after_ms=NEVER_MS))
        gone = await node.produce("orders", messages(4, key="k"))
        kept = await node.produce("orders", messages(3, key="k"))
        await node.checkpoint()
        node = restarted(node)  # from here on, reads go to files
        topic = node.topic("orders")
        subscription = topic.subscription("one")
        act = functools.partial(settle_and_drop, topic, subscription, gone)
        met = before_first(monkeypatch, topic.log, read, gone[0].ledger_id, act)
        inbox = node.attach(topic, subscription)
        expected = kept if subscription.honors_delay else waits + kept
        assert [each.position for each in await inbox.wait(len(expected), seconds=60)] == expected
        assert met == [gone[0].ledger_id]
        assert subscription.states.redelivery.queued == {}
        await inbox.ack(kept)
        return node

    run(scenario)


def test_a_window_of_due_messages_goes_on_without_the_ledger_that_went(monkeypatch: pytest.MonkeyPatch):
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        gone = await node.produce("orders", messages(4, deliver_after_ms=5_000))
        kept = await node.produce("orders", messages(4, deliver_after_ms=5_000))
        topic = node.topic("orders")
        subscription = topic.subscription("one")
        inbox = node.attach(topic, subscription)
        act = functools.partial(settle_and_drop, topic, subscription, gone)
        before_first(monkeypatch, topic.log, "read", gone[0].ledger_id, act)
        assert [each.position for each in await inbox.wait(4, seconds=60)] == kept
        await inbox.ack(kept)
        return node

    run(scenario)


def test_an_acknowledgement_is_confirmed_when_the_ledger_goes_meanwhile(monkeypatch: pytest.MonkeyPatch):
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        gone = await node.produce("orders", messages(4))
        topic = node.topic("orders")
        subscription = topic.subscription("one")

        async def drop() -> None:
            monkeypatch.undo()
            await settle_and_drop(topic, subscription, gone)

        before_first(monkeypatch, topic.log, "times_of", gone[0].ledger_id, drop)
        assert (await requests.acknowledge(subscription, entries_of(gone))).failures == []
        assert subscription.states.count(*PROMISED) == 0
        return node

    run(scenario)


def test_the_index_is_built_past_a_ledger_that_goes_meanwhile(monkeypatch: pytest.MonkeyPatch):
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        await node.produce("orders", messages(4))
        gone = await node.produce("orders", messages(4))
        kept = await node.produce("orders", messages(3, deliver_after_ms=60_000))
        await node.checkpoint()
        node = restarted(node)
        topic = node.topic("orders")
        subscription = topic.subscription("one")
        inner = topic.log.read_times

        async def read_times(ledger_id: int, *arguments: Any) -> Any:
            found = await inner(ledger_id, *arguments)
            if ledger_id == gone[0].ledger_id and topic.log.entry_count(ledger_id) is not None:
                await settle_and_drop(topic, subscription, gone)
            return found

        monkeypatch.setattr(topic.log, "read_times", read_times)
        await asyncio.sleep(5)
        assert topic.index.position == topic.log.end
        assert topic.log.entry_count(gone[0].ledger_id) is None
        assert topic.index.scheduled_count() == 3
        inbox = node.attach(topic, subscription)
        await inbox.ack([each.position for each in await inbox.wait(4)])
        assert [each.position for each in await inbox.wait(3, seconds=120)] == kept
        await inbox.ack(kept)
        return node

    run(scenario, tracker="memory")


def test_a_bucket_whose_ledger_went_yields_nothing_after_the_clock_stepped_back():
    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe("orders", "one")
        gone = await node.produce("orders", messages(4, deliver_after_ms=10_000))
        kept = await node.produce("orders", messages(3, deliver_after_ms=3_600_000))
        await asyncio.sleep(6)  # both are sealed into one bucket
        await node.checkpoint()
        topic = node.topic("orders")
        assert [topic.index_image().bucket_ids != ()] == [True]
        await inbox.wait(4)
        await settle_and_drop(topic, inbox.subscription, gone)
        node.clock.step(-60_000)  # type: ignore[attr-defined]
        node = restarted(node)  # from a manifest that names the ledger, and a bucket that holds its entries
        topic = node.topic("orders")
        await asyncio.sleep(1)
        assert topic.index.rebuilds == 0
        next_due_ms = topic.index.tracker.next_due_ms()
        assert next_due_ms is not None
        assert next_due_ms > node.clock.now_ms() + 3_000_000
        await node.checkpoint()
        found = await node.broker.verify_topic("orders")
        assert found.findings == []
        node = restarted(node)
        inbox = await node.subscribe("orders", "one")
        node.clock.step(3_600_000)  # type: ignore[attr-defined]
        assert [each.position for each in await inbox.wait(3)] == kept
        await inbox.ack(kept)
        return node

    run(scenario, min_index_count=7, ledger_max_entries=4, max_segment_entries=100)


def test_files_stay_while_a_check_reads_them():
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        gone = await node.produce("orders", messages(4))
        await node.produce("orders", messages(1))
        await node.checkpoint()
        topic = node.topic("orders")
        ledger = next(iter(topic.log))
        with topic.log.keep_files():
            await settle_and_drop(topic, topic.subscription("one"), gone)
            await node.checkpoint()
            assert len(await ledger.read_times(0, 4)) == 4
            assert node.broker.counters.removed_ledgers == 0
        await node.checkpoint()
        assert node.broker.counters.removed_ledgers == 0, "nothing has changed, so nothing is written"
        await asyncio.sleep(1)  # the next visit asks for another checkpoint
        await node.checkpoint()
        assert node.broker.counters.removed_ledgers == 1
        return node

    run(scenario, reclaim_interval_ms=500)


def test_a_ledger_that_was_never_written_leaves_no_files_when_it_goes():
    async def scenario(node: Node) -> Node:
        await node.create_subscription("orders", "one")
        gone = await node.produce("orders", messages(4))
        topic = node.topic("orders")
        tail = next(iter(topic.log))
        await settle_and_drop(topic, topic.subscription("one"), gone)
        await node.checkpoint()
        await tail.flush()  # what was on its way to the files when it went
        assert [n for n in node.vfs.list_dir(f"{DATA_DIR}/topics/1/ledgers") if n.startswith("1.")] == []
        return node

    run(scenario)


@pytest.mark.parametrize(
    "error",
    [Unavailable("a read failed"), OSError(5, "a read failed"), Corrupt("a block is damaged")],
    ids=repr,
)
def test_one_failed_read_ends_neither_reclaim_nor_the_broker(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def scenario(node: Node) -> Node:
        subscription = await node.create_subscription("orders", "one")
        gone = await node.produce("orders", messages(4, deliver_after_ms=3_600_000))
        others = await node.produce("orders", messages(4))
        await node.produce("orders", messages(1))
        topic = node.topic("orders")
        outcomes = await topic.schedule.change(gone, Cancel(), dry_run=False)
        assert [each.result for each in outcomes] == [ChangeResult.DONE] * 4
        assert (await requests.acknowledge(subscription, entries_of(others))).failures == []
        inner = topic.log.read_times
        failed: list[int] = []

        async def read_times(ledger_id: int, *arguments: Any) -> Any:
            task = asyncio.current_task()
            if task is not None and task.get_name() == "reclaim" and not failed:
                failed.append(ledger_id)
                raise error
            return await inner(ledger_id, *arguments)

        monkeypatch.setattr(topic.log, "read_times", read_times)
        async with asyncio.timeout(30):
            while topic.log.entry_count(others[0].ledger_id) is not None:  # the others go all the same
                await asyncio.sleep(0.1)
        assert failed == [gone[0].ledger_id]
        async with asyncio.timeout(30):
            while topic.log.entry_count(gone[0].ledger_id) is not None:  # and this one at a later visit
                await asyncio.sleep(0.1)
        return node

    run(scenario, reclaim_interval_ms=1_000)


def test_reclaim_goes_on_after_a_visit_that_could_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a journal that has failed is the end of it, and that tells of itself."""
    visited: list[str] = []

    def visit(_: Reclaimer, topic: Topic) -> None:
        visited.append(topic.name)
        if len(visited) == 1:
            raise Unavailable("It cannot be read just now")

    monkeypatch.setattr(Reclaimer, "_visit", visit)

    async def scenario(node: Node) -> Node:
        await node.create_subscription("t", "s")
        async with asyncio.timeout(3_600):
            while len(visited) < 3:
                await asyncio.sleep(1)
        assert "reclaim" in node.broker.supervisor.names()
        return node

    run(scenario, reclaim_interval_ms=1_000)
