"""Owners of keys: which consumer gets the messages of a key (KEY_SHARED). Pure: no file, no clock, no await.

A key belongs to one of `SLOTS` slots, and a slot to one consumer, its *owner*. Keys of one slot are treated as one key.

    owner        the consumer with the greatest weight for the slot (rendezvous hashing): a function of who is there,
                 not of who came when. Who joins takes an even share from all, who leaves gives its own to all.
    hindered     another consumer than the owner holds messages of the slot still. They were handed out before the slot
                 changed hands; until they are settled or given back, a second consumer would get the same key.
    coming back  messages of the slot were lost (their consumer left, their lease ended) and come back: they lie before
                 what was not sent yet. A slot is in this state while the record is on its way to the disk, and for what
                 was not sent yet until they have been taken from the redelivery queue.
    parked       messages of the slot were taken from their source and could not go; see `Parked`.

Messages without a key belong to nobody's slot, `NO_KEY`, and go to whoever can take them.

Invariants:
  KEYSHARED-1  Messages of a slot go to its owner only, and not while the slot is hindered.
  KEYSHARED-2  What was not sent yet goes after whatever of its slot is parked or coming back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from broker.model import (
    Array,
    Entries,
    Int64Column,
    UInt32Column,
    UInt64Column,
    bitmap_of,
    common_entries,
    count_entries,
    is_among,
    members,
    merge_entries,
)
from broker.subscriptions.leases import Leases

SLOTS = 4096
"""A thousand consumers share them fairly, and a pass over all takes some microseconds."""
NO_KEY = SLOTS
NOBODY = -1
ANY_TIME_MS = -1
"""Expected time of an entry that no chunk brought."""

_GONE = SLOTS + 1
_FIND_ROWS = 16_384
"""Parked messages that are considered at once."""
_SLACK_ROWS = 4_096
"""Rows of no use that columns may hold beyond as many as are of use."""

SlotColumn = npt.NDArray[np.uint16]
SeatColumn = npt.NDArray[np.int32]
RoomColumn = npt.NDArray[np.int64]
"""For each seat, how many messages it can take."""
Mask = npt.NDArray[np.bool_]


def slots_of(key_hashes: UInt32Column) -> SlotColumn:
    """The slot of each message; hash 0 is no key."""
    return np.where(key_hashes == 0, NO_KEY, key_hashes % np.uint32(SLOTS)).astype(np.uint16)


class KeyRouter:
    """Owners of slots, and the slots that may be sent to their owners. Consumers have small numbers, their seats."""

    def __init__(self, returning: Entries | None = None, ready: Entries | None = None) -> None:
        """Both were handed out by the dispatcher of consumers that all left: what comes back now, and what is back."""
        self.seats: dict[str, int] = {}
        self.owner: SeatColumn = np.full(SLOTS + 1, NOBODY, dtype=np.int32)  # NO_KEY stays nobody's
        self.blocked: Mask = np.zeros(SLOTS + 1, dtype=np.bool_)
        """Slots of which nothing may be sent: hindered, or with messages on their way back to the disk."""
        self.behind: Mask = np.zeros(SLOTS + 1, dtype=np.bool_)
        """Slots of which nothing new may be sent: messages that came back wait for redelivery."""
        self._weights: UInt64Column = np.zeros(SLOTS, dtype=np.uint64)
        self._out: dict[str, _Columns] = {}
        self._rows = 0  # of all in `_out`
        self._granted_count = 0
        self._hindering: dict[str, _Columns] = {}
        self._hindering_at = 0  # how many leases had ended when they were looked at
        self._coming: list[tuple[Entries, Mask]] = []
        if returning:
            before: Entries = {}
            merge_entries(before, returning)  # a copy: the records change `returning`
            self._coming.append((before, self._slots_holding(before)))
        self._back: Entries = {}
        if ready:
            merge_entries(self._back, ready)
            self.behind |= self._slots_holding(ready)

    # -- consumers -------------------------------------------------------------------------------------------

    def update(
        self,
        consumer_ids: Sequence[str],
        leases: Leases,
        came_back: Sequence[Entries],
        returning: Entries,
        ready: Entries,
    ) -> None:
        """See who shares the slots, what was settled and what comes back. Call it before each look at the rest.

        `came_back` was given back unasked since the last call; it is `returning` while the record is on its way to the
        disk, and then `ready` in the redelivery queue until it is taken. What was never sent needs no record.
        """
        changed = self._note_returns(came_back, returning, ready)
        ended_count = self._granted_count - leases.count()
        if self._hindering and ended_count != self._hindering_at:
            self._hindering_at = ended_count
            self._hindering = _still_held(self._hindering, leases)
            changed = True
        if list(self.seats) != consumer_ids and self._seat(consumer_ids):
            self._find_hindering(leases)  # after the returns: it forgets what is not leased any more
            changed = True
        if changed:
            self._block()

    def _seat(self, consumer_ids: Sequence[str]) -> bool:
        """Let these consumers share the slots; whether any came or went."""
        gone = self.seats.keys() - set(consumer_ids)
        fresh = [newcomer for newcomer in consumer_ids if newcomer not in self.seats]
        if not gone and not fresh:
            return False
        mine = is_among(self.owner[:SLOTS], [self.seats.pop(leaver) for leaver in sorted(gone)])
        self.owner[:SLOTS][mine] = NOBODY
        self._weights[mine] = 0
        slots = np.flatnonzero(mine)
        if len(slots):
            for consumer_id, seat in self.seats.items():
                self._claim(consumer_id, seat, slots)
        every = np.arange(SLOTS)
        free = iter(sorted(set(range(len(self.seats) + len(fresh))) - set(self.seats.values())))
        for consumer_id in fresh:
            self.seats[consumer_id] = seat = next(free)
            self._claim(consumer_id, seat, every)
        return True

    def _claim(self, consumer_id: str, seat: int, slots: Array) -> None:
        weights = _weights(consumer_id, slots)
        better = weights > self._weights[slots]
        self._weights[slots[better]] = weights[better]
        self.owner[slots[better]] = seat

    # -- hand-outs -------------------------------------------------------------------------------------------

    def handed_out(
        self,
        consumer_id: str,
        ledger_ids: Int64Column,
        entry_ids: UInt32Column,
        slots: SlotColumn,
        leases: Leases,
    ) -> None:
        """Remember what a consumer was given. Memory stays proportional to what is leased."""
        self._out.setdefault(consumer_id, _Columns.empty()).add(ledger_ids, entry_ids, slots)
        self._granted_count += len(slots)
        self._rows += len(slots)
        if self._rows > 2 * leases.count() + _SLACK_ROWS:
            self._forget_ended(leases)

    def _block(self) -> None:
        self.blocked[:] = False
        for columns in self._hindering.values():
            self.blocked[columns.slots] = True
        for _, mask in self._coming:
            self.blocked |= mask
        self.blocked[NO_KEY] = False

    def _find_hindering(self, leases: Leases) -> None:
        """Find the slots of which others than their owners hold messages."""
        self._forget_ended(leases)
        self._hindering = {}
        self._hindering_at = self._granted_count - leases.count()
        for consumer_id, columns in self._out.items():
            seat = self.seats.get(consumer_id, NOBODY)
            others = (self.owner[columns.slots] != seat) & (columns.slots != NO_KEY)
            if others.any():
                self._hindering[consumer_id] = columns.part(others)

    def _note_returns(self, came_back: Sequence[Entries], returning: Entries, ready: Entries) -> bool:
        """Follow what comes back, from its record to its place in the redelivery queue and out of it."""
        if not came_back and not self._coming and not self._back:
            return False
        coming = [*self._coming, *((entries, self._slots_holding(entries)) for entries in came_back)]
        self._coming = []
        for entries, mask in coming:
            if _are_disjoint(entries, returning):
                merge_entries(self._back, entries)
                self.behind |= mask
            else:
                self._coming.append((entries, mask))
        # What was taken is not waited for any more, also if it is in the queue again and waits there for its time: it
        # may have come back to it before this look.
        self._back = common_entries(self._back, ready)
        if not self._back:
            self.behind[:] = False
        return True

    def _slots_holding(self, entries: Entries) -> Mask:
        """The slots of what was handed out; all of them if some was handed out by a dispatcher before this one."""
        mask = np.zeros(SLOTS + 1, dtype=np.bool_)
        known: Entries = {}
        for columns in self._out.values():
            held = columns.part(columns.within(entries))
            mask[held.slots] = True
            merge_entries(known, held.entries())
        if count_entries(known) < count_entries(entries):
            mask[:] = True
        mask[NO_KEY] = False
        return mask

    def _forget_ended(self, leases: Leases) -> None:
        self._out = _still_held(self._out, leases)
        self._rows = sum(map(len, self._out.values()))

    # -- routes ----------------------------------------------------------------------------------------------

    def sendable(self, room: RoomColumn) -> Mask:
        """Slots of which something may be sent now, if `room` says how many messages each seat can take."""
        mask: Mask = np.zeros(SLOTS + 1, dtype=np.bool_)
        if len(room) and room.any():
            mask[:] = (self.owner != NOBODY) & ~self.blocked & (room[self.owner] > 0)
            mask[NO_KEY] = True
        return mask

    def seats_for(self, slots: SlotColumn, sendable: Mask, room: RoomColumn, first_seat: int) -> SeatColumn:
        """The seat that each message goes to, in order, or NOBODY.

        What goes to a seat of one slot is always the first of that slot. Messages without a key fill what room is left,
        shared out evenly from `first_seat` on.
        """
        seats: SeatColumn = np.where(sendable[slots], self.owner[slots], NOBODY).astype(np.int32)
        seats[_rank(seats) >= np.where(seats == NOBODY, len(seats), room[seats])] = NOBODY
        free = np.flatnonzero((slots == NO_KEY) & sendable[NO_KEY])
        if len(free):
            left = room - np.bincount(seats[seats != NOBODY], minlength=len(room))
            order = (first_seat + np.arange(len(room))) % len(room)
            shares = _share(left[order], len(free))
            chosen = np.repeat(order, shares)
            seats[free[: len(chosen)]] = chosen
        return seats


def _are_disjoint(left: Entries, right: Entries) -> bool:
    return all(left[i].isdisjoint(right[i]) for i in left.keys() & right.keys())


def _still_held(out: dict[str, _Columns], leases: Leases) -> dict[str, _Columns]:
    """Of what was handed out, what is neither settled nor given back."""
    held: dict[str, _Columns] = {}
    for consumer_id, columns in out.items():
        still = columns.part(columns.within(leases.held(consumer_id)))
        if len(still):
            held[consumer_id] = still
    return held


class Parked:
    """Messages that were taken from their source and could not go then, in the order in which they came.

    Their owner had no permits, their slot was blocked, or another one of their slot was parked. They are positions,
    no frames: 22 bytes each, and are read again when they can go. `find` leaves them here, `drop` takes them out, so
    that what was read in vain keeps its place.
    """

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(SLOTS + 1, dtype=np.int64)  # by slot
        self._columns = _Columns.empty(with_times=True)
        self._count = 0
        self._sorted = True

    def __len__(self) -> int:
        return self._count

    def park(
        self, ledger_ids: Int64Column, entry_ids: UInt32Column, expected_ms: Int64Column, slots: SlotColumn
    ) -> None:
        """Put messages behind all that are parked."""
        if len(self._columns) > 2 * self._count + _SLACK_ROWS:
            self._columns = self._columns.part(self._columns.slots != _GONE)
        self._columns.add(ledger_ids, entry_ids, slots, expected_ms)
        self.counts += np.bincount(slots, minlength=SLOTS + 1)
        self._count += len(slots)
        self._sorted = False

    def find(self, sendable: Mask, router: KeyRouter, room: RoomColumn, limit: int) -> Array:
        """Return where the first messages are that may go: of each seat no more than it has room for."""
        if not (sendable & (self.counts > 0)).any():
            return np.empty(0, dtype=np.int64)
        slots = self._columns.slots
        rows = np.flatnonzero(np.append(sendable, False)[slots])[:_FIND_ROWS]
        seats = router.owner[slots[rows]]
        most = np.where(seats == NOBODY, limit, room[seats])  # without a key: whoever has room
        return rows[_rank(seats) < most][:limit]

    def at(self, rows: Array) -> tuple[Int64Column, UInt32Column, Int64Column, SlotColumn]:
        """Ledger ids, entry ids, expected times and slots."""
        columns = self._columns
        return columns.ledger_ids[rows], columns.entry_ids[rows], columns.times[rows], columns.slots[rows]

    def drop(self, rows: Array) -> None:
        """Take messages out. Where others are stays as it was until more are parked or sorted."""
        slots = self._columns.slots
        self.counts -= np.bincount(slots[rows], minlength=SLOTS + 1)
        slots[rows] = _GONE
        self._count -= len(rows)

    def sort(self) -> None:
        """Bring all into the log's order."""
        if not self._sorted:
            columns = self._columns
            self._columns = columns.part(np.lexsort((columns.entry_ids, columns.ledger_ids)))
            self._sorted = True


