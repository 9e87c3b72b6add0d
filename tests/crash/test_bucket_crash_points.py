"""The power goes, or the process, after every operation of a history that seals, merges and checkpoints constantly.

Whatever is found: every bucket that a manifest names is there and whole, nothing else lies in the folder, the
index check has nothing to say, and every subscription gets what it is owed, once and on time.

`make test-deep` looks at every operation under every policy; a change at some under each, on each day at others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import run_sim
from tests.crash.bucket_history import (
    LONGEST_MS,
    QUICK,
    attach_all,
    check_inbox,
    check_named_is_found,
    check_verify,
    crash_bucket_config,
    record_bucket_history,
    upkeep_of,
)
from tests.crash.history import Model, Recorder, observe
from tests.crash.points import (
    Still,
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
from tests.harness import Node, Outgoing

__all__ = ["same_broker_id"]
pytestmark = pytest.mark.usefixtures("same_broker_id")

SEEDS = range(at_depth(change=1, deep=4))
STRIDE = at_depth(change=560, deep=1)
DENSE = at_depth(change=112, deep=1)
"""Of the operations around buckets and manifests."""
FURTHER = at_depth(change=5, deep=1)
"""Of the states, those that are looked at for longer."""


@cache
def history() -> Recorder:
    return record_bucket_history()


def is_about_buckets(at: int) -> bool:
    """Return whether an operation next to this moment concerns a bucket or a manifest."""
    near = history().vfs.ops[max(at - 1, 0) : at + 1]
    return any("/buckets" in op.path or "manifest" in op.path for op in near)


def moments_about_buckets() -> list[int]:
    return [at for at in range(history().vfs.op_count + 1) if is_about_buckets(at)]


def crash_states(policy: CrashPolicy) -> Iterator[tuple[int, int, MemVfs]]:
    """The states that a policy makes of the history: (operation, seed, disk). Around buckets five times as many."""
    some = moments_of(policy, range(history().vfs.op_count + 1), STRIDE)
    dense = moments_of(policy, moments_about_buckets(), DENSE)
    return states_at(history(), sorted({*some, *dense}), policy, SEEDS)


def test_the_history_is_rich_enough_to_mean_something():
    vfs = history().vfs
    ops = Counter(op.kind for op in vfs.ops if "/buckets/" in op.path)
    assert ops["create"] >= 12
    assert ops["sync"] >= 12
    assert ops["remove"] >= 10
    manifests = [
        at for at, op in enumerate(vfs.ops, 1) if op.kind == "rename" and op.path.endswith("/1/manifest.new")
    ]
    assert len(manifests) >= 8
    named = []
    for at in manifests:
        with contextlib.suppress(Exception):
            named.append(check_named_whole(vfs.crashed(at, CrashPolicy.LOSE_UNSYNCED)))
    assert max(named) >= 2
    assert history().vfs.snapshot()["data/topics/1/manifest"]


def check_named_whole(vfs: MemVfs) -> int:
    Node(vfs, SimClock(Still()), crash_bucket_config()).open(start=False)
    return check_named_is_found(vfs)


_opened: dict[Tree, int] = {}  # how many records a disk that was looked at kept
_buckets: Counter[int] = Counter()


@pytest.mark.parametrize("policy", CrashPolicy, ids=lambda policy: policy.value)
def test_a_crash_leaves_the_buckets_that_manifests_name_and_all_is_delivered(policy):
    for at, seed, vfs in crash_states(policy):
        with told(history(), at, policy, seed):
            tree = frozenset(vfs.snapshot().items())
            if tree not in _opened:
                start_ms = history().clock_at(at)
                _opened[tree] = run_sim(
                    lambda _, clock, vfs=vfs, at=at: open_and_deliver(vfs, clock, at),
                    at,
                    start_ms=start_ms,
                    latency=QUICK,
                )
            answered, possible = history().bounds(at)
            assert answered <= _opened[tree] <= possible
    assert _buckets[2], "buckets were never found"


async def open_and_deliver(vfs: MemVfs, clock: SimClock, at: int) -> int:
    node = Node(vfs, clock, crash_bucket_config()).open(start=False)
    kept = node.broker.journal.durable_lsn
    _buckets[min(check_named_is_found(vfs), 2)] += 1
    model = model_after(history(), kept, history().life_at(at))
    assert await observe(node) == model
    check_verify(vfs)
    if not at % FURTHER:
        await deliver(node, model)
    return kept


async def deliver(node: Node, model: Model) -> None:
    """Recover once more, deliver everything, and look at the disk again."""
    vfs, clock = node.vfs, node.clock
    again = node.crash(CrashPolicy.KEEP_ALL).open(start=False)
    assert again.vfs.snapshot() == vfs.snapshot(), "recovering twice changed something"
    node = again
    opened_ms = clock.now_ms()
    node.broker.start()
    for topic in model.values():
        inboxes = attach_all(node, topic.name)
        await node.produce(topic.name, [Outgoing(b"more", deliver_after_ms=HOUR_AFTER)] * 12)
        await asyncio.sleep(LONGEST_MS / 1000 + 1)
        for subscription_id, inbox in zip(topic.subscriptions, inboxes, strict=True):
            check_inbox(topic.subscriptions[subscription_id], inbox, opened_ms)
        assert node.topic(topic.name).index.rebuilds == 0
        assert upkeep_of(node, topic.name).image().bucket_ids, "what is pending is sealed"
    assert node.failures == []
    await node.checkpoint()
    await asyncio.sleep(0.1)
    check_verify(node.vfs)
    after = node.crash(CrashPolicy.LOSE_UNSYNCED).open(start=False)
    check_named_is_found(after.vfs)


HOUR_AFTER = 3_600_000
_recovered_trees: set[Tree] = set()


@pytest.mark.parametrize("policy", CrashPolicy, ids=lambda policy: policy.value)
def test_recovery_that_is_cut_leaves_what_recovers_to_the_same(policy):
    moments = moments_of(policy, moments_about_buckets(), DENSE * FURTHER)
    for at, seed, vfs in states_at(history(), moments, policy, SEEDS):
        tree = frozenset(vfs.snapshot().items())
        if tree in _recovered_trees:
            continue
        _recovered_trees.add(tree)
        with told(history(), at, policy, seed):
            check_recovery_of_recovery(vfs, clock_at(history(), at), crash_bucket_config(), tree)
