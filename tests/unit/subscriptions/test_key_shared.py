"""Owners of slots, when they may be sent to, and what is parked, against plain dicts and lists."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from broker.model import (
    Entries,
    Int64Column,
    Position,
    UInt32Column,
    count_entries,
    merge_entries,
    remove_entries,
)
from broker.subscriptions.key_shared import (
    _FIND_ROWS,
    _SLACK_ROWS,
    ANY_TIME_MS,
    NO_KEY,
    NOBODY,
    SLOTS,
    KeyRouter,
    Parked,
    SlotColumn,
    slots_of,
)
from broker.subscriptions.leases import Leases
from tests.depth import at_depth
from tests.harness import entries_of

CONSUMERS = [f"consumer-{i}" for i in range(6)]
FEW_SLOTS = (*range(12), NO_KEY)


def owners(router: KeyRouter) -> list[str | None]:
    names = {seat: name for name, seat in router.seats.items()}
    return [names.get(seat) for seat in router.owner[:SLOTS].tolist()]


def router_of(names: list[str]) -> KeyRouter:
    router = KeyRouter()
    router.update(names, Leases(), [], {}, {})
    return router


def union(some: list[Entries]) -> Entries:
    all_: Entries = {}
    for each in some:
        merge_entries(all_, each)
    return all_


def columns_of(positions: list[Position], slots: list[int]) -> tuple[Int64Column, UInt32Column, SlotColumn]:
    return (
        np.array([p.ledger_id for p in positions], dtype=np.int64),
        np.array([p.entry_id for p in positions], dtype=np.uint32),
        np.array(slots, dtype=np.uint16),
    )


# -- owners ------------------------------------------------------------------------------------------------------------


def test_a_hash_has_one_slot_and_no_key_has_none():
    hashes = np.array([0, 1, SLOTS - 1, SLOTS, SLOTS + 1, (1 << 32) - 1], dtype=np.uint32)
    assert slots_of(hashes).tolist() == [NO_KEY, 1, SLOTS - 1, 0, 1, SLOTS - 1]


@pytest.mark.parametrize("seed", range(10))
def test_owners_depend_on_who_is_there_and_not_on_how_it_came_about(seed: int):
    rng = random.Random(seed)
    router, there = KeyRouter(), list[str]()
    for _ in range(12):
        before, was = owners(router), set(there)
        there = rng.sample(CONSUMERS, rng.randint(0, len(CONSUMERS)))
        router.update(there, Leases(), [], {}, {})
        after = owners(router)
        assert after == owners(router_of(sorted(there)))
        stayed = was & set(there)
        for old, new in zip(before, after, strict=True):
            if old in stayed:
                assert new == old or new not in was, "a slot moved from one who stayed to another who stayed"
    assert len(set(router.seats.values())) == len(there)


def test_slots_are_shared_evenly_and_nobody_owns_them_when_nobody_is_there():
    counts = Counter(owners(router_of([f"c{i}" for i in range(10)])))
    assert len(counts) == 10
    assert min(counts.values()) > SLOTS / 10 * 0.8
    assert set(owners(router_of([]))) == {None}


# -- hindered slots, and what comes back -------------------------------------------------------------------------------


class World:
    """A router with leases and records, and next to it what a dict knows."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.router, self.leases = KeyRouter(), Leases()
        self.there: list[str] = []
        self.slot_of: dict[Position, int] = {}
        self.holder: dict[Position, str] = {}
        self.came_back: list[Entries] = []
        self.coming: list[Entries] = []  # records on their way to the disk
        self.ready: Entries = {}

    def update(self) -> None:
        self.router.update(self.there, self.leases, self.came_back, union(self.coming), self.ready)
        self.came_back = []

    def join_or_leave(self) -> None:
        self.there = self.rng.sample(CONSUMERS, self.rng.randint(0, 4))
        for name in set(self.holder.values()) - set(self.there):
            if self.rng.random() < 0.6:  # else it drains, and holds on
                self.give_back(name, [p for p, by in self.holder.items() if by == name], at_once=True)

    def give_back(self, name: str, positions: list[Position], *, at_once: bool) -> None:
        if not positions:
            return
        self.leases.take_back(name, entries_of(positions))
        for position in positions:
            del self.holder[position]
        if at_once:
            self.came_back.append(entries_of(positions))
            self.coming.append(entries_of(positions))

    def hand_out(self) -> None:
        self.update()
        names = {seat: name for name, seat in self.router.seats.items()}
        for name in self.there:
            given = []
            for _ in range(self.rng.randint(0, 3)):
                slot = self.rng.choice(FEW_SLOTS)
                owner = int(self.router.owner[slot])
                if slot == NO_KEY or (names.get(owner) == name and not self.router.blocked[slot]):
                    given.append(Position(self.rng.randint(1, 3), len(self.slot_of)))
                    self.slot_of[given[-1]], self.holder[given[-1]] = slot, name
            if given:
                self.leases.grant(name, entries_of(given), 0)
                self.router.handed_out(
                    name, *columns_of(given, [self.slot_of[p] for p in given]), self.leases
                )

    def end_some(self) -> None:
        for name in sorted(set(self.holder.values())):
            mine = [p for p, by in self.holder.items() if by == name and self.rng.random() < 0.4]
            if self.rng.random() < 0.5:
                self.give_back(name, mine, at_once=self.rng.random() < 0.5)
            else:
                self.leases.settle(entries_of(mine))
                for position in mine:
                    del self.holder[position]

    def apply_a_record(self) -> None:
        if self.coming:
            merge_entries(self.ready, self.coming.pop(0))

    def take_returned(self) -> None:
        self.update()
        for ledger_id in list(self.ready):
            some = [e for e in self.ready[ledger_id] if self.rng.random() < 0.7]
            remove_entries(self.ready, entries_of(Position(ledger_id, e) for e in some))

    def check(self) -> None:
        self.update()
        seats = self.router.seats
        blocked = {
            self.slot_of[p]
            for p, by in self.holder.items()
            if seats.get(by, NOBODY) != self.router.owner[self.slot_of[p]]
        }
        blocked |= {self.slot_of[Position(i, e)] for each in self.coming for i, b in each.items() for e in b}
        assert set(np.flatnonzero(self.router.blocked).tolist()) == blocked - {NO_KEY}
        waiting = {self.slot_of[Position(i, e)] for i, b in self.ready.items() for e in b} - {NO_KEY}
        behind = set(np.flatnonzero(self.router.behind).tolist())
        assert waiting <= behind
        assert self.ready or not behind


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_a_slot_is_blocked_while_another_holds_of_it_or_some_of_it_comes_back(seed: int):
    world = World(random.Random(seed))
    steps = [
        world.join_or_leave,
        world.hand_out,
        world.hand_out,
        world.end_some,
        world.apply_a_record,
        world.take_returned,
        world.check,
    ]
    for _ in range(80):
        world.rng.choice(steps)()
        if world.rng.random() < 0.5:
            world.check()


