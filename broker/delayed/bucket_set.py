"""Sealed buckets of a bucket tracker, in the order of the log: how they are sealed, merged, lent and let go.

A new one is written from what was gathered in memory (seal) or from its neighbours (merge, or a job outside the broker
whose work is adopted), and put to use in one step at the marks as they stand then. BUCKET stands in `bucket_tracker`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor

from broker.delayed.bucket_values import BucketImage, BucketPolicyValues, Marks
from broker.delayed.bucket_writer import (
    BucketWriter,
    NewBucket,
    NotNeeded,
    SegmentLimits,
)
from broker.delayed.lent_buckets import Loan, check_steps, loan_of, not_needed_of
from broker.delayed.mutable_bucket import MutableBucket
from broker.delayed.sealed_bucket import BucketState, SealedBucket
from broker.delayed.stale import AmendmentsOf, LeftOut, StaleRows
from broker.model import Position
from broker.runs.gathered import Gathered
from broker.runs.merging import plan_merge
from broker.runs.upkeep import RunCounters, RunFiles, RunWork, counters_of
from broker.storage.bucket_files import BucketStorage
from broker.storage.bucket_snapshot import BucketMetadata

IndexMark = tuple[Position, int]
"""Position and lsn up to which everything was added."""


class BucketSet:
    """See the module's description. `seal`, `merge` and `adopt` may run beside everything else."""

    def __init__(
        self,
        storage: BucketStorage,
        executor: Executor | None,
        *,
        memory: Gathered[MutableBucket, IndexMark],
        stale: StaleRows,
        marks: Marks,
        held_count: Callable[[], int],
        amendments_of: AmendmentsOf,
        policy: BucketPolicyValues,
    ) -> None:
        """`held_count`: entries that the whole index holds."""
        self.policy = policy
        self._storage = storage
        self._writer = BucketWriter(storage, executor)
        self._files = RunFiles(storage)
        self._seals = RunWork(self._files, "A bucket could not be sealed; its entries stay in memory")
        self._merges = RunWork(self._files, "Buckets could not be merged and stay as they are")
        self._adoptions = RunWork(self._files, "A bucket that was handed in cannot be used")
        self._memory = memory
        self._stale = stale
        self._marks = marks
        self._held_count = held_count
        self._amendments_of = amendments_of
        self.in_use: list[SealedBucket] = []
        self._generation = 0

    @property
    def counters(self) -> RunCounters:
        return counters_of(self._seals, self._merges)

    def passed(self, position: Position, lsn: int = 0) -> None:
        """Every row before `position`, and every move of a record up to `lsn`, was added."""
        self._memory.mark = (position, lsn)

    def image(self) -> BucketImage:
        """Return the image for the next manifest; see `remove_deleted`."""
        position, lsn = self._memory.durable_mark  # BUCKET-4
        return BucketImage(
            bucket_ids=tuple(bucket.bucket_id for bucket in self.in_use),
            indexed_through=position,
            index_lsn=lsn,
            frontier_ms=self._marks.frontier.deliver_at_ms,
            next_bucket_id=self._files.next_id,
            deleted_ids=tuple(self._files.deleted_ids),
        )

    @property
    def has_deleted(self) -> bool:
        """Return whether files wait for a manifest that does not name them."""
        return bool(self._files.deleted_ids)

    async def remove_deleted(self, image: BucketImage) -> None:
        """Remove the files that `image` did not name, now that a manifest with it is durable (BUCKET-9)."""
        await self._files.remove_deleted(image.deleted_ids)

    def disown(self, bucket_ids: Sequence[int]) -> None:
        """Buckets of a manifest that cannot be used: their files go once one without them is durable (BUCKET-9)."""
        self._files.delete(bucket_ids)

    async def restore(
        self,
        metadatas: Sequence[BucketMetadata],
        *,
        indexed_through: Position,
        index_lsn: int,
        next_bucket_id: int,
    ) -> None:
        """Take up the buckets of an image, in its order. They begin after the frontier given to the constructor.

        Raises Corrupt or OSError if a segment in which the frontier lies cannot be read; `clear` then. What buckets
        hold of ledgers that were dropped since lies at or before the frontier.
        """
        assert not self.in_use and not self._memory.count
        self._files.restore([metadata.bucket_id for metadata in metadatas], next_bucket_id)
        buckets = [await self._open(metadata, self._generation) for metadata in metadatas]
        for bucket in buckets:  # in one step: if one cannot be opened, nothing has changed
            bucket.state = BucketState.LIVE
        self.in_use += buckets
        self._memory.restore((indexed_through, index_lsn))
        self._stale.is_sought = bool(self.in_use)  # until `seek_stale` has ended
        self.drop_spent()

    def clear(self) -> None:
        """Let all of them go; what is under way changes nothing any more (BUCKET-7)."""
        self._generation += 1
        for bucket in self.in_use:
            self._delete(bucket)
        self.in_use = []

    def needs_seal(self, now_ms: int) -> bool:
        mutable, policy = self._memory.recent, self.policy
        if not mutable.count or self._seals.is_running:
            return False
        waited_ms = self._memory.waited_ms(now_ms)
        if not self._seals.is_ready(now_ms):
            return False
        if mutable.count >= policy.min_index_count or waited_ms >= policy.seal_after_ms:
            return True
        position, _ = self._memory.sealed_mark
        return mutable.count_ledgers_from(position.ledger_id) > policy.ledgers_per_bucket

    async def seal(self) -> bool:
        """Write what was added to a bucket; False if that failed, and everything is as it was (BUCKET-5)."""
        memory, generation = self._memory, self._generation
        if self._seals.is_running or not memory.recent.count:
            return True
        mark = memory.mark
        with self._seals.attempt() as attempt, memory.freeze() as frozen:
            new = NewBucket(attempt.run_id, memory.sealed_mark[0], mark[0])
            not_needed = self._not_needed(frozen.ledger_ids)
            metadata = await self._writer.seal(new, frozen.blocks(), not_needed, self._segment_limits())
            left_out = await self._prepare_left_out(not_needed)
            sealed = None if metadata is None else await self._open(metadata, generation)
            if generation == self._generation:  # no await from here on (BUCKET-6, BUCKET-7)
                memory.sealed(mark)
                self._use_sealed(sealed, left_out)
                attempt.is_used = sealed is not None
        await self._forget_left_out()
        return not attempt.has_failed

    def needs_merge(self, now_ms: int) -> bool:
        return self._merges.is_ready(now_ms) and self._plan_merge() is not None

    async def merge(self) -> bool:
        """Make one bucket of several, as planned now; False if that failed, and the sources are as they were."""
        sources = self._plan_merge()
        if self._merges.is_running or sources is None:
            return True
        generation = self._generation
        with self._merges.attempt() as attempt, self._merging(sources):
            new = NewBucket(attempt.run_id, sources[0].metadata.start, sources[-1].metadata.end)
            not_needed = self._not_needed(_ledgers_of(sources))
            metadata = await self._writer.merge(new, sources, not_needed, self._segment_limits())
            attempt.is_used = await self._use_merged(sources, metadata, not_needed, generation)
        await self._forget_left_out()
        return not attempt.has_failed

    # Those that somebody outside the broker merges; see `lent_buckets`.

    def lend(self, bucket_ids: Sequence[int]) -> Loan:
        """Lend buckets that are there, side by side."""
        by_id = {bucket.bucket_id: bucket for bucket in self.in_use}
        sources = tuple(by_id[bucket_id] for bucket_id in bucket_ids)
        not_needed = self._not_needed(_ledgers_of(sources))
        return loan_of(sources, self._files.take_id(), not_needed, self._segment_limits(), self._generation)

    async def adopt(self, loan: Loan, *, rest: float) -> bool:
        """Put a bucket that was written to its final name in the place of its sources; whether that was done.

        If it was not, its file goes with the next manifest, and the sources stay. `rest`: how long the check of it
        rests, by how long it works.
        """
        with self._adoptions.attempt(loan.buckets.new_bucket_id) as attempt:
            if not self._is_lent(loan):
                return False
            with self._merging(loan.sources):
                not_needed = not_needed_of(loan.buckets, loan.frontier)
                steps = check_steps(self._storage, loan.sources, loan.buckets, not_needed)
                metadata = await self._writer.check(steps, rest)
                attempt.is_used = await self._use_merged(loan.sources, metadata, not_needed, loan.generation)
        await self._forget_left_out()
        return not attempt.has_failed and loan.generation == self._generation

    def _is_lent(self, loan: Loan) -> bool:
        """Return whether the sources are there as they were lent, and nobody merges."""
        if self._merges.is_running or loan.generation != self._generation:
            return False
        if any(bucket.state is not BucketState.LIVE for bucket in loan.sources):
            return False
        at = self.in_use.index(loan.sources[0])
        return tuple(self.in_use[at : at + len(loan.sources)]) == loan.sources

    @contextlib.contextmanager
    def _merging(self, sources: Sequence[SealedBucket]) -> Iterator[None]:
        """Hold buckets together while one is made of them."""
        self._merges.is_running = True
        for bucket in sources:
            bucket.state = BucketState.MERGING
        try:
            yield
        finally:
            self._merges.is_running = False
            for bucket in sources:
                if bucket.state is BucketState.MERGING:
                    bucket.state = BucketState.LIVE
            self.drop_spent()

    # How they come and go.

    async def _open(self, metadata: BucketMetadata, generation: int) -> SealedBucket:
        """A bucket that begins at `loaded_end`. The caller puts it to use before it awaits anything (BUCKET-6)."""
        bucket = SealedBucket(metadata)
        while (segment := bucket.start_at(self._marks.loaded_end)) is not None:
            columns = await bucket.read(self._storage, segment)
            if generation != self._generation:  # BUCKET-7; what is stale in there is stale no more
                break
            self._stale.meet(columns, self._marks.frontier)
            if bucket.start_at(self._marks.loaded_end) == segment:
                bucket.feed(columns)
                bucket.take(bucket.count_before(self._marks.loaded_end))
                break
        return bucket

    def _use_sealed(self, sealed: SealedBucket | None, left_out: LeftOut) -> None:
        if sealed is not None:
            sealed.state = BucketState.LIVE
            self.in_use.append(sealed)
        self._stale.left_out(left_out, self._marks.frontier, self._marks.loaded_end, by_merge=False)
        self._seals.succeeded(sealed.metadata.count if sealed is not None else 0)
        self.drop_spent()

    async def _use_merged(
        self,
        sources: Sequence[SealedBucket],
        metadata: BucketMetadata | None,
        not_needed: NotNeeded,
        generation: int,
    ) -> bool:
        """Put what was made of buckets in their place; whether there is anything, and they were still in use."""
        left_out = await self._prepare_left_out(not_needed)
        merged = None if metadata is None else await self._open(metadata, generation)
        if generation != self._generation:  # no await from here on (BUCKET-6, BUCKET-7)
            return False
        self._stale.left_out(left_out, self._marks.frontier, self._marks.loaded_end, by_merge=True)
        at = self.in_use.index(sources[0])
        assert self.in_use[at : at + len(sources)] == list(sources)
        self.in_use[at : at + len(sources)] = [] if merged is None else [merged]
        if merged is not None:
            merged.state = BucketState.LIVE
        for source in sources:
            self._delete(source)
        self._merges.succeeded(merged.metadata.count if merged is not None else 0)
        return merged is not None

    def _plan_merge(self) -> list[SealedBucket] | None:
        smallest = max(self.policy.min_index_count, 1)
        if self._stale.outweigh(max(smallest, self._held_count())):
            return list(self.in_use) or None  # most of what lies there is stale: write what is left
        plan = plan_merge(
            [bucket.waiting for bucket in self.in_use],
            runs_max=max(self.policy.max_buckets, 1),
            unit=smallest,
        )
        return None if plan is None else self.in_use[plan.start : plan.end]

    def drop_spent(self) -> None:
        """Take out of use what holds nothing after the frontier (BUCKET-3)."""
        for bucket in self.in_use:
            is_spent = not bucket.waiting and bucket.last_key <= self._marks.frontier
            if bucket.state is BucketState.LIVE and is_spent:
                self._delete(bucket)
        self.in_use = [bucket for bucket in self.in_use if not bucket.is_deleting]
        mutable = self._memory.recent
        if mutable.count and not mutable.waiting and mutable.last_ms <= self._marks.frontier.deliver_at_ms:
            self._memory.drop_recent()

    def _delete(self, bucket: SealedBucket) -> None:
        bucket.state = BucketState.DELETING
        self._files.delete([bucket.bucket_id])

    def _segment_limits(self) -> SegmentLimits:
        return SegmentLimits(self.policy.segment_time_step_ms, self.policy.max_segment_entries)

    def _not_needed(self, ledger_ids: set[int]) -> NotNeeded:
        amendments = {ledger_id: self._amendments_of(ledger_id) for ledger_id in ledger_ids}
        return NotNeeded(
            self._marks.frontier, {key: amended for key, amended in amendments.items() if amended is not None}
        )

    async def _prepare_left_out(self, not_needed: NotNeeded) -> LeftOut:
        return await self._writer.left_out(not_needed, self._marks.frontier, self._marks.loaded_end)

    async def _forget_left_out(self) -> None:
        await self._stale.forget_left_out(lambda: self._marks.frontier)


def _ledgers_of(buckets: Sequence[SealedBucket]) -> set[int]:
    return {span.ledger_id for bucket in buckets for span in bucket.metadata.spans}
