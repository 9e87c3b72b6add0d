"""The model of a tracker, and what the tracker with buckets does besides: it seals and merges beside everything
else, stops anywhere in that, meets failures, and starts again from the image of a checkpoint.

The log of the model is a list of additions; a position is an index of it. After a crash the tracker gets what a
broker would give it: the buckets of the last image, and the additions after `indexed_through`, those above the
frontier. All that is live and lies above the frontier must then be held again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from pyroaring import BitMap

from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.bucket_values import BucketImage, BucketPolicyValues
from broker.delayed.tracker import ENTRY_AFTER_ALL, Frontier, TimesReader
from broker.errors import PostdateError
from broker.model import Position
from broker.runtime.steps import run_step
from broker.storage.amendments import Amendments
from broker.storage.bucket_files import SnapshotReader
from broker.testing.mem_vfs import MemVfs
from tests.model.tracker_machine import LEDGERS, OFFSETS_MS, Row, TrackerMachine
from tests.run_files import run_ids
from tests.unit.delayed.gated_buckets import FOLDER, IS_BACKGROUND, GatedExecutor, new_storage, spin

FAILURES = (OSError, PostdateError)
POLICIES = st.builds(
    BucketPolicyValues,
    min_index_count=st.integers(1, 5),
    ledgers_per_bucket=st.integers(1, 3),
    seal_after_ms=st.sampled_from([1, 1_000, 3_600_000]),
    max_buckets=st.integers(1, 4),
    segment_time_step_ms=st.sampled_from([1, 100, 3_600_000]),
    max_segment_entries=st.integers(1, 3),
)


class BucketMachine(TrackerMachine):
    """One tracker with buckets, its disk, and the last image that became durable."""

    policy: ClassVar[BucketPolicyValues] = BucketPolicyValues()
    load_entries_max: ClassVar[int] = 65_536
    tracker: BucketTracker

    def __init__(self) -> None:
        self.executor = GatedExecutor()
        self.vfs = MemVfs()
        self.storage = new_storage(self.vfs, self.executor)
        self.log: list[tuple[int, dict[int, int]]] = []
        self.amended: set[tuple[int, int]] = set()
        self.ever: set[Row] = set()  # all that was added since the last clear, and not discarded
        self.ghosts: set[Row] = set()  # of discarded ledgers: they may count until they are read
        self.doubles = 0  # entries added again
        self.may_fail = False  # a disk failed, or files went while they were read
        self.tasks: list[asyncio.Task[bool]] = []
        self.policy_now = type(self).policy
        super().__init__()
        self.durable: BucketImage = self.tracker.buckets.image()

    def factory(self, reader: TimesReader, frontier: Frontier) -> BucketTracker:
        return BucketTracker(
            self.storage,
            frontier,
            executor=self.executor,
            amendments_of=self.amendments_of,
            policy=self.policy_now,
            load_entries_max=type(self).load_entries_max,
            give_way=self.give_way,
        )

    async def give_way(self) -> None:
        """Between two slices of what a seal or merge left out anything may happen, and nothing fails: no disk is asked."""
        with suppress(*FAILURES):
            await run_step(self.executor, lambda: None)

    def amendments_of(self, ledger_id: int) -> Amendments | None:
        of_ledger = sorted(entry_id for ledger, entry_id in self.amended if ledger == ledger_id)
        times = {entry_id: self.effective[ledger_id, entry_id] for entry_id in of_ledger}
        moved = [entry_id for entry_id, time in times.items() if time]
        return Amendments(
            BitMap(entry_id for entry_id, time in times.items() if not time),
            np.array(moved, dtype=np.uint32),
            np.array([times[entry_id] for entry_id in moved], dtype=np.int64),
            np.ones(len(moved), dtype=np.uint32),
            np.ones(len(moved), dtype=np.uint64),
        )

    def uncertain(self) -> int:
        unsure = 0 if self.tracker.is_exact else sum(len(entries) for _, entries in self.log)
        return len(self.ghosts) + self.doubles + unsure

    def may_pass(self, stale: set[Row]) -> set[Row]:
        return self.ghosts | stale

    def add_rows(self, ledger_id: int, entries: dict[int, int]) -> None:
        rows = {(time, ledger_id, entry_id) for entry_id, time in entries.items()}
        super().add_rows(ledger_id, entries)
        self.ever |= rows
        self.log.append((ledger_id, dict(entries)))
        self.tracker.buckets.passed(Position(len(self.log), 0), len(self.log))

    def added_again(self, count: int) -> None:
        self.doubles += count

    def changed(self, position: tuple[int, int]) -> None:
        self.amended.add(position)

    def discarded(self, ledger_id: int) -> None:
        """The ledger is gone from the log too."""
        gone = {row for row in self.ever if row[1] == ledger_id}
        self.ghosts |= gone
        self.ever -= gone
        self.amended |= {position for position in self.effective if position[0] == ledger_id}
        self.log = [(ledger, {} if ledger == ledger_id else entries) for ledger, entries in self.log]

    def cleared(self) -> None:
        self.ever, self.log, self.ghosts, self.doubles = set(), [], set(), 0
        self.may_fail = True
        self.checkpoint()

    @rule()
    def start_seal(self) -> None:
        self.start(self.tracker.buckets.seal)

    @rule()
    def seal_if_needed(self) -> None:
        if self.tracker.buckets.needs_seal(self.now_ms):
            self.start(self.tracker.buckets.seal)

    @rule(calls=st.integers(0, 8), is_forced=st.booleans())
    def start_merge(self, calls: int, is_forced: bool) -> None:
        """A merge that stops after some steps; a forced one as if policy allowed a single bucket."""
        if is_forced:
            self.tracker.buckets.policy = replace(self.policy_now, max_buckets=1)
        if self.tracker.buckets.needs_merge(self.now_ms):
            self.start(self.tracker.buckets.merge)
        self.tracker.buckets.policy = self.policy_now
        self.let_work_go_on(calls)

    @rule(
        data=st.lists(
            st.tuples(st.sampled_from(LEDGERS), st.lists(OFFSETS_MS, min_size=1, max_size=6)),
            min_size=2,
            max_size=4,
        ),
        calls=st.integers(0, 12),
    )
    def store_and_seal(self, data: list[tuple[int, list[int]]], calls: int) -> None:
        """Several buckets whose times overlap, and a merge of them that stops."""
        for ledger_id, offsets in data:
            self.store(ledger_id, offsets)
            self.start(self.tracker.buckets.seal)
            self.let_work_go_on(100)
        self.start_merge(calls, True)

    def start(self, work) -> None:
        token = IS_BACKGROUND.set(True)
        try:
            self.tasks.append(self.loop.create_task(work()))
        finally:
            IS_BACKGROUND.reset(token)
        self.run(spin(5))

    @rule(calls=st.sampled_from([1, 1, 2, 3, 5, 100]))
    def let_work_go_on(self, calls: int) -> None:
        for _ in range(calls):
            if self.executor.let_go():
                self.run(spin())
        self.collect()

    @rule()
    def seal_and_merge_all(self) -> None:
        for _ in range(50):
            self.let_work_go_on(1_000)
            if self.tracker._memory.recent.count:
                self.start(self.tracker.buckets.seal)
            elif self.tracker.buckets.needs_merge(self.now_ms):
                self.start(self.tracker.buckets.merge)
            elif not self.executor.stopped:
                break
        self.let_work_go_on(1_000)
        if not any(not task.done() for task in self.tasks):
            count = len(self.tracker.buckets.image().bucket_ids)
            assert (
                count <= self.tracker.buckets.policy.max_buckets
                or self.tracker.buckets.counters.merge_failures
            )

    def collect(self) -> None:
        for task in [task for task in self.tasks if task.done()]:
            task.result()  # failures of the disk are reported, and nothing else happens
            self.tasks.remove(task)
        counters = self.tracker.buckets.counters
        assert self.may_fail or not counters.seal_failures + counters.merge_failures

    @rule(calls=st.integers(1, 4))
    def load_beside_work(self, calls: int) -> None:
        """Seals and merges go on while a load waits for its reads."""
        self.executor.let_go_beside = calls
        self.load_once()
        self.executor.let_go_beside = 0
        self.run(spin())
        self.collect()

    @precondition(lambda self: self.executor.stopped)
    @rule(count=st.integers(1, 2), fails_after=st.booleans())
    def work_fails(self, count: int, fails_after: bool) -> None:
        self.may_fail = True
        self.executor.fail_background, self.executor.fails_after = count, fails_after
        self.let_work_go_on(count)
        self.executor.fail_background, self.executor.fails_after = 0, False

    @rule()
    def load_fails(self) -> None:
        if not self.tracker.needs_load(self.now_ms):
            return
        self.executor.fail_foreground = 1
        calls = self.executor.calls
        count = self.tracker.count()
        try:
            self.run(self.tracker.load(self.now_ms))
        except FAILURES:
            assert self.tracker.count() == count
        else:
            assert self.executor.calls == calls
        self.executor.fail_foreground = 0

    @rule(policy=POLICIES)
    def replace_policy(self, policy: BucketPolicyValues) -> None:
        self.policy_now = self.tracker.buckets.policy = policy

    @rule()
    def checkpoint(self) -> None:
        image = self.tracker.buckets.image()
        files = set(run_ids(self.vfs, FOLDER))
        assert files.issuperset(image.bucket_ids)
        assert not set(image.bucket_ids) & set(image.deleted_ids)
        self.durable = image
        self.run(self.tracker.buckets.remove_deleted(image))
        files = set(run_ids(self.vfs, FOLDER))
        assert files.issuperset(image.bucket_ids)
        if not self.tasks:
            assert files == set(image.bucket_ids)

    @rule()
    def crash(self) -> None:
        """Start again from the last image; what runs never ends."""
        for task in self.tasks:
            task.cancel()
        while self.executor.let_go():
            self.run(spin())
        self.run(spin())
        self.tasks.clear()
        image = self.durable
        for bucket_id in run_ids(self.vfs, FOLDER):
            if bucket_id not in image.bucket_ids:
                self.run(self.storage.delete(bucket_id))
        frontier = Frontier(max(self.now_ms, image.frontier_ms), *ENTRY_AFTER_ALL)
        self.tracker = self.factory(self.read_times, frontier)
        self.frontier = frontier
        self.run(self.restore(image))
        # Buckets of the image may hold a ledger that was discarded since; nothing of it is live.
        self.held = {row for row in self.ever | self.ghosts if row[0] > frontier.deliver_at_ms}
        unindexed = self.log[image.indexed_through.ledger_id :]
        for ledger_id in LEDGERS:  # under the times that they have now, each once
            entry_ids = sorted({i for ledger, entries in unindexed if ledger == ledger_id for i in entries})
            times = {i: self.effective[ledger_id, i] for i in entry_ids}
            later = [i for i in entry_ids if times[i] > frontier.deliver_at_ms]
            self.tracker.add(
                ledger_id,
                np.array(later, dtype=np.uint32),
                np.array([times[i] for i in later], dtype=np.int64),
            )
        self.tracker.buckets.passed(Position(len(self.log), 0), len(self.log))
        self.checkpoint()

    @rule()
    def seek_stale(self) -> None:
        """After a start, beside everything else, the broker looks for rows that were amended."""
        self.run(self.tracker.seek_stale())

    async def restore(self, image: BucketImage) -> None:
        await self.tracker.buckets.restore(
            [
                await self.storage.read(bucket_id, SnapshotReader.read_metadata)
                for bucket_id in image.bucket_ids
            ],
            indexed_through=image.indexed_through,
            index_lsn=image.index_lsn,
            next_bucket_id=image.next_bucket_id,
        )

    def teardown(self) -> None:
        self.executor.fail_background = 0
        self.let_work_go_on(1_000)
        super().teardown()
