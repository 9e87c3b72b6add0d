"""Facts of a ledger's rows, against counting them one by one; and the check that reads bitmaps alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.delayed.check import IndexCheck, IndexState, Kind, LedgerRows, ledger_facts
from broker.delayed.check.facts import DAY_MS
from broker.model import Position
from tests.unit.delayed.index_world import (
    Faults,
    World,
    faults_of,
    feed_of,
    find_faults,
    sound_worlds,
    wild_worlds,
)


@pytest.mark.slow
@given(sound_worlds(), st.sampled_from([1, DAY_MS // 4, DAY_MS * 40_000]))
def test_facts_are_those_of_counting(world: World, scale: int) -> None:
    world.times = {i: [time * scale for time in times] for i, times in world.times.items()}
    world.moves = {entry: (time * scale, lsn) for entry, (time, lsn) in world.moves.items()}
    frontier_ms = world.state.frontier_ms * scale
    for ledger_id, times in world.times.items():
        entries = [(ledger_id, i) for i in range(len(times))]
        live = [each for each in entries if each not in world.cancelled and not world.is_settled(each)]
        due = [world.effective(each) for each in live if world.effective(each) > frontier_ms]
        facts = ledger_facts(world.rows(ledger_id), frontier_ms)
        assert (facts.entries, facts.live, facts.pending) == (len(times), len(live), len(due))
        assert facts.last_due_ms == max(due, default=0)
        assert facts.due_days == Counter(time // DAY_MS for time in due)


def test_settled_and_cancelled_beyond_the_rows_are_left_out() -> None:
    facts = ledger_facts(LedgerRows(1, np.array([5, 6, 0]), settled=BitMap([1, 9])), 0)
    assert (facts.live, facts.pending, facts.last_due_ms) == (2, 1, 5)


def check_bitmaps(world: World) -> Faults:
    check = IndexCheck(world.state, named_max=1000)
    findings = []
    for fed in map(feed_of, range(1, 100), world.buckets):
        assert fed.bitmaps is not None
        findings += check.hold_bitmaps(fed.metadata, fed.bitmaps)
    for ledger_id in world.times:
        findings += check.check_ledger(world.rows(ledger_id))
    return faults_of(findings + check.finish())


@pytest.mark.slow
@given(sound_worlds())
def test_bitmaps_of_what_a_broker_may_leave_are_clean(world: World) -> None:
    world.moves, world.cancelled = (
        {},
        set(),
    )  # where an entry was held before it was moved, bitmaps cannot tell
    keys = [(world.effective(entry), *entry) for entry in world.entries() if world.is_pending(entry)]
    world.buckets = [keys[::2], keys[1::2]]
    world.buckets = [bucket for bucket in world.buckets if bucket]
    assert check_bitmaps(world) == {}


@pytest.mark.slow
@given(wild_worlds())
def test_bitmaps_never_name_what_times_would_not(world: World) -> None:
    """With bitmaps alone less is found; what is found is a fault."""
    world.moves, world.cancelled = {}, set()
    found, faults = check_bitmaps(world), find_faults(world)
    assert found.get(Kind.EXTRA, set()) == faults.get(Kind.EXTRA, set())
    wrong = faults.get(Kind.WRONG_TIME, set())
    assert found.get(Kind.LOST, set()) == faults.get(Kind.LOST, set())
    assert found.get(Kind.DUPLICATE, set()) <= faults.get(Kind.DUPLICATE, set()) | wrong
    assert not found.keys() & {Kind.WRONG_TIME, Kind.MISSING_LEDGER}


def test_more_entries_in_bitmaps_than_the_metadata_counts_are_found() -> None:
    world = World({3: [7] * 5}, IndexState(Position(9, 9), 1, 1))
    fed = feed_of(1, [(7, 3, 1), (7, 3, 2)])
    check = IndexCheck(world.state)
    findings = check.hold_bitmaps(fed.metadata, {3: BitMap([1, 2, 3])})
    assert [(each.kind, each.count) for each in findings] == [(Kind.BITMAP, 1)]
