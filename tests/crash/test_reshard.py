"""The power goes, or the process, after every operation of a reshard: the folder is what it was, or what it is to be.

Either way each topic is in one of the folders in use, with every byte that its manifest names, and under its ids. The
start removes the rest, and a crash in that changes nothing.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import cache

import pytest

from broker.folder.recovery import open_manifests
from broker.folder.reshard import Reshard
from broker.folder.shard_folders import open_shard_folders, prepare_folder, read_shards, shard_folder
from broker.jobs.verify import verify_data_dir
from broker.model import Position, count_entries
from broker.policy import SubscriptionPolicy
from broker.runtime.vfs import Vfs, read_file
from broker.storage.blocks import file_lengths
from broker.storage.layout import Layout
from broker.storage.named_files import named_files
from broker.testing.mem_vfs import RANDOM_POLICIES, CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topic_shards import TopicShard, shard_of
from tests.crash.points import moments_of
from tests.depth import at_depth
from tests.harness import DATA_DIR, DAY_MS, EARLIEST, Node, Outgoing, small_config

STRIDE = at_depth(change=32 * len(CrashPolicy), deep=1)
SEEDS = range(at_depth(change=1, deep=4))
TOPICS = ("orders", "b", "topic9", "d")
EVERYWHERE = [(1, 3), (3, 2), (2, 1)]

Topics = dict[str, dict[str, bytes]]

CHECKED: set[frozenset[tuple[str, bytes]]] = set()
"""Files of folders in which all was well: most crashes leave the same as another one, and it is looked at once."""


def folders_in_use(vfs: Vfs) -> list[str]:
    shards = read_shards(vfs, DATA_DIR)
    return [shard_folder(DATA_DIR, number) for number in range(shards)] if shards else [DATA_DIR]


def topics_of(vfs: Vfs) -> Topics:
    """Return each topic's files by their paths, as far as the manifests name their bytes."""
    topics: Topics = {}
    for folder in folders_in_use(vfs):
        layout = Layout(folder)
        for image in open_manifests(vfs, layout, 0).topics:
            ends = {
                f"{ledger.ledger_id}.{ledger.capture.generation}.{kind}": length
                for ledger in image.ledgers
                for kind, length in file_lengths(ledger.capture).items()
            }
            assert image.name not in topics, "a topic is in two folders"
            files = topics[image.name] = {"manifest": read_file(vfs, layout.topic_manifest(image.topic_id))}
            for kind, names in named_files(image).items():
                for name in names:
                    path = f"{layout.topic(image.topic_id)}/{kind}/{name}"
                    files[f"{kind}/{name}"] = read_file(vfs, path, ends.get(name))
    return topics


def reshard(vfs: Vfs, shards: int, to: str | None = None) -> None:
    work = Reshard(vfs, DATA_DIR, shards, to)
    try:
        work.begin()
        work.run()
    finally:
        work.close()


def start(vfs: MemVfs) -> int:
    """Open the folder as `serve` does, with the number of shards it says; return the number."""
    for shards in (1, 2, 3):
        try:
            if shards == 1:
                prepare_folder(vfs, DATA_DIR)
            else:
                open_shard_folders(vfs, DATA_DIR, shards).close()
        except Exception as error:
            if getattr(error, "reason", "") != "OTHER_SHARD_COUNT":
                raise
        else:
            return shards
    raise AssertionError("no number of shards will do")


async def fill(clock: SimClock) -> tuple[MemVfs, dict[str, Position]]:
    """Return a disk on which a broker without shards was stopped that had everything that a topic can have.

    And the id that each topic gave the message with sequence id 5.
    """
    given: dict[str, Position] = {}
    vfs = MemVfs()
    node = Node(vfs, clock, small_config()).open()
    for topic in TOPICS:
        policy = SubscriptionPolicy(max_delivery_attempts=1)
        await node.create_subscription(topic, "s", position=EARLIEST, policy=policy)
        for index in range(3):
            batch = [
                Outgoing(b"%d-%d" % (index, each), sequence_id=8 * index + each + 1, schedule_key=f"k{index}{each}",
                         deliver_after_ms=each % 3 * 100_000)
                for each in range(7)
            ]  # fmt: skip
            ids = await node.produce(topic, batch, "producer")
            given.setdefault(topic, ids[4])
        inbox = await node.subscribe(topic, "s")
        taken = await inbox.wait(9)
        await inbox.ack(each.position for each in taken[:4])
        await inbox.nack([taken[4].position])  # a dead letter
        await node.checkpoint()
    await asyncio.sleep(20)
    await node.stop()
    return vfs, given


