"""Hands out the messages of a KEY_SHARED subscription: those of one key to one consumer at a time, in their order.

A step takes from one source, and gives each consumer what is its own of it. What cannot go is parked, so that a
consumer without permits stops its own keys only. Of one slot (`key_shared`), messages go in the order in which the
sources give them: first what came back, in the log's order, then what is due, in due order, then what else arrived.
What was parked goes before what was not taken yet. What waits for its time (a delay, a nack) is outside the order;
what waited in the redelivery queue and was never handed out is as new as what the log and the replay queue give.

Parked positions are bounded by `PARKED_MAX`: with so many, no more is taken from the replay queue and the log until
something was unparked, so that a slow consumer holds up all in the end. What came back is taken all the same, since it
goes before what is parked; it was in memory before, as part of the redelivery queue.

When the replay queue is emptied (catch-up begins, or nobody is left), what is parked goes: what came back into the
redelivery queue again (the subscription sees to that), and the rest is found by catch-up.
"""

from __future__ import annotations

import numpy as np

from broker.delayed.due_rows import DueRows
from broker.model import Array, Int64Column, UInt32Column, distinct_values, members
from broker.runtime.clock import Clock
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.damage import read_on
from broker.subscriptions.entry_states import State
from broker.subscriptions.handout import (
    DueWindows,
    HandOut,
    Read,
    Taken,
    Window,
    entries_in,
    taken_from_chunk,
    taken_from_ledger,
)
from broker.subscriptions.key_shared import (
    ANY_TIME_MS,
    NOBODY,
    KeyRouter,
    Mask,
    Parked,
    RoomColumn,
    SlotColumn,
    slots_of,
)
from broker.subscriptions.subscription import Subscription

PARKED_MAX = 100_000
"""Positions parked at most, give or take a batch."""


