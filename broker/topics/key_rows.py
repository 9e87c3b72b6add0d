"""Schedule keys of entries, and what became of these, as a topic's rows have it: read around what is damaged.

A block of rows that cannot be read is stepped over. The first one is remembered, so that a later start reads it again.
"""

from __future__ import annotations

import numpy as np

from broker.delayed.key_writer import Standing
from broker.errors import Corrupt, MissingFile, PostdateError
from broker.model import (
    CANCELLED_MS,
    Array,
    Int64Column,
    Position,
    RowColumn,
    UInt32Column,
    UInt64Column,
)
from broker.observe.logs import get_logger
from broker.storage.key_filter import BoolColumn
from broker.storage.salvage import UNREADABLE_TIME, by_block, read_marking_damage, times_around_damage
from broker.topics.key_services import KeyedTopic

log = get_logger(__name__)


class KeyRows:
    """See the module's description."""

    def __init__(self, topic: KeyedTopic) -> None:
        self._topic = topic
        self.missed: Position | None = None
        """The first of the rows that could not be read for damage."""

    def note_all_is_read_again(self) -> None:
        self.missed = None

    def note_dropped(self) -> None:
        """Ledgers are gone, and with them what was missed of them."""
        if self.missed is not None:
            self.missed = max(self.missed, self._topic.log.begin)

    async def read_keys(
        self, ledger_id: int, entry_ids: UInt32Column, *, also_settled: bool
    ) -> tuple[UInt32Column, UInt64Column]:
        """Read which of some rising ids hold a key, and its hash, but those of each block that is damaged.

        `also_settled`: and of what held one the newest of each hash, as before a restart: a key that replaced its own
        message again and again would be looked for among all of them.
        """
        try:
            return await self._keys_of(ledger_id, entry_ids, also_settled=also_settled)
        except MissingFile:
            raise
        except Corrupt as error:
            parts, damage = by_block(entry_ids), error
        if len(parts) == 1:
            self._miss(ledger_id, entry_ids, damage)
            return entry_ids[:0], np.empty(0, np.uint64)
        columns = [await self.read_keys(ledger_id, part, also_settled=also_settled) for part in parts]
        ids, hashes = zip(*columns, strict=True)
        return np.concatenate(ids), np.concatenate(hashes)

    def _miss(self, ledger_id: int, entry_ids: UInt32Column, damage: Corrupt) -> None:
        first = Position(ledger_id, int(entry_ids[0]))
        self.missed = first if self.missed is None else min(self.missed, first)
        log.error(
            "Ledger rows cannot be read; their schedule keys are treated as unused",
            topic_id=self._topic.topic_id,
            ledger_id=ledger_id,
            entry_id=first.entry_id,
            messages=len(entry_ids),
            error=str(damage),
        )

    async def _keys_of(
        self, ledger_id: int, entry_ids: UInt32Column, *, also_settled: bool
    ) -> tuple[UInt32Column, UInt64Column]:
        """As `read_keys`, in one read; none if the ledger is gone."""
        nothing = np.empty(0, np.uint32), np.empty(0, np.uint64)
        try:
            rows = await self.read(ledger_id, entry_ids)
            if rows is None:
                return nothing
            at = np.flatnonzero(rows["schedule_hash"])
            if not len(at):
                return nothing
            times = await self._topic.log.times_of(ledger_id, entry_ids[at])
        except (OSError, PostdateError):
            if self._topic.log.entry_count(ledger_id) is None:
                return nothing
            raise
        is_kept = self._is_pending(times)
        if also_settled:
            had = np.flatnonzero(~is_kept & (times != 0))[::-1]
            is_kept[had[np.unique(rows["schedule_hash"][at[had]], return_index=True)[1]]] = True
        at = at[is_kept]
        return entry_ids[at], rows["schedule_hash"][at]

    async def read(self, ledger_id: int, entry_ids: UInt32Column) -> RowColumn | None:
        """Rows of some rising ids; None if there are none, or the ledger is gone."""
        if not len(entry_ids) or self._topic.log.entry_count(ledger_id) is None:
            return None
        first, count = int(entry_ids[0]), len(entry_ids)
        if int(entry_ids[-1]) - first == count - 1:
            return await self._topic.log.read_rows(ledger_id, first, count)
        _, rows, _ = await read_marking_damage(self._topic.log, ledger_id, entry_ids, 1)
        return rows

    async def standings(self, ledger_id: int, entry_ids: UInt32Column) -> Array:
        """The `Standing` of entries with keys; those whose times are damaged may hold theirs."""
        topic_log = self._topic.log
        unknown = np.full(len(entry_ids), Standing.UNKNOWN)
        if topic_log.entry_count(ledger_id) is None:
            return unknown
        try:
            times, _ = await times_around_damage(topic_log.times_of, ledger_id, entry_ids)
            standings = np.where(times >= CANCELLED_MS, Standing.CANCELLED, Standing.DELIVERED)
            standings[times == 0] = Standing.UNKNOWN
            standings[self._is_pending(times) | (times == UNREADABLE_TIME)] = Standing.HOLDS
            ledger = topic_log.find(ledger_id)
            if ledger is not None and ledger.sparse is not None:
                # What a compaction left out counts as cancelled, and was remembered before it.
                cancelled = np.flatnonzero(standings == Standing.CANCELLED)
                rows = await self.read(ledger_id, entry_ids[cancelled])
                if rows is not None:
                    standings[cancelled[rows["schedule_hash"] == 0]] = Standing.UNKNOWN
        except (OSError, PostdateError):
            if topic_log.entry_count(ledger_id) is None:
                return unknown
            raise
        return standings

    def _is_pending(self, times: Int64Column) -> BoolColumn:
        is_pending: BoolColumn = (times > self._topic.frontier_ms) & (times < CANCELLED_MS)
        return is_pending
