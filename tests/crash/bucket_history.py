"""A history that seals, merges, loads and checkpoints all the time, and what must hold of the disk it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Collection, Mapping

from broker.config import BrokerConfig
from broker.delayed.bucket_upkeep import BucketUpkeep
from broker.jobs.verify import verify_data_dir
from broker.model import Position
from broker.storage.bucket_files import bucket_storage
from broker.storage.bucket_snapshot import Ordinals, decode_entries
from broker.storage.layout import Layout
from broker.storage.manifest import decode_broker, decode_topic
from broker.storage.named_files import read_named
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import Latency, SimLoop, run_sim
from tests.crash.history import Recorder
from tests.harness import DATA_DIR, EARLIEST, Inbox, Node, Outgoing, small_config
from tests.reference import Subscription

LONGEST_MS = 6_000
LATE_MS = 1_000
"""Greatest lateness of a delivery: a few calls to files of at most 3 ms each, and a look at the clock."""

QUICK = Latency(slow_every=0)
HOUR_MS = 3_600_000


def bucket_config(**changes: object) -> BrokerConfig:
    """Two or three seals between two checkpoints, and merges of nearly every bucket."""
    settings: dict[str, object] = {
        "min_index_count": 4,
        "seal_after_ms": 300,
        "checkpoint_interval_ms": 250,
        "ledger_max_entries": 6,
        "journal_group_bytes_max": 1024,
        "clock_recheck_ms": 60_000,
    }
    return small_config(**{**settings, **changes})


def crash_bucket_config() -> BrokerConfig:
    """As above, but what was indexed often waits in memory for its seal while a checkpoint is written."""
    return bucket_config(min_index_count=9)


async def play(recorder: Recorder) -> None:
    """Three lives: stopped, killed, stopped."""
    rng = random.Random(5)
    node = recorder.open()
    await node.create_subscription("orders", "early")
    await node.create_subscription("orders", "late", position=EARLIEST)
    await live(node, rng, rounds=9)
    await node.stop()
    node = recorder.open()
    await live(node, rng, rounds=9)
    await node.submit("orders", messages(rng, 5))  # the kill comes before the answer
    recorder.kill(node)
    await asyncio.sleep(1)  # what the dead process's threads had begun has ended
    node = recorder.open()
    await live(node, rng, rounds=5)
    await node.stop()


async def live(node: Node, rng: random.Random, rounds: int) -> None:
    inbox = await node.subscribe("orders", "early")
    for _ in range(rounds):
        await node.produce("orders", messages(rng, 5))
        await asyncio.sleep(rng.uniform(0.02, 0.15))
        found = inbox.poll()
        await inbox.ack([each.position for each in found if rng.random() < 0.8])


def messages(rng: random.Random, count: int) -> list[Outgoing]:
    delays = [rng.choice((0, 1, 40, rng.randrange(1, LONGEST_MS), LONGEST_MS)) for _ in range(count)]
    return [Outgoing(b"%d" % number, deliver_after_ms=delay) for number, delay in enumerate(delays)]


def record_bucket_history() -> Recorder:
    async def scenario(_: SimLoop, clock: SimClock) -> Recorder:
        recorder = Recorder(MemVfs(), clock, crash_bucket_config())
        await play(recorder)
        return recorder

    return run_sim(scenario, 1, latency=QUICK)


# -- what is on the disk -------------------------------------------------------------------------------------------


def named_and_found(vfs: MemVfs) -> dict[int, tuple[list[str], list[str]]]:
    """By topic: the files that its manifest names, and those that lie in its folder."""
    layout = Layout(DATA_DIR)
    root = decode_broker(read_named(vfs, layout.manifest), layout.manifest)
    result = {}
    for topic_id in root.topics:
        path = layout.topic_manifest(topic_id)
        image = decode_topic(read_named(vfs, path), path)
        result[topic_id] = (
            sorted(f"{bucket_id}.bucket" for bucket_id in image.bucket_ids),
            sorted(vfs.list_dir(layout.buckets(topic_id))),
        )
    return result


def check_named_is_found(vfs: MemVfs) -> int:
    """Every name in a manifest's bucket list is a whole file, and every file is named. How many there are."""
    count = 0
    for topic_id, (named, found) in named_and_found(vfs).items():
        assert found == named, f"topic {topic_id} names {named} and its folder holds {found}"
        for name in named:
            check_whole(vfs, topic_id, int(name.partition(".")[0]))
        count += len(named)
    return count


def check_whole(vfs: MemVfs, topic_id: int, bucket_id: int) -> None:
    """Read every byte of a snapshot that means anything; raises Corrupt."""
    storage = bucket_storage(vfs, Layout(DATA_DIR).buckets(topic_id), topic_id)
    with contextlib.closing(storage.open_reader(bucket_id)) as reader:
        metadata = reader.read_metadata()
        ordinals = Ordinals(metadata.spans)
        for index, segment in enumerate(reader.read_segments(metadata, 0, len(metadata.segments))):
            decode_entries(metadata, ordinals, index, segment)
        assert sum(map(len, reader.read_bitmaps().values())) == metadata.count


def check_verify(vfs: MemVfs) -> None:
    """`verify` finds no problem in what lies on the disk now."""
    report = verify_data_dir(vfs.crashed(vfs.op_count, CrashPolicy.KEEP_ALL), DATA_DIR)
    assert report.problems == [], report.problems


# -- what is delivered ---------------------------------------------------------------------------------------------


def attach_all(node: Node, topic: str = "orders") -> list[Inbox]:
    found = node.topic(topic)
    return [
        node.attach(found, subscription, lease_ms=HOUR_MS) for subscription in found.subscriptions.values()
    ]


def check_inbox(model: Subscription[Position], inbox: Inbox, opened_ms: int) -> None:
    """Everything owed arrived exactly once, not before its time and not long after."""
    due_ms = {position: entry.message.due_ms for position, entry in model.open.items()}
    check_arrived(inbox, due_ms, opened_ms)
    for each in inbox.received:
        model.check_sent(model.entries[each.position], each.sent_ms, each.sent_ns, each.deliver_at_ms)


def check_arrived(
    inbox: Inbox, due_ms: Mapping[Position, int], opened_ms: int, *, waited_ms: int = 0
) -> None:
    """`waited_ms`: the longest wait for a disk that fails for good."""
    inbox.poll()
    received = [each.position for each in inbox.received]
    assert len(set(received)) == len(received), f"P4: twice: {doubles(received)}"
    assert set(received) <= due_ms.keys(), "P3: a settled message came back, or one of nowhere came"
    lost = sorted(due_ms.keys() - set(received))
    assert not lost, f"P3: {len(lost)} did not come: {[(p, due_ms[p] - opened_ms) for p in lost[:5]]}"
    for each in inbox.received:
        assert each.sent_ms >= due_ms[each.position], f"P2: {each.position} came early"
        late_ms = each.sent_ms - max(due_ms[each.position], opened_ms)
        assert late_ms < LATE_MS + waited_ms, f"{each.position} came {late_ms} ms late"


def doubles(received: Collection[Position]) -> list[Position]:
    seen: set[Position] = set()
    return [position for position in received if position in seen or seen.add(position)]


def upkeep_of(node: Node, topic: str = "orders") -> BucketUpkeep:
    upkeep = node.topic(topic).index.upkeep
    assert upkeep is not None
    return upkeep