@cache
def disk() -> MemVfs:
    made: list[MemVfs] = []

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        made.append((await fill(clock))[0])

    run_sim(scenario, seed=1)
    return made[0].crashed(made[0].op_count, CrashPolicy.KEEP_ALL)


@cache
def before(shards: int) -> MemVfs:
    """Return the disk with so many shards, from which a reshard begins."""
    vfs = disk().crashed(0, CrashPolicy.KEEP_ALL) if shards == 1 else before({3: 1, 2: 3}[shards])
    if shards > 1:
        vfs = vfs.crashed(vfs.op_count, CrashPolicy.KEEP_ALL)
        reshard(vfs, shards)
    return vfs.crashed(vfs.op_count, CrashPolicy.KEEP_ALL)


@cache
def history(old: int, new: int) -> MemVfs:
    vfs = before(old).crashed(0, CrashPolicy.KEEP_ALL)
    reshard(vfs, new)
    return vfs


@cache
def moving(old: int, new: int) -> MemVfs:
    """Return the disk that a reshard leaves that is cut where its names are moved, and a start on it."""
    vfs = history(old, new)
    moment = next(
        at for at in range(vfs.op_count + 1) if read_moving(vfs.crashed(at, CrashPolicy.LOSE_UNSYNCED))
    )
    disk = vfs.crashed(moment, CrashPolicy.LOSE_UNSYNCED)
    start(disk)
    return disk


@cache
def topics_before() -> Topics:
    return topics_of(before(1))


def check(vfs: MemVfs, shards: tuple[int, ...], expected: Topics) -> None:
    number = start(vfs)
    assert number in shards
    files = frozenset(vfs.snapshot().items())
    if files not in CHECKED:
        assert topics_of(vfs) == expected
        for folder in folders_in_use(vfs):
            report = verify_data_dir(vfs, folder)
            assert not report.problems, report.problems
        CHECKED.add(files)
    names = set(vfs.list_dir(DATA_DIR))
    shard_names = {f"shard-{each:04}" for each in range(number)} | {"shards.json"}
    assert names <= (
        {"lock", *shard_names} if number > 1 else {"lock", "broker.manifest", "journal", "topics"}
    )


def test_the_topics_are_of_every_kind() -> None:
    files = {path for topic in topics_of(disk()).values() for path in topic}
    assert {path.partition("/")[0] for path in files} >= {"manifest", "ledgers", "cursors", "buckets", "keys"}
    assert any("producers" in path for path in files)
    assert any(name.endswith("~dead-letters") for name in topics_of(disk()))
    assert {shard_of(name, 3) for name in TOPICS} == {0, 1, 2}


@pytest.mark.parametrize(("old", "new"), EVERYWHERE)
def test_a_reshard_leaves_every_topic_as_it_was_and_nothing_else(old: int, new: int) -> None:
    vfs = history(old, new)
    check(vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED), (new,), topics_before())


@pytest.mark.parametrize("policy", CrashPolicy)
@pytest.mark.parametrize(("old", "new"), EVERYWHERE)
def test_a_crash_at_any_operation_leaves_the_old_folders_or_the_new(
    old: int, new: int, policy: CrashPolicy
) -> None:
    vfs, expected = history(old, new), topics_before()
    for at in moments_of(policy, range(vfs.op_count + 1), STRIDE):
        for seed in SEEDS if policy in RANDOM_POLICIES else SEEDS[:1]:
            found = vfs.crashed(at, policy, random.Random(f"{seed}/{at}"))
            check(found, (old, new), expected)
            again = vfs.crashed(at, policy, random.Random(f"{seed}/{at}"))
            if read_moving(again):
                continue
            if start(again) != new:  # whoever was cut runs the command again
                reshard(again, new)
            check(again, (new,), expected)


