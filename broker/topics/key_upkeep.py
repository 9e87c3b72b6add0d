"""Keeps the lookup of one topic's schedule keys up with its log: taken up at the start, built again if it is damaged,
sealed and merged in the background. What a seal or merge leaves out, and what goes with a ledger, is remembered for
a while (`settled_keys`).

    manifest: runs, keys_through -> rows from there to the end of the log, read -> every batch that is applied

Seals and merges are tasks of the broker's supervisor, at most one of each a topic; between them a timer runs only
while something waits to be sealed, and another one while settled keys wait to expire.

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

from broker.delayed.key_writer import Standing
from broker.delayed.schedule_keys import KeyImage, ScheduleKeys
from broker.errors import Corrupt, MissingFile, PostdateError, Unavailable
from broker.model import (
    CANCELLED_MS,
    START,
    Array,
    Int64Column,
    Position,
    RowColumn,
    UInt32Column,
    UInt64Column,
    members,
)
from broker.observe.logs import Notice, get_logger
from broker.runtime.supervise import OneAtATime, YieldBudget
from broker.storage.changes import Changed
from broker.storage.key_filter import BoolColumn
from broker.storage.records import Produced
from broker.storage.salvage import UNREADABLE_TIME, by_block, read_marking_damage, times_around_damage
from broker.topics.key_services import KeyedTopic, KeyServices
from broker.topics.settled_upkeep import SettledUpkeep

log = get_logger(__name__)

_READ_ROWS = 65_536
_RETRY_SECONDS = 1.0
_UNSEALED_MAX = 4
"""Rows are not read on while so many times as many keys as are sealed together are in memory."""


class KeyUpkeep:
    """See the module's description."""

    def __init__(self, topic: KeyedTopic, services: KeyServices, image: KeyImage) -> None:
        """`image`: what the manifest says. The topic's log is as the manifest says, too."""
        self.keys = ScheduleKeys(
            services.storage(topic.topic_id),
            services.cache,
            self.standings,
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
        self._missed: Position | None = None  # of the rows that could not be read for damage, the first
        self._moved: list[tuple[int, UInt32Column]] = []  # rows that are to be read besides
        self._settled = asyncio.Event()  # it is ready, or in trouble
        self._trouble: PostdateError | OSError | None = None
        self._budget = YieldBudget(services.clock)
        self._notice = Notice(services.clock)
        self._timer: asyncio.TimerHandle | None = None
        self._reading = OneAtATime(services.spawn, f"reading of schedule keys of topic {topic.topic_id}")
        self._sealing = OneAtATime(services.spawn, f"seal of schedule keys of topic {topic.topic_id}")
        self._merging = OneAtATime(services.spawn, f"merge of schedule keys of topic {topic.topic_id}")
        self._is_running = False
        self.remembered = SettledUpkeep(topic, self.keys, services)

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
        self.remembered.stop()
        if self._timer is not None:
            self._timer.cancel()
        for work in (self._reading, self._sealing, self._merging):
            work.cancel()

    async def wait_ready(self) -> None:
        """Return once `is_ready`; raises Unavailable if rows cannot be read, which is tried again."""
        while not self.is_ready:
            await self._settled.wait()
            if self._trouble is not None:
                raise Unavailable(
                    "The schedule keys of this topic cannot be looked up: a file cannot be read. The broker's log "
                    "says which",
                    reason="SCHEDULE_KEYS_UNAVAILABLE",
                ) from self._trouble

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
        at = np.flatnonzero((hashes != 0) & (record.times != 0))
        if len(at):
            self.keys.add(record.ledger_id, (at + record.first_entry_id).astype(np.uint32), hashes[at])
        if self.is_ready:
            self.keys.passed(self._topic.log.end)  # KEYUPKEEP-2
        if len(at):
            self._look()

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
        if self._missed is None:
            return image
        return replace(image, keys_through=min(image.keys_through, self._missed))

    def dropped(self) -> None:
        begin = self._topic.log.begin
        if self._missed is not None:
            self._missed = max(self._missed, begin)
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
        self._moved, self._missed = [], None

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
        self.remembered.start(self.standings, self.rows)
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
        self._look()

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
        entry_ids, hashes = await self._keys_around_damage(
            ledger_id, np.arange(first, first + count, dtype=np.uint32), also_settled=True
        )
        if self._next == position and version == self.version:  # it was not damaged meanwhile
            self.keys.add(ledger_id, entry_ids, hashes)
            self._next = Position(ledger_id, first + count)
            self.keys.passed(self._next)
        await self._wait_sealed()

    async def _read_moved(self) -> None:
        ledger_id, entry_ids = self._moved[-1]
        version = self.version
        found_ids, hashes = await self._keys_around_damage(
            ledger_id, entry_ids[:_READ_ROWS], also_settled=False
        )
        if version != self.version:
            return  # there is more to read, or all is read again
        self.keys.add(ledger_id, found_ids, hashes)
        self._moved[-1] = (ledger_id, entry_ids[_READ_ROWS:])
        if len(entry_ids) <= _READ_ROWS:
            self._moved.pop()
        await self._wait_sealed()

    async def _keys_around_damage(
        self, ledger_id: int, entry_ids: UInt32Column, *, also_settled: bool
    ) -> tuple[UInt32Column, UInt64Column]:
        """As `_keys_of`, without those of each block that is damaged."""
        try:
            return await self._keys_of(ledger_id, entry_ids, also_settled=also_settled)
        except MissingFile:
            raise
        except Corrupt as error:
            parts, damage = by_block(entry_ids), error
        if len(parts) == 1:
            self._miss(ledger_id, entry_ids, damage)
            return entry_ids[:0], np.empty(0, np.uint64)
        columns = [
            await self._keys_around_damage(ledger_id, part, also_settled=also_settled) for part in parts
        ]
        ids, hashes = zip(*columns, strict=True)
        return np.concatenate(ids), np.concatenate(hashes)

    def _miss(self, ledger_id: int, entry_ids: UInt32Column, damage: Corrupt) -> None:
        first = Position(ledger_id, int(entry_ids[0]))
        self._missed = first if self._missed is None else min(self._missed, first)
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
        """Those of some rising ids that hold a key, and its hash; none if the ledger is gone.

        `also_settled`: and of what held one the newest of each hash, as before a restart: a key that replaced its own
        message again and again would be looked for among all of them.
        """
        nothing = np.empty(0, np.uint32), np.empty(0, np.uint64)
        try:
            rows = await self.rows(ledger_id, entry_ids)
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

    async def rows(self, ledger_id: int, entry_ids: UInt32Column) -> RowColumn | None:
        """Rows of some rising ids; None if there are none, or the ledger is gone."""
        if not len(entry_ids) or self._topic.log.entry_count(ledger_id) is None:
            return None
        first, count = int(entry_ids[0]), len(entry_ids)
        if int(entry_ids[-1]) - first == count - 1:
            return await self._topic.log.read_rows(ledger_id, first, count)
        _, rows, _ = await read_marking_damage(self._topic.log, ledger_id, entry_ids, 1)
        return rows

    async def _wait_sealed(self) -> None:
        """Bounds what is in memory while rows are read."""
        self._look()
        limit = _UNSEALED_MAX * self.keys.limits.seal_count
        if self.keys.unsealed_count > limit:
            await self._sealing.wait()
        await self._budget.spent()

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
                rows = await self.rows(ledger_id, entry_ids[cancelled])
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

    # -- seals and merges ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Start a seal or a merge if it is time for one, and see to it that the next look comes."""
        if not self._is_running or not self._is_restored:
            return
        now_ms = self._services.clock.now_ms()
        if not self._sealing.is_running and self.keys.needs_seal(now_ms):
            self._sealing.start(self._seal)
        self._arm()

    def _look_at_runs(self) -> None:
        if not self._is_running or self._merging.is_running:
            return
        if self.keys.needs_merge(self._services.clock.now_ms()):
            self._merging.start(self._merge)

    def _arm(self) -> None:
        """One timer, while something waits to be sealed."""
        if self._timer is not None or not self.keys.unsealed_count:
            return
        seconds = max(self.keys.limits.seal_after_ms, 1_000) / 1000
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._look()
        self._look_at_runs()

    async def _seal(self) -> None:
        await self._topic.prepare_folders()
        if await self.keys.seal():
            self.remembered.changed()
            self._look_at_runs()
        self._arm()

    async def _merge(self) -> None:
        while self.keys.needs_merge(self._services.clock.now_ms()):
            if not await self.keys.merge():
                break
            self.remembered.changed()

    def _note_deleted(self) -> None:
        if self.keys.has_deleted:
            self._topic.note_change()  # the next manifest names them no more, and then they go
