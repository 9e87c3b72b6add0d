"""The schedule keys of one topic: who holds a key now.

A message whose time has not come holds its key. The lookup says where to look (`KeyUpkeep` keeps it up with the
log); here its answers are confirmed by reading the messages, and weighed by what is applied.

A topic without schedule keys has no lookup, and pays with a look at the hashes of each batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from broker.delayed.schedule_keys import KeyImage, KeyStats
from broker.errors import Corrupt, PostdateError
from broker.model import CANCELLED_MS, Int64Column, Position, UInt32Column, UInt64Column, distinct_values
from broker.storage import schedule_hash
from broker.storage.changes import Moved
from broker.storage.key_filter import BoolColumn, Probe
from broker.storage.manifest import TopicImage
from broker.storage.message_fields import SCHEDULE_KEY_TAG
from broker.storage.records import LedgersDropped, Produced, Record, Replaced, Transferred
from broker.storage.salvage import NO_FRAME, read_around_damage
from broker.storage.varint import encode_varint
from broker.topics.component import Capture, not_applied
from broker.topics.key_services import KeyedTopic, KeyServices
from broker.topics.key_upkeep import KeyUpkeep
from broker.topics.schedule_frames import schedule_key_of

_READ_FRAME_BYTES = 8 << 20
_KEY_HEAD = bytes((SCHEDULE_KEY_TAG,))


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """Entries of one ledger that were stored with some keys, and their effective times when they were read."""

    ledger_id: int
    entry_ids: UInt32Column  # rising
    times: Int64Column
    places: Sequence[int]  # of the key of each


class SettledKey(NamedTuple):
    """The last message that is remembered to have had a key."""

    position: Position
    was_cancelled: bool | None
    """False: it was delivered or expired. None: its row is still there and says so itself."""


class TopicKeys:
    """See the module's description. Small: idle topics have nothing behind it."""

    __slots__ = ("_is_running", "_live", "_services", "_topic")

    def __init__(self, topic: KeyedTopic, services: KeyServices, image: TopicImage) -> None:
        """The topic's log is as the manifest says."""
        self._topic = topic
        self._services = services
        self._live: KeyUpkeep | None = None
        if image.keys_through is not None:
            key_image = KeyImage(image.key_run_ids, image.next_key_run_id, image.keys_through)
            self._live = KeyUpkeep(topic, services, key_image)
        self._is_running = False

    @property
    def is_used(self) -> bool:
        """Return whether any message was stored with a schedule key, or is about to be."""
        return self._live is not None

    # -- durable state: called by the topic, in lsn order ----------------------------------------------------

    def apply(self, record: Record, lsn: int) -> None:
        """See `Applier`. The log is as the record says already."""
        match record:
            case Produced():
                self._append(record)
            case Replaced():
                self._append(record.produced)
                if self._live is not None:
                    hashes = distinct_values(record.produced.rows["schedule_hash"])
                    self._live.keys.discard_among(hashes, record.cancelled.entries)
            case Transferred():
                if record.produced.topic_id == self._topic.topic_id:
                    self._append(record.produced)
            case Moved():
                if self._live is not None:
                    self._live.moved(record.ledgers)
            case LedgersDropped():
                if self._live is not None:
                    self._live.dropped()
            case _:
                not_applied(self, record)

    def _append(self, record: Produced) -> None:
        hashes = record.rows["schedule_hash"]
        live = self._live
        if live is None:
            if not np.count_nonzero(hashes):  # nearly always so
                return
            live = self._begin(Position(record.ledger_id, record.first_entry_id))
        live.applied(record, hashes)

    def capture(self, image: TopicImage) -> Capture:
        """See `Component`."""
        if self._live is None:
            return Capture(image)
        keys = self._live.image()
        return Capture(
            replace(
                image,
                key_run_ids=keys.run_ids,
                next_key_run_id=keys.next_run_id,
                keys_through=keys.keys_through,
            ),
            durable=partial(self.durable, keys),
        )

    async def durable(self, image: KeyImage) -> None:
        """A manifest with this image is durable: remove the files that it did not name."""
        if self._live is not None:
            self._live.remembered.image_durable(image)
            await self._live.keys.remove_deleted(image)

    # -- life ------------------------------------------------------------------------------------------------

    def start(self, *, anew: bool) -> None:
        """The log is whole: read what is missing, or all of it. Called once."""
        self._is_running = True
        if self._live is not None:
            self._live.start(anew=anew)

    def clock_set_back(self) -> None:
        """The frontier has gone back, with the clock."""
        if self._live is not None:
            self._live.begin_anew()

    def stop(self) -> None:
        self._is_running = False
        if self._live is not None:
            self._live.stop()

    def stats(self) -> KeyStats:
        return KeyStats(0, 0, 0, 0) if self._live is None else self._live.keys.stats()

    # -- looks -----------------------------------------------------------------------------------------------

    async def find(self, keys: Sequence[str]) -> list[Position | None]:
        """For each key the newest message that holds it; if none does, the newest one that is known to have had it,
        which is due or was cancelled."""
        names = [key.encode() for key in keys]
        distinct = list(dict.fromkeys(names))
        holders = await self.holders(distinct, schedule_hash.hash_keys(distinct)) if distinct else []
        waiting: dict[bytes, Position] = {}
        had: dict[bytes, Position] = {}
        for holder in holders:  # in the order of the log
            if self._topic.log.entry_count(holder.ledger_id) is None:
                continue
            states = zip(
                holder.entry_ids.tolist(), holder.places, self.times_now(holder).tolist(), strict=True
            )
            for entry_id, place, time_ms in states:
                positions = waiting if self._topic.frontier_ms < time_ms < CANCELLED_MS else had
                positions[distinct[place]] = Position(holder.ledger_id, entry_id)
        return [waiting.get(name) or had.get(name) for name in names]

    async def find_settled(self, keys: Sequence[str]) -> list[SettledKey | None]:
        """For each key the last message that is remembered to have had it, once `find` has named none that waits.

        What has a row is confirmed by reading the message; of what has none the hash of its key has to do. Raises
        Unavailable.
        """
        names = [key.encode() for key in keys]
        distinct = list(dict.fromkeys(names))
        if not distinct or self._live is None:
            return [None] * len(names)
        hashes = schedule_hash.hash_keys(distinct)
        remembered = await self._live.remembered.find(hashes)
        gone: dict[int, dict[Position, bool]] = {}
        there: dict[int, list[Position]] = {}
        for value, ends in remembered.items():
            for position, was_cancelled in ends.items():
                if await self._has_row(position):
                    there.setdefault(value, []).append(position)
                else:
                    gone.setdefault(value, {})[position] = was_cancelled
        settled: dict[bytes, SettledKey] = {}
        for name, value in zip(distinct, hashes.tolist(), strict=True):
            if value in gone:
                last = max(gone[value])
                settled[name] = SettledKey(last, gone[value][last])
        for holder in await self._confirm(there, distinct, hashes):  # in the order of the log
            for entry_id, place in zip(holder.entry_ids.tolist(), holder.places, strict=True):
                position, name = Position(holder.ledger_id, entry_id), distinct[place]
                if name not in settled or settled[name].position < position:
                    settled[name] = SettledKey(position, None)
        return [settled.get(name) for name in names]

    async def remember(self, ledger_id: int) -> int | None:
        """Rows of a ledger are about to go: remember what became of those messages that had a key.

        They may go once `is_remembered` says so of what is returned; None: not this time.
        """
        return 0 if self._live is None else await self._live.remembered.remember(ledger_id)

    def is_remembered(self, version: int) -> bool:
        """Return whether no crash can undo the `remember` that returned this version."""
        return self._live is None or version <= self._live.remembered.durable_version

    @property
    def is_ready(self) -> bool:
        """Return whether `maybe` can be asked; see KEYUPKEEP-1."""
        return self._used.is_ready

    @property
    def version(self) -> int:
        """Another one: who held a key when it was looked at is perhaps not all who do."""
        return self._used.version

    async def wait_ready(self) -> None:
        """Raises Unavailable if the rows cannot be read."""
        await self._used.wait_ready()

    async def wait_room(self) -> None:
        """Return once there is room for more keys in memory: if they come faster than they are sealed, they wait."""
        if self._live is not None:
            await self._live.wait_room()

    def maybe(self, wanted: Probe) -> BoolColumn:
        """For each hash whether an entry or a batch in flight may have it; while `is_ready`."""
        return self._used.keys.maybe(wanted)

    def in_flight(self, hashes: UInt64Column) -> asyncio.Future[None] | None:
        """Return what makes a batch durable that was submitted with one of some hashes; None: no batch was."""
        return self._used.keys.in_flight_with(hashes)

    def expect(self, first: Position, wanted: Probe, durable: asyncio.Future[None]) -> None:
        """A batch with some hashes, whose new messages begin at `first`, was submitted."""
        self._used.keys.expect(first, wanted, durable)

    async def holders(self, keys: Sequence[bytes], hashes: UInt64Column) -> list[Holders]:
        """Every entry that holds one of some distinct keys, and perhaps some that are due, cancelled or gone.

        In the order of the log; of one moment between the call and its return. Raises Corrupt, Unavailable.
        """
        self._services.counters.schedule_key_lookups += len(keys)
        return await self._confirm(await self._used.find(hashes), keys, hashes)

    async def _confirm(
        self, candidates: Mapping[int, Sequence[Position]], keys: Sequence[bytes], hashes: UInt64Column
    ) -> list[Holders]:
        """Those of some entries, by hash, that have one of some distinct keys, in the order of the log."""
        places: dict[int, list[int]] = {}
        for place, value in enumerate(hashes.tolist()):
            places.setdefault(value, []).append(place)
        ledgers: dict[int, list[tuple[int, list[int]]]] = {}
        for value, positions in candidates.items():
            for position in positions:
                ledgers.setdefault(position.ledger_id, []).append((position.entry_id, places[value]))
        holders = []
        for ledger_id in sorted(ledgers):
            holders += await self._confirmed(ledger_id, sorted(ledgers[ledger_id]), keys)
        return holders

    def times_now(self, holders: Holders) -> Int64Column:
        """The effective times as of now; CANCELLED_MS of what was cancelled or is gone. Reads nothing."""
        if self._topic.log.entry_count(holders.ledger_id) is None:
            return np.full(len(holders.entry_ids), CANCELLED_MS, dtype=np.int64)
        return self._topic.log.amendments.effective_now(holders.ledger_id, holders.entry_ids, holders.times)

    async def _confirmed(
        self, ledger_id: int, candidates: Sequence[tuple[int, list[int]]], keys: Sequence[bytes]
    ) -> list[Holders]:
        """The candidates of one ledger (rising ids, each with the places of keys it may have) that have one."""
        entry_ids = np.array([entry_id for entry_id, _ in candidates], dtype=np.uint32)
        held: list[tuple[int, int, int]] = []
        at = 0
        while at < len(entry_ids):
            read = await self._topic_read(ledger_id, entry_ids[at:])
            if read is None:
                return []
            times, frames = read
            for offset, frame in enumerate(frames):
                entry_id, places = candidates[at + offset]
                place = next((place for place in places if _has_key(frame, keys[place])), None)
                if place is not None:
                    held.append((entry_id, int(times[offset]), place))
            at += len(frames)
        if not held:
            return []
        ids, row_times, held_places = zip(*held, strict=True)
        columns = np.array(ids, dtype=np.uint32), np.array(row_times, dtype=np.int64)
        return [Holders(ledger_id, *columns, held_places)]

    async def _has_row(self, position: Position) -> bool:
        """Return whether the row of a message with a key exists: not dropped with its ledger, nor by a compaction."""
        ledger = self._topic.log.find(position.ledger_id)
        if ledger is None or position.ledger_id in self._topic.log.under_way.going:
            return False
        if ledger.sparse is None:
            return True
        try:
            rows = await self._topic.log.read_rows(position.ledger_id, position.entry_id, 1)
        except Corrupt:
            return True
        except (OSError, PostdateError):
            if self._topic.log.entry_count(position.ledger_id) is None:
                return False
            raise
        return bool(rows["schedule_hash"][0])

    async def _topic_read(
        self, ledger_id: int, entry_ids: UInt32Column
    ) -> tuple[Int64Column, list[bytes]] | None:
        """Times and as many frames as fit, empty ones where nothing can be read; None: the ledger is gone."""
        topic_log = self._topic.log
        if topic_log.entry_count(ledger_id) is None:
            return None
        try:
            times, _, frames = await topic_log.read(ledger_id, entry_ids, _READ_FRAME_BYTES)
        except Corrupt:
            return await self._read_around(ledger_id, entry_ids)
        except (OSError, PostdateError):
            if topic_log.entry_count(ledger_id) is None:
                return None
            raise
        return times, frames

    async def _read_around(
        self, ledger_id: int, entry_ids: UInt32Column
    ) -> tuple[Int64Column, list[bytes]] | None:
        try:
            salvaged = await read_around_damage(self._topic.log, ledger_id, entry_ids, _READ_FRAME_BYTES)
        except (OSError, PostdateError):
            if self._topic.log.entry_count(ledger_id) is None:
                return None
            raise
        marked = zip(salvaged.frames, salvaged.unreadable.tolist(), strict=False)
        return salvaged.times, [b"" if is_unreadable else frame for frame, is_unreadable in marked]

    @property
    def _used(self) -> KeyUpkeep:
        return self._live if self._live is not None else self._begin(self._topic.log.end)

    def _begin(self, position: Position) -> KeyUpkeep:
        """The first row with a key comes at or after a position."""
        live = self._live = KeyUpkeep(self._topic, self._services, KeyImage(keys_through=position))
        if self._is_running:
            live.start()
        return live


def _has_key(frame: bytes, key: bytes) -> bool:
    """Return whether a message has this very key; of a damaged one the hash of its row has to do."""
    if frame is NO_FRAME:
        return True
    field = b"".join((_KEY_HEAD, encode_varint(len(key)), key))
    # In nearly every other message these bytes are nowhere.
    return field in frame and schedule_key_of(frame).encode() == key
