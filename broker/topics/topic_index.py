"""The delayed index of one topic: made when the topic starts, said in its manifest, told of what changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.bucket_upkeep import BucketUpkeep, NoteIndex
from broker.delayed.bucket_values import BucketImage
from broker.delayed.due_rows import DueRows
from broker.delayed.index_pump import AHEAD_MS_MAX, IndexPump
from broker.delayed.memory_tracker import MemoryTracker
from broker.delayed.segment_cache import SegmentCache
from broker.delayed.tracker import ENTRY_AFTER_ALL, DelayedDeliveryTracker, Frontier
from broker.model import START, Int64Column, UInt32Column
from broker.policy import TRACKER_MEMORY
from broker.runtime.clock import Clock
from broker.runtime.supervise import Spawn
from broker.storage.bucket_files import BucketStorage
from broker.storage.changes import Cancelled, Changed, Moved
from broker.storage.log import TopicLog
from broker.storage.manifest import TopicImage
from broker.storage.records import (
    LedgersDropped,
    Produced,
    Record,
    Replaced,
    TopicPolicyChanged,
    Transferred,
)
from broker.topics.component import Capture, not_applied
from broker.topics.policies import bucket_policy
from broker.topics.topic_policies import TopicPolicies


@dataclass(frozen=True, slots=True)
class IndexServices:
    """Services that the indexes of all topics share."""

    clock: Clock
    clock_recheck_ms: int
    due_entries: int
    spawn: Spawn
    spawn_lasting: Spawn  # for the pump
    bucket_storage: Callable[[int], BucketStorage]  # (topic_id)
    executor: Executor
    note: NoteIndex
    looked: SegmentCache
    give_way: Callable[[], Awaitable[None]]  # to whoever is served


class TopicIndex:
    """See the module's description. Before `start` it is what the manifest says."""

    def __init__(
        self, image: TopicImage, log: TopicLog, policies: TopicPolicies, services: IndexServices
    ) -> None:
        self.pump: IndexPump | None = None
        self.clock_was_ahead = False
        """True if the clock was ahead when the manifest was written, so that it was started from the rows alone."""
        self._topic_id = image.topic_id
        self._log = log
        self._policies = policies
        self._services = services
        self._on_discarded: Callable[[], None] = lambda: None
        self._found = BucketImage(
            bucket_ids=image.bucket_ids,
            indexed_through=image.indexed_through,
            index_lsn=image.index_lsn,
            frontier_ms=image.frontier_ms,
            next_bucket_id=image.next_bucket_id,
            deleted_ids=(),
        )

    def start(
        self,
        *,
        on_due: Callable[[DueRows], None],
        on_rebuild: Callable[[], None],
        on_set_back: Callable[[], None],
        on_discarded: Callable[[], None],
        prepare_folders: Callable[[], Awaitable[None]],
        changed: Callable[[], None],
    ) -> IndexPump:
        """Begin, after recovery; the caller runs the pump.

        `on_discarded`: the index held something of ledgers that are gone.
        """
        services, policy = self._services, self._policies.effective
        self._on_discarded = on_discarded
        now_ms = services.clock.now_ms()
        # Was the clock far ahead when the manifest was written? What buckets left out as taken is still to come then,
        # and nothing may count as due until a time that may be years away: so the index begins now, from the rows.
        self.clock_was_ahead = self._found.frontier_ms - now_ms > AHEAD_MS_MAX
        frontier = Frontier(
            now_ms if self.clock_was_ahead else max(now_ms, self._found.frontier_ms), *ENTRY_AFTER_ALL
        )
        tracker: DelayedDeliveryTracker
        upkeep: BucketUpkeep | None = None
        if policy.tracker == TRACKER_MEMORY:
            tracker = MemoryTracker(self._read_times, frontier, tick_ms=policy.tick_ms)
        else:
            storage = services.bucket_storage(self._topic_id)
            tracker = BucketTracker(
                storage,
                frontier,
                executor=services.executor,
                amendments_of=self._log.amendments_of,
                policy=bucket_policy(policy),
                looked=services.looked,
                give_way=services.give_way,
            )
            upkeep = BucketUpkeep(
                tracker,
                storage,
                self._found,
                spawn=services.spawn,
                prepare_folders=prepare_folders,
                changed=changed,
                clock=services.clock,
                note=services.note,
                begins_anew=self.clock_was_ahead,
            )
        self.pump = IndexPump(
            self._log,
            tracker,
            clock=services.clock,
            clock_recheck_ms=services.clock_recheck_ms,
            due_entries=services.due_entries,
            on_due=on_due,
            on_rebuild=on_rebuild,
            upkeep=upkeep,
            on_set_back=on_set_back,
            on_unread=lambda: services.note("read", 0.0, failed=True),
        )
        return self.pump

    def stop(self) -> None:
        if self.pump is not None and self.pump.upkeep is not None:
            self.pump.upkeep.stop()

    # -- durable state: called by the topic, in lsn order ----------------------------------------------------

    def apply(self, record: Record, lsn: int) -> None:
        """See `Applier`. The log is as the record says already."""
        match record:
            case Produced():
                self._append(record)
            case Replaced():
                self._append(record.produced)
                self._change(record.cancelled.ledgers, lsn)
            case Transferred():
                if record.produced.topic_id == self._topic_id:
                    self._append(record.produced)
            case Cancelled() | Moved():
                self._change(record.ledgers, lsn)
            case LedgersDropped():
                self._drop(record)
            case TopicPolicyChanged():
                # Other limits of buckets count from the next seal, merge or cut on.
                if self.pump is not None and self.pump.upkeep is not None:
                    self.pump.upkeep.set_policy(bucket_policy(self._policies.effective))
            case _:
                not_applied(self, record)

    def _append(self, record: Produced) -> None:
        pump = self.pump
        if pump is None:
            return
        if record.due.row_count:
            pump.appended(record.due)
        else:
            pump.appended_undelayed()

    def _change(self, ledgers: dict[int, Changed], lsn: int) -> None:
        if self.pump is not None:
            for ledger_id, changed in ledgers.items():
                if self._log.entry_count(ledger_id) is not None:
                    self.pump.changed(ledger_id, changed, lsn)

    def _drop(self, record: LedgersDropped) -> None:
        """Ledgers are gone, whose entries came due by a time, as the clock once said.

        Before the start, the index begins after that time: what came due while the broker was down, or was due before
        and perhaps not in the index, is delivered by position.
        """
        gone = [ledger_id for ledger_id in record.ledger_ids if self._log.entry_count(ledger_id) is None]
        if self.pump is not None:
            if self.pump.discard_ledgers(gone):
                self._on_discarded()
        elif gone:
            self._found = replace(self._found, frontier_ms=max(self._found.frontier_ms, record.came_due_ms))

    def capture(self, image: TopicImage) -> Capture:
        """See `Component`."""
        index = self.image()
        return Capture(
            replace(
                image,
                indexed_through=index.indexed_through,
                index_lsn=index.index_lsn,
                frontier_ms=index.frontier_ms,
                bucket_ids=index.bucket_ids,
                next_bucket_id=index.next_bucket_id,
            ),
            durable=partial(self.durable, index),
        )

    def image(self) -> BucketImage:
        """Return the index's image for the manifest. A memory tracker has only its frontier."""
        if self.pump is None:
            return self._found
        if self.pump.upkeep is not None:
            return self.pump.upkeep.image()
        return BucketImage(
            bucket_ids=(),
            indexed_through=START,
            index_lsn=0,
            frontier_ms=self.pump.tracker.frontier.deliver_at_ms,
            next_bucket_id=self._found.next_bucket_id,
            deleted_ids=(),
        )

    async def durable(self, image: BucketImage) -> None:
        """A manifest with this image is durable: files that it does not name can go."""
        if self.pump is not None and self.pump.upkeep is not None:
            await self.pump.upkeep.remove_deleted(image)

    async def _read_times(self, ledger_id: int, entry_ids: UInt32Column) -> Int64Column:
        if self._log.entry_count(ledger_id) is None:
            return np.zeros(len(entry_ids), dtype=np.int64)  # gone: of no time
        return await self._log.times_of(ledger_id, entry_ids)
