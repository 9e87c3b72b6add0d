"""A log of groups in an object store: one object a group, named by its index (`group_objects.py`).

The store's create-if-absent is all that decides (CLUSTER-1). `append` trusts "stored" and nothing else: what failed,
timed out or "exists" is repeated and read until its outcome is known (CLUSTER-2), so the log has no holes and no second
form of a group.

  CLUSTER-6  Every group carries cluster, shard and shard count; a foreign one is refused. So is a log that does not
             reach to an lsn that a folder holds, and one without index 1, which `cluster create` writes: it is never
             begun anew.
  CLUSTER-17  The log is trimmed below the older of the two newest bases, each read back once, oldest index first; what
              a late writer put there again goes with the next trim.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from broker.cluster.group_head import (
    ADVICE,
    NONCE_BYTES,
    GroupKind,
    Head,
    LogEntry,
    Shard,
    blank,
    decode_head,
    encode_entry,
    is_blank,
)
from broker.cluster.group_objects import AHEAD, GroupObjects
from broker.cluster.group_reader import GroupReader
from broker.cluster.lease import Moment, OwnerLease
from broker.cluster.object_store import ObjectStore
from broker.cluster.read_ahead import AheadLimits
from broker.cluster.remote_store import AttemptTime
from broker.cluster.take_over import Answer, AppendStep, after_create, after_read, is_removable, is_void
from broker.errors import Corrupt, Fenced
from broker.observe.logs import get_logger
from broker.runtime.flight import for_all
from broker.runtime.vfs import WriteFailed
from broker.storage.group_log import NewRecord, StoredGroup
from broker.storage.segment import Group

T = TypeVar("T")

LOG_ATTEMPT = AttemptTime(seconds=1.0, seconds_per_mib=0.1)
"""Time for an attempt of an append: three fit into a lease."""

FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.5
TAIL_PAUSE_SECONDS = 0.25
REMOVED_TOGETHER = 16

log = get_logger(__name__)


class ObjectGroupLog:
    """The log of one shard, for one process: who appends to it, or follows it.

    `follow` reads the group at `next_index`, which moves behind every group that was read or appended.
    """

    def __init__(
        self,
        store: ObjectStore,
        shard: Shard,
        node: str,
        lease: OwnerLease,
        *,
        repeat_pause_seconds: float = FIRST_PAUSE_SECONDS,
        tail_pause_seconds: float = TAIL_PAUSE_SECONDS,
        ahead: AheadLimits = AHEAD,
        make_nonce: Callable[[], bytes] = lambda: os.urandom(NONCE_BYTES),
    ) -> None:
        self._objects = GroupObjects(store, shard, ahead)
        self._reader = GroupReader(self._objects)
        self._node = node
        self._lease = lease
        self._repeat_pause_seconds = repeat_pause_seconds
        self._tail_pause_seconds = tail_pause_seconds
        self._make_nonce = make_nonce
        self._epoch = 0
        self._until_ms = 0
        self._floor_ms = (
            0  # no time after it may have been handed out: of owners before, and of our own clock
        )
        self._next_index = 1
        self._stored_bytes = 0
        self._counted_below = 1  # groups from here on are not in `_stored_bytes` yet
        self._appending: asyncio.Task[StoredGroup] | None = None
        self._closing: asyncio.Event = asyncio.Event()
        self._grown = asyncio.Event()

    @property
    def next_index(self) -> int:
        return self._next_index

    @property
    def stored_bytes(self) -> int:
        return self._stored_bytes

    @property
    def epoch(self) -> int:
        """The epoch of the last group that was read or appended."""
        return self._epoch

    @property
    def unread(self) -> int:
        """The records that the log is known to have, from its opening or a later list, and that have not been read."""
        return max(self._reader.known_end - self._next_index, 0)

    @property
    def until_ms(self) -> int:
        """The greatest time until which the writer of a group that was read or appended may own the shard."""
        return self._until_ms

    @property
    def is_closed(self) -> bool:
        """Return whether it was closed: nothing is appended any more."""
        return self._closing.is_set()

    async def open(self, from_index: int, epoch: int, *, needed_to: int = 0, until_ms: int = 0) -> None:
        """Begin to read where a folder ends: at an index, after a group of an epoch.

        Raises Corrupt unless the log is there and reaches to that index and behind `needed_to` (CLUSTER-6).
        """
        if await self._objects.read(1) is None:
            raise Corrupt(
                "The journal has no first group: it was lost, or the prefix is wrong. `postdate-broker cluster create` "
                "writes it, once",
                path=self._objects.place(1),
                advice=ADVICE,
            )
        last, sizes = await self._last()
        self._check_reach(last.next_index, max(from_index - 1, needed_to))
        await self._reader.begin(from_index, last.next_index, sizes)
        self._next_index, self._epoch, self._until_ms = from_index, epoch, until_ms

    def check_read(self, needed_to: int) -> None:
        """Raise Corrupt unless what was read reaches behind an lsn that a folder holds (CLUSTER-6)."""
        self._check_reach(self._next_index, needed_to)

    def append(self, index: int, records: Sequence[NewRecord]) -> asyncio.Future[StoredGroup]:
        """As `GroupLog.append`; also fails with WriteFailed if `close` came before its outcome was known."""
        kind = GroupKind.HEARTBEAT if is_blank(records) else GroupKind.RECORDS
        return self._begin(kind, self._epoch, index, records)

    def take_over(self, index: int, epoch: int) -> asyncio.Future[StoredGroup]:
        """Begin to append a take-over; from then on appends are of this epoch."""
        self._floor_ms = self._until_ms
        return self._begin(GroupKind.TAKE_OVER, epoch, index, blank())

    def resign(self, index: int, to: str = "") -> asyncio.Future[StoredGroup]:
        """Begin to append a resignation, the last group of this owner, whose lease ends at once."""
        self._lease.end()  # before: whoever is named takes over as soon as it is stored
        return self._begin(GroupKind.RESIGN, self._epoch, index, blank(to.encode()))

    def read(self, index: int) -> Iterator[Group]:
        end = self._next_index
        if index >= end:
            return
        with _LoopThread() as thread:
            entries = self._objects.entries(index, end)
            try:
                while (entry := thread.run(_next(entries))) is not None:
                    yield entry.group
            finally:
                thread.run(entries.aclose())

    async def groups(self, index: int) -> AsyncGenerator[Group, None]:
        """As `read`, for who may wait."""
        if index < self._next_index:
            async with contextlib.aclosing(self._objects.entries(index, self._next_index)) as entries:
                async for entry in entries:
                    yield entry.group

    async def entries(self, index: int) -> AsyncGenerator[LogEntry, None]:
        """Yield the groups from the one that holds `index` on with their heads, as far as they are stored now.

        Raises Trimmed, or Corrupt if they are damaged.
        """
        end = (await self._last())[0].next_index
        if index < end:
            async with contextlib.aclosing(self._objects.entries(index, end)) as entries:
                async for entry in entries:
                    yield entry

    async def follow(self) -> LogEntry | None:
        """Return the group at `next_index`, if it is there, and move behind it.

        Where many wait, some are read ahead.
        """
        entry = await self._reader.read(self._next_index)
        if (
            entry is not None and entry.head.first_lsn == self._next_index
        ):  # else an append of ours came first
            self._note(entry)
        return entry

    async def stop_following(self) -> None:
        """End what `follow` reads ahead."""
        await self._reader.end()

    async def tail(self, index: int, wait_ms: int) -> Group | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ms / 1e3):
                while self._next_index <= index:
                    self._grown.clear()
                    if await self.follow() is None:
                        await self._wait_grown()
        if self._next_index <= index:
            return None
        async with contextlib.aclosing(self._objects.entries(index, self._next_index)) as entries:
            async for entry in entries:
                return entry.group
        return None

    async def is_cut_off(self) -> bool:
        """Return whether there is no group at `next_index` but one behind it: what this reader needs was trimmed."""
        if await self._objects.read(self._next_index) is not None:
            return False
        return await self._objects.has_any_behind(self._next_index)

    async def trim(self, below: int) -> None:
        """Remove what ends below an index, oldest first, but for take-overs (CLUSTER-4, CLUSTER-17)."""
        indexes = await self._objects.sizes()
        kept = max(
            (index for index in indexes if index <= below), default=0
        )  # it holds `below`, or is the last one
        candidates = sorted(index for index in indexes if index < kept)
        # A failure ends all that is under way, as nobody would wait for it; the next trim begins with the oldest again.
        await for_all(
            iter(candidates),
            lambda index: self._remove_if_removable(index, kept, indexes[index]),
            REMOVED_TOGETHER,
        )

    async def shrink(self, below: int) -> None:
        await self.trim(below)

    async def close(self) -> None:
        """End writing once the outcome of the append in flight is known, or it was repeated for as long as a lease."""
        if self._appending is not None and not self._appending.done():
            await asyncio.wait([self._appending], timeout=self._lease.owner_lease_ms / 1e3)
        self._closing.set()
        if self._appending is not None:
            await asyncio.wait([self._appending])

    # Appending.

    def _begin(
        self, kind: GroupKind, epoch: int, index: int, records: Sequence[NewRecord]
    ) -> asyncio.Future[StoredGroup]:
        assert not self._closing.is_set()
        assert self._appending is None or self._appending.done(), "one append at a time (CLUSTER-2)"
        begin = self._lease.begin()
        self._floor_ms = max(self._floor_ms, begin.wall_ms)
        head = Head(
            kind,
            self._objects.shard,
            epoch,
            index,
            begin.wall_ms,
            self._floor_ms if kind is GroupKind.RESIGN else self._lease.until_after(begin),
            self._make_nonce(),
            self._node,
        )
        self._appending = asyncio.get_running_loop().create_task(self._append(head, records, begin))
        self._appending.add_done_callback(_look_at_error)
        # Whoever waits may be cancelled; the append goes on, as none may begin before its outcome is known (CLUSTER-2).
        return asyncio.shield(self._appending)

    async def _append(self, head: Head, records: Sequence[NewRecord], begin: Moment) -> StoredGroup:
        index = head.first_lsn
        if index != self._next_index:
            self._lease.end()  # somebody else's group was read there
            raise Fenced(
                f"The journal goes on with lsn {self._next_index}, not with {index}", reason="JOURNAL_FENCED"
            )
        body = encode_entry(head, records)
        started = asyncio.get_running_loop().time()
        await self._append_until_known(index, body)
        self._next_index = index + len(records)
        self._epoch = head.epoch
        self._until_ms = max(self._until_ms, head.until_ms)
        self._stored_bytes += len(body)
        if head.kind is not GroupKind.RESIGN:
            self._lease.extend(begin)
        self._grown.set()
        return StoredGroup(len(body), asyncio.get_running_loop().time() - started)

    async def _append_until_known(self, index: int, body: bytes) -> None:
        """Create and read until the group is stored, or another one is there (CLUSTER-2)."""
        step, pause_seconds = AppendStep.CREATE, self._repeat_pause_seconds
        while True:
            try:
                step, is_passing = await self._try(step, index, body)
            except Fenced:
                self._lease.end()
                raise
            if step is AppendStep.STORED:
                return
            if not is_passing:
                continue
            if await self._wait_closing(pause_seconds):
                raise WriteFailed(
                    None,
                    "The journal was closed before it was known whether the group is stored",
                    self._objects.place(index),
                )
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)

    async def _try(self, step: AppendStep, index: int, body: bytes) -> tuple[AppendStep, bool]:
        """Take one step of an append; returns the next one, and whether it is only worth while after a pause."""
        if step is AppendStep.CREATE:
            step = after_create(await self._create(index, body))
            return step, step is AppendStep.CREATE
        try:
            stored = await self._objects.read(index)
        except OSError as error:
            log.warning("A group could not be read", place=self._objects.place(index), error=str(error))
            return AppendStep.READ, True
        step = after_read(body, stored)
        if step is AppendStep.FENCED:
            assert stored is not None
            raise self._fenced(index, stored)
        return step, step is AppendStep.CREATE

    async def _create(self, index: int, body: bytes) -> Answer:
        try:
            await self._objects.create(index, body)
        except FileExistsError:
            return Answer.EXISTS
        except OSError as error:
            log.warning(
                "A group could not be stored; retrying", place=self._objects.place(index), error=str(error)
            )
            return Answer.UNKNOWN
        return Answer.STORED

    def _fenced(self, index: int, stored: bytes) -> Fenced:
        try:
            head = decode_head(stored, self._objects.place(index))
        except Corrupt as error:
            return Fenced(
                f"The object at the index of this node's next group is no valid group: {error.message}",
                reason="JOURNAL_FENCED",
            )
        return Fenced(
            f"Node {head.node!r} stored a group of epoch {head.epoch} at the index of this node's next group",
            reason="JOURNAL_FENCED",
            node=head.node,
            epoch=head.epoch,
        )

    async def _wait_closing(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()

    # Reading.

    def _note(self, entry: LogEntry) -> None:
        if is_void(
            entry.head.epoch, self._epoch
        ):  # with a create that is atomic there is none (CLUSTER-1, CLUSTER-4)
            raise Corrupt(
                f"A group of epoch {entry.head.epoch} follows one of epoch {self._epoch}: the store let two clients "
                "create the same object, or take-over groups were removed",
                path=self._objects.place(entry.head.first_lsn),
                advice=ADVICE,
            )
        if self._next_index >= self._counted_below:
            self._stored_bytes += entry.bytes
        self._next_index = entry.next_index
        self._epoch = entry.head.epoch
        # Who resigned has waited for those before, and hands nothing out any more.
        is_resigned = entry.head.kind is GroupKind.RESIGN
        self._until_ms = entry.head.until_ms if is_resigned else max(self._until_ms, entry.head.until_ms)
        self._grown.set()

    def _check_reach(self, next_index: int, needed_to: int) -> None:
        if next_index <= needed_to:
            raise Corrupt(
                f"The journal ends before lsn {next_index}, but the data directory contains lsn {needed_to}: it "
                "belongs to another journal, or the journal has lost groups",
                path=self._objects.place(next_index),
                advice=ADVICE,
            )

    async def _last(self) -> tuple[LogEntry, dict[int, int]]:
        """Return the last group of the log, and the bytes of all by index, which are noted."""
        while True:
            sizes = await self._objects.sizes()
            if not sizes:
                raise Corrupt(
                    "The store returns the first group, but does not list it",
                    path=self._objects.place(1),
                )
            entry = await self._objects.entry(max(sizes))
            if entry is not None:  # else it was trimmed since, behind new ones
                self._stored_bytes, self._counted_below = sum(sizes.values()), entry.next_index
                return entry, sizes

    async def _wait_grown(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._grown.wait(), self._tail_pause_seconds)

    async def _remove_if_removable(self, index: int, kept: int, stored_bytes: int) -> None:
        head = await self._objects.head(index)
        if head is not None and is_removable(head.kind, index, kept):
            await self._objects.remove(index)
            self._stored_bytes -= stored_bytes


def _look_at_error(append: asyncio.Task[StoredGroup]) -> None:
    if not append.cancelled():
        append.exception()  # its waiter may be gone; else asyncio logs that it was never looked at


async def _next(entries: AsyncIterator[LogEntry]) -> LogEntry | None:
    return await anext(entries, None)


class _LoopThread:
    """A thread with an event loop, for calls from code that may not await."""

    def __enter__(self) -> _LoopThread:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="log reader", daemon=True)
        self._thread.start()
        return self

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
