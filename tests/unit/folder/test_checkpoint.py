"""Cost of a checkpoint on the disk, and the order of its steps."""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from typing import Any

import pytest

from broker.errors import StorageFailed
from broker.folder.checkpoint import TOPICS_AT_ONCE, Checkpointer, is_due
from broker.storage.manifest import decode_broker
from broker.storage.named_files import read_named
from broker.storage.segment import HEADER_BYTES
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.topic import TopicCapture
from tests.depth import at_depth, sampled
from tests.harness import DATA_DIR, Node, Outgoing, small_config

COUNT = 3 * TOPICS_AT_ONCE + 1


def on_node(scenario: Any, **changes: Any) -> None:
    async def run(_: SimLoop, clock: SimClock) -> None:
        await scenario(Node(MemVfs(), clock, small_config(**changes)).open())

    run_sim(run, 1)


async def make_topics(node: Node) -> None:
    for number in range(COUNT):
        await node.broker.registry.topic_or_create(f"topic-{number}")


@pytest.mark.parametrize(
    ("journal_bytes", "elapsed_ms", "has_changes", "lsns_behind", "expected"),
    [
        (0, 0, True, 0, False),
        (999, 29_999, True, 500, False),
        (1_000, 0, True, 0, True),
        (0, 30_000, True, 0, True),
        (5_000, 60_000, False, 99, False),
        (0, 30_000, False, 100, True),
    ],
)
def test_a_checkpoint_is_due_after_enough_journal_or_time_if_something_changed(
    journal_bytes: int, elapsed_ms: int, has_changes: bool, lsns_behind: int, expected: bool
) -> None:
    gathered = (journal_bytes, elapsed_ms, has_changes, lsns_behind)
    assert is_due(*gathered, bytes_max=1_000, interval_ms=30_000) is expected


def test_a_checkpoint_is_written_when_the_interval_is_over_and_none_while_nothing_changes() -> None:
    async def scenario(node: Node) -> None:
        counters = node.broker.counters
        await node.produce("orders", [Outgoing(b"x")])
        before = counters.checkpoints
        await asyncio.sleep(9.9)
        assert counters.checkpoints == before
        await asyncio.sleep(0.2)
        assert counters.checkpoints == before + 1
        await asyncio.sleep(100)
        assert counters.checkpoints == before + 1

    on_node(scenario, checkpoint_interval_ms=10_000)


INTERVAL = {"checkpoint_interval_ms": 10_000}


def journal_of(node: Node) -> list[str]:
    return node.vfs.list_dir(f"{DATA_DIR}/journal")


async def fill_journal(node: Node) -> None:
    """Enough for several segments, and a checkpoint of all of it."""
    for _ in range(6):
        await node.produce("orders", [Outgoing(bytes(3_000))])
    await node.checkpoint()


def test_a_journal_of_which_nothing_is_needed_shrinks_after_an_interval_without_a_record() -> None:
    async def scenario(node: Node) -> None:
        await fill_journal(node)
        await asyncio.sleep(9.9)
        await node.produce("orders", [Outgoing(b"a")])
        await asyncio.sleep(9.9)
        assert len(journal_of(node)) == 2, "a segment and a spare"
        await asyncio.sleep(10.2)
        (segment,) = journal_of(node)
        last = node.broker.journal.durable_lsn
        assert segment == f"{last + 1:016x}.seg"
        assert len(node.vfs.snapshot()[f"data/journal/{segment}"]) == HEADER_BYTES
        done = len(node.vfs.ops)
        await asyncio.sleep(60)
        assert len(node.vfs.ops) == done, "a broker at rest does nothing"
        await node.produce("orders", [Outgoing(b"b")])
        assert journal_of(node) == [segment]
        after = node.crash(CrashPolicy.LOSE_UNSYNCED).open(start=False)
        assert after.broker.journal.durable_lsn == last + 1

    on_node(scenario, **INTERVAL)


def test_a_journal_shrinks_after_a_start_too() -> None:
    async def scenario(node: Node) -> None:
        await fill_journal(node)
        await node.stop()
        assert len(journal_of(node)) == 2
        node = Node(node.vfs, node.clock, node.config).open()
        await asyncio.sleep(10.1)
        assert journal_of(node) == [f"{node.broker.journal.next_lsn:016x}.seg"]
        await node.stop()

    on_node(scenario, **INTERVAL)