class KeyDispatch:
    """See the module's description."""

    def __init__(self, subscription: Subscription, clock: Clock) -> None:
        self._subscription = subscription
        self._clock = clock
        self._out = HandOut(subscription, clock)
        self._windows = DueWindows(subscription, self._out)
        states = subscription.states
        self._router = KeyRouter(states.column(State.RETURNING), states.came_back(states.redelivery.ready))
        self._by_seat: dict[int, Consumer] = {}
        self._returned = Parked()  # what came back
        self._parked = Parked()  # what was never sent
        self._clears = subscription.replay.clears
        self._turn = 0

    async def step(self) -> bool:
        """Hand out what one source has, or look for more; False when there is nothing to do."""
        subscription = self._subscription
        self._notice_clear()
        room = self._look_around()
        at_once = min(subscription.limits.batch_entries, self._out.fitting_frame(), subscription.pacing.room)
        limit = min(int(room.sum()), at_once)
        if not limit:
            return False
        if returned := subscription.states.take(self._clock.now_ms(), limit):
            await self._read_and_hand_out(taken_from_ledger(*returned, from_redelivery=True))
        elif len(at := self._returned.find(self._for_returned(room), self._router, room, limit)):
            await self._hand_out_parked(self._returned, at)
        elif len(at := self._parked.find(self._for_parked(room), self._router, room, limit)):
            await self._hand_out_parked(self._parked, at)
        elif len(self._parked) + len(self._returned) >= PARKED_MAX:
            return False
        elif window := await self._windows.next():
            self._hand_out_window(window, limit)
        elif unread := subscription.reader.take(limit):
            await self._read_and_hand_out(taken_from_ledger(*unread, from_redelivery=False))
        elif subscription.reader.is_behind:
            await read_on(subscription)
        else:
            return False
        return True

    @property
    def has_taker(self) -> bool:
        """Return whether there is a consumer that would be given a message now."""
        return any(consumer.can_take for consumer in self._subscription.consumers.takers())

    # -- what is so now: true until the next await -----------------------------------------------------------

    def _notice_clear(self) -> bool:
        """Forget what is parked if the replay queue was emptied; whether it was."""
        clears = self._subscription.replay.clears
        if clears == self._clears:
            return False
        self._clears = clears
        self._returned, self._parked = Parked(), Parked()
        return True

    def _look_around(self) -> RoomColumn:
        """Return who is there, and how much each seat can take."""
        subscription = self._subscription
        active = [
            taker
            for taker in subscription.consumers.takers()
            if not taker.draining and taker.closed_because is None
        ]
        self._router.update(
            [taker.consumer_id for taker in active],
            subscription.states.leases,
            subscription.states.take_lost(),
            subscription.states.column(State.RETURNING),
            subscription.states.redelivery.ready,
        )
        seats = self._router.seats
        room = np.zeros(max(seats.values(), default=0) + 1, dtype=np.int64)
        self._by_seat = {seats[taker.consumer_id]: taker for taker in active if taker.can_take}
        for seat, consumer in self._by_seat.items():
            room[seat] = consumer.permits
        return room

    def _for_returned(self, room: RoomColumn) -> Mask:
        """Slots of which what came back may go."""
        return self._router.sendable(room)

    def _for_parked(self, room: RoomColumn) -> Mask:
        """Slots of which what is parked and was never sent may go."""
        mask: Mask = self._for_returned(room) & ~self._router.behind & (self._returned.counts == 0)
        return mask

    def _for_new(self, room: RoomColumn) -> Mask:
        """Slots of which what was just taken may go."""
        mask: Mask = self._for_parked(room) & (self._parked.counts == 0)
        return mask

    # -- handing out -----------------------------------------------------------------------------------------

    async def _read_and_hand_out(self, taken: Taken) -> None:
        self._notice_clear()
        try:
            read = await self._out.read(taken)
        except BaseException:
            if taken.from_redelivery or not self._notice_clear():
                self._subscription.states.put_back(0, entries_in(taken, slice(None)))
            raise
        if not self._notice_clear():
            self._hand_out(taken, read)
        elif taken.from_redelivery:  # the rest is found by catch-up, which has begun meanwhile
            self._subscription.states.put_back(0, entries_in(taken, slice(None)))

    def _hand_out_window(self, window: Window, limit: int) -> None:
        """Hand out or park the first ones of a window. No await in here (HANDOUT-1)."""
        self._notice_clear()
        count = min(limit, len(window.taken.entry_ids))
        self._windows.rest = window.after(count)
        self._hand_out(*window.first(count))
        if any(consumer.lacks_room for consumer in self._by_seat.values()):
            self._windows.put_back()

    def _hand_out(self, taken: Taken, read: Read) -> None:
        """The last look, and the hand-out; what cannot go is parked. No await in here (HANDOUT-1)."""
        self._subscription.consumers.expire_leases()  # while the log was read, some may have ended
        now_ms = self._clock.now_ms()
        keep = self._out.last_look(taken, read, now_ms)
        slots = slots_of(read.rows["key_hash"])
        if taken.from_redelivery:
            # What only waited there, for a time or because a read failed, was never out and is as new as any other.
            came_back = self._came_back(taken)
            room = self._look_around()
            sendable = self._for_returned(room) & (self._returned.counts == 0)
            self._send_or_park(taken, read, keep & came_back, slots, sendable, room, now_ms, self._returned)
            keep &= ~came_back
        if keep.any():
            room = self._look_around()
            self._send_or_park(taken, read, keep, slots, self._for_new(room), room, now_ms, self._parked)

    def _came_back(self, taken: Taken) -> Mask:
        # The redelivery queue gives one ledger at a time.
        (ledger_id,) = distinct_values(taken.ledger_ids).tolist()
        entries = entries_in(taken, slice(None))
        came_back = self._subscription.states.came_back(entries)
        nothing = np.zeros(len(taken.entry_ids), np.bool_)
        return members(taken.entry_ids, came_back[ledger_id]) if ledger_id in came_back else nothing

    def _send_or_park(
        self,
        taken: Taken,
        read: Read,
        keep: Mask,
        slots: SlotColumn,
        sendable: Mask,
        room: RoomColumn,
        now_ms: int,
        store: Parked,
    ) -> None:
        left = np.flatnonzero(keep & ~self._send(taken, read, keep, slots, sendable, room, now_ms))
        if not len(left):
            return
        times = np.full(len(left), ANY_TIME_MS) if taken.expected_ms is None else taken.expected_ms[left]
        store.park(taken.ledger_ids[left], taken.entry_ids[left], times, slots[left])
        if store is self._returned:
            self._subscription.states.parked(entries_in(taken, left))
            store.sort()

    async def _hand_out_parked(self, store: Parked, at: Array) -> None:
        """Read what is parked once more, and hand it out; what cannot go keeps its place."""
        # An entry is parked twice if catch-up found it before the index had it. One of them goes, and the last look
        # refuses the other one next time.
        at = at[_first_of_each(*store.at(at)[:2])]
        ledger_ids, entry_ids, expected_ms, slots = store.at(at)
        taken = taken_from_chunk(DueRows(expected_ms, ledger_ids, entry_ids))
        read = await self._out.read(taken)
        if self._notice_clear():
            return
        taken.expected_ms = np.where(expected_ms == ANY_TIME_MS, read.times, expected_ms)
        self._subscription.consumers.expire_leases()
        now_ms = self._clock.now_ms()
        self._subscription.states.unparked(entries_in(taken, slice(None)))
        keep = self._out.last_look(taken, read, now_ms)
        room = self._look_around()
        sendable = self._for_returned(room) if store is self._returned else self._for_parked(room)
        done = ~keep | self._send(taken, read, keep, slots, sendable, room, now_ms)
        store.drop(at[done])
        if store is self._returned:
            self._subscription.states.parked(entries_in(taken, ~done))

    def _send(
        self,
        taken: Taken,
        read: Read,
        keep: Mask,
        slots: SlotColumn,
        sendable: Mask,
        room: RoomColumn,
        now_ms: int,
    ) -> Mask:
        """Give each consumer what is its own of what may be sent; which ones were sent."""
        sent: Mask = np.zeros(len(keep), dtype=np.bool_)
        ready = np.flatnonzero(keep[: len(read.frames)])
        self._turn = (self._turn + 1) % len(room)
        seats = self._router.seats_for(slots[ready], sendable, room, self._turn)
        for seat in distinct_values(seats[seats != NOBODY]).tolist():
            consumer, chosen = self._by_seat[seat], ready[seats == seat]
            chosen = chosen[: self._out.fitting(consumer, read.rows["length"][chosen])]
            if not len(chosen):
                continue
            self._out.deliver(consumer, taken, read, chosen, now_ms)
            self._router.handed_out(
                consumer.consumer_id,
                taken.ledger_ids[chosen],
                taken.entry_ids[chosen],
                slots[chosen],
                self._subscription.states.leases,
            )
            sent[chosen] = True
        return sent


def _first_of_each(ledger_ids: Int64Column, entry_ids: UInt32Column) -> Mask:
    """Return which entries do not stand before."""
    order = np.lexsort((entry_ids, ledger_ids))
    is_first: Mask = np.ones(len(order), dtype=np.bool_)
    is_first[order[1:]] = (np.diff(ledger_ids[order]) != 0) | (np.diff(entry_ids[order]) != 0)
    return is_first
