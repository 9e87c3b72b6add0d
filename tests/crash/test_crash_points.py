"""The power goes, or the process, after every operation of a history; what is found must open to what was promised.

For each operation and each way a disk can lose what was not synced, the broker is reopened and compared with the
model (`history.py`) after as many records as its journal kept: all that were answered (P1), none that was not
submitted. Then it delivers, and every subscription gets what it is owed, on time and once (P2, P3, P4).

A change cuts after every fifth operation, on each day after others, under one of the policies; `make test-deep` after
each under all of them, and draws the random ones oftener.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from broker.model import Position
from broker.storage.records import GivenBack, Produced, Record, ReturnReason, Settled, SettleReason
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import run_sim
from tests.crash.history import (
    LONGEST_DELAY_MS,
    Model,
    Recorder,
    crash_config,
    observe,
    record_history,
)
from tests.crash.points import (
    Tree,
    check_recovery_of_recovery,
    clock_at,
    model_after,
    moments_of,
    same_broker_id,
    states_at,
    told,
)
from tests.depth import at_depth
from tests.harness import Inbox, Node, Outgoing, payload_of
from tests.reference import Subscription

__all__ = ["same_broker_id"]
pytestmark = pytest.mark.usefixtures("same_broker_id")

SEEDS = range(at_depth(change=1, deep=10))
STRIDE = at_depth(change=32 * len(CrashPolicy), deep=1)
HOUR_MS = 3_600_000


@cache
def history() -> Recorder:
    return record_history()


def crash_states(policy: CrashPolicy) -> Iterator[tuple[int, int, MemVfs]]:
    """The states that a policy makes of the history: (operation, seed, disk)."""
    operations = range(history().vfs.op_count + 1)
    return states_at(history(), moments_of(policy, operations, STRIDE), policy, SEEDS)


def test_the_history_is_rich_enough_to_mean_something():
    recorder = history()
    ops = Counter(op.kind for op in recorder.vfs.ops)
    assert ops["sync"] > 80
    assert ops["sync_dir"] > 60
    records: list[Record] = [each.record for each in recorder.lives[-1].submitted]
    kinds = Counter(type(record).__name__ for record in records)
    assert kinds["TopicDeleted"] == 2
    assert kinds["SubscriptionDeleted"] == 1
    assert kinds["Produced"] >= 15
    settled = {record.reason for record in records if isinstance(record, Settled)}
    assert settled == {SettleReason.ACKED, SettleReason.EXPIRED}  # dead letters have a history of their own
    assert {record.reason for record in records if isinstance(record, GivenBack)} == set(ReturnReason)
    ledgers = Counter({(r.topic_id, r.ledger_id) for r in records if isinstance(r, Produced)})
    assert max(Counter(topic_id for topic_id, _ in ledgers).values()) >= 3, "a topic rolls its ledger twice"
    assert any(is_recycled(recorder.vfs)), "a segment of the journal lives twice"
    unanswered = [each for life in recorder.lives for each in life.submitted if each.answered_at is None]
    assert len(unanswered) >= 2, "some records were submitted and never answered"


def is_recycled(vfs: MemVfs) -> Iterator[bool]:
    """For each rename of a journal file into a segment, whether it was one before."""
    were_segments = set()
    for op in vfs.ops:
        if op.kind == "rename" and "/journal/" in op.path:
            if op.path.endswith(".seg") and "spare" not in op.path:
                were_segments.add(op.node)
            else:
                yield op.node in were_segments


class Checker:
    """Opens crash states; a disk that was seen before is not looked at twice."""

    def __init__(self) -> None:
        self.recovered: dict[Tree, int] = {}  # how many records were kept
        self.states = 0

    def check(self, at: int, policy: CrashPolicy, seed: int, vfs: MemVfs) -> None:
        self.states += 1
        tree = frozenset(vfs.snapshot().items())
        kept = self.recovered.get(tree)
        if kept is None:
            kept = run_sim(
                lambda _, clock: self._open(vfs, clock, at), seed=at, start_ms=history().clock_at(at)
            )
            self.recovered[tree] = kept
        answered, possible = history().bounds(at)
        assert answered <= kept, f"P1: {answered} records were answered, {kept} are there"
        assert kept <= possible, f"{kept} records are there, {possible} were submitted"

    async def _open(self, vfs: MemVfs, clock: SimClock, at: int) -> int:
        node = Node(vfs, clock, crash_config()).open(start=False)
        kept = node.broker.journal.durable_lsn
        life = history().life_at(at)
        model = model_after(history(), kept, life)
        assert await observe(node) == model
        node.broker.start()
        inboxes = await check_deliveries(node, model)
        await check_next_life(node, inboxes, checkpointed=at % 2 == 0)
        assert node.failures == []
        return kept


async def check_deliveries(node: Node, model: Model) -> list[Inbox]:
    """Attach a consumer everywhere, let all times come, and look at what arrived."""
    opened_ms = node.clock.now_ms()
    inboxes = [
        (
            topic_model.subscriptions[subscription_id],
            attach(node, topic_model.name, subscription_id),
        )
        for topic_model in model.values()
        for subscription_id in topic_model.subscriptions
    ]
    await asyncio.sleep(2 * LONGEST_DELAY_MS / 1000)
    for subscription, inbox in inboxes:
        check_inbox(subscription, inbox, opened_ms)
    return [inbox for _, inbox in inboxes]


def attach(node: Node, topic: str, subscription_id: int) -> Inbox:
    found = node.topic(topic)
    return node.attach(found, found.subscriptions[subscription_id], lease_ms=HOUR_MS)


def check_inbox(model: Subscription[Position], inbox: Inbox, opened_ms: int) -> None:
    for each in inbox.poll():
        entry = model.entries.get(each.position)
        assert entry is not None, "a message of nowhere came"
        assert each.payload == payload_of(entry.message.content)
        model.check_sent(entry, each.sent_ms, each.sent_ns, each.deliver_at_ms)
        model.send(entry, inbox, each.attempt, each.sent_ms, each.sent_ns, HOUR_MS)
    for position, entry in model.open.items() if model.paused_ns is None else ():
        entry.message.note_time(max(opened_ms, entry.message.due_ms) + 100)
        is_missing = model.must_have_come(entry, by_ms=1 << 62, by_ns=0)
        assert not is_missing, f"P3: {position} of {model} is owed and did not come"


async def check_next_life(node: Node, inboxes: list[Inbox], *, checkpointed: bool) -> None:
    """Check that the recovered broker can be used: produce and acknowledge, crash again, recover."""
    produced = {name: await node.produce(name, [Outgoing(b"after the crash")]) for name in topic_names(node)}
    for inbox in inboxes:
        if inbox.received:
            assert await inbox.ack([each.position for each in inbox.received]) == []
    if checkpointed:
        await node.checkpoint()
    node = node.crash(CrashPolicy.LOSE_UNSYNCED).open(start=False)
    found = {topic.name: topic for topic in (await observe(node)).values()}
    assert found.keys() == produced.keys()
    for name, (position,) in produced.items():
        assert payload_of(found[name].messages[position].content) == b"after the crash"
    for inbox in inboxes:
        subscription = found[inbox.topic.name].subscriptions[inbox.subscription.subscription_id]
        acked = [each.position for each in inbox.received]
        assert all(subscription.entries[position].is_settled for position in acked), "P3: it came back"


def topic_names(node: Node) -> list[str]:
    return sorted(node.broker.registry.by_name)


checker = Checker()


@pytest.mark.parametrize("policy", CrashPolicy, ids=lambda policy: policy.value)
def test_a_crash_keeps_what_was_answered_and_delivers_what_is_owed(policy):
    for at, seed, vfs in crash_states(policy):
        with told(history(), at, policy, seed):
            checker.check(at, policy, seed, vfs)


_recovered_trees: set[Tree] = set()


@pytest.mark.parametrize("policy", CrashPolicy, ids=lambda policy: policy.value)
def test_recovering_a_recovery_changes_nothing_wherever_it_was_cut(policy):
    """Open, and crash at each operation of opening; whatever the disk kept opens to the same files."""
    for at, seed, vfs in crash_states(policy):
        tree = frozenset(vfs.snapshot().items())
        if tree not in _recovered_trees:
            _recovered_trees.add(tree)
            with told(history(), at, policy, seed):
                check_recovery_of_recovery(vfs, clock_at(history(), at), crash_config(), tree)
