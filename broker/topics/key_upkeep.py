"""Keeps the lookup of one topic's schedule keys up with its log: taken up at the start, built again if it is damaged,
sealed and merged in the background (`key_sealing`). What a seal or merge leaves out, and what goes with a ledger, is
remembered for a while (`settled_upkeep`).

    manifest: runs, keys_through -> rows from there to the end of the log, read -> every batch that is applied

Invariants:
  KEYUPKEEP-1  While `is_ready`, the lookup finds every entry that holds a key, but for those of damaged blocks, which
      are stepped over until the next start. Keyed calls wait for it.
  KEYUPKEEP-2  Only a row that was passed in order moves `keys_through`: while rows are read, who reads them says how
      far.
  KEYUPKEEP-3  A checkpoint at any moment names the runs that there are, or were named before they were taken up.
  KEYUPKEEP-4  An entry whose time had come is perhaps in no run any more. If it is moved, its row is read again;
      after a restart so is that of every entry that was moved and whose time has not come.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from broker.delayed.schedule_keys import KeyImage, ScheduleKeys
from broker.errors import Corrupt, PostdateError, Unavailable
from broker.model import (
    START,
    Position,
    UInt32Column,
    UInt64Column,
    members,
)
from broker.observe.logs import Notice, get_logger
from broker.runtime.supervise import OneAtATime, YieldBudget
from broker.storage.changes import Changed
from broker.storage.records import Produced
from broker.topics.key_rows import KeyRows
from broker.topics.key_sealing import KeySealing
from broker.topics.key_services import KeyedTopic, KeyServices
from broker.topics.refusals import topic_not_found
from broker.topics.settled_upkeep import SettledUpkeep

log = get_logger(__name__)

_READ_ROWS = 65_536
_RETRY_SECONDS = 1.0


class KeyUpkeep:
    """See the module's description."""

    def __init__(self, topic: KeyedTopic, services: KeyServices, image: KeyImage) -> None:
        """`image`: what the manifest says. The topic's log is as the manifest says, too."""
        self._rows = KeyRows(topic)
        self.keys = ScheduleKeys(
            services.storage(topic.topic_id),
            services.cache,
            self._rows.standings,
            image,
            now_ms=services.clock.now_ms,
            executor=services.executor,
            limits=services.limits,
        )
        self.version = 0
        """Another one: an entry holds a key that nobody found before."""
        self.is_ready = False
        self._topic = topic
        self._services = services
        self._is_restored = False
        self._begins_anew = False
        self._next = image.keys_through  # the first row that is to be read
        self._read_end = topic.log.end  # rows from here on were added when they were applied
        self._moved: list[tuple[int, UInt32Column]] = []  # rows that are to be read besides
        self._settled = asyncio.Event()  # it is ready, or in trouble
        self._trouble: PostdateError | OSError | None = None
        self._budget = YieldBudget(services.clock)
        self._notice = Notice(services.clock)
        self._reading = OneAtATime(services.spawn, f"reading of schedule keys of topic {topic.topic_id}")
        self._is_running = False
        self._has_ended = False
        self.remembered = SettledUpkeep(topic, self.keys, services)
        self._sealing = KeySealing(topic, self.keys, self.remembered, services)

    # -- life ------------------------------------------------------------------------------------------------

    def start(self, *, anew: bool = False) -> None:
        """Recovery has ended, if there was one: read what is missing.

        `anew`: the clock was ahead when the runs were written, so they lack keys of what has yet to come.
        """
        self._begins_anew = anew
        self._is_running = True
        self._reading.start(self._read)

    def stop(self) -> None:
        self._is_running = False
        self._has_ended = True
        self._settled.set()
        self.remembered.stop()
        self._reading.cancel()
        self._sealing.stop()
        self.keys.close()

    async def wait_ready(self) -> None:
        """Return once `is_ready`; raises Unavailable if rows cannot be read, which is tried again, or are not any
        more."""
        while not self.is_ready:
            if not self._has_ended:
                await self._settled.wait()
            if self._has_ended:
                if self._topic.deleted:
                    raise topic_not_found(self._topic.name)
                raise Unavailable("The broker is stopping", reason="DRAINING")
            if self._trouble is not None:
                raise Unavailable(
                    "The schedule keys of this topic cannot be looked up: a file cannot be read. The broker's log "
                    "says which",
                    reason="SCHEDULE_KEYS_UNAVAILABLE",
                ) from self._trouble

    async def wait_room(self) -> None:
        """Return once there is room for keys of new messages."""
        await self._sealing.wait_room_to_produce()

    async def find(self, hashes: UInt64Column) -> dict[int, list[Position]]:
        """The entries with some hashes, newest first, of one moment at which it was ready. Raises Unavailable."""
        while True:
            await self.wait_ready()
            version = self.version
            try:
                entries = await self.keys.find(hashes)
            except Corrupt as error:
                if version == self.version:
                    log.error(
                        "Schedule keys are damaged; rebuilding them from the ledgers",
                        topic_id=self._topic.topic_id,
                        error=str(error),
                    )
                    self.begin_anew()
                continue
            if self.is_ready and version == self.version:
                return entries

    # -- what the log does -----------------------------------------------------------------------------------

    def applied(self, record: Produced, hashes: UInt64Column) -> None:
        first, count = record.first_entry_id, len(record.times)
        expected = self.keys.in_flight.of_batch(Position(record.ledger_id, first))
        if expected is not None and len(expected) == count == np.count_nonzero(record.times):
            hashes = expected  # one column, and not every eleventh word
            entry_ids = np.arange(first, first + count, dtype=np.uint32)
        else:
            at = np.flatnonzero((hashes != 0) & (record.times != 0))
            hashes, entry_ids = hashes[at], (at + first).astype(np.uint32)
        self.keys.add(record.ledger_id, entry_ids, hashes, is_expected=expected is not None)
        if self.is_ready:
            self.keys.passed(self._topic.log.end)  # KEYUPKEEP-2
        if len(hashes):
            self._sealing.look()

    def moved(self, ledgers: dict[int, Changed]) -> None:
        if not self._is_running:
            return  # in a recovery all that was moved is read later on (KEYUPKEEP-4)
        frontier_ms = self._topic.frontier_ms
        for ledger_id, changed in ledgers.items():
            was_due = changed.old_ms <= frontier_ms
            if was_due.any():
                self._moved.append((ledger_id, changed.entry_ids[was_due]))
        if self._moved:
            self._read_again()

    def image(self) -> KeyImage:
        """Return the image for the next manifest: rows that were skipped are read again at the next start."""
        image = self.keys.image()
        if self._rows.missed is None:
            return image
        return replace(image, keys_through=min(image.keys_through, self._rows.missed))

    def dropped(self) -> None:
        self._rows.note_dropped()
        self.keys.drop_ledgers_before(self._topic.log.begin.ledger_id)
        self._note_deleted()

    # -- rows that are to be read ----------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """The clock was set back: keys were left out of what has yet to come."""
        if not self._is_restored:
            self._begins_anew = True
            return
        self._clear()
        self._read_again()
        self._note_deleted()

    def _clear(self) -> None:
        self._services.counters.schedule_key_rebuilds += 1
        self.keys.clear()
        self._next, self._read_end = START, self._topic.log.end
        self._moved = []
        self._rows.note_all_is_read_again()

    def _read_again(self) -> None:
        self.is_ready = False
        self.version += 1
        self._settled.clear()
        if self._is_running:
            self._reading.start(self._read)

    async def _read(self) -> None:
        """Until the lookup is ready."""
        while True:
            try:
                if not self._is_restored:
                    await self._restore()
                await self._read_missing()
                return
            except (OSError, PostdateError) as error:
                # Other topics go on, and so does what has no schedule key.
                if self._notice.is_time():
                    log.error(
                        "Schedule keys cannot be looked up because a ledger cannot be read",
                        topic_id=self._topic.topic_id,
                        error=str(error),
                    )
                self._trouble = error
                self._settled.set()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _restore(self) -> None:
        try:
            await self.keys.restore()
        except (OSError, PostdateError):  # which it has logged
            self._begins_anew = True
        self._is_restored = True
        self.remembered.start(self._rows)
        self._sealing.start()
        if self._begins_anew:
            self._clear()
            self._note_deleted()
            return
        self._note_deleted()  # settled keys may have expired
        frontier_ms = self._topic.frontier_ms
        for ledger_id, amendments in self._topic.log.amendments.items():
            if ledger_id <= self._next.ledger_id and len(amendments.entry_ids):
                is_pending = (amendments.deliver_at_ms > frontier_ms) & ~members(
                    amendments.entry_ids, amendments.cancelled
                )
                self._moved.append((ledger_id, amendments.entry_ids[is_pending]))

    async def _read_missing(self) -> None:
        while True:
            while self._next < self._read_end:
                await self._read_rows()
            while self._moved:
                await self._read_moved()
            if self._next >= self._read_end:
                break
        # No await since the last look.
        self.is_ready = True
        self._trouble = None
        self.keys.passed(self._topic.log.end)
        self._settled.set()
        self._sealing.look()

    async def _read_rows(self) -> None:
        """Rows in the order of the log."""
        topic_log = self._topic.log
        position, version = self._next, self.version
        ledger_id, first = position
        count = topic_log.entry_count(ledger_id)
        if count is None or first >= count:
            following = topic_log.next_ledger_id(ledger_id)
            self._next = (
                Position(following, 0) if following is not None else max(topic_log.end, self._read_end)
            )
            return
        count = min(_READ_ROWS, count - first)
        entry_ids, hashes = await self._rows.read_keys(
            ledger_id, np.arange(first, first + count, dtype=np.uint32), also_settled=True
        )
        if self._next == position and version == self.version:  # it was not damaged meanwhile
            self.keys.add(ledger_id, entry_ids, hashes)
            self._next = Position(ledger_id, first + count)
            self.keys.passed(self._next)
        await self._sealing.wait_room_to_read()
        await self._budget.spent()

    async def _read_moved(self) -> None:
        ledger_id, entry_ids = self._moved[-1]
        version = self.version
        found_ids, hashes = await self._rows.read_keys(ledger_id, entry_ids[:_READ_ROWS], also_settled=False)
        if version != self.version:
            return  # there is more to read, or all is read again
        self.keys.add(ledger_id, found_ids, hashes)
        self._moved[-1] = (ledger_id, entry_ids[_READ_ROWS:])
        if len(entry_ids) <= _READ_ROWS:
            self._moved.pop()
        await self._sealing.wait_room_to_read()
        await self._budget.spent()

    def _note_deleted(self) -> None:
        if self.keys.has_deleted:
            self._topic.note_change()  # the next manifest names them no more, and then they go
