"""The journal: the one durable log of records, with group commit.

`Journal` runs on the event loop and decides: it gathers what is submitted, gives out lsns, calls `apply` and
completes futures. A `GroupLog` makes groups durable, one at a time. While one group is stored, the next gathers; it is
appended only after the one before is durable (JOURNAL-3).

A group is appended and settled by the task of `run`, but for a record that comes alone: where nothing is under way and
the last group was of one record, `submit` appends it at once, and it is settled as soon as the loop hears that it is
stored. Where records come together, the first one waits for the others of its round of the loop. `run` takes over
whatever does not go that way: a write that failed, records that came meanwhile, the end.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from broker.errors import Fenced, OutOfRange, StorageFailed, Unavailable
from broker.runtime.patience import Patience
from broker.runtime.steps import StepFuture
from broker.settings import MIB
from broker.storage.frame import (
    LENGTH_MAX,
    RECORD_TYPE_FIRST,
    RECORD_TYPE_LAST,
    Part,
    byte_parts,
    framed_bytes,
)
from broker.storage.group_log import GroupLog, NewRecord, StoredGroup, records_from
from broker.storage.segment import Group

T = TypeVar("T")

_TOLD_TOGETHER = 8


@dataclass(frozen=True, slots=True)
class JournalStats:
    """Counters since the journal was opened, and its present size."""

    groups: int
    records: int
    bytes: int
    stored_bytes: int
    pending_bytes: int


class _Submitted(NamedTuple):
    """A record on its way to the log."""

    record: NewRecord
    framed_bytes: int
    apply: Callable[[int], Any]
    future: asyncio.Future[Any]


class _Group(NamedTuple):
    """The records of one group commit."""

    first_lsn: int
    submitted: list[_Submitted]
    framed_bytes: int


class Journal:
    """Makes records durable, many with one sync, and applies them in lsn order.

    A submitted record is queued, then in the group being stored, then durable. `apply` runs only then, and
    every `apply` of a group before anybody is told. After a failure the journal is `failed` for good: nothing
    is written any more, because after a failed sync nobody knows what is on disk, and a sync that succeeds
    later would vouch for bytes that the system has dropped. Whoever waits gets `StorageFailed`, which leaves
    open whether the record is on disk; the next recovery settles that.
    """

    def __init__(
        self,
        log: GroupLog,
        *,
        record_bytes_max: int = 64 * MIB,
        group_bytes_max: int = 8 * MIB,
        pending_bytes_max: int = 64 * MIB,
        group_gap_ms: int = 0,
        on_failed: Callable[[StorageFailed], None] | None = None,
        observe_sync: Callable[[float], None] | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`group_gap_ms`: the least time between the beginnings of two groups, where each costs money."""
        assert 0 < record_bytes_max <= LENGTH_MAX
        self._log = log
        self._record_bytes_max = record_bytes_max
        self._group_bytes_max = group_bytes_max
        self._pending_bytes_max = pending_bytes_max
        self._group_gap_seconds = group_gap_ms / 1e3
        self._begun_seconds = -self._group_gap_seconds  # when the last group was begun, on the loop's clock
        self._on_failed = on_failed
        self._observe_sync = observe_sync
        self._patience = patience or Patience()
        self._queue: deque[_Submitted] = deque()
        self._taken: deque[_Group] = deque()  # being written, or durable and not settled; two at most
        self._submitted: asyncio.Future[None] | None = None  # what `run` waits for while the queue is empty
        self._alone: asyncio.Future[StoredGroup] | None = None  # begun by `submit`, until `run` takes it over
        self._last_count = 1  # records of the last group
        self._context = contextvars.Context()  # of `run`
        self._room: list[asyncio.Future[None]] = []
        self._started = False
        self._stopped = asyncio.Event()
        self._closing = False
        self._follows = False
        self._failed: StorageFailed | None = None
        self._next_lsn = log.next_index
        self._durable_lsn = self._opened_lsn = log.next_index - 1
        self._pending_bytes = 0
        self._groups = 0
        self._appended_bytes = 0

    @property
    def next_lsn(self) -> int:
        """The lsn of the first record that no group has taken yet."""
        return self._next_lsn

    @property
    def durable_lsn(self) -> int:
        """The lsn of the last record that no crash can take back; what is applied, except within `apply`."""
        return self._durable_lsn

    @property
    def pending_bytes(self) -> int:
        """Return the framed bytes that are queued or being written."""
        return self._pending_bytes

    @property
    def appended_bytes(self) -> int:
        """All that became durable since opening; a checkpoint remembers it and compares."""
        return self._appended_bytes

    @property
    def failed(self) -> StorageFailed | None:
        return self._failed

    def stats(self) -> JournalStats:
        return JournalStats(
            groups=self._groups,
            records=self._durable_lsn - self._opened_lsn,
            bytes=self._appended_bytes,
            stored_bytes=self._log.stored_bytes,
            pending_bytes=self._pending_bytes,
        )

    def replay(self, from_lsn: int) -> Iterator[tuple[int, int, memoryview]]:
        """Every durable (lsn, type, body) from `from_lsn` on. Blocks; for recovery, before `run` starts."""
        return records_from(self._log.read(from_lsn), from_lsn)

    async def trim(self, below: int) -> None:
        """Give up records below an lsn. One at a time, and only when manifests that do without them are durable."""
        await self._log.trim(below)

    async def shrink(self, below: int) -> None:
        """As `trim`, of a journal that nothing was appended to for a while: it takes little room until it goes on."""
        await self._log.shrink(below)

    def submit(self, record_type: int, parts: Sequence[Part], apply: Callable[[int], T]) -> asyncio.Future[T]:
        """Queue one record; its future completes once the record is durable and applied.

        `apply(lsn)` runs on the loop, in lsn order, and gives the future its result. Cancelling the future
        changes nothing else. Buffers must not change until then.
        """
        self._check_open()
        assert RECORD_TYPE_FIRST <= record_type <= RECORD_TYPE_LAST
        buffers, body_bytes = byte_parts(parts)
        if body_bytes > self._record_bytes_max:
            raise OutOfRange(
                f"A record of {body_bytes} bytes is over the journal's limit of {self._record_bytes_max}",
                limit=self._record_bytes_max,
            )
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        record_bytes = framed_bytes(body_bytes)
        self._queue.append(_Submitted((record_type, buffers, body_bytes), record_bytes, apply, future))
        self._pending_bytes += record_bytes
        if self._last_count == 1 and self._may_begin_alone():
            self._begin_alone()
        else:
            self._wake_run()
        return future

    async def wait_room(self) -> None:
        """Wait until there is room for a record; raises StorageFailed if there will never be."""
        while self._pending_bytes >= self._pending_bytes_max and self._failed is None:
            # Whoever is woken looks again, because those woken before it have submitted meanwhile.
            waiter = asyncio.get_running_loop().create_future()
            self._room.append(waiter)
            await waiter
        self._check_open()

    async def run(self) -> None:
        """Append groups until `close` or a failure; a failure is told to `on_failed`. Runs once."""
        if self._started:  # `close` came before the first step of our task, and writes what is queued
            return
        self._started = True
        self._context = contextvars.copy_context()
        try:
            await self._write_groups()
        except (OSError, Fenced) as error:
            self._fail(f"The journal could not be written: {error}", error)
        except asyncio.CancelledError as error:
            # Nobody would write what is queued, and a group may be half written: its outcome is unknown.
            self._fail("The journal was stopped before this record was durable", error, report=False)
            raise
        except BaseException as error:
            self._fail("The journal stopped on a bug", error)
            raise
        finally:
            self._stopped.set()

    async def close(self) -> None:
        """Write what is queued, then close the log. Later submits are refused."""
        self._closing = True
        self._wake_run()
        await self.run()
        await self._stopped.wait()
        await self._log.close()

    def follow_only(self) -> None:
        """Refuse records from now on: somebody else appends to the log, and `followed` tells what."""
        assert not self._started
        self._follows = True

    def followed(self, group: Group, byte_count: int) -> None:
        """Note a group of somebody else that was read from the log and applied."""
        assert self._follows
        assert group.first_lsn == self._next_lsn
        self._durable_lsn = group.first_lsn + len(group.records) - 1
        self._next_lsn = self._durable_lsn + 1
        self._groups += 1
        self._appended_bytes += byte_count

    def fail(self, message: str, cause: BaseException) -> None:
        """End writing because something else of the broker could not be written; whoever calls this tells of it.

        A group that is being written may become durable; like that of a failed sync, its outcome is unknown.
        """
        self._fail(message, cause, report=False)
        self._wake_run()

    async def _write_groups(self) -> None:
        while await self._wait_work():
            write, self._alone = self._alone, None
            if write is None:
                await self._wait_gap()
                if not self._queue:  # `fail` came meanwhile
                    continue
                write = self._start_write()
            while write is not None:
                write = await self._finish_write(await self._wait_written(write))

    async def _wait_work(self) -> bool:
        """Wait for a record, or a write to take over; False if none will come."""
        if not self._queue and not self._closing and self._failed is None:
            self._submitted = asyncio.get_running_loop().create_future()
            await self._submitted
        return bool(self._queue) or self._alone is not None

    async def _wait_gap(self) -> None:
        """Wait until the next group may begin."""
        if (seconds := self._gap_seconds_left()) > 0:
            await asyncio.sleep(seconds)

    def _gap_seconds_left(self) -> float:
        """Return how long what is queued is to gather yet; a full group does not wait."""
        if not self._group_gap_seconds or self._closing or self._pending_bytes >= self._group_bytes_max:
            return 0.0
        return self._begun_seconds + self._group_gap_seconds - asyncio.get_running_loop().time()

    def _wake_run(self) -> None:
        if self._submitted is not None and not self._submitted.done():
            self._submitted.set_result(None)

    def _may_begin_alone(self) -> bool:
        """Return whether nothing is under way, and `run` sleeps."""
        return (
            not self._taken
            and self._submitted is not None
            and not self._submitted.done()
            and not self._group_gap_seconds
        )

    def _begin_alone(self) -> None:
        """Append the record that was submitted."""
        try:
            self._alone = write = self._start_write()
        except BaseException as bug:
            self._leave_to_run(bug)
            return
        if isinstance(write, StepFuture):
            write.when_done = self._alone_written
        else:
            write.add_done_callback(self._alone_written)

    def _alone_written(self, write: asyncio.Future[StoredGroup]) -> None:
        """Settle the group that `submit` began, unless that is for `run`."""
        if write is not self._alone:  # `run` has it
            return
        if self._queue or self._closing or self._failed is not None or write.cancelled() or write.exception():
            self._wake_run()
            return
        self._alone = None
        try:
            self._context.run(self._settle_alone, write.result())
        except BaseException as bug:
            self._leave_to_run(bug)

    def _settle_alone(self, written: StoredGroup) -> None:
        [durable] = self._taken[0].submitted
        _set_results([durable], self._settle(written))
        if self._queue or self._failed is not None:
            self._wake_run()

    def _leave_to_run(self, bug: BaseException) -> None:
        """`run` ends with it, and whoever runs it is told."""
        self._alone = asyncio.get_running_loop().create_future()
        self._alone.set_exception(bug)
        self._wake_run()

    def _start_write(self) -> asyncio.Future[StoredGroup]:
        group = self._take_group()
        self._taken.append(group)
        if self._group_gap_seconds:
            self._begun_seconds = asyncio.get_running_loop().time()
        return self._append(group)

    async def _wait_written(self, write: asyncio.Future[StoredGroup]) -> StoredGroup | None:
        """Wait for the group in flight; what failed before a byte of it was written is begun again.

        None if `fail` came meanwhile, which has told those who wait.
        """
        begun = [write]

        async def written() -> StoredGroup | None:
            if begun:
                return await begun.pop()
            return await self._append(self._taken[0]) if self._failed is None else None

        return await self._patience.wait_done(written)

    def _append(self, group: _Group) -> asyncio.Future[StoredGroup]:
        return self._log.append(group.first_lsn, [submitted.record for submitted in group.submitted])

    def _take_group(self) -> _Group:
        """All that is queued, up to `group_bytes_max`, and one record at least."""
        queue, group_bytes = self._queue, 0
        taken: list[_Submitted] = []
        while queue and (not taken or group_bytes + queue[0].framed_bytes <= self._group_bytes_max):
            group_bytes += queue[0].framed_bytes
            taken.append(queue.popleft())
        group = _Group(self._next_lsn, taken, group_bytes)
        self._last_count = len(taken)
        self._next_lsn += len(taken)
        return group

    async def _finish_write(self, written: StoredGroup | None) -> asyncio.Future[StoredGroup] | None:
        """Settle the group whose sync has returned; returns the write of the next group, if there is one."""
        if written is None or self._failed is not None:  # `fail` came, and has told those who wait
            return None
        durable = self._taken[0]
        # What has gathered goes to the disk first, so that the disk works while we apply.
        write = self._start_write() if self._queue and self._gap_seconds_left() <= 0 else None
        await _tell(durable.submitted, self._settle(written))
        if write is not None and self._failed is not None:  # `fail` came meanwhile, and told those who wait
            write.add_done_callback(_take_note)
            return None
        return write

    def _settle(self, written: StoredGroup) -> list[Any]:
        """Apply the group that is durable; returns what those who wait for it are to be told."""
        durable = self._taken[0]
        self._durable_lsn = durable.first_lsn + len(durable.submitted) - 1
        self._pending_bytes -= durable.framed_bytes
        self._groups += 1
        self._appended_bytes += written.bytes
        results = self._apply(durable)
        if self._failed is None:
            self._taken.popleft()
            self._wake_room()
            if self._observe_sync is not None:
                self._observe_sync(written.sync_seconds)
        return results

    def _apply(self, group: _Group) -> list[Any]:
        """Apply a durable group, all of it before anybody is told; returns the results, fewer after a bug."""
        results: list[Any] = []
        for lsn, submitted in enumerate(group.submitted, group.first_lsn):
            # Whatever goes wrong in here, memory no longer agrees with the log: the record is durable and
            # cannot be refused any more. So nothing may be applied after it, and the broker must recover.
            try:
                results.append(submitted.apply(lsn))
            except Exception as bug:
                _set_results(group.submitted, results)
                _set_exception(submitted.future, bug)
                self._fail(f"The journal stopped: a durable record could not be applied: {bug!r}", bug)
                break
        return results

    def _fail(self, message: str, cause: BaseException | None, *, report: bool = True) -> None:
        """Stop for good and tell everybody who waits."""
        if self._failed is not None:
            return
        failure = StorageFailed(message)
        failure.__cause__ = cause
        self._failed = failure
        waiting = [*chain.from_iterable(group.submitted for group in self._taken), *self._queue]
        self._taken.clear()
        self._queue.clear()
        self._pending_bytes = 0
        for submitted in waiting:
            _set_exception(submitted.future, self._refusal())
        self._wake_room()
        if report and self._on_failed is not None:
            self._on_failed(failure)

    def _wake_room(self) -> None:
        if self._room and self._pending_bytes < self._pending_bytes_max:
            waiters, self._room = self._room, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _check_open(self) -> None:
        if self._failed is not None:
            raise self._refusal()
        if self._closing or self._follows:
            raise Unavailable("The journal is closed" if self._closing else "The broker is a standby")

    def _refusal(self) -> StorageFailed:
        # One instance each: an exception raised in many tasks would gather all their tracebacks.
        assert self._failed is not None
        refusal = StorageFailed(self._failed.message)
        refusal.__cause__ = self._failed.__cause__
        return refusal


def _take_note(write: asyncio.Future[StoredGroup]) -> None:
    """A failed write after writing has ended is news to nobody; without this asyncio would log it."""
    if not write.cancelled():
        write.exception()


async def _tell(group: Sequence[_Submitted], results: Sequence[Any]) -> None:
    """Tell those whose records are applied, some in a round of the loop.

    A store that took long settles dozens of records at once. What they wake would hold up all that came due meanwhile.
    """
    first = 0
    try:
        while first + _TOLD_TOGETHER < len(results):
            end = first + _TOLD_TOGETHER
            _set_results(group[first:end], results[first:end])
            first = end
            await asyncio.sleep(0)
    finally:
        _set_results(group[first:], results[first:])


def _set_results(group: Sequence[_Submitted], results: Sequence[Any]) -> None:
    for submitted, result in zip(group, results, strict=False):
        if not submitted.future.done():  # cancelled: the record stands all the same
            submitted.future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Not everybody waits for their future. `on_failed` has told of the failure, once; without this line
        # asyncio would log it again for each of them.
        future.exception()
