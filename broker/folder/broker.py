"""The broker without its network edges: data directory, recovery, and the tasks that keep it going.

`server.py` puts gRPC and HTTP around it; the simulation drives it directly, on virtual time and an in-memory disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from pyroaring import BitMap64

from broker.config import BrokerConfig
from broker.delayed.key_cache import KeyCache
from broker.delayed.schedule_keys import KeyLimits
from broker.delayed.segment_cache import SegmentCache
from broker.errors import Fenced, LimitReached, PostdateError, StorageFailed, Unavailable
from broker.folder.backup import Backups
from broker.folder.checkpoint import Checkpointer
from broker.folder.compaction import Compactions
from broker.folder.ledger_packing import LedgerPacking
from broker.folder.ledger_rewrites import LedgerRewrites
from broker.folder.live_check import LiveCheck, TopicCheck
from broker.folder.overdue import Overdue
from broker.folder.pins import pinned
from broker.folder.rates import RatesOfLastHour
from broker.folder.recovery import (
    Manifests,
    cut_ledgers,
    decode_group,
    open_manifests,
    remove_unnamed,
    replay_journal,
    sync_manifests,
)
from broker.folder.retention import Reclaimer
from broker.folder.tail_writer import TailWriter
from broker.model import Batch
from broker.observe.audit_trail import AuditTrail
from broker.observe.logs import get_logger
from broker.observe.metrics import BrokerCounters
from broker.runtime.clock import Clock
from broker.runtime.foreground import Foreground
from broker.runtime.ownership import AlwaysOwner, Ownership
from broker.runtime.patience import Patience
from broker.runtime.steps import StepThread, run_step
from broker.runtime.supervise import Supervisor, YieldBudget
from broker.runtime.vfs import File, Vfs
from broker.settings import KIB
from broker.storage.blocks import LedgerName
from broker.storage.bucket_files import BucketStorage, bucket_storage
from broker.storage.group_log import NO_SHARD, GroupLog, ShardLog, ShardName
from broker.storage.journal import Journal
from broker.storage.key_run_files import KeyStorage, key_storage
from broker.storage.layout import Layout
from broker.storage.ledger import Ledger
from broker.storage.ledger_files import OpenFiles
from broker.storage.local_group_log import LocalGroupLog
from broker.storage.manifest import BrokerImage
from broker.storage.records import Record
from broker.storage.segment import Group
from broker.subscriptions.reasons import ReasonsMemory
from broker.topics.bulk_changes import BulkChanges
from broker.topics.dead_letters import DeadLetters
from broker.topics.intake import Accepted, check_first
from broker.topics.key_services import KeyServices
from broker.topics.policies import default_topic_policy
from broker.topics.producers import DedupMemory
from broker.topics.recurring_schedules import RecurringSchedules
from broker.topics.registry import Registry
from broker.topics.topic import Topic, TopicFiles, TopicServices
from broker.topics.topic_index import IndexServices

log = get_logger(__name__)

_DISK_CHECK_SECONDS = 1.0
_DECODED_HERE_BYTES = 64 * KIB
"""A group that is larger is decoded in a thread."""
_FAILING_SECONDS = 5.0
"""After file operations have failed for so long the broker is not ready: calls that write would wait for their end."""


class Broker:
    """One data directory, opened. `open` recovers, `start` begins to deliver, `stop` leaves a clean checkpoint."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        vfs: Vfs,
        clock: Clock,
        rng: random.Random,
        journal_executor: StepThread | Executor,
        file_executor: Executor,
        read_executor: Executor,
        index_executor: Executor,
        on_failure: Callable[[BaseException], None],
        sync_executor: Executor | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        """`ownership`: of what the broker tells; without it the folder is nobody else's."""
        self.config = config
        self.clock = clock
        self.ownership: Ownership = ownership or AlwaysOwner()
        self.counters = BrokerCounters()
        self.audit = AuditTrail(clock)
        self.started_ms = clock.now_ms()
        self.broker_id = ""
        self._vfs = vfs
        self._rng = rng
        self._journal_executor = journal_executor
        self._file_executor = file_executor
        self._sync_executor = sync_executor or file_executor
        self._patience = Patience(self._note_file_retry)
        self._read_executor = read_executor
        self._index_executor = index_executor
        self._on_failure = on_failure
        self._layout = Layout(config.data_dir)
        self._lock: File | None = None
        self._open_files = OpenFiles(vfs, config.tuning.open_ledgers_max, clock)
        self.registry = Registry(config)
        self.rates = RatesOfLastHour(self.registry, clock)
        self.ownership.watch(self.registry.wake)
        self.supervisor = Supervisor(lambda _, error: self._task_failed(error))
        self.dead_letters = DeadLetters(
            self.registry, config, clock, spawn=self.supervisor.spawn, wait_room=self._wait_room
        )
        self._overdue = Overdue(self.registry, clock, vfs, self._layout.alive, file_executor, self._patience)
        self.foreground = Foreground(lambda: self._journal is not None and self._journal.pending_bytes > 0)
        self.recurring = self._make_recurring()
        self.bulk_changes = self._make_bulk_changes()
        self._shard_log: ShardLog | None = None  # in a cluster
        self._journal: Journal | None = None
        self._checkpointer: Checkpointer | None = None
        self._backups: Backups | None = None
        self._tail_writer = TailWriter(config.tuning.tail_bytes_max, self._patience)
        self._live_check = LiveCheck(self._bucket_storage, index_executor)
        self.compactions = self._make_compactions()
        self._rewrites = self._make_rewrites()
        self._packing = self._make_packing()
        self.dedup_memory = DedupMemory(
            config.tuning.producers_per_topic_max,
            config.dedup_memory_bytes_max,
            config.tuning.reclaim_interval_ms,
        )
        self.reasons_memory = ReasonsMemory(clock)
        self._found_alive_ms = 0
        self.disk_free_bytes = 0  # as of the last look
        self._appended_at_look = self._unwritten_at_look = 0
        self._disk_full = False
        self._draining = False

    def _make_recurring(self) -> RecurringSchedules:
        return RecurringSchedules(
            self.registry,
            self.config,
            self.clock,
            spawn=self.supervisor.spawn,
            wait_room=self._wait_produce,
            counters=self.counters,
        )

    def _make_bulk_changes(self) -> BulkChanges:
        return BulkChanges(
            self.registry,
            self.config,
            self.clock,
            spawn=self.supervisor.spawn,
            wait_room=self._wait_change,
            counters=self.counters,
        )

    def _make_compactions(self) -> Compactions:
        return Compactions(
            self.registry,
            self._layout,
            self._vfs,
            self.clock,
            rng=self._rng,
            lease_ms_max=self.config.compaction_lease_ms,
            cleanup_ms=self.config.tuning.compaction_cleanup_ms,
            file_executor=self._file_executor,
            index_executor=self._index_executor,
            note=self.counters.note_compaction,
            checkpoint=self._write_checkpoint,
            changed=self._changed,
            on_write_failed=self._task_failed,
        )

    def _make_rewrites(self) -> LedgerRewrites:
        return LedgerRewrites(
            self.registry,
            self._layout,
            self._vfs,
            self.clock,
            moving=self.compactions.moving,
            reserve_bytes=self.config.disk_reserve_bytes,
            index_executor=self._index_executor,
            changed=self._changed,
            checkpoint=self._write_checkpoint,
        )

    def _make_packing(self) -> LedgerPacking:
        return LedgerPacking(
            self.registry,
            self._layout,
            self._vfs,
            self.clock,
            moving=self.compactions.moving,
            rows_min=self.config.tuning.packed_rows_min,
            reserve_bytes=self.config.disk_reserve_bytes,
            index_executor=self._index_executor,
            changed=self._changed,
        )

    # -- life ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Lock the data directory and recover it. Blocks; raises Fenced, Corrupt, OSError."""
        started_ns = self.clock.monotonic_ns()
        manifests = self._open_manifests(NO_SHARD)
        self._take_up(manifests, self._open_log(manifests))
        count = replay_journal(self.journal, manifests.root.checkpoint_lsn + 1, self.registry)
        self._check_topics()
        self._recovered(manifests, count, started_ns)

    async def open_shard(self, shard_log: ShardLog) -> None:
        """As `open`, for a folder without a journal: the log of its shard lies elsewhere.

        What that log holds so far is applied. Also raises what the log raises.
        """
        try:
            await self._open_shard(shard_log)
        except BaseException:  # its caller may try again, perhaps with another folder
            self._let_go()
            raise

    async def _open_shard(self, shard_log: ShardLog) -> None:
        started_ns = self.clock.monotonic_ns()
        self._shard_log = shard_log
        manifests = self._open_manifests(shard_log.shard)
        root = manifests.root
        await shard_log.open(
            root.checkpoint_lsn + 1,
            needed_to=manifests.needed_to_lsn,
            epoch=root.epoch,
            until_ms=root.last_alive_ms,
        )
        self.compactions.in_cluster = True
        self._take_up(manifests, shard_log)
        count = 0
        async with contextlib.aclosing(shard_log.groups(root.checkpoint_lsn + 1)) as groups:
            async for group in groups:
                for lsn, record in decode_group(group):
                    self.registry.apply(record, lsn)
                    count += 1
        self._recovered(manifests, count, started_ns)

    def _open_manifests(self, shard: ShardName) -> Manifests:
        """Lock the data directory and read what it says of itself. Blocks."""
        self._vfs.make_dir(self.config.data_dir)
        self._vfs.sync_dir(self.config.data_dir.rpartition("/")[0] or ".")
        self._lock = self._vfs.lock(self._layout.lock)
        if self._lock is None:
            raise Fenced(
                f"Another broker uses the data directory {self.config.data_dir!r}: stop it, or choose another "
                "directory",
                reason="DATA_DIR_LOCKED",
            )
        first_id = self.config.topic_shard.first_id
        return open_manifests(self._vfs, self._layout, self.clock.now_ms(), shard, first_id=first_id)

    def _take_up(self, manifests: Manifests, group_log: GroupLog) -> None:
        """Make the parts of a broker from its manifests and its log. Blocks."""
        config = self.config
        self._journal = Journal(
            group_log,
            group_bytes_max=config.tuning.journal_group_bytes_max,
            pending_bytes_max=config.tuning.journal_pending_bytes_max,
            group_gap_ms=0 if self._shard_log is None else self._shard_log.group_gap_ms,
            on_failed=self._writing_failed,
            observe_sync=self.counters.journal_sync.observe,
            patience=self._patience,
        )
        self._checkpointer = Checkpointer(
            broker_id=manifests.root.broker_id,
            layout=self._layout,
            vfs=self._vfs,
            clock=self.clock,
            executor=self._file_executor,
            sync_executor=self._sync_executor,
            patience=self._patience,
            journal=self._journal,
            registry=self.registry,
            open_files=self._open_files,
            checkpoint_lsn=manifests.root.checkpoint_lsn,
            checkpoint_bytes=config.tuning.checkpoint_bytes,
            interval_ms=config.checkpoint_interval_ms,
            counters=self.counters,
            shard_log=self._shard_log,
        )
        self._backups = Backups(
            config=config,
            layout=self._layout,
            vfs=self._vfs,
            clock=self.clock,
            executor=self._index_executor,
            checkpointer=self._checkpointer,
            journal=self._journal,
            broker_id=manifests.root.broker_id,
            counters=self.counters,
            spawn=self.supervisor.spawn,
            in_cluster=self._shard_log is not None,
        )
        cut_ledgers(self._vfs, self._layout, manifests)
        self._restore(manifests)

    def _check_topics(self) -> None:
        """Raise Fenced where the folder is that of another shard: its topics would not be found, and made anew."""
        strange = next(
            (name for name in self.registry.by_name if not self.config.topic_shard.holds(name)), None
        )
        if strange is not None:
            raise Fenced(
                f"{self.config.data_dir} contains topic {strange!r}, which does not belong to shard "
                f"{self.config.topic_shard.number}: it is the data directory of another shard",
                reason="DATA_DIR_OF_ANOTHER_SHARD",
            )

    def _recovered(self, manifests: Manifests, recovered_records: int, started_ns: int) -> None:
        """The log was replayed: remove what nobody names, and tell. Blocks."""
        sync_manifests(self._vfs, self._layout, manifests)
        remove_unnamed(self._vfs, self._layout, manifests, self.registry)
        self._overdue.read(
            manifests.root.last_alive_ms if self._shard_log is None else self._shard_log.ceiling_ms
        )
        self._found_alive_ms = manifests.root.last_alive_ms
        self.counters.recovery_seconds = (self.clock.monotonic_ns() - started_ns) / 1e9
        log.info(
            "Data directory opened",
            data_dir=self.config.data_dir,
            broker_id=self.broker_id,
            topics=len(self.registry.topics),
            replayed_records=recovered_records,
            seconds=round(self.counters.recovery_seconds, 3),
        )

    def start(self) -> None:
        """Begin to write, index and deliver."""
        self.started_ms = self.clock.now_ms()
        self._check_disk()
        self.supervisor.spawn("journal", self.journal.run())
        self.supervisor.spawn_lasting("ledger tails", self._tail_writer.run())
        self.supervisor.spawn_lasting("checkpoints", self.checkpointer.run())
        self.supervisor.spawn_lasting("disk space", self._watch_disk())
        reclaimer = Reclaimer(
            self.registry,
            interval_ms=self.config.tuning.reclaim_interval_ms,
            clock=self.clock,
            changed=self._changed,
        )
        self.supervisor.spawn_lasting("reclaim", reclaimer.run())
        self.supervisor.spawn_lasting("compaction leases", self.compactions.run())
        self.supervisor.spawn_lasting("rates of the last hour", self.rates.run())
        self.supervisor.spawn_lasting("packing of rows", self._packing.run())
        if self._shard_log is not None:
            self.supervisor.spawn_lasting("rewrites of ledgers", self._rewrites.run())
        self.registry.start(0 if self._shard_log is None else self._shard_log.ceiling_ms)
        self.supervisor.spawn_lasting("wall clock", self.registry.watch_clock(self.clock))
        self._overdue.begin(self.started_ms)
        self.recurring.begin(self._overdue.absences)
        self.supervisor.spawn_lasting("recurring schedules", self.recurring.run())
        self.bulk_changes.start()
        self.supervisor.spawn("overdue messages", self._overdue.sweep())
        self.supervisor.spawn_lasting("signs of life", self._overdue.beat())
        self.backups.begin()

    def start_offline(self) -> None:
        """Begin to write and to index, for upkeep of a folder that nobody else uses: nobody is delivered to.

        What came due in the broker's absence stays so: this was not a sign of life.
        """
        self.checkpointer.last_alive_ms = self._found_alive_ms
        self.compactions.rest = 0.0
        self.supervisor.spawn("journal", self.journal.run())
        self.supervisor.spawn_lasting("ledger tails", self._tail_writer.run())
        self.supervisor.spawn_lasting("checkpoints", self.checkpointer.run())
        self.registry.start()

    def start_following(self) -> None:
        """Begin to take in what another broker decides (`follow`), to write it and to index it; decide nothing.

        What comes due is taken from the index and handed to nobody, so that the index is up to date when this folder
        is opened to serve.
        """
        self.started_ms = self.clock.now_ms()
        self._check_disk()
        self.journal.follow_only()
        self.supervisor.spawn_lasting("ledger tails", self._tail_writer.run())
        self.supervisor.spawn_lasting("checkpoints", self.checkpointer.run())
        self.supervisor.spawn_lasting("disk space", self._watch_disk())
        self.supervisor.spawn_lasting("rewrites of ledgers", self._rewrites.run())
        self.supervisor.spawn_lasting("packing of rows", self._packing.run())
        self.registry.start()
        self.supervisor.spawn_lasting("wall clock", self.registry.watch_clock(self.clock))

    async def follow(self, group: Group, byte_count: int) -> None:
        """Apply the next group of the shard's log. Cancelled, it leaves a broker that can only be stopped."""
        await self._tail_writer.wait_room()
        records = decode_group(group)
        if byte_count >= _DECODED_HERE_BYTES:
            records = await run_step(self._read_executor, lambda: iter(list(decode_group(group))))
        budget = YieldBudget(self.clock)
        for lsn, record in records:
            self.registry.apply(record, lsn)
            await budget.spent()
        self.journal.followed(group, byte_count)

    def pinned(self) -> contextlib.AbstractAsyncContextManager[tuple[Layout, BrokerImage]]:
        """Second names of what a checkpoint wrote; see `pins`."""
        return pinned(self._vfs, self._layout, self.checkpointer, self._index_executor)

    def drain(self) -> None:
        """Refuse new work; what was accepted is finished."""
        self._draining = True

    async def stop(self) -> None:
        """Write what is pending and a last checkpoint, then let go of the data directory."""
        self._draining = True
        self._patience.end()
        await self.compactions.stop()
        self.registry.stop()
        await self.dead_letters.wait_idle()
        await self.backups.stop()
        # First the journal ends: everything submitted is durable and applied, and nothing comes after it.
        await self.journal.close()
        if self.journal.failed is None:
            try:
                await self.checkpointer.checkpoint()
            except (StorageFailed, OSError) as error:
                log.error("The last checkpoint failed; the next start replays the journal", error=error)
        await self.supervisor.stop()
        self.audit.flush()
        self._let_go()

    def _let_go(self) -> None:
        self._open_files.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _open_log(self, manifests: Manifests) -> GroupLog:
        groups = LocalGroupLog(
            self._vfs,
            self._layout.journal,
            segment_bytes=self.config.tuning.journal_segment_bytes,
            spare_segments_max=self.config.tuning.journal_spare_segments_max,
            clock=self.clock,
            executor=self._journal_executor,
            upkeep_executor=self._sync_executor,
        )
        groups.open(manifests.root.checkpoint_lsn + 1, manifests.needed_to_lsn)
        return groups

    def _restore(self, manifests: Manifests) -> None:
        root = manifests.root
        self.broker_id = root.broker_id
        self.registry.next_topic_id = root.next_topic_id
        self.registry.next_ledger_id = root.next_ledger_id
        policy = default_topic_policy(self.config)
        services = TopicServices(
            config=self.config,
            clock=self.clock,
            foreground=self.foreground,
            ownership=self.ownership,
            rng=self._rng,
            submit=self._submit,
            new_ledger_id=self.registry.new_ledger_id,
            open_ledger=self._new_ledger,
            remove_ledger=self.checkpointer.remove_ledger,
            live_ledger_ids=BitMap64(),
            spawn=self.supervisor.spawn,
            appended=self._tail_writer.appended,
            changed=self._changed,
            make_folders=self._make_topic_folders,
            index=self._make_index_services(),
            note_rebuild=self.counters.note_rebuild,
            dead_letter_sink=self.dead_letters,
            keys=KeyServices(
                clock=self.clock,
                spawn=self.supervisor.spawn,
                storage=self._key_storage,
                executor=self._index_executor,
                cache=KeyCache(self.config.tuning.schedule_key_cache_bytes),
                counters=self.counters,
                limits=KeyLimits(
                    seal_count=policy.min_index_count,
                    seal_after_ms=policy.seal_after_ms,
                    settled_keep_ms=self.config.tuning.settled_key_retention_ms,
                    settled_max=self.config.tuning.settled_keys_per_topic_max,
                ),
            ),
            dedup_memory=self.dedup_memory,
            reasons_memory=self.reasons_memory,
        )
        self.registry.bind(services)
        for image in manifests.topics:
            ledgers = [
                Ledger.restore(
                    ledger.capture,
                    self._layout.ledgers(image.topic_id),
                    self._open_files,
                    self._file_executor,
                    self._read_executor,
                )
                for ledger in image.ledgers
            ]
            topic_id = image.topic_id
            amendments, cursors = manifests.amendments[topic_id], manifests.cursors[topic_id]
            files = TopicFiles(
                manifests.producers.get(topic_id),
                manifests.recurring.get(topic_id),
                manifests.bulk.get(topic_id),
            )
            self.registry.add(Topic(image, ledgers, cursors, amendments, services, files))

    def _make_index_services(self) -> IndexServices:
        return IndexServices(
            clock=self.clock,
            clock_recheck_ms=self.config.tuning.clock_recheck_ms,
            due_entries=self.config.tuning.due_batch_entries,
            spawn=self.supervisor.spawn,
            spawn_lasting=self.supervisor.spawn_lasting,
            bucket_storage=self._bucket_storage,
            executor=self._index_executor,
            note=self.counters.note_index,
            looked=SegmentCache(self.config.tuning.looked_segment_bytes),
            give_way=partial(self.foreground.give_way, 0.0),
        )

    # -- calls -----------------------------------------------------------------------------------------------

    @property
    def journal(self) -> Journal:
        assert self._journal is not None, "the broker was not opened"
        return self._journal

    @property
    def checkpointer(self) -> Checkpointer:
        assert self._checkpointer is not None, "the broker was not opened"
        return self._checkpointer

    @property
    def backups(self) -> Backups:
        assert self._backups is not None, "the broker was not opened"
        return self._backups

    @property
    def not_ready_because(self) -> str | None:
        """Return the reason why the broker cannot serve, in one line; None if it can."""
        if (reason := self._not_serving_because()) is not None:
            return reason
        if self._patience.failing_seconds() >= _FAILING_SECONDS:
            return "waiting for the disk: a file cannot be opened, created or renamed"
        return None

    def _not_serving_because(self) -> str | None:
        if self._journal is None:
            return "recovering"
        if self._journal.failed is not None:
            return f"writing has stopped: {self._journal.failed.told}"
        return "draining" if self._draining else None

    async def submit_batch(self, topic_name: str, batch: Batch, *, replace: bool = False) -> Accepted:
        """Accept a batch for a topic, waiting for room; its ids count once `durable` is done.

        `replace`: messages that wait under the schedule keys of these give way to them.
        """
        try:
            return await self._accept(topic_name, batch, replace=replace)
        except PostdateError:
            if (topic := self.registry.by_name.get(topic_name)) is not None:
                topic.counters.refused_batches += 1
            raise

    async def submit_together(self, topic_name: str, batch: Batch) -> Accepted | None:
        """As `submit_batch`, with what several requests have; None, and nothing is stored, if each is for itself.

        That is so if one of them may be refused, or begin a topic or a ledger. What refuses all of them is not counted:
        they will be tried one by one.
        """
        if batch.schedule_keys is not None:
            return None
        await self._wait_produce()
        topic = self.registry.by_name.get(topic_name)
        return None if topic is None or topic.begins_ledger(batch) else topic.submit(batch)

    async def _accept(self, topic_name: str, batch: Batch, *, replace: bool) -> Accepted:
        await self._wait_produce()
        if topic_name not in self.registry.by_name:
            # A request that will be refused must not leave a topic behind. A topic that this call makes has the
            # broker's own policy, so what is checked here holds.
            check_first(batch, self.clock.now_ms(), default_topic_policy(self.config))
        topic = await self.registry.topic_or_create(topic_name)
        return (
            topic.submit(batch) if batch.schedule_keys is None else await topic.keyed.submit(batch, replace)
        )

    async def _wait_produce(self) -> None:
        """Return once there is room for a batch; raises what refuses every batch."""
        self.check_serving()
        if self._disk_full or self._appended_into_reserve():
            raise LimitReached(
                "Free disk space is below disk_reserve_bytes: new messages are refused until space is freed",
                reason="DISK_RESERVE_REACHED",
                retry_after_ms=5_000,
                disk_reserve_bytes=self.config.disk_reserve_bytes,
            )
        await self._wait_room()

    async def _wait_change(self) -> None:
        """Return once there is room for a change of what is stored, which the reserve of the disk does not refuse."""
        self.check_serving()
        await self._wait_room()

    async def verify_topic(self, name: str) -> TopicCheck:
        """Compare a topic's index with its messages while it delivers; see `live_check`."""
        return await self._live_check.run(self.registry.topic(name))

    async def _wait_room(self) -> None:
        await self.journal.wait_room()
        await self._tail_writer.wait_room()

    def check_serving(self) -> None:
        """Raise Unavailable unless requests are accepted."""
        if self._journal is not None and (failure := self._journal.failed) is not None:
            raise StorageFailed(failure.message) from failure.__cause__
        if (reason := self._not_serving_because()) is not None:
            raise Unavailable(
                f"The broker is {reason}", reason="DRAINING" if self._draining else "RECOVERING"
            )

    def _submit(self, record: Record, apply: Callable[[int], None]) -> asyncio.Future[None]:
        return self.journal.submit(record.type, record.encode(), apply)

    def _changed(self, topic: Topic) -> None:
        self.checkpointer.changed(topic)

    def _new_ledger(self, topic_id: int, ledger_id: int) -> Ledger:
        name = LedgerName(self._layout.ledgers(topic_id), topic_id, ledger_id, 0)
        return Ledger(name, self._open_files, self._file_executor, self._read_executor)

    def _bucket_storage(self, topic_id: int) -> BucketStorage:
        return bucket_storage(self._vfs, self._layout.buckets(topic_id), topic_id, self._read_executor)

    def _key_storage(self, topic_id: int) -> KeyStorage:
        return key_storage(self._vfs, self._layout.keys(topic_id), topic_id, self._read_executor)

    async def _make_topic_folders(self, topic_id: int) -> None:
        loop, make_folders = asyncio.get_running_loop(), self._layout.make_topic_folders
        await self._patience.wait_done(
            lambda: loop.run_in_executor(self._file_executor, make_folders, self._vfs, topic_id)
        )

    async def _write_checkpoint(self) -> None:
        await self.checkpointer.checkpoint()

    def _note_file_retry(self) -> None:
        self.counters.file_retries += 1

    def _writing_failed(self, error: StorageFailed) -> None:
        if isinstance(error.__cause__, Fenced):
            log.error("Writing has stopped: another broker owns the journal now", error=error)
        else:
            log.error("Writing has stopped; restart the broker once the disk works", error=error)
        self._on_failure(error)

    def _task_failed(self, error: BaseException) -> None:
        # A ledger or a manifest that could not be written ends writing as a failed sync of the journal does: a
        # checkpoint after it could drop journal records that are nowhere else.
        if isinstance(error, OSError | StorageFailed):
            self.journal.fail(f"A file could not be written: {error}", error)
        self._on_failure(error)

    async def _watch_disk(self) -> None:
        while True:
            await asyncio.sleep(_DISK_CHECK_SECONDS)
            try:
                self._check_disk()
            except OSError as error:  # the last figure stands until there is another
                self._note_file_retry()
                log.warning("The free disk space could not be read", error=error)

    def _appended_into_reserve(self) -> bool:
        """Return whether what was accepted since the last measurement of the disk takes of the reserve.

        Each byte goes to the journal, where it may wait for its turn, and to a ledger, a little later.
        """
        if not self.config.disk_reserve_bytes:
            return False
        appended = self.journal.appended_bytes + self.journal.pending_bytes - self._appended_at_look
        owed_bytes = 2 * appended + self._unwritten_at_look
        return self.disk_free_bytes - owed_bytes < self.config.disk_reserve_bytes

    def _check_disk(self) -> None:
        self._appended_at_look = self.journal.appended_bytes
        self._unwritten_at_look = self._tail_writer.unwritten_bytes
        self.disk_free_bytes = free_bytes = self._vfs.free_bytes(self.config.data_dir)
        full = free_bytes < self.config.disk_reserve_bytes
        if full != self._disk_full:
            self._disk_full = full
            if full:
                log.warning(
                    "Free disk space is below disk_reserve_bytes; new messages are refused",
                    free_bytes=free_bytes,
                )
            else:
                log.info(
                    "Free disk space is above disk_reserve_bytes; new messages are accepted",
                    free_bytes=free_bytes,
                )
