"""Upkeep of a bucket tracker: opens its buckets at the start, seals and merges in the background.

Each topic has at most one seal and one merge under way, as tasks of the broker's supervisor; the index pump only
starts them, so that neither holds up a delivery.

Until `restore` has ended, `image` is what the manifest said: a checkpoint of that time must not forget the buckets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.bucket_values import BucketImage, BucketPolicyValues
from broker.delayed.lent_buckets import Loan
from broker.delayed.sealed_bucket import SealedBucket
from broker.errors import Corrupt, PostdateError, Unavailable
from broker.model import START, Position
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.supervise import OneAtATime, Spawn
from broker.storage.bucket_files import BucketStorage, SnapshotReader

log = get_logger(__name__)

T = TypeVar("T")

_RETRY_SECONDS = 1.0
_FAILED_READS_MAX = 30
"""So many reads in a row fail, a second apart, and are tried again; then the failure lasts, like that of a bad sector,
and no wait ends it. Whatever is in a bucket is in the ledgers too."""


class NoteIndex(Protocol):
    """Told of every seal, merge and load."""

    def __call__(self, operation: str, seconds: float, *, failed: bool) -> None: ...


class BucketUpkeep:
    """See the module's description. Belongs to one index pump."""

    def __init__(
        self,
        tracker: BucketTracker,
        storage: BucketStorage,
        image: BucketImage,
        *,
        spawn: Spawn,
        prepare_folders: Callable[[], Awaitable[None]],
        changed: Callable[[], None],
        clock: Clock,
        note: NoteIndex,
        begins_anew: bool = False,
    ) -> None:
        """`begins_anew`: the buckets of `image` lack entries that lie after the tracker's frontier."""
        self._tracker = tracker
        self._storage = storage
        self._image: BucketImage | None = image
        self._prepare_folders = prepare_folders
        self._changed = changed
        self._clock = clock
        self._note = note
        self._begins_anew = begins_anew
        self._misses_rows = False
        self._failed_reads = 0  # in a row
        self._keepers = 0
        self._sealing = OneAtATime(spawn, "seal of a bucket")
        self._merging = OneAtATime(spawn, "merge of buckets")
        self._seeking = OneAtATime(spawn, "search for stale rows")

    async def restore(self) -> bool:
        """Take up the buckets that the manifest names; False if one of them cannot be used, and none is."""
        image = self._image
        assert image is not None
        tracker = self._tracker
        try:
            if self._begins_anew:
                raise Unavailable("the clock was ahead when they were written")
            await self._take_up(image)
        except PostdateError as error:
            log.error(
                "Buckets cannot be used; rebuilding the delayed index from the ledgers", error=str(error)
            )
            tracker.clear()
            tracker.buckets.disown(image.bucket_ids)
            await tracker.buckets.restore(
                [], indexed_through=START, index_lsn=0, next_bucket_id=image.next_bucket_id
            )
            self._changed()
            return False
        finally:
            self._image = None
        return True

    async def _take_up(self, image: BucketImage) -> None:
        while True:
            try:
                read = SnapshotReader.read_metadata
                metadatas = [await self._storage.read(bucket_id, read) for bucket_id in image.bucket_ids]
                await self._tracker.buckets.restore(
                    metadatas,
                    indexed_through=image.indexed_through,
                    index_lsn=image.index_lsn,
                    next_bucket_id=image.next_bucket_id,
                )
            except (OSError, Unavailable) as error:
                # What passes costs a wait. To read all ledgers again may take minutes, and meets the same disk.
                self._note_failed_read(error)
                log.error("Buckets cannot be read; retrying", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self._failed_reads = 0
                return

    def _note_failed_read(self, error: Exception) -> None:
        """Count a read that failed and may pass; raises Corrupt if so many did in a row that it does not."""
        self._failed_reads += 1
        if self._failed_reads > _FAILED_READS_MAX:
            self._failed_reads = 0
            raise Corrupt(f"A bucket could not be read in {_FAILED_READS_MAX} attempts: {error}") from error

    @property
    def indexed_through(self) -> Position:
        return self.image().indexed_through

    def image(self) -> BucketImage:
        """Return the image for the next manifest, without buckets that miss rows."""
        if self._image is not None:
            return self._image
        image = self._tracker.buckets.image()
        if self._misses_rows:
            return replace(image, bucket_ids=(), indexed_through=START, index_lsn=0)
        return image

    def miss_rows(self) -> None:
        """Rows were stepped over. Buckets are sealed and merged as ever, and the next start builds the index again."""
        self._misses_rows = True
        self._changed()

    def begin_anew(self) -> None:
        """The tracker was cleared: what follows is indexed from the start of the log again."""
        self._misses_rows = False

    async def remove_deleted(self, image: BucketImage) -> None:
        """A manifest with this image is durable: remove the files that it did not name, unless they are kept."""
        if not self._keepers:
            await self._tracker.buckets.remove_deleted(image)

    @contextlib.contextmanager
    def keep_files(self) -> Iterator[BucketImage]:
        """Within this, every file that the image names stays, merged or spent. A later checkpoint removes it."""
        self._keepers += 1
        try:
            yield self.image()
        finally:
            self._keepers -= 1

    def buckets(self) -> Sequence[SealedBucket]:
        """The buckets in the order of the log; none before they were taken up."""
        return self._tracker.buckets.in_use

    def lend(self, bucket_ids: Sequence[int]) -> Loan:
        """Lend adjacent buckets to somebody who merges them; see `lent_buckets`."""
        return self._tracker.buckets.lend(bucket_ids)

    async def adopt(self, loan: Loan, *, rest: float) -> bool:
        """Put what was made of lent buckets in their place, if they still stand; whether it was."""
        adopted = await self._noted("merge", self._tracker.buckets.adopt(loan, rest=rest))
        self._changed()
        return adopted

    @property
    def is_exact(self) -> bool:
        """Return whether every entry counts once, and no stale row counts."""
        return not self._seeking.is_running and self._tracker.is_exact

    def seek_stale(self) -> None:
        """Find what was cancelled or moved in the buckets that were taken up."""
        self._seeking.start(self._seek_stale)

    async def _seek_stale(self) -> None:
        try:
            await self._tracker.seek_stale()
        except (OSError, PostdateError) as error:  # whoever loads that segment will build the index again
            log.error("Stale rows cannot be counted because a bucket cannot be read", error=str(error))

    def passed(self, position: Position, lsn: int) -> None:
        """Every row before `position`, and every move of a record up to `lsn`, was added."""
        self._tracker.buckets.passed(position, lsn)

    def set_policy(self, policy: BucketPolicyValues) -> None:
        """Other limits count from the next seal, merge or cut on."""
        self._tracker.buckets.policy = policy

    def look(self, now_ms: int) -> None:
        """Start a seal or a merge if it is time for one."""
        if self._tracker.buckets.has_deleted:
            self._changed()  # the next manifest names them no more, and then they go
        if not self._sealing.is_running and self._tracker.buckets.needs_seal(now_ms):
            self._sealing.start(self._seal)
        if not self._merging.is_running and self._tracker.buckets.needs_merge(now_ms):
            self._merging.start(self._merge)

    def stop(self) -> None:
        for work in (self._sealing, self._merging, self._seeking):
            work.cancel()

    async def load(self, now_ms: int) -> None:
        """One bounded step of loading; raises what the tracker does, and Corrupt for a failure that lasts."""
        try:
            await self._noted("load", self._tracker.load(now_ms))
        except (OSError, Unavailable) as error:
            self._note_failed_read(error)
            raise
        self._failed_reads = 0

    async def _seal(self) -> None:
        await self._prepare_folders()
        if await self._noted("seal", self._tracker.buckets.seal()):
            self._changed()

    async def _merge(self) -> None:
        if await self._noted("merge", self._tracker.buckets.merge()):
            self._changed()

    async def _noted(self, operation: str, work: Awaitable[T]) -> T:
        started_ns, failed = self._clock.monotonic_ns(), True
        try:
            result = await work
            failed = result is False
            return result
        finally:
            self._note(operation, (self._clock.monotonic_ns() - started_ns) / 1e9, failed=failed)
