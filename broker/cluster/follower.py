"""Following a shard's log and taking it over, as far as that is about the log.

    FOLLOW     read the group at the next index and apply it; a take-over only after a look at the bases
    TAKE OVER  after a lease's silence append a take-over at that index; look at the bases; the shard is ours

The rules are in `take_over.py`. What applies groups, makes bases and serves is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from broker.cluster.group_head import GroupKind, LogEntry
from broker.cluster.lease import LeaseClock, OwnerLease
from broker.cluster.object_group_log import TAIL_PAUSE_SECONDS, ObjectGroupLog
from broker.cluster.take_over import is_stray, may_take_over
from broker.errors import Fenced
from broker.observe.logs import get_logger

log = get_logger(__name__)


class CutOff(Exception):
    """A folder is behind the part of the log that was trimmed: its node must begin with a base."""


class TakenOver(NamedTuple):
    """A take-over that won."""

    at_index: int
    epoch: int
    until_ms: int
    """The greatest time until which anybody before may have taken itself for the owner."""


class Follower:
    """A standby's reading of the log, and its attempts to become the owner."""

    def __init__(
        self,
        group_log: ObjectGroupLog,
        lease: OwnerLease,
        clock: LeaseClock,
        node: str,
        trimmed_below: Callable[[], Awaitable[int]],
        *,
        rank: int = 0,
        rest_ms: int = 0,
        pause_seconds: float = TAIL_PAUSE_SECONDS,
    ) -> None:
        """`trimmed_below` looks at the bases, and returns the index below which the log may be trimmed.

        `rest_ms`: time for which it takes over after a longer silence than others.
        """
        self._log = group_log
        self._lease = lease
        self._clock = clock
        self._node = node
        self._trimmed_below = trimmed_below
        self._rank = rank
        self._pause_seconds = pause_seconds
        # Also after a restart: a folder proves nothing of an owner (CLUSTER-13).
        self._heard_ns = clock.boottime_ns()
        self._rests_until_ns = self._heard_ns + rest_ms * 1_000_000
        self._resigned_to_us = False
        self.competes_last = False
        """It takes over after a longer silence than others, and for another reason than a rest."""

    @property
    def silent_ms(self) -> float:
        """Return the time since the last group was read."""
        return (self._clock.boottime_ns() - self._heard_ns) / 1e6

    @property
    def owner_lease_ms(self) -> int:
        return self._lease.owner_lease_ms

    async def run(
        self,
        apply: Callable[[LogEntry], Awaitable[None]],
        note_end: Callable[[bool], None] = lambda is_end: None,
    ) -> TakenOver:
        """Apply every group as it comes, until this node owns the shard. Raises CutOff, Corrupt.

        `note_end` is told that there is nothing more to read, or (False) that the log cannot be read.
        """
        try:
            return await self._run(apply, note_end)
        finally:
            await self._log.stop_following()

    async def _run(
        self, apply: Callable[[LogEntry], Awaitable[None]], note_end: Callable[[bool], None]
    ) -> TakenOver:
        await self._check_trim()
        while True:
            entry = await self._read(note_end)
            if entry is not None:
                if entry.head.kind is GroupKind.TAKE_OVER:
                    await self._check_bases(entry.head.first_lsn)
                await apply(entry)
            elif not self._may_take_over():
                await asyncio.sleep(self._pause_seconds)
            elif (taken := await self._take_over()) is not None:
                return taken

    async def _read(self, note_end: Callable[[bool], None]) -> LogEntry | None:
        try:
            entry = await self._log.follow()
            if entry is None and self._log.unread:  # it was listed, and is gone
                await self._check_trim()
        except OSError as error:
            log.warning("The journal could not be read", error=str(error))
            note_end(False)
            return None
        if entry is None:
            note_end(True)
        else:
            self._heard_ns = self._clock.boottime_ns()
            self._resigned_to_us = entry.resigned_to == self._node
        return entry

    def _may_take_over(self) -> bool:
        return may_take_over(
            self.silent_ms,
            self._lease.owner_lease_ms,
            self._rank,
            rests=self.competes_last or self._clock.boottime_ns() < self._rests_until_ns,
            resigned_to_us=self._resigned_to_us,
            is_fresh=not self._log.epoch,
        )

    async def _take_over(self) -> TakenOver | None:
        """Try to take over; None if somebody was alive after all."""
        index, epoch, until_ms = self._log.next_index, self._log.epoch + 1, self._log.until_ms
        try:
            await self._check_trim()  # a take-over where the log was trimmed would stay for good (CLUSTER-4)
        except OSError as error:
            log.warning("The journal could not be read before a take-over", error=str(error))
            await asyncio.sleep(self._pause_seconds)
            return None
        try:
            await self._log.take_over(index, epoch)
        except Fenced:
            self._heard_ns = self._clock.boottime_ns()
            self._resigned_to_us = False
            return None
        try:
            await self._check_bases(index)
        except CutOff:
            self._lease.end()
            raise
        return TakenOver(index, epoch, until_ms)

    async def _check_trim(self) -> None:
        """Raise CutOff if what comes next was trimmed."""
        if await self._log.is_cut_off():
            raise CutOff(f"Index {self._log.next_index} was trimmed")

    async def _check_bases(self, index: int) -> None:
        """Raise CutOff if the older of the two newest bases covers a take-over, which is a stray then (CLUSTER-5)."""
        while True:
            try:
                trimmed_below = await self._trimmed_below()
                break
            except OSError as error:
                log.warning("The bases could not be determined", error=str(error))
                await asyncio.sleep(self._pause_seconds)
        if is_stray(index, trimmed_below):
            raise CutOff(f"Index {index} was trimmed: the journal begins with {trimmed_below}")
