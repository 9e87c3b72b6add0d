"""Every state of an entry with every event, against the table; and walks of sets, against a dict of states."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from pyroaring import BitMap

from broker.model import Entries, Position
from broker.subscriptions.cursor import Cursor
from broker.subscriptions.entry_states import IN_COLUMNS, TRANSITIONS, EntryStates, State
from tests.depth import at_depth
from tests.harness import entries_of

LEDGER, COUNT = 1, 24
START = Position(LEDGER, 0)


class Spans:
    """A log of one ledger."""

    def entry_count(self, ledger_id: int) -> int | None:
        return COUNT if ledger_id == LEDGER else None

    def next_ledger_id(self, ledger_id: int) -> int | None:
        return None


def made() -> EntryStates:
    return EntryStates(Cursor(START), None, lambda _: None)


def _holder(states: EntryStates, entries: Entries) -> str | None:
    return "a" if states.leases.held_by("a", entries) else None


EVENTS: dict[str, Callable[[EntryStates, Entries], object]] = {
    "handed_out": lambda states, entries: states.handed_out("a", entries, 1),
    "taken_back": lambda states, entries: states.taken_back(
        _holder(states, entries), entries, 0, keeps_place=True
    ),
    "returning": lambda states, entries: states.returning(_holder(states, entries), entries),
    "returned": lambda states, entries: states.returned(0, entries),
    "given_up": lambda states, entries: states.given_up(_holder(states, entries), entries),
    "settling": lambda states, entries: states.settling(entries),
    "settled": lambda states, entries: states.settled(entries, Spans()),
    "take": lambda states, entries: states.take(0, COUNT),
    "put_back": lambda states, entries: states.put_back(0, entries),
    "parked": lambda states, entries: states.parked(entries),
    "unparked": lambda states, entries: states.unparked(entries),
    "park_cleared": lambda states, entries: states.park_cleared(),
    "moved": lambda states, entries: states.moved(entries),
    "sought": lambda states, entries: states.sought(START),
}
WAYS = {
    State.UNSENT: [],
    State.QUEUED: ["put_back"],
    State.PARKED: ["parked"],
    State.LEASED: ["handed_out"],
    State.RETURNING: ["handed_out", "returning"],
    State.GIVING_UP: ["given_up"],
    State.SETTLING: ["settling"],
    State.SETTLED: ["settled"],
}
OF_ALL = {"take", "park_cleared", "sought"}
"""Events of all entries at once."""


def state_of(states: EntryStates, position: Position) -> State:
    """The state, and that no other column has the entry."""
    found = [
        state
        for state in IN_COLUMNS
        if position.entry_id in states.column(state).get(position.ledger_id, BitMap())
    ]
    if states.cursor.is_settled(position):
        found.append(State.SETTLED)
    assert len(found) <= 1, f"STATES-2: {found}"
    answer = states.state_of(position)
    assert answer is (found[0] if found else State.UNSENT)
    return answer


def test_table_is_whole() -> None:
    assert TRANSITIONS.keys() == EVENTS.keys()
    assert WAYS.keys() == set(State)
    assert {end for row in TRANSITIONS.values() for end in row.values()} == set(State)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_event_in_state(state: State, event: str) -> None:
    states, position = made(), Position(LEDGER, 3)
    one = entries_of([position])
    for step in WAYS[state]:
        EVENTS[step](states, one)
    assert state_of(states, position) is state
    end = TRANSITIONS[event].get(state)
    if end is None:
        with pytest.raises(AssertionError):
            EVENTS[event](states, one)
        assert state_of(states, position) is state, "a refused event changes nothing"
    else:
        EVENTS[event](states, one)
        assert state_of(states, position) is end


def _walk(seed: int) -> int:
    rng = random.Random(seed)
    states, count = made(), 0
    model = {Position(LEDGER, entry_id): State.UNSENT for entry_id in range(COUNT)}
    recorded, unrecorded = set[Position](), set[Position]()  # of what came back
    for _ in range(200):
        event = rng.choice(list(EVENTS))
        row = TRANSITIONS[event]
        if event in OF_ALL:
            some = set(model)
        else:
            wanted = rng.choice(list(row))
            some = {each for each, state in model.items() if state is wanted and rng.random() < 0.5}
            if event not in ("taken_back", "returning", "given_up"):  # those are of one holder
                some |= {each for each, state in model.items() if state in row and rng.random() < 0.2}
        if event == "settled" and rng.random() < 0.8:
            continue  # or nothing else is left
        if not some:
            continue
        EVENTS[event](states, entries_of(some))
        if event == "returned":
            recorded |= {each for each in some if model[each] is not State.SETTLED}
        elif event == "taken_back":
            unrecorded |= some
        if event in ("handed_out", "settling", "settled", "moved", "sought"):
            unrecorded -= some
        if event in ("settled", "sought"):
            recorded -= some
        model |= {each: row[model[each]] for each in some}
        count += len(some)
        assert {each: state_of(states, each) for each in model} == model, event
        for state in IN_COLUMNS:
            assert states.count(state) == sum(each is state for each in model.values())
        assert states.came_back(entries_of(model)) == entries_of(recorded | unrecorded), f"STATES-3: {event}"
    return count


@pytest.mark.slow
def test_walks() -> None:
    walks = at_depth(fast=10, change=20, deep=500)
    assert sum(_walk(seed) for seed in range(walks)) > 200 * walks


def test_what_was_acknowledged_while_it_came_back_is_not_queued() -> None:
    states, one = made(), entries_of([Position(LEDGER, 3)])
    states.handed_out("a", one, 1)
    states.returning("a", one)
    states.settling(one)
    assert states.returned(0, one) == one, "it is owed after a crash"
    assert states.take(0, COUNT) is None
    assert list(states.redelivery.capture().by_ledger()) == [LEDGER]
    assert states.settled(one, Spans()) == one
    assert list(states.redelivery.capture().by_ledger()) == []