def test_what_an_earlier_dispatcher_handed_out_blocks_every_key_while_it_comes_back():
    router = router_of(["a"])
    lost = entries_of([Position(1, 1)])
    router.update(["a"], Leases(), [lost], lost, {})
    assert router.blocked[:SLOTS].all()
    assert router.sendable(np.array([1]))[NO_KEY]
    router.update(["a"], Leases(), [], {}, lost)
    assert not router.blocked.any()
    assert router.behind[:SLOTS].all()
    router.update(["a"], Leases(), [], {}, {})
    assert not router.behind.any()


def test_a_message_that_is_queued_again_later_does_not_hold_up_its_key():
    world = World(random.Random(0))
    world.there = ["consumer-0"]
    first, second = Position(1, 0), Position(1, 1)
    world.leases.grant("consumer-0", entries_of([first, second]), 0)
    world.update()
    world.router.handed_out("consumer-0", *columns_of([first, second], [5, 6]), world.leases)
    world.holder = dict.fromkeys([first, second], "consumer-0")
    world.give_back("consumer-0", [first, second], at_once=True)
    world.update()
    world.apply_a_record()
    world.update()
    remove_entries(world.ready, entries_of([first]))  # taken, and sent
    world.update()
    world.ready = entries_of([first])  # given back for later, while the other one was taken
    world.update()
    assert not world.router.behind.any()


def test_memory_is_proportional_to_what_is_leased():
    router, leases = router_of(["a"]), Leases()
    for number in range(300):
        given = [Position(1, 100 * number + i) for i in range(100)]
        leases.grant("a", entries_of(given), 0)
        router.handed_out("a", *columns_of(given, [7] * 100), leases)
        leases.settle(entries_of(given[1:]))
    assert leases.count() == 300
    assert router._rows <= 2 * 300 + _SLACK_ROWS + 100


# -- routes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_each_seat_gets_the_first_of_its_own_and_those_without_a_key_fill_the_rest(seed: int):
    rng = random.Random(seed)
    names = CONSUMERS[: rng.randint(1, 6)]
    router = router_of(names)
    router.blocked[rng.sample(range(12), 3)] = True
    room = np.array([rng.choice((0, 1, 3, 50)) for _ in names], dtype=np.int64)
    slots = np.array([rng.choice(FEW_SLOTS) for _ in range(rng.randint(0, 60))], dtype=np.uint16)
    seats = router.seats_for(slots, router.sendable(room), room, rng.randrange(len(names)))
    left, free, expected = room.tolist(), 0, list[int | None]()
    for slot in slots.tolist():
        owner = int(router.owner[slot])
        if slot == NO_KEY:
            expected.append(None)
            free += 1
        elif router.blocked[slot] or not left[owner]:
            expected.append(NOBODY)
        else:
            expected.append(owner)
            left[owner] -= 1
    for seat, wanted in zip(seats.tolist(), expected, strict=True):
        assert wanted is None or seat == wanted
    taken = Counter(seats[seats != NOBODY].tolist())
    assert all(taken[seat] <= room[seat] for seat in taken)
    shared = seats[slots == NO_KEY]
    assert (shared != NOBODY).sum() == min(free, sum(left))
    assert (shared[: min(free, sum(left))] != NOBODY).all(), "the first ones go first"


