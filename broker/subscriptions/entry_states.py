"""States of the entries of one subscription: a column for each, and a table of transitions. Pure: no await, no clock.

    UNSENT     owed, and in no column: the reader, a chunk or the dispatcher's present step brings it
    QUEUED     in the redelivery queue, for its time or for a consumer
    PARKED     taken from the queue; waits in the dispatcher for the consumer of its key (KEY_SHARED)
    LEASED     with a consumer
    RETURNING  named by a record on its way that gives it back
    GIVING_UP  on its way to the dead-letter topic, and named by no record yet
    SETTLING   named by a record on its way that settles it
    SETTLED    done, or before the start

A column is a set of positions (a bitmap for each ledger), so an event moves thousands of entries at once. Each event is
a method of `EntryStates`, and nothing else moves an entry; the table below says from which states to which. `settled`,
`returned` and `sought` are records that became durable, and a recovery replays them. All others are volatile: after a
crash every entry that is not settled is UNSENT or QUEUED.

Invariants:
  STATES-1  An entry named by a record that is not durable yet (RETURNING, SETTLING) is not handed out.
  STATES-2  An entry is in one state: the columns are disjoint.
  STATES-3  What was handed out and came back is told from what is new wherever it waits meanwhile: by its record until
      it is settled; if it was taken back unsent, by a set until it is handed out again, settled or moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from broker.model import (
    Entries,
    Position,
    UInt32Column,
    common_entries,
    count_entries,
    members,
    merge_entries,
    remove_entries,
    without_entries,
)
from broker.storage.manifest import LedgerTimes
from broker.subscriptions.cursor import Cursor, LedgerSpans
from broker.subscriptions.leases import Leases
from broker.subscriptions.redelivery import RedeliveryQueue

Mask = npt.NDArray[np.bool_]


class State(IntEnum):
    """State of an entry; see the module's description.

    The number of one with a column is its index in `EntryStates._columns`. So one is 0: do not ask whether it is true.
    """

    QUEUED = 0
    PARKED = 1
    LEASED = 2
    RETURNING = 3
    GIVING_UP = 4
    SETTLING = 5
    UNSENT = 6
    SETTLED = 7


PROMISED: Final = (State.SETTLING, State.RETURNING, State.GIVING_UP)
"""States of entries of which a record decides that is on its way, or soon will be."""
HELD: Final = (State.LEASED, *PROMISED)
"""States of entries that somebody holds, or decides about."""
IN_COLUMNS: Final = (*HELD, State.QUEUED, State.PARKED)
"""States that have a column, most likely first. A reader or a chunk that brings such an entry leaves it alone."""


_TABLE: Final = """
event         UNSENT     QUEUED     PARKED     LEASED     RETURNING  GIVING_UP  SETTLING   SETTLED
handed_out    LEASED     -          -          -          -          -          -          -
taken_back    -          -          -          QUEUED     -          QUEUED     -          -
returning     -          -          -          RETURNING  -          RETURNING  -          -
returned      QUEUED     QUEUED     -          -          QUEUED     -          SETTLING   SETTLED
given_up      GIVING_UP  GIVING_UP  GIVING_UP  GIVING_UP  -          -          -          -
settling      SETTLING   SETTLING   SETTLING   SETTLING   SETTLING   SETTLING   SETTLING   -
settled       SETTLED    SETTLED    SETTLED    SETTLED    SETTLED    SETTLED    SETTLED    SETTLED
take          UNSENT     UNSENT     PARKED     LEASED     RETURNING  GIVING_UP  SETTLING   SETTLED
put_back      QUEUED     QUEUED     QUEUED     LEASED     RETURNING  GIVING_UP  SETTLING   SETTLED
parked        PARKED     -          -          -          -          -          -          -
unparked      UNSENT     QUEUED     UNSENT     LEASED     RETURNING  GIVING_UP  SETTLING   SETTLED
park_cleared  UNSENT     QUEUED     QUEUED     LEASED     RETURNING  GIVING_UP  SETTLING   SETTLED
moved         UNSENT     UNSENT     UNSENT     LEASED     RETURNING  GIVING_UP  SETTLING   SETTLED
sought        UNSENT     UNSENT     UNSENT     UNSENT     RETURNING  UNSENT     SETTLING   UNSENT
"""


def _read(table: str) -> dict[str, dict[State, State]]:
    """Transitions by event."""
    (_, *names), *rows = (line.split() for line in table.strip().splitlines())
    states = [State[name] for name in names]
    return {
        event: {state: State[end] for state, end in zip(states, ends, strict=True) if end != "-"}
        for event, *ends in rows
    }


TRANSITIONS: Final = _read(_TABLE)
"""State of an entry after an event, by event and by the state before; the event asserts that there is one."""
_REFUSED: Final = {
    event: [state for state in IN_COLUMNS if state not in row] for event, row in TRANSITIONS.items()
}


class EntryStates:
    """State of every entry of a subscription. Others ask its parts, and change them by the events here only."""

    __slots__ = (
        "_columns",
        "_lost",
        "_on_lease_end",
        "_returning",
        "_settling",
        "_unrecorded",
        "cursor",
        "leases",
        "redelivery",
    )

    def __init__(
        self, cursor: Cursor, owed: dict[int, LedgerTimes] | None, on_lease_end: Callable[[str], None]
    ) -> None:
        """`owed` came back and is to be sent again; `on_lease_end` is told whose leases ended."""
        self._on_lease_end = on_lease_end
        self._returning: Entries = {}
        self._settling: Entries = {}
        self._lost: list[Entries] = []
        self._begin(cursor, RedeliveryQueue(owed))

    def _begin(self, cursor: Cursor, redelivery: RedeliveryQueue) -> None:
        self.cursor = cursor
        self.leases = Leases(self._on_lease_end)
        self.redelivery = redelivery
        self._unrecorded: Entries = {}  # what keeps its place, and no record tells of
        # By number: a dict for each of ten thousand idle subscriptions would take three times as much.
        self._columns: tuple[Entries, ...] = (
            redelivery.queued,
            {},
            self.leases.leased,
            self._returning,
            {},
            self._settling,
        )

    # -- from the dispatcher to a consumer, and back unsent --------------------------------------------------

    def handed_out(self, consumer_id: str, entries: Entries, deadline_ns: int) -> None:
        """A consumer holds entries until its lease ends."""
        self._check("handed_out", entries)
        self._forget_place(entries)
        self.leases.grant(consumer_id, entries, deadline_ns)

    def take(self, now_ms: int, limit: int) -> tuple[int, UInt32Column] | None:
        """Take at most `limit` entries of one ledger from the redelivery queue; None if none may go yet."""
        return self.redelivery.take(now_ms, limit)

    def put_back(self, not_before_ms: int, entries: Entries) -> None:
        """Entries were taken from somewhere and not sent: they are queued (0: at once), unless others have them now."""
        fresh = self.without(entries, *HELD, State.SETTLED)
        remove_entries(self._columns[State.PARKED], fresh)
        self.redelivery.push(not_before_ms, fresh)

    def parked(self, entries: Entries) -> None:
        """Entries wait in the dispatcher."""
        self._check("parked", entries)
        merge_entries(self._columns[State.PARKED], entries)

    def unparked(self, entries: Entries) -> None:
        """The dispatcher looks at parked entries once more."""
        remove_entries(self._columns[State.PARKED], entries)

    def park_cleared(self) -> None:
        """The dispatcher forgets what it has parked, which keeps its place."""
        parked = self._columns[State.PARKED]
        if not parked:
            return
        self.redelivery.push(0, parked)
        self._lost.append(dict(parked))
        parked.clear()

    def taken_back(
        self, consumer_id: str | None, entries: Entries, not_before_ms: int, *, keeps_place: bool = False
    ) -> None:
        """Entries are queued as if they had not been handed out. `consumer_id`: see `returning`."""
        self._check("taken_back", entries)
        self._end_hold(consumer_id, entries)
        self.redelivery.push(not_before_ms, entries)
        if keeps_place:
            merge_entries(self._unrecorded, entries)
            self._lost.append(entries)

    # -- decisions: a record is on its way -------------------------------------------------------------------

    def returning(self, consumer_id: str | None, entries: Entries, *, keeps_place: bool = False) -> None:
        """A record gives back entries that a consumer holds, or (None) that were being given up.

        Entries that keep their place come before what was not sent yet: see `take_lost`.
        """
        self._check("returning", entries)
        self._end_hold(consumer_id, entries)
        merge_entries(self._returning, entries)
        if keeps_place:
            self._lost.append(entries)

    def take_lost(self) -> list[Entries]:
        """Return what came back and keeps its place, since this was asked last."""
        lost, self._lost = self._lost, []
        return lost

    def given_up(self, consumer_id: str | None, entries: Entries) -> None:
        """Entries that a consumer holds, or (None) nobody, are on their way to the dead-letter topic."""
        self._check("given_up", entries)
        if consumer_id is not None:
            self.leases.take_back(consumer_id, entries)
        self.redelivery.forget(entries)
        remove_entries(self._columns[State.PARKED], entries)
        merge_entries(self._columns[State.GIVING_UP], entries)

    def settling(self, entries: Entries) -> None:
        """A record settles entries, whoever has them."""
        self._check("settling", entries)
        self._forget_place(entries)
        self.leases.settle(entries)
        self.redelivery.forget(entries)
        for state in (State.PARKED, State.GIVING_UP, State.RETURNING):
            remove_entries(self._columns[state], entries)
        merge_entries(self._settling, entries)

    # -- records that became durable -------------------------------------------------------------------------

    def settled(self, entries: Entries, spans: LedgerSpans) -> Entries:
        """Entries are done; the answer holds those that were not before."""
        fresh = self.cursor.settle(entries, spans)
        self._forget_place(entries)
        self.leases.settle(entries)
        self.redelivery.settle(entries)
        for state in (State.PARKED, *PROMISED):
            remove_entries(self._columns[state], entries)
        return fresh

    def returned(self, not_before_ms: int, entries: Entries) -> Entries:
        """Entries came back, not before a time; the answer holds those that are still owed."""
        self._check("returned", entries)
        owed = without_entries(entries, self.cursor.settled_part(entries))
        self.redelivery.put(not_before_ms, owed)
        self.redelivery.forget(self.among(owed, State.SETTLING))
        remove_entries(self._returning, entries)
        return owed

    def moved(self, entries: Entries) -> None:
        """Entries are due at another time: the index brings them, whatever they waited for until now."""
        self._forget_place(entries)
        self.redelivery.forget(entries)
        remove_entries(self._columns[State.PARKED], entries)

    def dropped(self, ledger_ids: Iterable[int], spans: LedgerSpans) -> bool:
        """Ledgers are gone, all of them settled; whether anything changed here."""
        return self.cursor.drop(ledger_ids, spans)

    def sought(self, start: Position) -> None:
        """Everything from a position on is owed anew.

        What is RETURNING or SETTLING stays so: the records that name it were submitted after this one, and follow.
        """
        self._begin(Cursor(start), RedeliveryQueue())

    # -- questions -------------------------------------------------------------------------------------------

    def column(self, state: State) -> Entries:
        """Return the entries that are in a state, but for UNSENT and SETTLED."""
        return self._columns[state]

    def count(self, *states: State) -> int:
        """Return how many entries are in one of some states, but for UNSENT and SETTLED."""
        return sum(count_entries(self._columns[state]) for state in states)

    def among(self, entries: Entries, *states: State) -> Entries:
        """Return which of some entries are in one of some states, but for UNSENT and SETTLED."""
        matches: Entries = {}
        for state in states:
            merge_entries(matches, common_entries(entries, self._columns[state]))
        return matches

    def without(self, entries: Entries, *states: State) -> Entries:
        """Return which of some entries are in none of some states, but for UNSENT."""
        for state in states:
            if state is State.SETTLED:
                entries = without_entries(entries, self.cursor.settled_part(entries))
            else:
                entries = without_entries(entries, self._columns[state])
        return entries

    def came_back(self, entries: Entries) -> Entries:
        """Return which of some entries were handed out before and come before what is new, also if none was sent."""
        came_back = self.redelivery.came_back(entries)
        merge_entries(came_back, common_entries(entries, self._unrecorded))
        return came_back

    def mask(self, ledger_id: int, entry_ids: UInt32Column, states: Iterable[State]) -> Mask:
        """For each of some rising ids, whether it is SETTLED or in one of some states."""
        mask = self.cursor.settled_mask(ledger_id, entry_ids)
        if mask is None:
            mask = np.zeros(len(entry_ids), dtype=np.bool_)
        bitmaps = [held for state in states if (held := self._columns[state].get(ledger_id)) is not None]
        if bitmaps:
            mask |= members(entry_ids, *bitmaps)
        return mask

    def state_of(self, position: Position) -> State:
        """Return the state of one entry."""
        if self.cursor.is_settled(position):
            return State.SETTLED
        for number, column in enumerate(self._columns):
            if position.entry_id in column.get(position.ledger_id, _NOTHING):
                return State(number)
        return State.UNSENT

    # ----------------------------------------------------------------------------------------------------------

    def _end_hold(self, consumer_id: str | None, entries: Entries) -> None:
        if consumer_id is None:
            remove_entries(self._columns[State.GIVING_UP], entries)
        else:
            self.leases.take_back(consumer_id, entries)

    def _forget_place(self, entries: Entries) -> None:
        if self._unrecorded:
            remove_entries(self._unrecorded, entries)

    def _check(self, event: str, entries: Entries) -> None:
        """Assert that an event may happen to all of some entries."""
        row = TRANSITIONS[event]
        if State.UNSENT not in row:
            wrong = self.without(entries, *row)
            assert not wrong, f"{event}: {wrong}"
            return
        for state in _REFUSED[event]:
            column = self._columns[state]
            for ledger_id in column.keys() & entries.keys() if column else ():
                assert column[ledger_id].isdisjoint(entries[ledger_id]), (
                    f"{event}, but {state.name}: {entries}"
                )
        assert State.SETTLED in row or not self.cursor.has_any(entries), f"{event}, but settled: {entries}"


_NOTHING = BitMap()