def test_a_journal_that_cannot_be_shrunk_is_tried_again_and_holds_nobody_up() -> None:
    async def scenario(node: Node) -> None:
        await fill_journal(node)
        fault = node.vfs.faults.add(Fault("create", "*/spare*", error=errno.EMFILE))
        await asyncio.sleep(10.1)
        assert fault.hit_count == 1 and len(journal_of(node)) == 1 and node.failures == []
        await node.produce("orders", [Outgoing(b"a")])
        await asyncio.sleep(20.2)
        assert journal_of(node) == [f"{node.broker.journal.next_lsn:016x}.seg"]

    on_node(scenario, **INTERVAL)


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_a_shrink_in_doubt_ends_writing(kind: str) -> None:
    async def scenario(node: Node) -> None:
        await fill_journal(node)
        node.vfs.faults.add(Fault(kind, "*/spare*"))
        await asyncio.sleep(10.1)
        assert node.broker.journal.failed is not None and len(node.failures) == 1
        with pytest.raises(StorageFailed):
            await node.produce("orders", [Outgoing(b"a")])

    on_node(scenario, **INTERVAL)


@pytest.mark.slow
@pytest.mark.parametrize("policy", CrashPolicy)
def test_a_crash_at_any_step_of_a_rest_keeps_what_was_answered(policy: CrashPolicy) -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", "all")
        await fill_journal(node)
        first, count = node.vfs.op_count, 6
        await asyncio.sleep(10.1)
        steps = {op.kind for op in node.vfs.ops[first:]}
        assert steps >= {"remove", "create", "rename", "sync_dir"}
        answered = [(first, count)]
        for _ in range(3):
            await node.produce("orders", [Outgoing(b"a")])
            count += 1
            answered.append((node.vfs.op_count, count))
        for at in range(first, node.vfs.op_count + 1):
            after = node.crash(policy, random.Random(at), at=at).open(start=False)
            kept = sum(ledger.entry_count for ledger in after.topic("orders").log)
            owed = max(count for when, count in answered if when <= at)
            assert owed <= kept <= count, at
            again = after.crash(policy, random.Random(at)).open(start=False)
            assert sum(ledger.entry_count for ledger in again.topic("orders").log) == kept, at

    on_node(scenario, **INTERVAL)


@pytest.mark.slow
def test_a_new_topic_costs_two_syncs_and_one_that_did_not_change_none() -> None:
    async def scenario(node: Node) -> None:
        await make_topics(node)
        for topics in (COUNT, 0):
            before = len(node.vfs.ops)
            await node.checkpoint()
            done = Counter(op.kind for op in node.vfs.ops[before:])
            assert done["sync"] == topics + 1, "each manifest, and the root"
            assert done["sync_dir"] == topics + 2, "each topic's folder, that of all topics, and the root's"

    on_node(scenario)


def test_the_folders_of_a_new_topic_are_durable_before_the_root_names_it() -> None:
    async def scenario(node: Node) -> None:
        await make_topics(node)
        await node.checkpoint()
        ops = node.vfs.ops
        (root,) = [
            at
            for at, op in enumerate(ops)
            if op.kind == "rename"
            and op.path.endswith("broker.manifest.new")
            and any(each.path.endswith("/manifest.new") for each in ops[:at])
        ]
        for topic in node.broker.registry.topics.values():
            folder = f"topics/{topic.topic_id}"
            made = [
                at
                for at, op in enumerate(ops)
                if op.kind in ("make_dir", "rename") and f"{folder}/" in op.path
            ]
            synced = [at for at, op in enumerate(ops) if op.kind == "sync_dir" and op.path.endswith(folder)]
            assert len(made) == 5 and max(made) < synced[-1] < root

    on_node(scenario)


def test_several_topics_are_written_at_a_time_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: set[int] = set()
    most, written = 0, Counter[int]()
    inner = Checkpointer._persist

    async def persist(self: Checkpointer, capture: TopicCapture) -> None:
        nonlocal most
        topic_id = capture.image.topic_id
        written[topic_id] += 1
        under_way.add(topic_id)
        most = max(most, len(under_way))
        await inner(self, capture)
        under_way.remove(topic_id)

    async def scenario(node: Node) -> None:
        await make_topics(node)
        await node.checkpoint()
        assert most == TOPICS_AT_ONCE >= 4  # one by one a stop with thousands of new topics takes minutes
        assert len(written) == COUNT and set(written.values()) == {1}

    monkeypatch.setattr(Checkpointer, "_persist", persist)
    on_node(scenario)


