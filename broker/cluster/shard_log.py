"""A shard's log as a broker uses it: it reads and appends, and leaves the ends of the log to its node.

A checkpoint trims nothing, as standbys and new nodes read the log from older ones: what goes is what two bases cover
(CLUSTER-17). An owner's last group is a resignation.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence

from broker.cluster.group_head import Shard
from broker.cluster.object_group_log import ObjectGroupLog
from broker.errors import Fenced
from broker.observe.logs import get_logger
from broker.storage.group_log import NewRecord, ShardName, StoredGroup
from broker.storage.segment import Group

log = get_logger(__name__)


def shard_name(shard: Shard) -> ShardName:
    """Return the name of a shard in data directories. All nodes' brokers have one id, so that they share bases."""
    return ShardName(str(shard), str(uuid.uuid5(uuid.UUID(bytes=shard.cluster), str(shard))))


class FollowedLog:
    """The log of a shard that another broker owns: it is read through a follower, and from the folder's end on."""

    def __init__(self, group_log: ObjectGroupLog, shard: Shard) -> None:
        self._log = group_log
        self.shard = shard_name(shard)
        self.group_gap_ms = 0

    @property
    def next_index(self) -> int:
        return self._log.next_index

    @property
    def stored_bytes(self) -> int:
        return self._log.stored_bytes

    @property
    def epoch(self) -> int:
        return self._log.epoch

    @property
    def until_ms(self) -> int:
        return self._log.until_ms

    @property
    def ceiling_ms(self) -> int:
        return self._log.until_ms

    async def open(self, from_index: int, *, needed_to: int, epoch: int, until_ms: int) -> None:
        await self._log.open(from_index, epoch, needed_to=needed_to, until_ms=until_ms)

    def append(self, index: int, records: Sequence[NewRecord]) -> asyncio.Future[StoredGroup]:
        raise Fenced("The shard is owned by another broker", reason="JOURNAL_FENCED")

    def read(self, index: int) -> Iterator[Group]:
        return self._log.read(index)

    def groups(self, index: int) -> AsyncGenerator[Group, None]:
        return self._log.groups(index)

    async def tail(self, index: int, wait_ms: int) -> Group | None:
        return await self._log.tail(index, wait_ms)

    async def trim(self, below: int) -> None:
        """Nothing goes."""

    async def shrink(self, below: int) -> None:
        """Nothing goes."""

    async def close(self) -> None:
        """The log stays open, for the take-over."""


class OwnedLog(FollowedLog):
    """The log of a shard that was taken over."""

    def __init__(
        self, group_log: ObjectGroupLog, shard: Shard, *, ceiling_ms: int, group_gap_ms: int = 0
    ) -> None:
        """`ceiling_ms`: the `until_ms` of the take-over."""
        super().__init__(group_log, shard)
        self.group_gap_ms = group_gap_ms
        self._ceiling_ms = ceiling_ms
        self.resigns_to: str | None = None
        """The node that is to take over when this one stops, empty for any; None: the lease just ends."""

    @property
    def ceiling_ms(self) -> int:
        return self._ceiling_ms

    async def open(self, from_index: int, *, needed_to: int, epoch: int, until_ms: int) -> None:
        """The follower has read all before the take-over; a folder that is ahead of it is of another log."""
        self._log.check_read(max(from_index - 1, needed_to))

    def append(self, index: int, records: Sequence[NewRecord]) -> asyncio.Future[StoredGroup]:
        return self._log.append(index, records)

    async def close(self) -> None:
        if self.resigns_to is not None and not self._log.is_closed:
            try:
                await self._log.resign(self._log.next_index, self.resigns_to)
            except (OSError, Fenced) as error:
                log.warning(
                    "The resignation could not be stored; the owner lease will expire instead",
                    error=str(error),
                )
        await self._log.close()
