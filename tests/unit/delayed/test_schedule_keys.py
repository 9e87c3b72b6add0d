"""The lookup of schedule keys: whatever happens beside it, what is pending is found, and nothing that never was there."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from broker.delayed import key_writer
from broker.delayed.schedule_keys import KeyImage, KeyLimits
from broker.model import START, Position
from broker.storage.key_filter import Probe
from broker.storage.key_run import BLOCK_ENTRIES, KeyColumns
from tests.unit.delayed.gated_buckets import IS_BACKGROUND, GatedExecutor, spin
from tests.unit.delayed.key_world import Topic, column
from tests.unit.storage.key_entries import FOLDER, TOPIC_ID

MANY = KeyLimits(seal_count=1_000_000, max_runs=64)  # seals and merges only when the test says so


async def sealed(*batches: list[int], **options: object) -> Topic:
    """A topic with a run for each batch."""
    topic = await Topic(limits=MANY, **options).started()  # type: ignore[arg-type]
    for batch in batches:
        topic.produce(batch)
        assert await topic.keys.seal()
    return topic


def random_hashes(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(1, 1 << 64, count, dtype=np.uint64).tolist()  # type: ignore[no-any-return]


# What is found


async def test_keys_are_found_in_memory_and_in_runs_newest_first() -> None:
    topic = await sealed([7, 8, 7], [9, 7])
    topic.produce([7, 0, 11])
    found = await topic.keys.find(column([7, 9, 11, 12]))
    assert found == {
        7: [Position(1, 5), Position(1, 4), Position(1, 2), Position(1, 0)],
        9: [Position(1, 3)],
        11: [Position(1, 7)],
    }
    assert topic.keys.maybe(Probe(column([7, 8, 9, 11]))).all()
    assert not topic.keys.maybe(Probe(column([12, 13]))).any()


async def test_an_empty_lookup_finds_nothing_and_costs_nothing() -> None:
    topic = await Topic().started()
    assert await topic.keys.find(column([5])) == {}
    assert not topic.keys.maybe(Probe(column([5]))).any() and not len(topic.keys.maybe(Probe(column([]))))
    assert topic.keys.image() == KeyImage()
    assert await topic.keys.seal() and await topic.keys.merge()
    assert topic.files == set()


async def test_rows_that_are_added_twice_are_found_once() -> None:
    topic = await sealed([7, 8])
    topic.add_from(START)
    assert await topic.keys.find(column([7])) == {7: [Position(1, 0)]}


async def test_a_batch_that_names_a_key_twice_keeps_both() -> None:
    topic = await Topic().started()
    topic.produce([5, 6, 5])
    topic.produce([5])
    assert await topic.keys.find(column([5])) == {5: [Position(1, 3), Position(1, 2), Position(1, 0)]}
    await topic.check([5, 6])


async def test_what_was_cancelled_in_memory_is_not_found_any_more() -> None:
    topic = await Topic().started()
    rows = topic.produce([5, 5, 5, 6])
    left = set(rows[:3])
    for row in (rows[1], rows[0], rows[2]):  # in the middle, the oldest, the last one
        topic.cancel([row])
        left.remove(row)
        found = await topic.keys.find(column([5]))
        assert found == ({5: sorted(left, reverse=True)} if left else {})
    topic.cancel(rows)  # a second time
    assert await topic.keys.find(column([5, 6])) == {}


@pytest.mark.slow
async def test_a_key_that_replaces_itself_again_and_again_leaves_one_entry() -> None:
    topic = await Topic(limits=MANY).started()
    for _ in range(2_000):
        found = await topic.keys.find(column([5]))
        topic.cancel(found.get(5, []))
        topic.produce([5])
        assert len(found.get(5, [])) <= 1
    assert await topic.keys.seal()
    assert topic.keys.stats().entries == 1


async def test_cancels_count_while_a_seal_is_under_way() -> None:
    executor = GatedExecutor()
    topic = await Topic(executor=executor).started()
    rows = topic.produce([5, 6])
    seal = background(topic.keys.seal())
    await spin()
    topic.cancel(rows[:1])
    assert await topic.keys.find(column([5, 6])) == {6: [rows[1]]}
    await finish(executor, seal)
    await topic.check([5, 6])


@pytest.mark.slow
@pytest.mark.parametrize("bits", [64, 4])
async def test_a_run_of_many_blocks_is_searched(bits: int) -> None:
    values = [value % (1 << bits) or 1 for value in random_hashes(3 * BLOCK_ENTRIES)]
    topic = await sealed(values, cache_bytes=0)
    wanted = sorted(set(values))[:: 1 if bits == 4 else 40]
    await topic.check(wanted)
    topic.cache_bytes = 1 << 20
    topic.manifest = topic.keys.image()
    topic.open()
    await topic.started()
    await topic.check([*wanted, *random_hashes(300, seed=2)])


# Sealing and merging


async def test_a_seal_is_due_by_count_or_by_age() -> None:
    topic = await Topic().started()
    assert not topic.keys.needs_seal(1_000)
    topic.produce([1, 2, 3])
    assert not topic.keys.needs_seal(2_000) and not topic.keys.needs_seal(61_999)
    assert topic.keys.needs_seal(62_000)
    topic.produce([4])
    assert topic.keys.needs_seal(2_000)
    assert await topic.keys.seal()
    assert not topic.keys.needs_seal(10**9)
    topic.produce([5])
    assert not topic.keys.needs_seal(10**9)  # its age counts from here
    assert not topic.keys.needs_seal(1_000)  # and anew when the clock steps back
    assert not topic.keys.needs_seal(60_999) and topic.keys.needs_seal(61_000)


async def test_what_is_not_pending_is_left_out_by_seals_and_merges_keywriter_1() -> None:
    topic = await Topic(limits=MANY).started()
    rows = topic.produce([5, 6, 7])
    topic.fall_due(rows[:1])
    assert await topic.keys.seal()
    assert topic.keys.stats().entries == 2 and await topic.keys.find(column([5])) == {}
    topic.keys.limits = KeyLimits(max_runs=1)
    more = topic.produce([8])
    assert await topic.keys.seal()
    topic.fall_due([rows[1]])
    assert await topic.keys.merge()
    assert (topic.keys.stats().runs, topic.keys.stats().entries) == (1, 2)
    await topic.check(topic.values)
    topic.fall_due([rows[2], *more])
    topic.produce([9])
    assert await topic.keys.seal() and await topic.keys.merge()
    topic.fall_due(topic.log.pending.copy())
    topic.produce([10])
    topic.fall_due(topic.log.pending.copy())
    image = topic.keys.image()
    assert await topic.keys.seal()
    assert topic.keys.image().run_ids == image.run_ids  # a seal of nothing makes no run
    assert topic.keys.image().keys_through == topic.log.end


async def test_a_merge_of_nothing_that_is_pending_leaves_no_run() -> None:
    topic = await sealed([5, 6], [7])
    topic.fall_due(topic.log.pending.copy())
    topic.keys.limits = KeyLimits(max_runs=1)
    assert await topic.keys.merge()
    assert topic.keys.image().run_ids == ()
    await topic.checkpoint()
    assert topic.files == set()


@pytest.mark.slow
async def test_runs_merge_in_tiers_and_their_number_stays_bounded() -> None:
    topic = await Topic(limits=KeyLimits(seal_count=10, max_runs=64)).started()
    values = random_hashes(1_300)
    written = 0
    for first in range(0, len(values), 10):
        topic.produce(values[first : first + 10])
        assert topic.keys.needs_seal(0) and await topic.keys.seal()
        while topic.keys.needs_merge(0):
            assert await topic.keys.merge()
            written += 1
        assert topic.keys.stats().runs <= 7 + 7 + 2  # seven of each of two classes, and two of the third
        await topic.checkpoint()
    assert topic.keys.stats().entries == 1_300 and topic.keys.counters.merges == written == 16 + 2
    assert len(topic.files) == topic.keys.stats().runs
    assert topic.keys.stats().disk_bytes == sum(map(len, topic.vfs.snapshot().values()))
    await topic.check(values)


@pytest.mark.slow
async def test_a_merge_holds_a_few_blocks_of_each_source_also_of_one_hash(monkeypatch) -> None:
    """Four bits: every hash fills many blocks, and every source has all of them."""
    values = [value % 16 or 1 for value in random_hashes(5 * BLOCK_ENTRIES)]
    topic = await sealed(values, values, values)
    sizes: list[int] = []

    class Noted(key_writer._Question):
        def __init__(self, keys: KeyColumns) -> None:
            sizes.append(len(keys))
            super().__init__(keys)

    monkeypatch.setattr(key_writer, "_Question", Noted)
    monkeypatch.setattr(key_writer, "STEP_BLOCKS", 1)
    topic.keys.limits = KeyLimits(max_runs=1)
    assert await topic.keys.merge()
    assert sum(sizes) == 3 * len(values) == topic.keys.stats().entries
    assert max(sizes) <= 3 * BLOCK_ENTRIES
    topic.log.pending = set(sorted(topic.log.pending)[::50])
    await topic.check(range(1, 16))


async def test_runs_whose_ledgers_are_gone_go_without_a_merge() -> None:
    topic = await sealed(random_hashes(50, 1), random_hashes(60, 2), random_hashes(20, 3))
    first, *rest = topic.keys.image().run_ids
    topic.keys.drop_ledgers_before(1)
    assert len(topic.keys.image().run_ids) == 3
    for oldest in (2, 3):  # the second run ends in the third ledger
        topic.fall_due({row for row in topic.log.pending if row.ledger_id < oldest})
        topic.keys.drop_ledgers_before(oldest)
        assert topic.keys.image().run_ids == tuple(rest)
        await topic.check(topic.values)
    assert f"{FOLDER}/{first}.keys" in topic.files
    await topic.checkpoint()
    assert f"{FOLDER}/{first}.keys" not in topic.files


# Beside each other


def background(work):
    async def run():
        IS_BACKGROUND.set(True)
        return await work

    return asyncio.get_running_loop().create_task(run())


async def finish(executor: GatedExecutor, *tasks: asyncio.Task[Any]) -> None:
    while not all(task.done() for task in tasks):
        executor.let_go()
        await spin(8)
    for task in tasks:
        assert task.cancelled() or task.exception() is None


@pytest.mark.slow
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("removed", [False, True])
async def test_a_find_that_a_merge_overtakes_finds_everything_keys_2(removed: bool, cache_bytes: int) -> None:
    """Whatever the find has read when the merge swaps the runs, and whether their files are still there."""
    for stops in range(12):
        executor = GatedExecutor()
        topic = await sealed([5, 6], [7], [5], executor=executor, cache_bytes=cache_bytes)
        topic.keys.limits = KeyLimits(max_runs=1)
        find = background(topic.keys.find(column([5, 6, 7, 8])))
        await spin()
        for _ in range(stops):
            executor.let_go()
            await spin()
        assert await topic.keys.merge()
        if removed:
            await topic.checkpoint()
        is_done = find.done()
        topic.produce([8])
        await finish(executor, find)
        topic.check_found([5, 6, 7] if is_done else [5, 6, 7, 8], await find)
        # Nothing is kept of what is gone.
        assert topic.cache.memory_bytes == topic.cache.bytes_of(TOPIC_ID, topic.keys.image().run_ids[0])


async def test_a_find_that_a_seal_overtakes_finds_everything_keys_2() -> None:
    for stops in range(6):
        executor = GatedExecutor()
        topic = await sealed([5], executor=executor, cache_bytes=0)
        topic.produce([6])
        find = background(topic.keys.find(column([5, 6, 7])))
        await spin()
        for _ in range(stops):
            executor.let_go()
            await spin()
        is_done = find.done()
        topic.produce([7])
        assert await topic.keys.seal()
        await finish(executor, find)
        topic.check_found([5, 6] if is_done else [5, 6, 7], await find)


async def test_a_clear_outlives_the_seal_and_the_merge_that_were_under_way_keys_5() -> None:
    executor = GatedExecutor()
    topic = await sealed([5], [6], executor=executor)
    topic.keys.limits = KeyLimits(max_runs=1)
    topic.produce([7])
    tasks = [background(topic.keys.seal()), background(topic.keys.merge())]
    await spin()
    topic.keys.clear()
    await finish(executor, *tasks)
    assert topic.keys.image().run_ids == () and topic.keys.image().keys_through == START
    assert await topic.keys.find(column([5, 6, 7])) == {}
    topic.add_from(START)
    await topic.check([5, 6, 7])
    await topic.checkpoint()
    assert topic.files == set()


async def test_ledgers_that_go_during_a_merge_take_its_sources_only_with_the_next_look() -> None:
    executor = GatedExecutor()
    topic = await sealed(random_hashes(50, 1), random_hashes(50, 2), random_hashes(60, 3), executor=executor)
    topic.keys.limits = KeyLimits(max_runs=2)
    merge = background(topic.keys.merge())
    await spin()
    topic.fall_due({row for row in topic.log.pending if row.ledger_id < 3})
    topic.keys.drop_ledgers_before(3)
    assert topic.keys.stats().runs == 3
    await finish(executor, merge)
    topic.keys.drop_ledgers_before(3)
    assert topic.keys.stats().runs == 1
    await topic.check(topic.values)
    await topic.checkpoint()
    assert len(topic.files) == 1


async def test_a_cancelled_seal_or_merge_leaves_everything_as_it_was_keywriter_5() -> None:
    executor = GatedExecutor()
    topic = await sealed([5], [6], executor=executor)
    topic.keys.limits = KeyLimits(max_runs=1)
    topic.produce([7])
    await topic.checkpoint()
    before = topic.keys.image()
    for stops in range(4):
        for work in (topic.keys.seal, topic.keys.merge):
            task = background(work())
            await spin()
            for _ in range(stops):
                executor.let_go()
                await spin()
            if task.done():
                continue
            task.cancel()
            await spin()
            assert len(executor.stopped) == 1  # one thread at a time: nothing is cleaned up beside the step
            await finish(executor, task)
            assert task.cancelled()
            topic.produce([8 + stops])
            await topic.check(topic.values)
            assert topic.keys.image().run_ids == before.run_ids
    assert await topic.keys.seal() and await topic.keys.merge()
    await topic.check(topic.values)
    await topic.checkpoint()
    assert len(topic.files) == 1
