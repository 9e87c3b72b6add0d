"""Leases against a plain dict: position -> (consumer, deadline)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.model import Entries, Position
from broker.subscriptions.leases import Leases
from tests.harness import entries_of

Model = dict[Position, tuple[str, int]]

CONSUMERS = ("a", "b", "c")
EVERYTHING = {1: BitMap(range(1000)), 2: BitMap(range(1000))}


def positions_in(some: Entries) -> set[Position]:
    return {Position(ledger_id, entry_id) for ledger_id, bitmap in some.items() for entry_id in bitmap}


def deadlines_of(leases: Leases) -> Model:
    """Every held entry with its holder and its deadline; -1: it was found to be late."""
    found: Model = dict.fromkeys(positions_in(leases._late), ("", -1))
    for ledger_id, times in leases._deadlines.capture().by_ledger().items():
        for entry_id, deadline in zip(
            times.entries, np.frombuffer(times.column, "<i8").tolist(), strict=True
        ):
            assert Position(ledger_id, entry_id) not in found  # LEASE-2
            found[Position(ledger_id, entry_id)] = ("", deadline)
    named = set[Position]()
    for grant in leases._grants:
        assert not named & positions_in(grant.entries)  # LEASE-4
        named |= positions_in(grant.entries)
        for position in positions_in(leases._alive(grant)):
            assert position not in found  # LEASE-2
            found[position] = ("", grant.deadline_ns)
    for consumer_id, held in leases._held.items():
        for position in positions_in(held):
            found[position] = (consumer_id, found[position][1])
    return found


def check(leases: Leases, model: Model) -> None:
    assert positions_in(leases.leased) == model.keys()  # LEASE-1
    assert all(leases.leased.values())
    for consumer_id in CONSUMERS:
        mine = {position for position, (holder, _) in model.items() if holder == consumer_id}
        assert positions_in(leases.held(consumer_id)) == mine
        assert positions_in(leases.held_by(consumer_id, EVERYTHING)) == mine
    found = deadlines_of(leases)
    assert found.keys() == model.keys()
    for position, lease in found.items():
        assert lease == model[position] or (lease[1] == -1 and lease[0] == model[position][0])
    told = {
        Position(ledger_id, entry_id): (lease.consumer_id, lease.deadline_ns or -1)
        for ledger_id, bitmap in EVERYTHING.items()
        for entry_id, lease in leases.of(ledger_id, bitmap).items()
    }
    assert told == found
    assert leases._held.keys() == {holder for holder, _ in model.values()}
    assert leases.count() == len(model)
    # It may be too early: what was settled leaves its deadline behind. It is never too late.
    wake = leases.next_deadline_ns()
    assert (wake is None) == (not model)
    assert wake is None or wake <= min(deadline for _, deadline in model.values())


def check_expired(leases: Leases, model: Model, now_ns: int) -> list[tuple[str, Entries]]:
    late = leases.expired(now_ns)
    assert all(each for _, each in late)
    assert len({consumer_id for consumer_id, _ in late}) == len(late)
    found = {(consumer_id, position) for consumer_id, each in late for position in positions_in(each)}
    assert found == {(holder, p) for p, (holder, deadline) in model.items() if deadline <= now_ns}
    return late


def test_a_settled_entry_is_held_by_nobody():
    leases = Leases()
    leases.grant("a", {1: BitMap([1, 2])}, 10)
    leases.grant("b", {1: BitMap([3])}, 20)
    leases.settle({1: BitMap([1, 2, 3, 4]), 9: BitMap([1])})
    check(leases, {})


def test_only_the_holder_loses_what_is_taken_back():
    leases = Leases()
    leases.grant("a", {1: BitMap([1, 2])}, 10)
    leases.grant("b", {1: BitMap([3])}, 20)
    leases.take_back("a", {1: BitMap([1])})
    check(leases, {Position(1, 2): ("a", 10), Position(1, 3): ("b", 20)})
    leases.grant("b", {1: BitMap([1])}, 30)
    check(leases, {Position(1, 1): ("b", 30), Position(1, 2): ("a", 10), Position(1, 3): ("b", 20)})


def test_an_extended_lease_ends_at_its_new_deadline_only():
    leases = Leases()
    leases.grant("a", {1: BitMap([1, 2])}, 10)
    leases.extend({1: BitMap([1])}, 30)
    assert leases.expired(10) == [("a", {1: BitMap([2])})]
    leases.extend({1: BitMap([1])}, 20)  # also to an earlier one
    leases.take_back("a", {1: BitMap([2])})
    assert leases.next_deadline_ns() == 20
    assert leases.expired(20) == [("a", {1: BitMap([1])})]


def test_what_has_expired_stays_held_until_it_is_taken_back():
    leases = Leases()
    leases.grant("a", {1: BitMap([1])}, 10)
    assert leases.expired(9) == []
    assert leases.expired(10) == leases.expired(11) == [("a", {1: BitMap([1])})]
    check(leases, {Position(1, 1): ("a", 10)})


def test_a_message_that_is_held_on_and_on_gathers_no_grants():
    leases = Leases()
    leases.grant("a", {1: BitMap([0])}, 1 << 60)
    for now in range(1, 1000):
        leases.grant("a", {1: BitMap([now])}, now + 10)
        leases.settle({1: BitMap([now])})
        assert leases.expired(now) == []
        assert len(deadlines_of(leases)) == 1


def test_a_deadline_behind_a_longer_one_that_is_settled_wakes_once():
    leases = Leases()
    leases.grant("a", {1: BitMap([0])}, 100)
    leases.grant("a", {1: BitMap([1])}, 10)
    leases.settle({1: BitMap([1])})
    assert leases.expired(10) == []
    assert leases.next_deadline_ns() == 100


def test_what_held_answers_is_a_copy():
    leases = Leases()
    leases.grant("a", {1: BitMap([1])}, 10)
    leases.held("a")[1].add(5)
    check(leases, {Position(1, 1): ("a", 10)})


sets = st.frozensets(st.builds(Position, st.integers(1, 2), st.integers(0, 8)), min_size=1, max_size=6)
steps = st.lists(
    st.tuples(
        st.sampled_from(["grant", "grant", "settle", "take_back", "extend", "expire"]),
        st.sampled_from(CONSUMERS),
        sets,
        st.integers(1, 30),
    ),
    max_size=40,
)


@pytest.mark.parametrize("grants_max", [0, 2, 4_096])
@given(steps=steps)
def test_leases_say_what_a_plain_dict_says(
    grants_max: int, steps: list[tuple[str, str, frozenset[Position], int]]
):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("broker.subscriptions.leases._GRANTS_MAX", grants_max)
        _compare_with_a_dict(steps)


def _compare_with_a_dict(steps: list[tuple[str, str, frozenset[Position], int]]) -> None:
    leases, model, done, now = Leases(), Model(), set[Position](), 0
    for step, consumer_id, some, number in steps:
        mine = {p for p in some if model.get(p, ("", 0))[0] == consumer_id}
        if step == "grant":
            if not (free := some - model.keys() - done):
                continue
            leases.grant(consumer_id, entries_of(free), now + number)
            model |= dict.fromkeys(free, (consumer_id, now + number))
        elif step == "settle":
            leases.settle(entries_of(some))
            done |= some  # what is settled is never sent again
            model = {p: lease for p, lease in model.items() if p not in some}
        elif step == "expire":
            now += number
            for holder, late in check_expired(leases, model, now):
                leases.take_back(holder, late)
            model = {p: lease for p, lease in model.items() if lease[1] > now}
        elif mine:
            if step == "take_back":
                leases.take_back(consumer_id, entries_of(mine))
                model = {p: lease for p, lease in model.items() if p not in mine}
            else:
                leases.extend(entries_of(mine), now + number)
                model |= dict.fromkeys(mine, (consumer_id, now + number))
        check(leases, model)
    check_expired(leases, model, now + 15)
    check(leases, model)
