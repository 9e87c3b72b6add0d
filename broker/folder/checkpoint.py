"""Checkpoints: the moments at which files and journal agree, so that the journal before them can go.

    1  note `checkpoint_lsn` and the topics there are; then capture each changed topic in one step without await
    2  per topic: sync its ledgers, write the files that changed, sync folders, replace its manifest
    3  sync the folder of topics, replace `broker.manifest`
    4  drop the journal up to `checkpoint_lsn`; delete the files that no manifest names any more

Topics are written several at a time, for each waits for syncs of its own. The steps of one topic are in this order;
those of two touch different files, and the root comes after all of them.

A crash between any two steps leaves manifests that are each older or newer than the root, never torn, and a
journal that begins at or before what the oldest of them needs. A topic's manifest that is newer than the root
is fine: replay applies to each topic only what lies above its own `applied_lsn`. Files written for a manifest
that was not replaced are named by nobody, and recovery removes them.

`is_due` says when one is due. One is also written at the stop, for a backup, for a pin of the folder's files, once a
compaction or a rewrite of ledgers was swapped in, and by a standby.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from broker.errors import PostdateError, StorageFailed
from broker.observe.logs import get_logger
from broker.observe.metrics import BrokerCounters
from broker.runtime.clock import Clock
from broker.runtime.patience import Patience
from broker.runtime.vfs import Vfs, WriteFailed, replace_file
from broker.storage.group_log import ShardLog
from broker.storage.journal import Journal
from broker.storage.layout import Layout, remove_tree
from broker.storage.ledger_files import OpenFiles
from broker.storage.log import DroppedLedger
from broker.storage.manifest import BrokerImage, encode_broker, encode_topic
from broker.topics.registry import Registry
from broker.topics.topic import Topic, TopicCapture

log = get_logger(__name__)

T = TypeVar("T")

_LSNS_BEHIND_MAX = 100
TOPICS_AT_ONCE = 8
"""Number of topics that a checkpoint writes at a time: one sync of most file systems serves whoever waits for one."""


def is_due(
    journal_bytes: int,
    elapsed_ms: int,
    has_changes: bool,
    lsns_behind: int,
    bytes_max: int,
    interval_ms: int,
) -> bool:
    """Return whether a checkpoint is to be written, by what has gathered since the last one: the whole rule.

    `lsns_behind` counts blanks as well, which change nothing; it is 0 unless the log lies in an object store, where
    each is a group to be read after a start.
    """
    if not has_changes and lsns_behind < _LSNS_BEHIND_MAX:
        return False
    return journal_bytes >= bytes_max or elapsed_ms >= interval_ms


class Checkpointer:
    """Writes checkpoints, one at a time. A failed write or sync ends writing for good; what fails without having
    written anything is tried again."""

    def __init__(
        self,
        *,
        broker_id: str,
        layout: Layout,
        vfs: Vfs,
        clock: Clock,
        executor: Executor | None,
        sync_executor: Executor | None,
        patience: Patience,
        journal: Journal,
        registry: Registry,
        open_files: OpenFiles,
        checkpoint_lsn: int,
        checkpoint_bytes: int,
        interval_ms: int,
        counters: BrokerCounters,
        shard_log: ShardLog | None = None,
    ) -> None:
        self._broker_id = broker_id
        self._layout = layout
        self._vfs = vfs
        self._clock = clock
        self._executor = executor
        self._sync_executor = sync_executor
        self._patience = patience
        self._journal = journal
        self._registry = registry
        self._open_files = open_files
        self._checkpoint_bytes = checkpoint_bytes
        self._interval_ms = interval_ms
        self._changed: set[int] = set()
        self._bytes_before = journal.appended_bytes
        self._written_lsn = checkpoint_lsn  # what the root says
        self._may_be_due = asyncio.Event()
        self._lock = asyncio.Lock()
        self._cut_short = False  # a checkpoint has begun and not ended; true for good if it never will
        self._counters = counters
        self._shard_log = shard_log
        self.last_alive_ms: int | None = None
        """Time at which the broker was last alive, as the root has it; None: it is alive."""

    def changed(self, topic: Topic) -> None:
        """A topic has something for the next checkpoint."""
        self._changed.add(topic.topic_id)
        if self._is_due(0):
            self._may_be_due.set()

    @property
    def is_behind(self) -> bool:
        """Return whether anything was applied since the last checkpoint."""
        return self._journal.durable_lsn > self._written_lsn

    async def run(self) -> None:
        """Write a checkpoint whenever one is due, until cancelled."""
        while True:
            await self._write_next()

    async def _write_next(self) -> None:
        """Wait until a checkpoint is due and write it; or until an interval is over in which nothing has changed."""
        began_ns = self._clock.monotonic_ns()
        elapsed_ms = 0
        while elapsed_ms < self._interval_ms:
            await self._wait_may_be_due(self._interval_ms - elapsed_ms)
            elapsed_ms = (self._clock.monotonic_ns() - began_ns) // 1_000_000
            if self._is_due(elapsed_ms):
                await self.checkpoint()
                return
        await self._shrink_journal()

    async def _shrink_journal(self) -> None:
        """After an interval in which nothing was appended: give back the room of what is not needed any more."""
        async with self._lock:
            if self.is_behind:
                return
            try:
                await self._journal.shrink(self._written_lsn + 1)
            except WriteFailed:
                raise
            except OSError as error:  # the next interval tries again
                log.warning("The journal at rest could not be shrunk", error=error)

    async def _wait_may_be_due(self, wait_ms: int) -> None:
        """Wait until something has changed enough for a checkpoint, or so long."""
        timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._may_be_due.set)
        try:
            await self._may_be_due.wait()
        finally:
            timer.cancel()
        self._may_be_due.clear()

    def _is_due(self, elapsed_ms: int) -> bool:
        journal_bytes = self._journal.appended_bytes - self._bytes_before
        has_changes = bool(self._changed or self._registry.deleted_ids)
        lsns_behind = 0 if self._shard_log is None else self._journal.durable_lsn - self._written_lsn
        return is_due(
            journal_bytes,
            elapsed_ms,
            has_changes,
            lsns_behind,
            self._checkpoint_bytes,
            self._interval_ms,
        )

    async def checkpoint(self) -> None:
        """Write one checkpoint; returns when it is durable."""
        async with self.at_rest():
            pass

    @contextlib.asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Write one checkpoint. Within this no other begins: what the manifests name stays, and so does the journal
        after it."""
        async with self._lock:
            if self._cut_short:
                raise StorageFailed(
                    "A previous checkpoint was interrupted: restart the broker to recover from the journal"
                )
            # What changed is forgotten as it is captured. A root written after a checkpoint that failed or was
            # cancelled would drop the journal of a topic whose manifest does not hold its records yet.
            self._cut_short = True
            try:
                await self._write_checkpoint()
            except (OSError, PostdateError):
                self._counters.checkpoint_failures += 1
                raise
            self._cut_short = False
            yield

    async def _write_checkpoint(self) -> None:
        started_ns = self._clock.monotonic_ns()
        self._bytes_before = self._journal.appended_bytes
        root = self._capture_root()
        deleted, self._registry.deleted_ids = self._registry.deleted_ids, set()
        changed, self._changed = self._changed, set()
        await self._write_topics(changed)
        await self._in_thread(self._vfs.sync_dir, self._layout.topics)  # folders of new topics
        # A topic that went meanwhile has no manifest that holds its records up to the root's lsn, perhaps none
        # at all. Left out, it is one of those whose records recovery skips.
        root = replace(root, topics={i: n for i, n in root.topics.items() if i in self._registry.topics})
        await self._in_thread(replace_file, self._vfs, self._layout.manifest, [encode_broker(root)])
        await self._patience.wait_done(partial(self._journal.trim, root.checkpoint_lsn + 1))
        for topic_id in sorted(deleted):
            try:
                await self._once_in_thread(self._executor, self._remove_topic, topic_id)
            except OSError as error:
                # The next checkpoint tries again. A seal that had begun may have put a file there meanwhile; then
                # it finds nobody at work.
                self._registry.deleted_ids.add(topic_id)
                if error.errno != errno.ENOTEMPTY:
                    log.warning(
                        "A deleted topic's files could not be removed", topic_id=topic_id, error=error
                    )
        self._written_lsn = root.checkpoint_lsn
        self._counters.checkpoints += 1
        self._counters.checkpoint.observe((self._clock.monotonic_ns() - started_ns) / 1e9)

    def _capture_root(self) -> BrokerImage:
        registry, shard_log = self._registry, self._shard_log
        alive_ms = self._clock.now_ms() if self.last_alive_ms is None else self.last_alive_ms
        return BrokerImage(
            broker_id=self._broker_id,
            checkpoint_lsn=self._journal.durable_lsn,
            topics={topic.topic_id: topic.name for topic in registry.topics.values()},
            next_topic_id=registry.next_topic_id,
            next_ledger_id=registry.next_ledger_id,
            last_alive_ms=alive_ms if shard_log is None else shard_log.until_ms,
            shard="" if shard_log is None else shard_log.shard.text,
            epoch=0 if shard_log is None else shard_log.epoch,
        )

    async def _write_topics(self, topic_ids: set[int]) -> None:
        waiting = iter(sorted(topic_ids))

        async def write_some() -> None:
            for topic_id in waiting:
                if topic := self._registry.topics.get(topic_id):
                    await self._checkpoint_topic(topic)

        tasks = [asyncio.create_task(write_some()) for _ in range(min(TOPICS_AT_ONCE, len(topic_ids)))]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _checkpoint_topic(self, topic: Topic) -> None:
        capture = topic.capture()
        await self._persist(capture)
        for part in capture.parts:
            if part.durable is not None:
                await part.durable()

    async def _persist(self, capture: TopicCapture) -> None:
        await self._in_thread(self._layout.make_topic_folders, self._vfs, capture.image.topic_id)
        for part in capture.parts:
            for ledger, named in part.ledgers:
                await self._patience.wait_done(partial(ledger.persist, named, self._sync_executor))
        await self._in_thread(self._write_topic, capture)

    def _write_topic(self, capture: TopicCapture) -> None:
        """Blocking: files, folders, manifest, in this order; then the files that it does not name any more."""
        topic_id = capture.image.topic_id
        folder = self._layout.topic(topic_id)
        # Each sync counts: with thousands of changed topics they hold up the journal's.
        for part in capture.parts:
            for file in part.files:
                replace_file(self._vfs, f"{folder}/{file.path}", [file.encode()])
            if part.ledgers:
                self._vfs.sync_dir(self._layout.ledgers(topic_id))
        # The sync of the topic's folder in here is that of new folders too. Until it returns, a crash can leave the
        # manifest of a new topic without them; nobody reads it then, as the root does not name the topic yet.
        replace_file(self._vfs, self._layout.topic_manifest(topic_id), [encode_topic(capture.image)])
        for part in capture.parts:
            for path in part.replaced:
                self._remove_unnamed(f"{folder}/{path}")

    def _remove_unnamed(self, path: str) -> None:
        try:
            self._vfs.remove(path)
        except FileNotFoundError:  # a first attempt at this manifest has removed it
            pass
        except OSError as error:
            log.warning(
                "An unneeded file could not be removed; the next start removes it", path=path, error=error
            )

    async def remove_ledger(self, dropped: DroppedLedger) -> None:
        """Remove the files of a ledger that its topic's manifest does not name any more."""
        await self._once_in_thread(self._executor, self._remove_ledger, dropped)
        self._counters.removed_ledgers += dropped.successor is None
        is_compacted = dropped.successor is not None and (
            dropped.successor.name.generation != dropped.ledger.name.generation
        )
        self._counters.compacted_ledgers += is_compacted
        left_bytes = 0 if dropped.successor is None else dropped.successor.disk_bytes
        self._counters.reclaimed_bytes += max(0, dropped.ledger.disk_bytes - left_bytes)

    def _remove_ledger(self, dropped: DroppedLedger) -> None:
        dropped.ledger.delete(self._vfs, dropped.successor)
        if dropped.amendments_file:
            with contextlib.suppress(FileNotFoundError):
                self._vfs.remove(f"{dropped.ledger.name.folder}/{dropped.amendments_file}")

    def _remove_topic(self, topic_id: int) -> None:
        # A file that is open takes space until it is closed.
        self._open_files.discard_topic(topic_id)
        if self._vfs.exists(self._layout.topic(topic_id)):
            remove_tree(self._vfs, self._layout.topic(topic_id))

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Call it in one of the threads for syncs, and again if it failed without having written anything."""
        return await self._patience.wait_done(
            partial(self._once_in_thread, self._sync_executor, function, *arguments)
        )

    async def _once_in_thread(
        self, executor: Executor | None, function: Callable[..., T], *arguments: object
    ) -> T:
        loop = asyncio.get_running_loop()
        # Shielded: half a checkpoint may be left behind by a crash, but not by a caller that went away while
        # the file thread still writes.
        writing = loop.run_in_executor(executor, function, *arguments)
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(_failed_for_nobody)  # what ended the checkpoint has been told
            raise


def _failed_for_nobody(writing: asyncio.Future[Any]) -> None:
    if not writing.cancelled():
        writing.exception()
