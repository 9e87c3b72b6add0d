"""Backups: consistent copies of all topics at one lsn, made while the broker goes on.

    1  write a checkpoint, and hold off the next one; the backup's lsn is what is durable then
    2  give second names, in `backup.pins`, to all files that the manifests name; copy the journal's end: what
       lies between the checkpoint's lsn and the backup's; let checkpoints go on
    3  link or copy the pinned files into `<name>.partial`, folder by folder, each synced
    4  write `broker.manifest`, then `backup.json`, then take `unfinished` away; rename the folder to `<name>`

Manifests of one checkpoint may differ in their lsns by what came while it was written. The journal's end makes them
equal: who starts from the backup replays it, as after a crash. Nothing that a manifest names goes away but within a
checkpoint, so nothing is missing at step 2; after it the pins keep what later checkpoints remove. Where files cannot
have second names, checkpoints wait until all is copied.

A crash leaves a `.partial` folder that no broker starts from, and pins; the next start removes both. Files that a
broker would write to are copies in every backup, never links, so what it holds never changes.

Work on files goes in small steps to the thread that seals and merges buckets: deliveries, reads and the journal never
wait for it. A disk that fails here fails the backup only; a checkpoint that fails ends writing, as always.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from broker.config import BrokerConfig
from broker.errors import Corrupt, NotFound, PostdateError, Refused, StorageFailed, Unavailable
from broker.folder.checkpoint import Checkpointer
from broker.folder.tree_copy import Steps, TreeCopy, advance, is_linkless, pin_topics, remove_in_steps
from broker.observe.logs import get_logger
from broker.observe.metrics import BrokerCounters
from broker.runtime.clock import Clock
from broker.runtime.steps import run_step
from broker.runtime.supervise import Spawn
from broker.runtime.vfs import File, Vfs, list_if_there, replace_file
from broker.storage.backup_marker import (
    Backup,
    backup_name,
    check_backup_name,
    check_label,
    decode_marker,
    encode_marker,
    is_backup_name,
    plan_prune,
)
from broker.storage.journal import Journal
from broker.storage.journal_copy import JournalCopy
from broker.storage.layout import Layout
from broker.storage.manifest import BrokerImage, decode_broker
from broker.storage.named_files import read_named
from broker.storage.record_types import RecordType

log = get_logger(__name__)

T = TypeVar("T")

PARTIAL = ".partial"
_NAMING_FILES = frozenset({int(RecordType.LEDGERS_COMPACTED)})
_CHECKPOINTS_MAX = 10


@dataclass(frozen=True, slots=True)
class _Cut:
    """State of the live directory between two checkpoints, at one moment."""

    root: bytes
    image: BrokerImage
    alive: bytes | None
    lsn: int


class Backups:
    """The backups of one broker. One is made or deleted at a time."""

    def __init__(
        self,
        *,
        config: BrokerConfig,
        layout: Layout,
        vfs: Vfs,
        clock: Clock,
        executor: Executor | None,
        checkpointer: Checkpointer,
        journal: Journal,
        broker_id: str,
        counters: BrokerCounters,
        spawn: Spawn,
        in_cluster: bool = False,
    ) -> None:
        self._config = config
        self._layout = layout
        self._vfs = vfs
        self._clock = clock
        self._executor = executor
        self._checkpointer = checkpointer
        self._journal = journal
        self._broker_id = broker_id
        self._counters = counters
        self._spawn = spawn
        self._in_cluster = in_cluster
        self._folder = backup_folder(config)
        self._busy = False
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None

    def path(self, name: str) -> str:
        """The folder of a backup."""
        return f"{self._folder}/{name}"

    def begin(self) -> None:
        """At the start of a broker: remove what its last life left unfinished, and see when it made its last backup."""
        if self._vfs.exists(self._folder):
            self._tidying = self._spawn("backups of an earlier life", self._tidy())

    async def _tidy(self) -> None:
        try:
            own = [backup for backup in await self.list() if backup.broker_id == self._broker_id]
            if own:
                self._note_last(max(own, key=lambda backup: backup.create_time_ms))
            async with self._alone():
                await self._remove_unfinished()
        except PostdateError as error:
            if not self._stopping:
                log.warning(
                    "Remains of earlier backups could not be removed",
                    folder=self._folder,
                    error=error.message,
                )

    async def create(self, label: str) -> Backup:
        """Make a backup; returns when it is complete and durable."""
        check_label(label)
        if self._in_cluster:
            raise Refused(
                "Backups are not available in a cluster: its nodes keep bases in the object store",
                reason="NOT_IN_A_CLUSTER",
            )
        return await self._do("backup", lambda: self._make(label))

    async def list(self) -> list[Backup]:
        """All complete backups in the folder, the oldest first."""
        return await self._in_thread(lambda: read_markers(self._vfs, self._folder))

    async def delete(self, name: str) -> None:
        """Delete a backup."""
        check_backup_name(name)
        await self._do("deletion of a backup", lambda: self._delete_alone(name))

    async def stop(self) -> None:
        """Give up what is being made or deleted; the next start removes what there is of it."""
        # Not cancelled: a checkpoint that is cut short leaves a longer replay to the next start.
        self._stopping = True
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    # -- one at a time ---------------------------------------------------------------------------------------

    async def _do(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do what nothing else may be done beside, to its end: a caller who goes away neither stops it nor takes the
        folder's lock along."""
        if self._busy:
            raise backup_running()
        self._busy = True
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_look_at)
        try:
            self._task = self._spawn(what, self._run(work, done))
        except BaseException:
            self._busy = False
            raise
        return await asyncio.shield(done)

    async def _run(self, work: Callable[[], Awaitable[T]], done: asyncio.Future[T]) -> None:
        try:
            result = await work()
        except asyncio.CancelledError:
            _fail(done, Unavailable("The broker is stopping", reason="DRAINING"))
            raise
        except BaseException as error:
            _fail(done, error)
            # Of a backup's own failures nothing is lost. What else there is came from the checkpoint, or is a bug.
            if not isinstance(error, PostdateError) or isinstance(error, StorageFailed):
                raise
        else:
            if not done.done():
                done.set_result(result)
        finally:
            self._busy = False

    # -- making one ------------------------------------------------------------------------------------------

    async def _make(self, label: str) -> Backup:
        try:
            return await self._make_and_prune(label)
        except Exception as error:
            self._counters.backup_failures += 1
            log.error("Backup failed", label=label, error=error)
            raise

    async def _make_and_prune(self, label: str) -> Backup:
        started_ns = self._clock.monotonic_ns()
        async with self._alone():
            await self._remove_unfinished()
            backup = await self._make_alone(label, started_ns)
            self._note_last(backup)
            self._counters.backups += 1
            log.info(
                "Backup completed",
                path=self.path(backup.name),
                lsn=backup.lsn,
                files=backup.files,
                bytes=backup.bytes,
                copied_bytes=backup.copied_bytes,
                seconds=backup.duration_ms / 1000,
            )
            await self._prune()
        return backup

    async def _make_alone(self, label: str, started_ns: int) -> Backup:
        now_ms = self._clock.now_ms()
        name = await self._in_thread(lambda: free_name(self._vfs, self._folder, now_ms, label))
        partial_ = Layout(self.path(name) + PARTIAL)
        pins = Layout(self._layout.pins)
        try:
            await self._in_thread(lambda: _make_folders(self._vfs, partial_))
            copy, cut = await self._copy(partial_, pins)
            backup = Backup(
                name=name,
                label=label,
                broker_id=self._broker_id,
                create_time_ms=now_ms,
                lsn=cut.lsn,
                topics=len(cut.image.topics),
                files=copy.files,
                bytes=copy.bytes,
                copied_bytes=copy.copied_bytes,
                duration_ms=(self._clock.monotonic_ns() - started_ns) // 1_000_000,
            )
            await self._in_thread(lambda: _finish(self._vfs, partial_, self.path(name), cut, backup))
        except Exception:
            # Whatever cannot be removed now, the next backup or the next start removes.
            with contextlib.suppress(PostdateError):
                await self._remove_unfinished()
            raise
        await self._steps(remove_in_steps(self._vfs, pins.root), missing_ok=True)
        return backup

    async def _copy(self, partial_: Layout, pins: Layout) -> tuple[TreeCopy, _Cut]:
        for _ in range(_CHECKPOINTS_MAX):
            async with self._checkpointer.at_rest():
                lsn = self._journal.durable_lsn
                cut = await self._in_thread(partial(_note_cut, self._vfs, self._layout, lsn))
                copy = TreeCopy(self._vfs, pins, partial_, self._config.disk_reserve_bytes)
                await self._in_thread(partial(copy.check_room, 0))
                if not await self._copy_journal(copy, partial_, cut):
                    continue
                pinned = await self._pin(pins, cut.image)
                if not pinned:
                    copy.source = self._layout
                    await self._steps(copy.topics(cut.image))
            if pinned:
                await self._steps(copy.topics(cut.image))
            return copy, cut
        raise Unavailable(
            "The backup could not begin, because compactions were committed again and again: try again",
            reason="BACKUP_FAILED",
            retry_after_ms=60_000,
        )

    async def _pin(self, pins: Layout, root: BrokerImage) -> bool:
        """Pin all files; False where files cannot have second names."""
        try:
            await self._steps(pin_topics(self._vfs, self._layout, pins, root))
        except BackupFailed as error:
            if isinstance(error.__cause__, OSError) and is_linkless(error.__cause__):
                return False
            raise
        return True

    async def _copy_journal(self, copy: TreeCopy, partial_: Layout, cut: _Cut) -> bool:
        """False if it names files that no manifest names yet; after another checkpoint one does."""
        journal = JournalCopy(
            self._vfs,
            self._layout.journal,
            partial_.journal,
            cut.image.checkpoint_lsn + 1,
            cut.lsn,
            self._config.tuning.journal_segment_bytes,
        )
        copied = await self._steps(journal.steps())
        if journal.record_types & _NAMING_FILES:
            await self._in_thread(journal.remove)
            return False
        copy.bytes += copied
        copy.copied_bytes += copied
        copy.files += 1
        return True

    # -- removing ----------------------------------------------------------------------------------------------

    async def _prune(self) -> None:
        config = self._config
        names = plan_prune(
            await self.list(),
            self._broker_id,
            self._clock.now_ms(),
            config.backup_keep_count,
            config.backup_max_age_ms,
        )
        for name in names:
            try:
                await self._delete(name)
            except PostdateError as error:
                log.warning("An old backup could not be deleted", name=name, error=error.message)
            else:
                log.info("An old backup was deleted", name=name)

    async def _delete_alone(self, name: str) -> None:
        async with self._alone():
            if not await self._in_thread(lambda: self._vfs.exists(self.path(name))):
                raise NotFound(f"Backup {name!r} does not exist", reason="BACKUP_NOT_FOUND")
            await self._delete(name)

    async def _delete(self, name: str) -> None:
        path = self.path(name)
        # From here on it is no backup, whatever is left of it.
        await self._in_thread(lambda: _rename(self._vfs, path, path + PARTIAL))
        await self._steps(remove_in_steps(self._vfs, path + PARTIAL))

    async def _remove_unfinished(self) -> None:
        # Who deleted a backup may have been killed before that was durable.
        await self._in_thread(lambda: self._vfs.sync_dir(self._folder))
        names = await self._in_thread(lambda: self._vfs.list_dir(self._folder))
        folders = [
            self.path(name)
            for name in names
            if name.endswith(PARTIAL) and is_backup_name(name.removesuffix(PARTIAL))
        ]
        for folder in (self._layout.pins, *folders):
            await self._steps(remove_in_steps(self._vfs, folder), missing_ok=True)

    # -- files ---------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold the folder's lock: brokers may share it, and nobody may take what another one makes for left over."""
        if self._tidying is not None and self._tidying is not asyncio.current_task():
            await asyncio.wait([self._tidying])
        lock = await self._in_thread(lambda: lock_backups(self._vfs, self._folder))
        if lock is None:
            raise backup_running()
        try:
            yield
        finally:
            lock.close()

    async def _steps(self, steps: Steps, *, missing_ok: bool = False) -> int:
        """Run all steps, a few at a time; returns the bytes they copied."""
        total = 0
        while True:
            self._check_going_on()
            try:
                is_done, byte_count = await run_step(self._executor, partial(advance, steps))
            except FileNotFoundError as error:
                if missing_ok:
                    return total
                raise BackupFailed(error) from error
            except OSError as error:
                raise BackupFailed(error) from error
            total += byte_count
            if is_done:
                return total

    async def _in_thread(self, work: Callable[[], T]) -> T:
        self._check_going_on()
        try:
            return await run_step(self._executor, work)
        except OSError as error:
            raise BackupFailed(error) from error

    def _check_going_on(self) -> None:
        if self._stopping:
            raise Unavailable("The broker is stopping", reason="DRAINING")

    def _note_last(self, backup: Backup) -> None:
        counters = self._counters
        counters.backup_last_ms = backup.create_time_ms
        counters.backup_last_seconds = backup.duration_ms / 1000
        counters.backup_last_bytes = backup.bytes


