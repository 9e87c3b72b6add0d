"""The lookup of schedule keys across restarts, crashes and failures of the disk; what it keeps in memory; a model."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import tracemalloc
from collections.abc import Awaitable
from dataclasses import asdict

import numpy as np
import pytest

from broker.delayed.key_cache import OPEN_RUNS, KeyCache
from broker.delayed.keys_in_flight import KeysInFlight
from broker.delayed.recent_keys import RecentKeys
from broker.delayed.schedule_keys import KeyImage, KeyLimits
from broker.errors import Corrupt, PostdateError, Unavailable
from broker.model import START, Position
from broker.runtime.vfs import replace_file
from broker.storage.key_filter import Probe
from broker.storage.key_run import BLOCK_ENTRIES
from broker.storage.key_run_files import KeyRunReader
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from tests.depth import at_depth
from tests.unit.delayed.gated_buckets import IS_BACKGROUND, GatedExecutor, spin
from tests.unit.delayed.key_world import LIMITS, Log, Topic, column
from tests.unit.storage.key_entries import FOLDER, TOPIC_ID

ONE_RUN = KeyLimits(max_runs=1)
MANY = KeyLimits(seal_count=1_000_000, max_runs=64)


def random_hashes(count: int, seed: int = 1) -> list[int]:
    return [int(value) for value in np.random.default_rng(seed).integers(1, 1 << 64, count, dtype=np.uint64)]


async def sealed(*batches: list[int], cache_bytes: int = 1 << 20) -> Topic:
    """A topic with a run for each batch, and a manifest that names them."""
    topic = await Topic(limits=MANY, cache_bytes=cache_bytes).started()
    for batch in batches:
        topic.produce(batch)
        assert await topic.keys.seal()
    await topic.checkpoint()
    return topic


async def restarted(topic: Topic) -> Topic:
    topic.open()
    return await topic.started()


# Restarts


async def test_a_restart_adds_only_the_rows_after_the_runs_keys_4() -> None:
    topic = await sealed([5, 0, 6], [7])
    topic.produce([0, 0])
    assert topic.keys.image().keys_through == topic.log.end  # nothing in memory: what has no key was passed
    topic.produce([8])
    await topic.checkpoint()
    assert topic.manifest.keys_through == Position(1, 4)
    before = await topic.keys.find(column([5, 6, 7, 8]))
    topic = await restarted(topic)
    assert len(topic.keys._memory.recent) == 1
    assert await topic.keys.find(column([5, 6, 7, 8])) == before
    assert topic.keys.image() == topic.manifest
    assert await topic.keys.seal()
    await topic.checkpoint()
    topic.open()
    await topic.keys.restore()  # and no rows follow
    assert topic.keys.image() == topic.manifest and topic.manifest.keys_through == topic.log.end


async def test_a_checkpoint_before_the_restore_forgets_no_run() -> None:
    topic = await sealed([5], [6])
    topic.open()
    topic.produce([7])  # a record that is replayed
    assert topic.keys.image() == topic.manifest
    with pytest.raises(AssertionError):
        topic.keys.maybe(Probe(column([5])))
    await topic.keys.restore()
    assert topic.keys.image().keys_through == Position(1, 2)
    await topic.check([5, 6, 7])


async def test_run_ids_are_never_used_again() -> None:
    topic = await sealed([5], [6])
    ids = set(topic.manifest.run_ids)
    topic.rebuild()
    assert await topic.keys.seal()
    await topic.checkpoint()
    topic = await restarted(topic)
    topic.produce([7])
    assert await topic.keys.seal()
    assert len(ids | set(topic.keys.image().run_ids)) == 4


async def test_a_seal_that_meets_a_file_of_its_name_takes_another_one() -> None:
    topic = await sealed([5])
    topic.vfs.open(f"{FOLDER}/{topic.manifest.next_run_id}.keys", create=True)
    topic.produce([6])
    assert not await topic.keys.seal()
    assert await topic.keys.seal()
    await topic.check([5, 6])
    await topic.checkpoint()
    assert topic.files == {f"{FOLDER}/{run_id}.keys" for run_id in topic.manifest.run_ids}


def damaged(content: bytes, how: str) -> bytes | None:
    return {
        "missing": None,
        "cut": content[:-1],
        "header": b"\xff" + content[1:],
        "empty": b"",
    }[how]


@pytest.mark.parametrize("how", ["missing", "cut", "header", "empty"])
async def test_a_damaged_run_fails_the_restore_loudly_and_the_rows_build_it_again(how: str, caplog) -> None:
    topic = await sealed([5, 6], [7])
    path = f"{FOLDER}/{topic.manifest.run_ids[1]}.keys"
    content = damaged(topic.vfs.snapshot()[path], how)
    topic.vfs.remove(path)
    if content is not None:
        topic.vfs.open(path, create=True).pwrite([content], 0)
    topic.open()
    with pytest.raises(Corrupt) as caught:
        await topic.keys.restore()
    assert caught.value.path == path
    image = topic.keys.image()
    assert (image.run_ids, image.keys_through) == ((), START)
    assert image.next_run_id == topic.manifest.next_run_id
    topic.add_from(START)
    await topic.check([5, 6, 7])
    assert await topic.keys.seal()
    await topic.checkpoint()
    assert len(topic.files) == 1  # those that could not be used are gone as well
    await (await restarted(topic)).check([5, 6, 7])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["block", "fences", "filter"])
async def test_a_run_found_damaged_later_fails_the_find_loudly(part: str) -> None:
    topic = await sealed(random_hashes(500))
    path = f"{FOLDER}/{topic.manifest.run_ids[0]}.keys"
    header = await topic.storage.read(topic.manifest.run_ids[0], KeyRunReader.read_header)
    at = {"block": header.filter_at - 1, "fences": header.fences_at, "filter": header.fences_at - 1}[part]
    file = topic.vfs.open(path)
    file.pwrite([bytes([file.pread(1, at)[0] ^ 1])], at)
    topic = await restarted(topic)
    with pytest.raises(Corrupt):
        await topic.keys.find(column(topic.values))
    topic.rebuild()
    await topic.check(topic.values)


# A disk that fails


@pytest.mark.parametrize("kind", ["create", "write", "read", "sync", "sync_dir", "open"])
@pytest.mark.parametrize("work", ["seal", "merge"])
async def test_a_seal_or_merge_that_fails_leaves_everything_as_it_was_keys_6(kind: str, work: str) -> None:
    topic = await sealed([5], [6])
    topic.keys.limits = ONE_RUN
    topic.produce([7])
    before = topic.keys.image()
    fault = topic.vfs.faults.add(Fault(kind, f"{FOLDER}/*" if kind != "sync_dir" else FOLDER))
    assert not await (topic.keys.seal() if work == "seal" else topic.keys.merge())
    assert fault.hit_count == 1
    topic.produce([8])
    after = topic.keys.image()
    assert (after.run_ids, after.keys_through) == (before.run_ids, before.keys_through)
    await topic.check([5, 6, 7, 8])
    counters = topic.keys.counters
    assert (counters.seal_failures, counters.merge_failures) == ((1, 0) if work == "seal" else (0, 1))
    assert await topic.keys.seal() and await topic.keys.merge()
    await topic.check([5, 6, 7, 8])
    await topic.checkpoint()
    assert len(topic.files) == 1


async def test_failures_are_tried_again_later_and_later() -> None:
    topic = await Topic(limits=LIMITS).started()
    topic.produce([1, 2, 3, 4])
    topic.vfs.faults.add(Fault("sync", onward=True))
    now_ms = 0
    tries: list[int] = []
    while len(tries) < 4:
        if topic.keys.needs_seal(now_ms):
            assert not await topic.keys.seal()
            tries.append(now_ms)
        now_ms += 500
    pauses = np.diff(tries)
    assert (np.diff(pauses) > 0).all() and pauses[0] >= 1_000
    topic.vfs.faults.clear()
    assert await topic.keys.seal()
    await topic.check([1, 2, 3, 4])


async def test_a_disk_that_does_not_read_is_told_to_whoever_asks_and_nothing_else_happens() -> None:
    topic = await sealed([5], cache_bytes=0)
    before = topic.keys.image()
    for kind in ("open", "read"):
        topic.vfs.faults.add(Fault(kind, error=errno.EIO, onward=True))
        with pytest.raises(Unavailable):
            await topic.keys.find(column([5]))
        topic.vfs.faults.clear()
        assert topic.keys.image() == before
        await topic.check([5])


async def test_a_file_that_cannot_be_removed_is_removed_with_the_next_checkpoint() -> None:
    topic = await sealed([5], [6])
    topic.keys.limits = ONE_RUN
    assert await topic.keys.merge()
    assert topic.keys.has_deleted
    topic.vfs.faults.add(Fault("remove"))
    await topic.checkpoint()
    assert topic.keys.has_deleted and len(topic.files) == 2
    await topic.checkpoint()
    assert not topic.keys.has_deleted and len(topic.files) == 1


async def test_files_stay_until_a_manifest_without_them_is_durable_keys_1() -> None:
    topic = await sealed([5], [6])
    image = topic.keys.image()
    topic.keys.limits = ONE_RUN
    assert await topic.keys.merge()
    await topic.keys.remove_deleted(image)  # it named them
    assert len(topic.files) == 3
    topic = await restarted(topic)
    assert topic.keys.image().run_ids == image.run_ids and len(topic.files) == 2
    await topic.check([5, 6])


# Crashes


class Recorded:
    """A history with checkpoints on a disk that remembers, and what held at each of its operations."""

    def __init__(self) -> None:
        self.vfs = MemVfs()
        self.vfs.make_dir(FOLDER)
        self.vfs.sync_dir("")
        self.moments: list[tuple[int, Position, frozenset[Position]]] = []

    async def run(self) -> Topic:
        topic = await Topic(vfs=self.vfs, limits=LIMITS).started()
        for step in range(9):
            topic.produce([1 + (step * 5 + i) % 7 for i in range(5)])
            self.note(topic)
            assert await topic.keys.seal()
            topic.fall_due(sorted(topic.log.pending)[:2])
            self.note(topic)
            while topic.keys.needs_merge(0):
                assert await topic.keys.merge()
            if step % 2:
                image = topic.keys.image()
                replace_file(self.vfs, "manifest", [json.dumps(asdict(image)).encode()])
                self.note(topic)
                await topic.keys.remove_deleted(image)
        assert topic.keys.counters.merges >= 3
        return topic

    def note(self, topic: Topic) -> None:
        self.moments.append((self.vfs.op_count, topic.log.end, frozenset(topic.log.pending)))

    def log_at(self, at: int, log: Log) -> Log:
        """The rows that were there before a crash, and the entries that were pending still."""
        ends = [end for count, end, _ in self.moments if count <= at] or [START]
        later = [pending for count, _, pending in self.moments if count >= at] or [self.moments[-1][2]]
        hash_of = {row: value for row, value in log.hash_of.items() if row < ends[-1]}
        return Log(hash_of, {row for row in later[0] if row in hash_of}, ends[-1])


def manifest_of(vfs: MemVfs) -> KeyImage:
    content = vfs.snapshot().get("manifest")
    if content is None:
        return KeyImage()
    said = json.loads(content)
    return KeyImage(tuple(said["run_ids"]), said["next_run_id"], Position(*said["keys_through"]))


@pytest.mark.slow
@pytest.mark.parametrize("policy", CrashPolicy)
async def test_a_crash_at_any_moment_of_seal_merge_swap_and_delete_loses_no_key(policy: CrashPolicy) -> None:
    recorded = Recorded()
    start = recorded.vfs.op_count
    log = (await recorded.run()).log
    merged = 0
    for state in recorded.vfs.crash_states(
        first=start, policies=[policy], seeds=range(at_depth(change=1, deep=2))
    ):
        image = manifest_of(state.vfs)
        topic = Topic(vfs=state.vfs, log=recorded.log_at(state.at, log), image=image)
        await topic.started()
        await topic.check(range(1, 8))
        assert topic.files - {"manifest", "manifest.new"} == {f"{FOLDER}/{i}.keys" for i in image.run_ids}
        if state.at % 10 == 0:  # what was left can be worked with
            topic.produce([1, 2])
            assert await topic.keys.seal()
            await topic.check(range(1, 8))
        merged += bool(image.run_ids) and len(image.run_ids) < image.next_run_id - 1
    assert merged


# Memory


@pytest.mark.slow
async def test_runs_cost_five_bytes_a_key_in_a_cache_and_nothing_beside_it() -> None:
    values = random_hashes(10_000)
    topic = await sealed(values)
    await topic.check(values[:20])
    stats = topic.keys.stats()
    assert stats.entries == len(values)
    assert 5 * len(values) <= stats.memory_bytes <= 5.2 * len(values) + 1_000
    assert stats.disk_bytes <= 19 * len(values)
    topic.cache_bytes = 0
    topic = await restarted(topic)
    await topic.check(values[:20])
    assert topic.keys.stats().memory_bytes < 1_000


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 1_000])
def test_a_key_in_memory_costs_less_than_two_hundred_bytes(batch: int) -> None:
    values = column(random_hashes(at_depth(change=2_000, deep=10_000)))
    ledger_ids = np.full(batch, 1 << 40, dtype=np.int64)
    tracemalloc.start()
    try:
        recent = RecentKeys(KeysInFlight())
        for first in range(0, len(values), batch):
            entry_ids = np.arange(first, first + batch, dtype=np.uint32)
            recent.add(values[first : first + batch], ledger_ids, entry_ids)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 200 * len(values)
    assert recent.memory_bytes() == pytest.approx(used, rel=0.2)


def test_the_cache_keeps_what_was_used_last_and_no_more_than_it_may() -> None:
    class Part:
        def __init__(self, memory_bytes: int) -> None:
            self.memory_bytes = memory_bytes

    cache = KeyCache(100)
    kept = {run_id: Part(40) for run_id in (1, 2)}
    parts = cache._parts
    for run_id, part in kept.items():
        cache.put(1, run_id, part)  # type: ignore[arg-type]
    cache._used((1, 1, Part))  # type: ignore[arg-type]
    cache.put(1, 3, Part(40))  # type: ignore[arg-type]
    assert [key[1] for key in parts] == [1, 3] and cache.memory_bytes == 80
    cache.put(1, 3, Part(50))  # type: ignore[arg-type]
    assert cache.memory_bytes == 90
    cache.put(1, 4, Part(101))  # type: ignore[arg-type]
    assert not cache.takes(101) and cache.takes(100)
    assert [key[1] for key in parts] == [1, 3]
    cache.put(2, 1, Part(100))  # type: ignore[arg-type]
    assert [key[:2] for key in parts] == [(2, 1)] and cache.memory_bytes == 100


# Files that stay open


def open_runs(topic: Topic) -> set[int]:
    runs = topic.keys.image().run_ids + topic.keys.image().deleted_ids
    return {run_id for run_id in runs if topic.cache.reader_of(TOPIC_ID, run_id) is not None}


async def finds(topic: Topic, value: int) -> asyncio.Task[dict[int, list[Position]]]:
    """A look that has come as far as it can."""
    finding = asyncio.create_task(topic.keys.find(column([value])))
    await spin()
    return finding


async def test_a_key_in_a_block_in_memory_is_found_without_a_thread_once_its_file_is_open() -> None:
    topic = await sealed([5, 5], [6])
    await topic.check([5])
    topic.executor.hold = True  # type: ignore[attr-defined]
    finding = await finds(topic, 5)
    assert finding.done() and finding.result() == {5: topic.log.owed(5)}
    assert topic.executor.waiting_count == 0  # type: ignore[attr-defined]
    assert open_runs(topic) == {1}


async def test_a_block_that_is_not_in_memory_is_read_in_a_thread() -> None:
    topic = await sealed([5])
    await topic.check([5])
    topic.vfs.faults.add(Fault("read", error=errno.EIO))
    with pytest.raises(Unavailable):
        await topic.keys.find(column([5]))
    await topic.check([5])


async def test_a_damaged_block_in_memory_is_told_as_ever() -> None:
    topic = await sealed([5])
    await topic.check([5])
    path = topic.keys.lookup.storage.path(1)
    topic.vfs.open(path).pwrite([bytes(8)], 112)
    with pytest.raises(Corrupt):
        await topic.keys.find(column([5]))


async def test_the_file_of_a_run_that_goes_is_closed() -> None:
    topic = await sealed([5], [6])
    await topic.check([5, 6])
    assert open_runs(topic) == {1, 2}
    reader = topic.cache.reader_of(TOPIC_ID, 1)
    topic.keys.limits = ONE_RUN
    assert await topic.keys.merge()
    assert not open_runs(topic)
    with pytest.raises(Unavailable):
        reader.read_fences(topic.keys._runs[0].header)  # type: ignore[union-attr]
    await topic.check([5, 6])


async def test_the_files_of_a_topic_that_is_stopped_are_closed_those_being_opened_too() -> None:
    topic = await sealed([5], [6])
    await topic.check([5])
    topic.executor.hold = True  # type: ignore[attr-defined]
    finding = await finds(topic, 6)
    topic.keys.close()
    topic.executor.hold = False  # type: ignore[attr-defined]
    topic.executor.work()  # type: ignore[attr-defined]
    assert await finding == {6: topic.log.owed(6)}
    assert not open_runs(topic)


async def test_whoever_is_cancelled_while_a_file_is_opened_leaves_it_to_the_next() -> None:
    topic = await sealed([5])
    run = topic.keys._runs[0]
    topic.keys.lookup.keep(run, await topic.keys.lookup._fences_of(run))
    topic.executor.hold = True  # type: ignore[attr-defined]
    finding = await finds(topic, 5)
    finding.cancel()
    await spin()
    topic.executor.work()  # type: ignore[attr-defined]
    await spin()
    assert finding.cancelled() and open_runs(topic) == {1}


def test_no_more_files_stay_open_than_may_and_those_used_last() -> None:
    class Reader:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    cache = KeyCache(100)
    readers = [Reader() for _ in range(OPEN_RUNS + 1)]
    for run_id, reader in enumerate(readers[:-1]):
        cache.put_reader(1, run_id, reader)  # type: ignore[arg-type]
    assert cache.reader_of(1, 0) is not None
    cache.put_reader(2, 0, readers[-1])  # type: ignore[arg-type]
    assert [reader.is_closed for reader in readers] == [False, True, *[False] * (OPEN_RUNS - 1)]
    cache.put_reader(2, 0, Reader())  # type: ignore[arg-type]
    assert readers[-1].is_closed and cache.reader_of(1, 1) is None
    cache.close_topic(1)
    assert all(reader.is_closed for reader in readers) and cache.reader_of(2, 0) is not None


def kept_filters(topic: Topic) -> int:
    return sum(topic.cache.filter_of(TOPIC_ID, run_id) is not None for run_id in topic.keys.image().run_ids)


@pytest.mark.slow
async def test_new_keys_cost_no_read_once_the_filters_are_there() -> None:
    topic = await sealed(random_hashes(12_000), random_hashes(12_000, 2))
    others = column(random_hashes(1_000, 3))
    passed = topic.keys.maybe(Probe(others))
    assert np.count_nonzero(passed) <= 3  # a seal leaves its filter in the cache
    others = others[~passed]
    topic = await restarted(topic)
    assert topic.keys.maybe(Probe(others)).all()  # KEYS-3
    await topic.keys.find(others[:1])
    assert kept_filters(topic) == 0  # one lookup is not worth it
    assert topic.keys.lookup.block_reads == 2
    await topic.keys.find(others)
    assert kept_filters(topic) == 2
    assert not topic.keys.maybe(Probe(others)).any()
    await topic.keys.find(others)
    assert topic.keys.lookup.block_reads == 2


async def test_a_merge_hands_on_the_filter_if_those_of_its_sources_are_in_use() -> None:
    for cache_bytes, in_use in ((1 << 20, True), (100, False)):
        topic = await sealed(random_hashes(300), random_hashes(300, 2), cache_bytes=cache_bytes)
        topic.keys.limits = ONE_RUN
        assert await topic.keys.merge()
        passed = topic.keys.maybe(Probe(column(random_hashes(50, 3))))
        assert np.count_nonzero(passed) <= 2 if in_use else passed.all()
        assert topic.cache.memory_bytes == topic.cache.bytes_of(TOPIC_ID, topic.keys.image().run_ids[0])


@pytest.mark.slow
async def test_filters_that_do_not_fit_make_it_slower_and_not_wrong() -> None:
    batches = [random_hashes(2 * BLOCK_ENTRIES, seed) for seed in range(4)]
    topic = await sealed(*batches, cache_bytes=12_000)  # one filter of four
    for batch in batches * 2:
        await topic.check([*batch[:3], *random_hashes(50, 9)])
        assert topic.cache.memory_bytes <= 12_000
    assert kept_filters(topic)


# Everything at once


class Run:
    """One random history: every operation beside seals, merges and finds that stop anywhere and may fail."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.executor = GatedExecutor()
        self.bits = self.rng.choice([4, 4, 12, 64])
        self.topic = Topic(
            executor=self.executor,
            cache_bytes=self.rng.choice([0, 150, 400, 1 << 20]),
            limits=KeyLimits(max_runs=self.rng.choice([1, 2, 4])),
        )
        self.background: list[asyncio.Task[None]] = []
        self.finds = 0

    async def run(self) -> None:
        await self.topic.started()
        steps = {
            self.produce: 12,
            self.fall_due: 2,
            self.cancel: 2,
            self.find_beside: 6,
            self.seal_beside: 8,
            self.merge_beside: 8,
            self.let_go: 30,
            self.check: 4,
            self.checkpoint: 3,
            self.fail: 1,
            self.drop_ledgers: 1,
            self.restart: 1,
            self.rebuild: 0.5,
        }
        for step in self.rng.choices([*steps], [*steps.values()], k=300):
            await step()
        await self.settle()
        await self.check()
        await self.checkpoint()
        cache, run_ids = self.topic.cache, self.topic.manifest.run_ids
        assert cache.memory_bytes == sum(cache.bytes_of(TOPIC_ID, run_id) for run_id in run_ids)
        assert self.topic.files == {f"{FOLDER}/{run_id}.keys" for run_id in self.topic.manifest.run_ids}

    def some_values(self) -> list[int]:
        known = self.topic.values
        return [*self.rng.sample(known, min(len(known), 6)), self.rng.randint(1, (1 << self.bits) - 1)]

    def some_pending(self) -> list[Position]:
        pending = sorted(self.topic.log.pending)
        return self.rng.sample(pending, min(len(pending), self.rng.randint(0, 12)))

    async def produce(self) -> None:
        top = (1 << self.bits) - 1
        self.topic.produce(
            self.rng.choice([0, self.rng.randint(1, top)]) for _ in range(self.rng.randint(1, 9))
        )

    async def fall_due(self) -> None:
        self.topic.fall_due(self.some_pending())

    async def cancel(self) -> None:
        self.topic.cancel(self.some_pending())

    async def check(self) -> None:
        self.executor.let_go_beside = self.rng.choice([0, 0, 2])
        await self.topic.check(set(self.some_values()))

    async def checkpoint(self) -> None:
        await self.topic.checkpoint()

    async def find_beside(self) -> None:
        topic, values = self.topic, set(self.some_values())

        async def find() -> None:
            try:
                found = await topic.keys.find(column(values))
            except (OSError, PostdateError):
                return
            if topic.keys is self.topic.keys:
                self.finds += 1
                topic.check_found(values, found)

        self.spawn(find())

    async def seal_beside(self) -> None:
        self.spawn(self.topic.keys.seal())

    async def merge_beside(self) -> None:
        self.spawn(self.topic.keys.merge())

    async def let_go(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self.executor.let_go()
            await spin(8)
        self.collect()

    async def fail(self) -> None:
        self.executor.fail_background = 1
        self.executor.fails_after = self.rng.random() < 0.5

    async def drop_ledgers(self) -> None:
        oldest = min((row.ledger_id for row in self.topic.log.pending), default=1)
        self.topic.keys.drop_ledgers_before(oldest)

    async def rebuild(self) -> None:
        self.topic.rebuild()

    async def restart(self) -> None:
        await self.settle()
        self.topic.open()
        await self.topic.started()

    async def settle(self) -> None:
        while not all(task.done() for task in self.background):
            self.executor.let_go()
            await spin(8)
        self.collect()
        self.executor.fail_background = 0

    def spawn(self, work: Awaitable[object]) -> None:
        async def run() -> None:
            IS_BACKGROUND.set(True)
            await work

        self.background.append(asyncio.get_running_loop().create_task(run()))

    def collect(self) -> None:
        for task in self.background:
            if task.done():
                task.result()
        self.background = [task for task in self.background if not task.done()]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(at_depth(change=10, deep=100)))
async def test_a_random_history_keeps_every_promise(seed: int) -> None:
    await Run(seed).run()
