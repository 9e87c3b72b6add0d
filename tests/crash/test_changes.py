"""The power goes, or the process, after every operation of a history in which messages are cancelled and moved.

Whatever is found equals the model (`history.py`) after as many records as the journal kept: each cancel, move or
replacement is wholly there or not at all, and whatever was answered is. Files of amendments are named or gone, `verify`
has nothing to say, and every subscription gets what it is owed, once, and not before its last time.

`make test-deep` looks at every operation under every policy; a change at some under each, on each day at others.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from broker.config import BrokerConfig
from broker.model import START, Position
from broker.storage.layout import Layout
from broker.storage.manifest import decode_broker, decode_topic
from broker.storage.named_files import read_named
from broker.storage.records import LedgersDropped
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import control
from broker.topics.schedule_values import Cancel, ChangeResult, Move
from broker.topics.topic import Topic
from tests.crash.bucket_history import QUICK, attach_all, check_inbox, check_verify
from tests.crash.history import Model, Recorder, TopicModel, observe
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
from tests.harness import DATA_DIR, EARLIEST, Node, Outgoing, small_config
from tests.reference import cancel

__all__ = ["same_broker_id"]
pytestmark = pytest.mark.usefixtures("same_broker_id")

SEEDS = range(at_depth(change=1, deep=4))
STRIDE = at_depth(change=2_800, deep=1)
DENSE = at_depth(change=560, deep=1)
"""Of the operations around changes."""
CUT = at_depth(change=3_360, deep=1)
"""Of these, those whose recovery is cut."""
FAR_MS = 5_000
TOPIC = "orders"


def change_config() -> BrokerConfig:
    """Checkpoints, seals and visits of the reclaimer between two changes."""
    return small_config(
        ledger_max_entries=4,
        ledger_max_age_ms=400,
        journal_group_bytes_max=1024,
        reclaim_interval_ms=90,
        checkpoint_interval_ms=110,
        min_index_count=4,
        seal_after_ms=120,
        clock_recheck_ms=60_000,
    )


async def play(recorder: Recorder) -> None:
    """Three lives: stopped, killed with a change on its way, stopped."""
    rng = random.Random(4)
    node = recorder.open()
    await node.create_subscription(TOPIC, "quick")
    await node.create_subscription(TOPIC, "slow")
    await live(node, rng, rounds=7)
    await node.stop()
    node = recorder.open()
    await node.create_subscription(TOPIC, "new", position=EARLIEST)
    await live(node, rng, rounds=6)
    topic = node.topic(TOPIC)
    await control.seek(topic, topic.subscription("slow"), START)
    await live(node, rng, rounds=2)
    far = await node.produce(TOPIC, messages(rng, 3, far=True))
    task = asyncio.get_running_loop().create_task(  # the kill comes before the answer
        topic.schedule.change(far, Move(shift_ms=700), dry_run=False)
    )
    await node.submit(TOPIC, [Outgoing(b"r", deliver_after_ms=900, schedule_key="k-1")], replace=True)
    recorder.kill(node)
    task.cancel()
    await asyncio.sleep(1)  # what the dead process's threads had begun has ended
    node = recorder.open()
    await live(node, rng, rounds=3)
    await asyncio.sleep(0.3)
    await node.stop()


async def live(node: Node, rng: random.Random, rounds: int) -> None:
    """Produce, change a part of what waits, and acknowledge; whole ledgers of what is far are cancelled."""
    topic, quick = node.topic(TOPIC), await node.subscribe(TOPIC, "quick")
    for number in range(rounds):
        positions = await node.produce(TOPIC, messages(rng, 3))
        far = await node.produce(TOPIC, messages(rng, 4, far=True))
        keyed = [Outgoing(b"k%d" % number, deliver_after_ms=2_000, schedule_key=f"k-{number % 2}")]
        await node.produce(TOPIC, keyed, replace=True)
        await change(topic, rng, [*positions, *far])
        if number % 2:
            await topic.schedule.change(far, Cancel(), dry_run=False)
        if number % 3 == 2:
            await topic.schedule.change(["k-0", "k-1"], Move(shift_ms=300), dry_run=False)
        await asyncio.sleep(rng.uniform(0.01, 0.15))
        await quick.ack([each.position for each in quick.poll()])
    quick.detach()


async def change(topic: Topic, rng: random.Random, positions: list[Position]) -> None:
    for wanted in (Move(deliver_after_ms=rng.choice((0, 40, 600, FAR_MS))), Cancel(), Move(shift_ms=-100)):
        some = [position for position in positions if rng.random() < 0.3]
        if some:
            await topic.schedule.change(some, wanted, dry_run=False)


def messages(rng: random.Random, count: int, *, far: bool = False) -> list[Outgoing]:
    delays = [FAR_MS if far else rng.choice((0, 1, 30, 200, 800)) for _ in range(count)]
    return [Outgoing(b"%d" % number, deliver_after_ms=delay) for number, delay in enumerate(delays)]


@cache
def history() -> Recorder:
    async def scenario(_: SimLoop, clock: SimClock) -> Recorder:
        recorder = Recorder(MemVfs(), clock, change_config())
        await play(recorder)
        return recorder

    return run_sim(scenario, 3, latency=QUICK)


def is_about_changes(at: int) -> bool:
    """Return whether an operation next to this moment writes amendments or replaces a manifest."""
    near = history().vfs.ops[max(at - 1, 0) : at + 1]
    return any(".amend" in op.path or op.kind == "rename" for op in near)


def is_after_a_change(at: int) -> bool:
    """Return whether a change was submitted or answered at this moment."""
    life = history().lives[history().life_at(at)]
    kinds = ("Cancelled", "Moved", "Replaced")
    records = [each for each in life.submitted if type(each.record).__name__ in kinds]
    return any(at in (each.submitted_at, each.answered_at) for each in records)


@cache
def moments_about_changes() -> list[int]:
    return [at for at in range(history().vfs.op_count + 1) if is_about_changes(at) or is_after_a_change(at)]


def crash_states(policy: CrashPolicy) -> Iterator[tuple[int, int, MemVfs]]:
    """The states that a policy makes of the history: (operation, seed, disk). Around changes many more."""
    some = moments_of(policy, range(history().vfs.op_count + 1), STRIDE)
    dense = moments_of(policy, moments_about_changes(), DENSE)
    return states_at(history(), sorted({*some, *dense}), policy, SEEDS)


def check_files(vfs: MemVfs) -> int:
    """Check that exactly the files of the manifests exist; return the number of amendment files."""
    layout, count = Layout(DATA_DIR), 0
    for topic_id in decode_broker(read_named(vfs, layout.manifest), layout.manifest).topics:
        path = layout.topic_manifest(topic_id)
        ledgers = decode_topic(read_named(vfs, path), path).ledgers
        named = {f"{each.ledger_id}.0.{kind}" for each in ledgers for kind in ("data", "times", "rows")}
        amended = {each.amendments_file for each in ledgers if each.amendments_file}
        count += len(amended)
        assert set(vfs.list_dir(layout.ledgers(topic_id))) == named | amended
    return count


def test_the_history_is_rich_enough_to_mean_something():
    recorder = history()
    records = [each.record for each in recorder.lives[-1].submitted]
    kinds = Counter(type(record).__name__ for record in records)
    assert kinds["Cancelled"] >= 12
    assert kinds["Moved"] >= 15
    assert kinds["Replaced"] >= 5
    assert sum(len(each.ledger_ids) for each in records if isinstance(each, LedgersDropped)) >= 5
    written = Counter(op.path for op in recorder.vfs.ops if op.kind == "rename" and ".amend" in op.path)
    removed = Counter(op.path for op in recorder.vfs.ops if op.kind == "remove" and ".amend" in op.path)
    names = {op.path for op in recorder.vfs.ops if ".amend" in op.path}
    assert len(names) >= 10, (written, removed)
    assert sum(removed.values()) >= 5
    life = recorder.lives[2].submitted
    assert any(
        each.answered_at is None and type(each.record).__name__ in ("Moved", "Replaced") for each in life
    ), "a change was on its way when the process was killed"


_opened: dict[Tree, int] = {}  # how many records a disk that was looked at kept


@pytest.mark.parametrize("policy", CrashPolicy, ids=lambda policy: policy.value)
def test_a_crash_keeps_changes_whole_and_loses_nothing(policy):
    for at, seed, vfs in crash_states(policy):
        with told(history(), at, policy, seed):
            tree = frozenset(vfs.snapshot().items())
            if tree not in _opened:
                _opened[tree] = run_sim(
                    lambda _, clock, vfs=vfs, at=at: open_and_deliver(vfs, clock, at),
                    at,
                    start_ms=history().clock_at(at),
                    latency=QUICK,
                )
            answered, possible = history().bounds(at)
            assert answered <= _opened[tree] <= possible


async def open_and_deliver(vfs: MemVfs, clock: SimClock, at: int) -> int:
    node = Node(vfs, clock, change_config()).open(start=False)
    kept = node.broker.journal.durable_lsn
    check_files(vfs)
    check_verify(vfs)
    model = model_after(history(), kept, history().life_at(at))
    assert await observe(node) == model
    if at % 3:
        return kept
    if at % 2:  # a second life, cut short, does nothing to the third
        node.broker.start()
        await asyncio.sleep(0.3)
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open(start=False)
        check_files(node.vfs)
    await deliver(node, model)
    return kept


async def deliver(node: Node, model: Model) -> None:
    """Everything owed comes once, at its last time; what waits can be cancelled still."""
    opened_ms = node.clock.now_ms()
    node.broker.start()
    for topic in model.values():
        inboxes = attach_all(node, topic.name)
        await cancel_what_waits(node, topic, opened_ms)
        await asyncio.sleep(FAR_MS * 2 / 1000)
        for subscription_id, inbox in zip(topic.subscriptions, inboxes, strict=True):
            check_inbox(topic.subscriptions[subscription_id], inbox, opened_ms)
            await inbox.ack([each.position for each in inbox.received])
        await asyncio.sleep(1)
        if topic.subscriptions:
            assert node.topic(topic.name).log.ledger_count == 0, "P8"
    assert node.failures == []
    await node.checkpoint()
    check_files(node.vfs)
    check_verify(node.vfs)


async def cancel_what_waits(node: Node, topic: TopicModel, opened_ms: int) -> None:
    """Cancel a part of what waits, in the broker and in the model."""
    waiting = sorted(
        p for p, m in topic.messages.items() if opened_ms + 1_000 < m.due_ms and not m.is_cancelled
    )[::3]
    if not waiting:
        return
    outcomes = await node.topic(topic.name).schedule.change(waiting, Cancel(), dry_run=False)
    assert {outcome.result for outcome in outcomes} == {ChangeResult.DONE}
    for position in waiting:
        cancel(topic.messages[position], position, topic.subscriptions.values(), 0)


_recovered_trees: set[Tree] = set()


@pytest.mark.parametrize("policy", CrashPolicy, ids=lambda policy: policy.value)
def test_recovery_that_is_cut_leaves_what_recovers_to_the_same(policy):
    moments = moments_of(policy, filter(is_about_changes, moments_about_changes()), CUT)
    for at, seed, vfs in states_at(history(), moments, policy, SEEDS):
        tree = frozenset(vfs.snapshot().items())
        if tree in _recovered_trees:
            continue
        _recovered_trees.add(tree)
        with told(history(), at, policy, seed):
            check_recovery_of_recovery(vfs, clock_at(history(), at), change_config(), tree)