class BackupFailed(Unavailable):
    """An error of the disk that a backup met."""

    def __init__(self, error: OSError) -> None:
        log.warning("A file of the backups could not be read, written or removed", error=error)
        super().__init__(
            f"Backups cannot be read, written or removed: {error.strerror}",
            reason="BACKUP_FAILED",
            retry_after_ms=60_000,
        )


def backup_folder(config: BrokerConfig) -> str:
    """Return where backups lie."""
    return f"{config.data_dir}/backups" if config.backup_dir == "auto" else config.backup_dir.rstrip("/")


def read_marker(vfs: Vfs, folder: str) -> Backup:
    """Read the marker of a backup; NotFound if the folder is none. Blocks."""
    path = Layout(folder).backup_marker
    if not vfs.exists(path):
        raise NotFound(
            f"{folder!r} is not a complete backup: it has no backup.json", reason="BACKUP_NOT_FOUND"
        )
    return decode_marker(read_named(vfs, path), path)


def backup_running() -> Refused:
    """Return the error for a second backup or deletion at a time."""
    return Refused(
        "Another backup is being made or deleted; only one at a time is possible", reason="BACKUP_RUNNING"
    )


def _fail(done: asyncio.Future[T], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)


def _look_at(done: asyncio.Future[T]) -> None:
    """Perhaps nobody waits for it any more."""
    if not done.cancelled():
        done.exception()


