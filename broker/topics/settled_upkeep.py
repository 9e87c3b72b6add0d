"""Keeps what is remembered of one topic's settled schedule keys: taken from ledgers before they go, merged, expired.

What seals and merges of the lookup leave out comes by itself (`SettledKeys.note`).

Invariant:
  SETTLEDUPKEEP-1  What became of a message is remembered before its row goes, with its ledger or in a compaction, as
      far as its row can be read: both wait for a durable manifest that names what is remembered.
"""

from __future__ import annotations

import asyncio

import numpy as np

from broker.delayed.key_writer import REMEMBERED
from broker.delayed.schedule_keys import KeyImage, ScheduleKeys
from broker.errors import Corrupt, PostdateError
from broker.model import Position, UInt32Column, UInt64Column
from broker.observe.logs import get_logger
from broker.runtime.supervise import OneAtATime, YieldBudget
from broker.storage.key_run import KeyColumns, newest_of_each, sort_keys
from broker.topics.key_rows import KeyRows
from broker.topics.key_services import KeyedTopic, KeyServices

log = get_logger(__name__)

_READ_ROWS = 65_536
_EXPIRY_LOOK_SECONDS = 3_600.0  # at the latest, as the clock may step


class SettledUpkeep:
    """See the module's description. Does nothing before `start`: the runs are not taken up yet."""

    def __init__(
        self,
        topic: KeyedTopic,
        keys: ScheduleKeys,
        services: KeyServices,
    ) -> None:
        self._topic = topic
        self._settled = keys.settled
        self._services = services
        self._rows: KeyRows | None = None
        self.durable_version = 0
        """Version up to which a durable manifest names what was remembered."""
        self._budget = YieldBudget(services.clock)
        self._merging = OneAtATime(
            services.spawn, f"merge of settled schedule keys of topic {topic.topic_id}"
        )
        self._expiry: asyncio.TimerHandle | None = None

    def start(self, rows: KeyRows) -> None:
        """The runs that there were are taken up."""
        self._rows = rows
        self._arm()

    def stop(self) -> None:
        self._rows = None
        if self._expiry is not None:
            self._expiry.cancel()
        self._merging.cancel()

    def image_durable(self, image: KeyImage) -> None:
        self.durable_version = max(self.durable_version, image.settled_version)

    async def remember(self, ledger_id: int) -> int | None:
        """Rows of a ledger are about to go: remember what became of those messages that had a key (SETTLEDUPKEEP-1).

        Returns what `durable_version` has to reach, 0 where there were none; None if it is to be tried again later.
        """
        if not self._settled.remembers:
            return 0
        first = noted = 0
        while (rows := self._rows) and first < (count := self._topic.log.entry_count(ledger_id) or 0):
            entry_ids = np.arange(first, min(first + _READ_ROWS, count), dtype=np.uint32)
            first += len(entry_ids)
            try:
                await self._topic.prepare_folders()
                noted += await self._remember(ledger_id, entry_ids, rows)
            except (OSError, PostdateError) as error:
                log.error(
                    "Ledger rows cannot be read; their settled schedule keys cannot be looked up",
                    topic_id=self._topic.topic_id,
                    ledger_id=ledger_id,
                    error=str(error),
                )
                if not isinstance(error, Corrupt):
                    return None
            await self._budget.spent()
        if self._rows is None:
            return None  # not begun yet, or the topic is being deleted
        if not noted:
            return 0
        is_written = await self._settled.flush()
        self.changed()
        return self._settled.version if is_written else None

    async def find(self, hashes: UInt64Column) -> dict[int, dict[Position, bool]]:
        """Look hashes up; see `SettledKeys.find`. Raises Unavailable."""
        return {} if self._rows is None else await self._settled.find(hashes)

    def changed(self) -> None:
        """Runs came or went: let the next manifest say so, merge if it is time for it, see to it that they expire."""
        self._topic.note_change()
        if self._rows is None:
            return
        if not self._merging.is_running and self._settled.needs_merge():
            self._merging.start(self._merge)
        self._arm()

    async def _remember(self, ledger_id: int, entry_ids: UInt32Column, rows: KeyRows) -> int:
        """Note some rows; returns how many."""
        columns = await rows.read(ledger_id, entry_ids)
        at = np.flatnonzero(columns["schedule_hash"]) if columns is not None else ()
        if columns is None or not len(at):
            return 0
        standing_of = await rows.standings(ledger_id, entry_ids[at])
        ledger_ids = np.full(len(at), ledger_id, dtype=np.int64)
        keys = KeyColumns(columns["schedule_hash"][at], ledger_ids, entry_ids[at])
        noted = 0
        for standing, kind in REMEMBERED:
            settled = newest_of_each(sort_keys(keys.part(standing_of == standing)))
            await self._settled.note(kind, settled)
            noted += len(settled)
        return noted

    async def _merge(self) -> None:
        while self._settled.needs_merge():
            if not await self._settled.merge():
                break
            self._topic.note_change()

    def _arm(self) -> None:
        """One timer, while a run waits to expire."""
        expiry_ms = self._settled.next_expiry_ms()
        if self._expiry is not None or expiry_ms is None:
            return
        seconds = max(1.0, (expiry_ms - self._services.clock.now_ms()) / 1000)
        later = asyncio.get_running_loop().call_later
        self._expiry = later(min(seconds, _EXPIRY_LOOK_SECONDS), self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry = None
        if self._settled.expire() or self._settled.needs_merge():
            self.changed()
        self._arm()
