"""The check of the delayed index: finds every fault that there is, and none where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pyroaring import BitMap

from broker.delayed.check import (
    BucketCheck,
    CursorView,
    Finding,
    IndexCheck,
    IndexedEntries,
    IndexState,
    Kind,
    LedgerCounts,
    LedgerRows,
    check_ledger,
    plan_passes,
    settled_by_all,
)
from broker.delayed.check.findings import time_text
from broker.model import LEDGER_ID_MAX, START, Position
from broker.storage.bucket_snapshot import BucketMetadata, LedgerSpan, SegmentColumns
from tests.unit.delayed.index_world import (
    Entry,
    Faults,
    Fed,
    World,
    check,
    cursors,
    faults_of,
    feed_of,
    find_faults,
    sound_worlds,
    wild_worlds,
)


def small_world() -> World:
    """Three ledgers, all but every fifth row delayed and pending, in two buckets; ledger 9 is indexed half way."""
    times = {
        ledger_id: [0 if i % 5 == 4 else 1_000 + (i * 7 + ledger_id) % 50 for i in range(25)]
        for ledger_id in (3, 5, 9)
    }
    world = World(times, IndexState(Position(9, 15), 10, 500), cursors=[CursorView(START, {})])
    keys = [(times[i][entry], i, entry) for i, entry in world.entries() if world.is_pending((i, entry))]
    world.buckets = [keys[::2], keys[1::2]]
    return world


# -- the whole, against the oracle -------------------------------------------------------------------------------


@pytest.mark.slow
@given(wild_worlds())
def test_every_fault_of_any_buckets_is_found_and_named(world: World) -> None:
    assert faults_of(check(world)) == find_faults(world)


@pytest.mark.slow
@given(sound_worlds())
def test_what_a_broker_may_leave_is_clean(world: World) -> None:
    assert check(world) == []


@pytest.mark.slow
@given(wild_worlds(), st.integers(1, 10))
def test_several_passes_find_what_one_does(world: World, entries_max: int) -> None:
    sizes = [(ledger_id, len(times)) for ledger_id, times in sorted(world.times.items())]
    findings: list[Finding] = []
    counts = LedgerCounts()
    for number, (first, last) in enumerate(plan_passes(sizes, entries_max)):
        part = IndexCheck(
            world.state, first_ledger_id=first, last_ledger_id=last, structure=not number, named_max=1000
        )
        inside = replace(world, times={i: times for i, times in world.times.items() if first <= i <= last})
        findings += check(inside, map(feed_of, range(1, 100), world.buckets), part)
        counts += part.counts
    whole = IndexCheck(world.state, named_max=1000)
    assert sorted(map(str, findings)) == sorted(map(str, check(world, check=whole)))
    assert counts == whole.counts


# -- each fault, planted ---------------------------------------------------------------------------------------------

Plant = Callable[[World, list[Fed], Callable[[], Entry]], Faults]
"""Changes keys of the buckets, or what they are fed as; gives what must be found."""


def lose(world: World, _: list[Fed], pick: Callable[[], Entry]) -> Faults:
    entry = pick()
    world.buckets = [[key for key in bucket if key[1:] != entry] for bucket in world.buckets]
    return {Kind.LOST: {entry}}


def hold_in_two_buckets(world: World, _: list[Fed], pick: Callable[[], Entry]) -> Faults:
    entry = pick()
    for bucket in world.buckets:
        if not any(key[1:] == entry for key in bucket):
            bucket.append((world.effective(entry), *entry))
    return {Kind.DUPLICATE: {entry}}


def hold_twice_in_one(world: World, _: list[Fed], pick: Callable[[], Entry]) -> Faults:
    entry = pick()
    for bucket in world.buckets:
        bucket += [key for key in bucket if key[1:] == entry]
    return {Kind.DUPLICATE: {entry}}


def hold_under_another_time(world: World, _: list[Fed], pick: Callable[[], Entry]) -> Faults:
    entry = pick()
    world.buckets = [
        [(key[0] + 1, *entry) if key[1:] == entry else key for key in bucket] for bucket in world.buckets
    ]
    return {Kind.WRONG_TIME: {entry}}


def hold_under_a_second_time(world: World, _: list[Fed], pick: Callable[[], Entry]) -> Faults:
    entry = pick()
    world.buckets[0].append((2_000, *entry))
    return {Kind.WRONG_TIME: {entry}}


def hold_beyond_a_ledger(world: World, _: list[Fed], pick: Callable[[], Entry]) -> Faults:
    world.buckets[0].append((1_010, 3, 25))
    return {Kind.EXTRA: {(3, 25)}}


def hold_what_is_not_delayed(world: World, _: list[Fed], pick: Callable[[], Entry]) -> Faults:
    world.buckets[1].append((1_010, 5, 14))
    return {Kind.EXTRA: {(5, 14)}}


def hold_what_is_not_indexed_yet(world: World, _: list[Fed], pick: Callable[[], Entry]) -> Faults:
    world.buckets[1].append((world.times[9][16], 9, 16))
    return {Kind.EXTRA: {(9, 16)}}


def hold_a_strange_ledger(world: World, _: list[Fed], pick: Callable[[], Entry]) -> Faults:
    world.buckets[0] += [(1_010, 4, 1), (1_020, 4, 2)]
    return {Kind.MISSING_LEDGER: {(4, 1), (4, 2)}}


CONTENT = (
    lose,
    hold_in_two_buckets,
    hold_twice_in_one,
    hold_under_another_time,
    hold_under_a_second_time,
    hold_beyond_a_ledger,
    hold_what_is_not_delayed,
    hold_what_is_not_indexed_yet,
    hold_a_strange_ledger,
)


def forget_in_a_bitmap(world: World, fed: list[Fed], pick: Callable[[], Entry]) -> Faults:
    ledger_id, entry_id = pick()
    for each in fed:
        assert each.bitmaps is not None
        each.bitmaps[ledger_id].discard(entry_id)
    return {Kind.BITMAP: {(ledger_id, entry_id)}}


def invent_in_a_bitmap(world: World, fed: list[Fed], pick: Callable[[], Entry]) -> Faults:
    assert fed[0].bitmaps is not None
    fed[0].bitmaps[5].add(19)
    return {Kind.BITMAP: {(5, 19)}}


def lose_a_bitmap(world: World, fed: list[Fed], pick: Callable[[], Entry]) -> Faults:
    assert fed[1].bitmaps is not None
    entries = fed[1].bitmaps.pop(3)
    return {Kind.BITMAP: {(3, entry_id) for entry_id in entries}}


def swap_entries(world: World, fed: list[Fed], pick: Callable[[], Entry]) -> Faults:
    columns = fed[0].segments[2]
    assert not isinstance(columns, str)
    times, ledgers, entries = (column[[1, 0, 2]] for column in columns)
    fed[0].segments[2] = (times, ledgers, entries)
    return {Kind.SEGMENT: set()}


def swap_segments(world: World, fed: list[Fed], pick: Callable[[], Entry]) -> Faults:
    segments = fed[1].segments
    segments[3], segments[4] = segments[4], segments[3]
    return {Kind.SEGMENT: set()}


def change_segment(name: str) -> Plant:
    def change(world: World, fed: list[Fed], pick: Callable[[], Entry]) -> Faults:
        segments = fed[0].metadata.segments
        column = getattr(segments, name).copy()
        column[1] += 1
        changed: dict[str, Any] = {name: column}
        fed[0].metadata = replace(fed[0].metadata, segments=replace(segments, **changed))
        return {Kind.SEGMENT: set()}

    change.__name__ = f"change_{name}"
    return change


def change_bucket(name: str) -> Plant:
    def change(world: World, fed: list[Fed], pick: Callable[[], Entry]) -> Faults:
        changed: dict[str, Any] = {name: getattr(fed[1].metadata, name) + 1}
        fed[1].metadata = replace(fed[1].metadata, **changed)
        return {Kind.BUCKET: set()}

    change.__name__ = f"change_{name}"
    return change


def disorder_spans(world: World, fed: list[Fed], pick: Callable[[], Entry]) -> Faults:
    spans = fed[0].metadata.spans
    fed[0].metadata = replace(fed[0].metadata, spans=(*spans, LedgerSpan(2, 0, 1)))
    assert fed[0].bitmaps is not None
    fed[0].bitmaps[2] = BitMap()
    return {Kind.BUCKET: set()}


def damage_a_segment(world: World, fed: list[Fed], pick: Callable[[], Entry]) -> Faults:
    columns = fed[1].segments[-1]
    assert not isinstance(columns, str)
    fed[1].segments[-1] = "its checksum is wrong"
    _, ledgers, entries = columns
    lost = set(zip(ledgers.tolist(), entries.tolist(), strict=True))
    return {Kind.CHECKSUM: set(), Kind.LOST: lost}


STRUCTURE = (
    forget_in_a_bitmap,
    invent_in_a_bitmap,
    swap_entries,
    swap_segments,
    *map(change_segment, ("counts", "first_ms", "last_ms", "first_ordinals", "last_ordinals")),
    *map(change_bucket, ("count", "checksum")),
)
ALONE = (lose_a_bitmap, disorder_spans, damage_a_segment)  # what one of these names depends on the others


def plant(world: World, plants: tuple[Plant, ...]) -> Faults:
    """Plant faults; what must be found, by kind."""
    expected: Faults = {}
    entries = iter([(3, 1), (5, 6), (3, 12), (9, 3)])
    fed: list[Fed] = []
    for each in plants:
        if each in CONTENT:
            _merge(expected, each(world, fed, lambda: next(entries)))
    fed += map(feed_of, range(1, 100), world.buckets)
    for each in plants:
        if each not in CONTENT:
            _merge(expected, each(world, fed, lambda: next(entries)))
    assert faults_of(check(world, fed)) == expected
    return expected


def _merge(into: Faults, faults: Faults) -> None:
    for kind, entries in faults.items():
        into.setdefault(kind, set()).update(entries)


@pytest.mark.parametrize("planted", [*CONTENT, *STRUCTURE, *ALONE], ids=lambda each: each.__name__)
def test_each_fault_is_found_by_itself(planted: Plant) -> None:
    assert check(small_world()) == []
    plant(small_world(), (planted,))


@pytest.mark.slow
def test_each_pair_of_faults_is_found() -> None:
    for pair in combinations([*CONTENT, *STRUCTURE], 2):
        plant(small_world(), pair)


# -- what is no fault ------------------------------------------------------------------------------------------------


def test_what_every_subscription_settled_may_be_absent_present_or_wrong() -> None:
    world = small_world()
    settled = CursorView(Position(3, 5), {3: BitMap([6, 12]), 5: BitMap([1])})
    world.cursors = [settled]
    for change in (lose, hold_in_two_buckets, hold_under_another_time):
        entries = iter([(3, 1), (3, 6), (3, 12), (5, 1)])
        for _ in range(4):
            change(world, [], lambda: next(entries))  # noqa: B023
        assert check(world) == []
    world.cursors = [settled, CursorView(Position(3, 2), {3: BitMap([6]), 5: BitMap([1])})]
    assert set(faults_of(check(world))) == {Kind.WRONG_TIME}
    world.cursors = [settled, CursorView(Position(9, 99), {})]
    assert check(world) == []


def test_what_was_moved_or_cancelled_is_stale_where_it_was() -> None:
    world = small_world()
    world.cancelled = {(3, 1)}
    world.moves = {(5, 2): (1_500, 10), (5, 3): (1_600, 11)}
    index = IndexCheck(world.state)
    # The move at lsn 10 must be in a bucket, that at 11 is indexed again after a start.
    assert faults_of(check(world, check=index)) == {Kind.LOST: {(5, 2)}}
    assert index.counts.stale == 3
    world.buckets[0] += [(1_500, 5, 2), (1_600, 5, 3)]
    index = IndexCheck(world.state)
    assert check(world, check=index) == []
    assert index.counts.stale == 3
    assert index.counts.entries == len(world.buckets[0]) + len(world.buckets[1])
    assert index.counts.stale_ratio == pytest.approx(3 / index.counts.entries)


def test_an_entry_moved_away_and_back_is_no_duplicate() -> None:
    world = small_world()
    world.moves = {(3, 1): (world.times[3][1], 9)}
    hold_in_two_buckets(world, [], lambda: (3, 1))
    index = IndexCheck(world.state)
    assert check(world, check=index) == []
    assert index.counts.stale == 1
    world.buckets[0].append((world.times[3][1], 3, 1))  # twice, for one move
    assert faults_of(check(world)) == {Kind.DUPLICATE: {(3, 1)}}


def test_what_is_moved_though_it_was_never_delayed_is_stale_and_no_extra() -> None:
    world = small_world()
    world.moves = {(3, 4): (1_700, 9)}
    world.buckets[0] += [(1_600, 3, 4), (1_700, 3, 4)]
    assert check(world) == []


def test_entries_of_a_discarded_ledger_are_stale() -> None:
    world = small_world()
    index = IndexCheck(world.state)
    for each in map(feed_of, (1, 2), world.buckets):
        bucket = index.begin_bucket(each.metadata)
        for columns in each.segments:
            bucket.add_segment(*columns)
        index.end_bucket(bucket, each.bitmaps)
    for ledger_id in (3, 5, 9):
        index.discard_ledger(ledger_id)
    assert index.finish() == []
    assert index.counts.stale == index.counts.entries == sum(map(len, world.buckets))


def test_without_a_subscription_everything_is_waited_for() -> None:
    world = small_world()
    world.cursors = []
    lose(world, [], lambda: (3, 1))
    assert faults_of(check(world)) == {Kind.LOST: {(3, 1)}}


# -- findings --------------------------------------------------------------------------------------------------------


def test_a_finding_names_the_first_entries_and_counts_all() -> None:
    world = small_world()
    world.buckets = [[key for key in bucket if key[1] != 3] for bucket in world.buckets]
    (finding,) = check(world, check=IndexCheck(world.state, named_max=2))
    assert (finding.kind, finding.count, finding.ledger_id) == (Kind.LOST, 20, 3)
    assert [suspect.entry_id for suspect in finding.suspects] == [0, 1]
    assert str(finding) == (
        "lost: ledger 3: pending, but in no bucket: entry 0 (due 1003 = 1970-01-01T00:00:01.003Z), "
        "entry 1 (due 1010 = 1970-01-01T00:00:01.010Z) and 18 more"
    )


def test_a_finding_says_which_buckets_hold_an_entry_and_for_when() -> None:
    world = small_world()
    hold_in_two_buckets(world, [], lambda: (3, 1))
    hold_under_another_time(world, [], lambda: (5, 6))
    duplicate, wrong = check(world)
    assert duplicate.suspects[0].bucket_ids == (1, 2)
    (suspect,) = wrong.suspects
    assert (suspect.expected_ms, suspect.found_ms, suspect.bucket_ids) == (1_047, 1_048, (2,))
    due, found = "1047 = 1970-01-01T00:00:01.047Z", "1048 = 1970-01-01T00:00:01.048Z"
    assert str(wrong).endswith(f"entry 6 (due {due}, indexed for {found}, in bucket 2)")


def test_a_time_beyond_all_dates_is_told_as_a_number() -> None:
    assert time_text(253_402_300_799_999) == "253402300799999 = 9999-12-31T23:59:59.999Z"
    assert time_text(253_402_300_800_000) == "253402300800000"


# -- parts -----------------------------------------------------------------------------------------------------------


@given(st.lists(cursors, max_size=3), st.integers(0, 8))
def test_settled_by_all_is_what_each_cursor_has_settled(views: list[CursorView], count: int) -> None:
    for ledger_id in (3, 5, 7):
        expected = {
            entry_id
            for entry_id in range(count)
            if views
            and all((ledger_id, entry_id) < v.mark or entry_id in v.settled.get(ledger_id, ()) for v in views)
        }
        found = settled_by_all(views, ledger_id, count)
        assert {entry_id for entry_id in found if entry_id < count} == expected


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 12))
def test_passes_cover_every_ledger_once_within_bounds(sizes: list[int], entries_max: int) -> None:
    ledgers = [(3 * number + 1, size) for number, size in enumerate(sizes)]
    passes = plan_passes(ledgers, entries_max)
    assert passes[0][0] == 0
    assert passes[-1][1] == LEDGER_ID_MAX
    assert all(right[0] == left[1] + 1 for left, right in pairwise(passes))
    for first, last in passes:
        inside = [size for ledger_id, size in ledgers if first <= ledger_id <= last]
        assert sum(inside) <= entries_max or sum(size > 0 for size in inside) == 1
        assert sum(inside) > 0 or len(passes) == 1


@pytest.mark.parametrize(
    ("keys", "misplaced"),
    [
        ([(5, 3, 1), (6, 3, 1), (9, 3, 9)], 0),
        ([(5, 3, 1), (5, 3, 1), (9, 3, 9)], 0),  # a duplicate is in order
        ([(5, 3, 2), (5, 3, 1), (9, 3, 9)], 1),
        ([(5, 4, 1), (5, 3, 2), (9, 3, 9)], 1),
        ([(6, 3, 1), (5, 4, 2), (9, 3, 9)], 1),
        ([(5, 4, 2), (6, 3, 1), (9, 3, 9)], 0),
        ([(5, 3, 1), (8, 3, 1), (7, 3, 1), (6, 3, 1), (9, 3, 9)], 2),
    ],
)
def test_entries_out_of_order_are_counted(keys: list[tuple[int, int, int]], misplaced: int) -> None:
    metadata = feed_of(1, [(1, 3, 0), (2, 3, 9), (1, 4, 0), (2, 4, 9)]).metadata
    findings = BucketCheck(metadata).add_segment(*np.array(keys).T)
    assert [each.count for each in findings if each.what == "entries are out of order"] == [misplaced] * (
        misplaced > 0
    )


def test_a_segment_that_begins_before_the_one_it_follows_is_found() -> None:
    bucket = BucketCheck(feed_of(1, [(5, 3, 1), (6, 3, 2), (7, 3, 3), (8, 3, 4)]).metadata)
    bucket.add_segment([5, 6, 8], [3, 3, 3], [1, 2, 4])
    findings = bucket.add_segment([7], [3], [3])
    assert "begins with (7, 3, 3), before (8, 3, 4)" in str(findings[0])
    findings = bucket.add_segment([7], [3], [3])
    assert [each.what for each in findings] == ["the metadata does not name it"]


def test_entries_outside_the_spans_are_counted_by_ledger() -> None:
    bucket = BucketCheck(feed_of(1, [(5, 3, 4), (6, 3, 6)]).metadata)
    bucket.add_segment([5, 6, 7, 8], [3, 3, 3, 9], [4, 6, 7, 5])
    findings = [each for each in bucket.end(None) if "span" in each.what]
    assert [(each.ledger_id, each.count) for each in findings] == [(3, 1), (9, 1)]


def test_segments_that_were_never_fed_are_missed() -> None:
    fed = feed_of(1, [(time, 3, time) for time in range(1, 8)])
    bucket = BucketCheck(fed.metadata)
    bucket.add_segment(*fed.segments[0])
    whats = [each.what for each in bucket.end(fed.bitmaps)]
    assert whats[0] == "1 segments, where the metadata names 3"


def test_a_span_without_an_entry_is_no_fault() -> None:
    fed = feed_of(1, [(5, 3, 1)])
    metadata = replace(fed.metadata, spans=(*fed.metadata.spans, LedgerSpan(8, 0, 10)))
    for bitmaps in ({3: BitMap([1])}, {3: BitMap([1]), 8: BitMap()}):
        bucket = BucketCheck(metadata)
        assert bucket.add_segment([5], [3], [1]) == []
        assert bucket.end(bitmaps) == []
    bucket = BucketCheck(fed.metadata)
    bucket.add_segment([5], [3], [1])
    whats = [each.what for each in bucket.end({3: BitMap([1]), 8: BitMap([2])})]
    assert whats == ["no span names its ledger", "in the bitmap, but in no segment"]


def test_a_bitmap_whose_entries_lie_far_apart_is_compared() -> None:
    fed = feed_of(1, [(5, 1, 0), (6, 1, 4_000_000_000)])
    assert fed.bitmaps is not None
    fed.bitmaps[1].add(4_294_967_295)
    bucket = BucketCheck(fed.metadata)
    for columns in fed.segments:
        assert bucket.add_segment(*columns) == []
    (finding,) = bucket.end(fed.bitmaps)
    assert (finding.kind, finding.count, finding.suspects[0].entry_id) == (Kind.BITMAP, 1, 4_294_967_295)


# -- garbage -----------------------------------------------------------------------------------------------------------

DTYPES = st.sampled_from(["i1", "i4", "u4", "i8", "u8", "f8", "?", "S3", "M8[ms]"])
columns = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, st.integers(0, 6)))
integers = st.integers(-(1 << 63), (1 << 63) - 1)
int_columns = st.lists(st.one_of(st.integers(-2, 12), integers), max_size=6).map(
    lambda v: np.array(v, dtype=np.int64)
)
any_bitmaps = st.dictionaries(
    st.integers(-1, 12),
    st.lists(st.one_of(st.integers(0, 12), st.integers(0, (1 << 32) - 1)), max_size=4).map(BitMap),
)
spans = st.builds(LedgerSpan, st.integers(-1, 12), st.integers(0, 1 << 32), st.integers(0, 1 << 32))
any_metadata = st.builds(
    BucketMetadata,
    topic_id=st.just(1),
    bucket_id=st.integers(0, 9),
    start=st.just(START),
    end=st.just(START),
    count=integers,
    checksum=integers,
    spans=st.lists(spans, max_size=4).map(tuple),
    segments=st.builds(SegmentColumns, *[st.one_of(columns, int_columns)] * 8),
)


@pytest.mark.slow
@given(
    any_metadata,
    st.lists(st.tuples(*[st.one_of(columns, int_columns)] * 3), max_size=3),
    st.none() | any_bitmaps,
    st.dictionaries(st.integers(0, 12), st.one_of(columns, int_columns), max_size=3),
    any_bitmaps,
)
def test_no_garbage_makes_it_raise(
    metadata: BucketMetadata,
    segments: list[tuple[Any, Any, Any]],
    bitmaps: dict[int, BitMap] | None,
    ledgers: dict[int, Any],
    settled: dict[int, BitMap],
) -> None:
    index = IndexCheck(IndexState(Position(9, 9), 3, 5))
    bucket = index.begin_bucket(metadata)
    findings = [finding for segment in segments for finding in bucket.add_segment(*segment)]
    findings += index.end_bucket(bucket, bitmaps)
    for ledger_id, times in ledgers.items():
        findings += index.check_ledger(LedgerRows(ledger_id, times, settled=settled.get(ledger_id, BitMap())))
    findings += index.finish()
    assert all(str(finding) for finding in findings)
    if any(len(segment[0]) for segment in segments):
        assert findings


@given(int_columns, int_columns, int_columns)
def test_no_times_and_no_entries_make_a_ledger_raise(times: Any, entries: Any, found: Any) -> None:
    size = min(len(entries), len(found))
    held = IndexedEntries(1, entries[:size].astype(np.uint32), found[:size])
    check_ledger(LedgerRows(3, times), [held], IndexState(Position(4, 0), 3, 5))