def lock_backups(vfs: Vfs, folder: str) -> File | None:
    """Lock the folder of backups, made if it is not there; None if another one holds it."""
    if not vfs.exists(folder):
        vfs.make_dir(folder)
        vfs.sync_dir(folder.rpartition("/")[0] or ".")
    return vfs.lock(f"{folder}/lock")


def free_name(vfs: Vfs, folder: str, now_ms: int, label: str) -> str:
    """Return a name that no backup in the folder has."""
    while vfs.exists(f"{folder}/{backup_name(now_ms, label)}"):
        now_ms += 1
    return backup_name(now_ms, label)


def _make_folders(vfs: Vfs, partial_: Layout) -> None:
    vfs.make_dir(partial_.root)
    vfs.open(partial_.unfinished, create=True).close()
    vfs.make_dir(partial_.journal)
    vfs.make_dir(partial_.topics)


def _note_cut(vfs: Vfs, layout: Layout, lsn: int) -> _Cut:
    root = read_named(vfs, layout.manifest)
    alive: bytes | None = None
    with contextlib.suppress(Corrupt):  # it is not there, and may be made or removed at any time
        alive = read_named(vfs, layout.alive)
    return _Cut(root, decode_broker(root, layout.manifest), alive, lsn)


def _finish(vfs: Vfs, partial_: Layout, final: str, cut: _Cut, backup: Backup) -> None:
    if cut.alive is not None:
        replace_file(vfs, partial_.alive, [cut.alive])
    vfs.sync_dir(partial_.root)
    replace_file(vfs, partial_.manifest, [cut.root])
    replace_file(vfs, partial_.backup_marker, [encode_marker(backup)])
    vfs.remove(partial_.unfinished)
    vfs.sync_dir(partial_.root)
    _rename(vfs, partial_.root, final)


def _rename(vfs: Vfs, source: str, target: str) -> None:
    vfs.rename(source, target)
    vfs.sync_dir(target.rpartition("/")[0])


def read_markers(vfs: Vfs, folder: str) -> list[Backup]:
    """Return the complete backups in a folder, the oldest first."""
    backups: list[Backup] = []
    for name in list_if_there(vfs, folder):
        if not is_backup_name(name):
            continue
        try:
            backup = read_marker(vfs, f"{folder}/{name}")
        except (NotFound, Corrupt) as error:
            log.warning("A folder is not listed as a backup", folder=f"{folder}/{name}", error=error.message)
            continue
        backups.append(backup)
    return backups
