"""The seam under the journal: a log of groups, each stored whole or not at all.

A group is what one commit stores: records, one after the other. Its index is the lsn of its first record, so the next
group's index follows from it, and an index means the same after a restart. `Journal` numbers the groups and keeps one
append in flight; how a group becomes durable, and where, is the log's affair.

How a log is opened is no part of the protocol, since each one needs something else for it; `folder/broker.py` opens
the local one. Backups (`journal_copy`), restore and the check of the journal (`jobs/journal`) read the segments of the
local log directly: they work on files of a data directory, and another log needs its own.

Invariants, of every log:
  GROUP-1  An index gets at most one group, ever; it is the first index that is free, so there are no holes.
  GROUP-2  What `append` was answered for is read back, byte for byte, until it is trimmed; also after a crash.
  GROUP-3  Of an append that failed or was cancelled nothing is known. After `WriteFailed` nothing may be appended any
           more. Any other OSError has stored nothing, and the same group may be appended again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from broker.runtime.vfs import Buffer
from broker.storage.record_types import RecordType
from broker.storage.segment import Group

NewRecord = tuple[int, Sequence[Buffer], int]
"""The type of a record, the parts of its body as bytes, and their length."""


class StoredGroup(NamedTuple):
    """The cost of a durable group."""

    bytes: int
    sync_seconds: float


class GroupLog(Protocol):
    """A log of groups."""

    @property
    def next_index(self) -> int:
        """The first index that is free: where the next group goes."""

    @property
    def stored_bytes(self) -> int:
        """The room that the log takes where it is stored, roughly."""

    def append(self, index: int, records: Sequence[NewRecord]) -> asyncio.Future[StoredGroup]:
        """Begin to store a group, at once; the future completes when no crash can take it back.

        It fails with Fenced if somebody else's group is there. One at a time.
        """

    def read(self, index: int) -> Iterator[Group]:
        """The groups from the one that holds `index` on, as far as they are durable now.

        Blocks; any thread. Raises Corrupt if they were trimmed or are damaged.
        """

    async def tail(self, index: int, wait_ms: int) -> Group | None:
        """The group that holds `index`; waits so long for it to come."""

    async def trim(self, below: int) -> None:
        """Give up groups whose records all lie below an index: they may go, and need not. One at a time."""

    async def shrink(self, below: int) -> None:
        """As `trim`, where nothing was appended for a while: room that is kept for what comes goes as well.

        Does nothing if something was appended from `below` on. One trim or shrink at a time.
        """

    async def close(self) -> None:
        """End writing, once the append in flight has ended."""


class ShardName(NamedTuple):
    """The shard of a cluster that a data directory is of."""

    text: str
    """Its cluster, its number and how many there are; empty: the directory is of no cluster, and has a journal."""

    broker_id: str
    """The name of the brokers of all nodes that hold it, for life; empty: a random one."""


NO_SHARD = ShardName("", "")


class ShardLog(GroupLog, Protocol):
    """A log that lies elsewhere than in the data directory of the broker, and that other brokers append to."""

    @property
    def shard(self) -> ShardName: ...

    @property
    def group_gap_ms(self) -> int:
        """The least time between the beginnings of two groups: each costs money."""

    @property
    def epoch(self) -> int:
        """The epoch of the last group that was read or appended."""

    @property
    def until_ms(self) -> int:
        """The greatest time until which anybody may have taken itself for the owner."""

    @property
    def ceiling_ms(self) -> int:
        """The same of those who owned the shard before: what is due by then may have been handed out."""

    async def open(self, from_index: int, *, needed_to: int, epoch: int, until_ms: int) -> None:
        """Begin after a data directory whose manifests say so.

        Raises Corrupt unless the log reaches to `needed_to`, the greatest lsn that they hold.
        """

    def groups(self, index: int) -> AsyncGenerator[Group, None]:
        """The groups from an index on, to the last that was read or appended. Raises Corrupt if they were trimmed."""


def records_from(groups: Iterable[Group], from_lsn: int) -> Iterator[tuple[int, int, memoryview]]:
    """The (lsn, type, body) of each record from `from_lsn` on; blanks have no effect and are left out."""
    for group in groups:
        for lsn, record in enumerate(group.records, group.first_lsn):
            if lsn >= from_lsn and record.type != RecordType.LOG_BLANK:
                yield lsn, record.type, record.body