class _Columns:
    """Positions with their slots, and perhaps with times."""

    def __init__(self, arrays: list[Array]) -> None:
        self._arrays = arrays
        self._count = len(arrays[0])

    @classmethod
    def empty(cls, *, with_times: bool = False) -> _Columns:
        times: list[Array] = [np.empty(0, dtype=np.int64)] if with_times else []
        return cls(
            [np.empty(0, np.int64), np.empty(0, np.uint32), np.empty(0, np.uint16), *times],
        )

    def __len__(self) -> int:
        return self._count

    @property
    def ledger_ids(self) -> Int64Column:
        return self._arrays[0][: self._count]

    @property
    def entry_ids(self) -> UInt32Column:
        return self._arrays[1][: self._count]

    @property
    def slots(self) -> SlotColumn:
        return self._arrays[2][: self._count]

    @property
    def times(self) -> Int64Column:
        return self._arrays[3][: self._count]

    def add(self, *columns: Array) -> None:
        """Append rows; room is made for as many again, so that a row is moved a few times at most."""
        count = self._count + len(columns[0])
        if count > len(self._arrays[0]):
            grown = [np.empty(max(64, 2 * count), dtype=array.dtype) for array in self._arrays]
            for new, old in zip(grown, self._arrays, strict=True):
                new[: self._count] = old[: self._count]
            self._arrays = grown
        for array, column in zip(self._arrays, columns, strict=True):
            array[self._count : count] = column
        self._count = count

    def part(self, chosen: Array) -> _Columns:
        return _Columns([array[: self._count][chosen] for array in self._arrays])

    def within(self, entries: Entries) -> Mask:
        """Return which rows are in a set."""
        mask: Mask = np.zeros(self._count, dtype=np.bool_)
        if entries:
            for ledger_id, at in self._by_ledger():
                if (bitmap := entries.get(ledger_id)) is not None:
                    mask[at] = members(self.entry_ids[at], bitmap)
        return mask

    def entries(self) -> Entries:
        return {ledger_id: bitmap_of(self.entry_ids[at]) for ledger_id, at in self._by_ledger()}

    def _by_ledger(self) -> Iterator[tuple[int, Array]]:
        ledger_ids = self.ledger_ids
        order = np.argsort(ledger_ids, kind="stable")
        starts = np.flatnonzero(np.diff(ledger_ids[order], prepend=-1))
        for at in np.split(order, starts[1:]) if len(order) else ():
            yield int(ledger_ids[at[0]]), at


def _weights(consumer_id: str, slots: Array) -> UInt64Column:
    """Return how much a consumer weighs for each slot: well mixed (the finalizer of splitmix64), and never 0."""
    seed = int.from_bytes(hashlib.blake2b(consumer_id.encode(), digest_size=8).digest(), "little")
    mixed: UInt64Column = slots.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


def _rank(seats: SeatColumn) -> Int64Column:
    """Return how many elements before each one are equal to it."""
    order = np.argsort(seats, kind="stable")
    starts = np.flatnonzero(np.diff(seats[order], prepend=-2))
    lengths = np.diff(starts, append=len(order))
    ranks: Int64Column = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order)) - np.repeat(starts, lengths)
    return ranks


def _share(room: RoomColumn, count: int) -> RoomColumn:
    """Share out a number among those who have room, as evenly as their room allows."""
    shares = np.zeros_like(room)
    count = min(count, int(room.sum()))
    while count:
        open_ = np.flatnonzero(shares < room)
        more = np.minimum(room[open_] - shares[open_], max(1, count // len(open_)))
        more = np.diff(np.minimum(np.cumsum(more), count), prepend=0)
        shares[open_] += more
        count -= int(more.sum())
    return shares