def test_after_a_checkpoint_that_was_cancelled_none_follows() -> None:
    async def scenario(node: Node) -> None:
        await make_topics(node)
        await node.produce("topic-1", [Outgoing(b"a")])
        task = asyncio.create_task(node.checkpoint())
        while not any(op.path.endswith("/manifest.new") for op in node.vfs.ops):
            await asyncio.sleep(0.0001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(StorageFailed, match="was interrupted"):
            await node.checkpoint()
        assert node.broker.counters.checkpoints == 0

    on_node(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("policy", CrashPolicy)
def test_a_crash_at_any_step_of_a_checkpoint_leaves_every_new_topic(policy: CrashPolicy) -> None:
    async def scenario(node: Node) -> None:
        names = ["one", "two", "three"]
        for name in names:
            await node.create_subscription(name, "all")
        first = node.vfs.op_count
        await node.checkpoint()
        for at in sampled(range(first, node.vfs.op_count + 1), at_depth(change=3, deep=1)):
            after = node.crash(policy, random.Random(at), at=at).open(start=False)
            for name in names:
                assert after.topic(name).subscriptions.find("all"), at
            await after.checkpoint()
            again = after.crash(policy, random.Random(at)).open(start=False)
            assert {topic.name for topic in again.broker.registry.topics.values()} == set(names), at

    on_node(scenario)


def test_the_journal_keeps_what_came_while_a_checkpoint_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Checkpointer._persist

    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", "all")

        async def persist(self: Checkpointer, capture: TopicCapture) -> None:
            await inner(self, capture)
            for _ in range(12):
                await node.produce("orders", [Outgoing(bytes(2000))])

        monkeypatch.setattr(Checkpointer, "_persist", persist)
        await node.checkpoint()
        after = node.crash(CrashPolicy.KEEP_ALL).open(start=False)
        assert sum(ledger.entry_count for ledger in after.topic("orders").log) == 12

    on_node(scenario)


def test_what_a_checkpoint_has_captured_it_does_not_write_again() -> None:
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", "all")
        inbox = await node.subscribe("orders", "all")
        await node.produce("orders", [Outgoing(b"x")])
        await inbox.ack([each.position for each in await inbox.wait(1)])
        first, again = (node.topic("orders").capture() for _ in range(2))
        assert [len(part.ledgers) for part in first.parts] == [0, 0, 1, 0, 0, 0, 0, 0]
        assert [file.path for part in first.parts for file in part.files] == ["cursors/1.4"]
        assert not any(part.ledgers or part.files or part.replaced for part in again.parts)
        node.abandon()

    on_node(scenario)


def test_after_a_checkpoint_only_what_came_since_hurries_the_next() -> None:
    async def scenario(node: Node) -> None:
        for _ in range(4):
            await node.produce("orders", [Outgoing(bytes(3_000))])
        await asyncio.sleep(1)
        before = node.broker.counters.checkpoints
        assert before >= 1
        await node.produce("orders", [Outgoing(b"little")])
        await asyncio.sleep(1)
        assert node.broker.counters.checkpoints == before
        await node.stop()

    on_node(scenario, checkpoint_bytes=8_000, checkpoint_interval_ms=3_600_000)


def test_a_topic_deleted_while_a_checkpoint_is_written_is_not_named_by_the_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = Checkpointer._persist

    async def scenario(node: Node) -> None:
        for name in ("goes", "stays"):
            await node.broker.registry.topic_or_create(name)

        async def persist(self: Checkpointer, capture: TopicCapture) -> None:
            await inner(self, capture)
            if capture.image.name == "goes":
                await node.broker.registry.delete_topic("goes")

        monkeypatch.setattr(Checkpointer, "_persist", persist)
        await node.checkpoint()
        path = f"{DATA_DIR}/broker.manifest"
        root = decode_broker(read_named(node.vfs, path), path)
        assert list(root.topics.values()) == ["stays"]

    on_node(scenario)


def test_a_ledger_that_went_is_named_until_its_last_time_has_come() -> None:
    async def scenario(node: Node) -> None:
        await node.broker.registry.topic_or_create("orders")
        topic = node.topic("orders")
        frontier_ms = topic.index_image().frontier_ms
        topic.ledgers.gone = {1: frontier_ms - 1, 2: frontier_ms, 3: frontier_ms + 1}
        assert topic.capture().image.gone_ledgers == ((3, frontier_ms + 1),)
        node.abandon()

    on_node(scenario)