def test_messages_without_a_key_are_shared_out_evenly():
    router = router_of(CONSUMERS[:3])
    room = np.array([100, 2, 100], dtype=np.int64)
    slots = np.full(42, NO_KEY, dtype=np.uint16)
    counts = Counter(router.seats_for(slots, router.sendable(room), room, 1).tolist())
    assert counts == {0: 20, 1: 2, 2: 20}


# -- parked ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(at_depth(change=10, deep=100)))
def test_parked_messages_are_a_list(seed: int):
    rng = random.Random(seed)
    router = router_of(CONSUMERS[:3])
    parked, model, numbers = Parked(), list[tuple[Position, int, int]](), iter(range(10**6))
    for _ in range(60):
        if rng.random() < 0.4:
            rows = [
                (
                    Position(rng.randint(1, 3), next(numbers)),
                    rng.choice((ANY_TIME_MS, 5)),
                    rng.choice(FEW_SLOTS),
                )
                for _ in range(rng.randint(1, 200))
            ]
            ledger_ids, entry_ids, slots = columns_of([row[0] for row in rows], [row[2] for row in rows])
            parked.park(ledger_ids, entry_ids, np.array([row[1] for row in rows]), slots)
            model += rows
        elif rng.random() < 0.1:
            parked.sort()
            model.sort()
        else:
            room = np.array([rng.choice((0, 2, 1000)) for _ in range(3)], dtype=np.int64)
            limit = rng.choice((1, 10, 10_000))
            sendable = router.sendable(room)
            found = parked.find(sendable, router, room, limit)
            left, expected = room.tolist(), list[tuple[Position, int, int]]()
            for row in model:
                owner = int(router.owner[row[2]])
                if sendable[row[2]] and len(expected) < limit and (row[2] == NO_KEY or left[owner]):
                    expected.append(row)
                    left[owner] -= row[2] != NO_KEY
            columns = [column.tolist() for column in parked.at(found)]
            got = [(Position(i, e), time, slot) for i, e, time, slot in zip(*columns, strict=True)]
            assert got == expected
            chosen = [index for index in range(len(got)) if rng.random() < 0.7]
            parked.drop(found[chosen])
            for index in chosen:
                model.remove(got[index])
        assert len(parked) == len(model)
        counts = Counter(row[2] for row in model)
        assert parked.counts.tolist() == [counts[slot] for slot in range(SLOTS + 1)]


@pytest.mark.slow
def test_parked_memory_shrinks_with_what_is_parked():
    parked, router, room = Parked(), router_of(["a"]), np.array([10**6])
    for number in range(200):
        positions = [Position(1, 1000 * number + i) for i in range(1000)]
        ledger_ids, entry_ids, slots = columns_of(positions, [number % 50] * 1000)
        parked.park(ledger_ids, entry_ids, np.full(1000, ANY_TIME_MS), slots)
        parked.drop(parked.find(router.sendable(room), router, room, 1000))
    assert len(parked) == 0
    assert len(parked._columns) <= _SLACK_ROWS + 2000


def test_who_has_many_parked_does_not_hide_the_others():
    router = router_of(["a", "b"])
    mine, other = (int(np.flatnonzero(router.owner == router.seats[name])[0]) for name in ("a", "b"))
    parked = Parked()
    for slot, first in ((mine, 0), (other, _FIND_ROWS + 5)):
        count = _FIND_ROWS + 5 if slot == mine else 3
        ids = np.arange(first, first + count, dtype=np.uint32)
        parked.park(
            np.ones(count, dtype=np.int64), ids, np.full(count, 1), np.full(count, slot, dtype=np.uint16)
        )
    room = np.zeros(2, dtype=np.int64)
    room[router.seats["b"]] = 2
    assert parked.find(router.sendable(room), router, room, 10).tolist() == [_FIND_ROWS + 5, _FIND_ROWS + 6]
    room[router.seats["a"]] = 1
    assert len(parked.find(router.sendable(room), router, room, 10))


@pytest.mark.slow
def test_the_world_above_hands_out_and_blocks_something():
    handed_out = blocked = 0
    for seed in range(10):
        world = World(random.Random(seed))
        for _ in range(40):
            world.join_or_leave()
            world.hand_out()
            world.check()
            blocked += int(world.router.blocked.sum())
        handed_out += len(world.slot_of)
        assert count_entries(world.leases.leased) == len(world.holder)
    assert handed_out > 100
    assert blocked > 100
