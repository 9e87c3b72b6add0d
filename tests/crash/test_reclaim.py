"""The power goes, or the process, after every operation of a history in which ledgers go all the time.

Whatever is found: every file that a manifest names is there and no other, what was dropped stays dropped, what was
not is whole, `verify` has nothing to say, and every subscription gets what it is owed, once, and nothing else.

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
from broker.storage.layout import Layout
from broker.storage.manifest import decode_broker, decode_topic
from broker.storage.named_files import read_named
from broker.storage.records import LedgersDropped
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.crash.bucket_history import QUICK, attach_all, check_inbox, check_verify
from tests.crash.history import Model, Recorder, observe
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
from tests.harness import DATA_DIR, EARLIEST, Inbox, Node, Outgoing, small_config

__all__ = ["same_broker_id"]
pytestmark = pytest.mark.usefixtures("same_broker_id")

SEEDS = range(at_depth(change=1, deep=4))
STRIDE = at_depth(change=308, deep=1)
DENSE = at_depth(change=112, deep=1)
"""Of the operations around drops."""
CUT = at_depth(change=560, deep=1)
"""Of these, those whose recovery is cut."""
LONGEST_MS = 5_000
HOUR_MS = 3_600_000


def reclaim_config() -> BrokerConfig:
    """Several visits and checkpoints while a ledger fills."""
    return small_config(
        ledger_max_entries=4,
        ledger_max_age_ms=400,
        journal_group_bytes_max=1024,
        reclaim_interval_ms=90,
        checkpoint_interval_ms=140,
        min_index_count=4,
        seal_after_ms=300,
        clock_recheck_ms=60_000,
    )


async def play(recorder: Recorder) -> None:
    """Three lives: stopped, killed, stopped. Ledgers go at the front, in the middle and at the end."""
    rng = random.Random(9)
    node = recorder.open()
    await node.create_subscription("orders", "quick")
    await node.create_subscription("orders", "slow", position=EARLIEST)
    await live(node, rng, rounds=9)
    await asyncio.sleep(0.4)  # the last ledger rests, and goes
    await node.stop()
    node = recorder.open()
    await live(node, rng, rounds=9)
    await node.create_subscription("orders", "new", position=EARLIEST)
    await live(node, rng, rounds=3)
    await node.topic("orders").subscriptions.delete("new")
    await asyncio.sleep(0.3)
    await node.submit("orders", messages(rng, 3))  # the kill comes before the answer
    recorder.kill(node)
    await asyncio.sleep(1)  # what the dead process's threads had begun has ended
    node = recorder.open()
    await live(node, rng, rounds=4)
    await asyncio.sleep(0.5)
    await node.stop()


async def live(node: Node, rng: random.Random, rounds: int) -> None:
    """One subscription acknowledges at once, the other from time to time; some messages wait for long."""
    quick, slow = await node.subscribe("orders", "quick"), await node.subscribe("orders", "slow")
    for number in range(rounds):
        await node.produce("orders", messages(rng, 3))
        await asyncio.sleep(rng.uniform(0.02, 0.2))
        await acknowledge(quick)
        if number % 3 == 2:
            await acknowledge(slow)
    await acknowledge(slow)
    for inbox in (quick, slow):
        inbox.detach()


async def acknowledge(inbox: Inbox) -> None:
    await inbox.ack([each.position for each in inbox.poll()])


def messages(rng: random.Random, count: int) -> list[Outgoing]:
    delays = [rng.choice((0, 0, 1, 40, 300, 300, 900, rng.choice((1, LONGEST_MS)))) for _ in range(count)]
    return [Outgoing(b"%d" % number, deliver_after_ms=delay) for number, delay in enumerate(delays)]


@cache
def history() -> Recorder:
    async def scenario(_: SimLoop, clock: SimClock) -> Recorder:
        recorder = Recorder(MemVfs(), clock, reclaim_config())
        await play(recorder)
        return recorder

    return run_sim(scenario, 3, latency=QUICK)


def is_about_reclaim(at: int) -> bool:
    """Return whether an operation next to this moment removes a ledger or replaces a manifest."""
    near = history().vfs.ops[max(at - 1, 0) : at + 1]
    return any((op.kind == "remove" and "/ledgers" in op.path) or op.kind == "rename" for op in near)


def moments_about_reclaim() -> list[int]:
    return [at for at in range(history().vfs.op_count + 1) if is_about_reclaim(at)]


def crash_states(policy: CrashPolicy) -> Iterator[tuple[int, int, MemVfs]]:
    """The states that a policy makes of the history: (operation, seed, disk). Around drops three times as many."""
    some = moments_of(policy, range(history().vfs.op_count + 1), STRIDE)
    dense = moments_of(policy, moments_about_reclaim(), DENSE)
    return states_at(history(), sorted({*some, *dense}), policy, SEEDS)


def named_and_found(vfs: MemVfs) -> Iterator[tuple[set[str], set[str]]]:
    """Of each topic the ledger files that its manifest names, and those that lie in its folder."""
    layout = Layout(DATA_DIR)
    root = decode_broker(read_named(vfs, layout.manifest), layout.manifest)
    for topic_id in root.topics:
        path = layout.topic_manifest(topic_id)
        ledgers = decode_topic(read_named(vfs, path), path).ledgers
        named = {f"{each.ledger_id}.0.{kind}" for each in ledgers for kind in ("data", "times", "rows")}
        yield named, set(vfs.list_dir(layout.ledgers(topic_id)))


def check_files(vfs: MemVfs) -> None:
    for named, found in named_and_found(vfs):
        assert found == named, f"orphans {sorted(found - named)}, missing {sorted(named - found)}"


def test_the_history_is_rich_enough_to_mean_something():
    recorder = history()
    dropped = [
        ledger_id
        for each in recorder.lives[-1].submitted
        if isinstance(each.record, LedgersDropped)
        for ledger_id in each.record.ledger_ids
    ]
    assert len(dropped) >= 15
    assert dropped != sorted(dropped), "some go from the middle"
    removed = Counter(op.kind for op in recorder.vfs.ops if "/ledgers/" in op.path)["remove"]
    assert removed >= 3 * 12


_opened: dict[Tree, int] = {}  # how many records a disk that was looked at kept
_emptied: Counter[bool] = Counter()


@pytest.mark.parametrize("policy", CrashPolicy, ids=lambda policy: policy.value)
def test_a_crash_brings_nothing_back_and_loses_nothing(policy):
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
    node = Node(vfs, clock, reclaim_config()).open(start=False)
    kept = node.broker.journal.durable_lsn
    check_files(vfs)
    check_verify(vfs)
    model = model_after(history(), kept, history().life_at(at))
    assert await observe(node) == model
    if at % 3 == 0:
        await deliver(node, model)
    return kept


async def deliver(node: Node, model: Model) -> None:
    """Everything owed comes once, and then everything goes."""
    opened_ms = node.clock.now_ms()
    node.broker.start()
    await asyncio.sleep(0.2)  # ledgers go while nobody is there, and then while consumers are
    for topic in model.values():
        inboxes = attach_all(node, topic.name)
        await asyncio.sleep(LONGEST_MS / 1000 + 1)
        for subscription_id, inbox in zip(topic.subscriptions, inboxes, strict=True):
            check_inbox(topic.subscriptions[subscription_id], inbox, opened_ms)
            await inbox.ack([each.position for each in inbox.received])
        await asyncio.sleep(1)
        if topic.subscriptions:
            assert node.topic(topic.name).log.ledger_count == 0, "P8"
            _emptied[True] += 1
    assert node.failures == []
    await node.checkpoint()
    check_files(node.vfs)
    check_verify(node.vfs)


_recovered_trees: set[Tree] = set()


@pytest.mark.parametrize("policy", CrashPolicy, ids=lambda policy: policy.value)
def test_recovery_that_is_cut_leaves_what_recovers_to_the_same(policy):
    moments = moments_of(policy, moments_about_reclaim(), CUT)
    for at, seed, vfs in states_at(history(), moments, policy, SEEDS):
        tree = frozenset(vfs.snapshot().items())
        if tree in _recovered_trees:
            continue
        _recovered_trees.add(tree)
        with told(history(), at, policy, seed):
            check_recovery_of_recovery(vfs, clock_at(history(), at), reclaim_config(), tree)