def read_moving(vfs: MemVfs) -> bool:
    try:
        read_shards(vfs, DATA_DIR)
    except Exception as error:
        return getattr(error, "reason", "") == "RESHARD_UNFINISHED"
    return False


OF_NAMES = pytest.mark.parametrize(
    "policy", [CrashPolicy.LOSE_UNSYNCED, CrashPolicy.NAMES_LOST_DATA_KEPT, CrashPolicy.MIXED]
)
"""With the ways to crash that can take back a name."""


@OF_NAMES
@pytest.mark.parametrize(("old", "new"), EVERYWHERE)
def test_a_crash_while_names_are_moved_at_the_start_changes_nothing(
    old: int, new: int, policy: CrashPolicy
) -> None:
    disk = moving(old, new)
    for at in moments_of(policy, range(disk.op_count + 1), max(STRIDE // 4, 1)):
        check(disk.crashed(at, policy, random.Random(at)), (new,), topics_before())


@OF_NAMES
@pytest.mark.parametrize(("old", "new"), EVERYWHERE)
def test_a_start_after_a_kill_relies_on_no_marker_that_a_power_cut_takes_back(
    old: int, new: int, policy: CrashPolicy
) -> None:
    """The process is killed once a marker has its name, a start finds it, and then the power goes: on some file systems
    what that start removed is gone then, and the name is not there."""
    vfs = history(old, new)
    for killed_at, op in enumerate(vfs.ops, 1):
        if op.kind != "rename" or not op.path.endswith("shards.json.new"):
            continue
        disk = vfs.killed(killed_at)
        start(disk)
        for at in moments_of(policy, range(disk.op_count + 1), max(STRIDE // 4, 1)):
            check(disk.crashed(at, policy, random.Random(at)), (old, new), topics_before())


def test_shards_go_on_as_one_broker_did_and_as_one_again() -> None:
    """Each message comes once more or never, as its state says; new ids collide with none."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        vfs, given = await fill(clock)
        seen: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}
        for shards in (3, 2, 1):
            reshard(vfs, shards)
            for number in range(shards):
                folder = shard_folder(DATA_DIR, number) if shards > 1 else DATA_DIR
                config = replace(
                    small_config(data_dir=folder, dedup_window_ms=DAY_MS),
                    topic_shard=TopicShard(number, shards),
                )
                node = Node(vfs, clock, config).open()
                here = {topic for topic in TOPICS if config.topic_shard.holds(topic)}
                assert set(node.broker.registry.by_name) == here | {
                    f"{topic}~s~dead-letters" for topic in here
                }
                for topic in sorted(here):
                    await go_on(node, topic, given[topic], seen[topic], b"with %d" % shards)
                await node.stop()
        handed_out = [
            b"1-6",
            b"2-0",
            b"2-3",
            b"2-6",
        ]  # of what was due, four were acknowledged, one is a dead letter
        later = [b"%d-%d" % (index, each) for index in range(3) for each in (1, 2, 4, 5)]
        for payloads in seen.values():
            assert sorted(payloads) == sorted([*handed_out, *later, b"with 3", b"with 2", b"with 1"])

    run_sim(scenario, seed=2)


async def go_on(node: Node, topic: str, given: Position, seen: list[bytes], payload: bytes) -> None:
    """Produce, once more what was stored before, and take all that is owed."""
    assert await node.produce(topic, [Outgoing(b"again", sequence_id=5)], "producer") == [given]
    await node.produce(topic, [Outgoing(payload)])
    inbox = await node.subscribe(topic, "s")
    for _ in range(30):  # before a lease ends
        await asyncio.sleep(10)
        taken = inbox.poll()
        await inbox.ack(each.position for each in taken)
        seen += [each.payload for each in taken]
    assert node.topic(f"{topic}~s~dead-letters").log.end.entry_id == 1
    assert count_entries(inbox.subscription.dead_letters) == 1
