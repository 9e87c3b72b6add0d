"""A topic small enough to be checked by hand: rows, amendments, cursors, and what buckets hold of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.delayed.check import CursorView, Finding, IndexCheck, IndexState, Kind, LedgerRows, settled_by_all
from broker.model import Position, bitmap_of
from broker.runs.tally import rows_checksum
from broker.storage.amendments import Amendments
from broker.storage.bucket_snapshot import BucketMetadata, LedgerSpan, SegmentColumns

Key = tuple[int, int, int]  # (deliver_at_ms, ledger_id, entry_id)
Entry = tuple[int, int]
Faults = dict[Kind, set[Entry]]
SEGMENT_ENTRIES = 3


@dataclass
class World:
    """Stored state of one topic. `moves` and `buckets` may say anything."""

    times: dict[int, list[int]]
    state: IndexState
    cancelled: set[Entry] = field(default_factory=set)
    moves: dict[Entry, tuple[int, int]] = field(default_factory=dict)  # (deliver_at_ms, lsn); each moved once
    cursors: list[CursorView] = field(default_factory=list)
    buckets: list[list[Key]] = field(default_factory=list)

    def effective(self, entry: Entry) -> int:
        if entry in self.cancelled:
            return 0
        return self.moves[entry][0] if entry in self.moves else self.times[entry[0]][entry[1]]

    def has_row(self, entry: Entry) -> bool:
        """Return whether a delayed row before `indexed_through` backs an index entry."""
        times = self.times[entry[0]]
        if entry[1] >= len(times) or entry >= self.state.indexed_through:
            return False
        return times[entry[1]] != 0 or entry in self.moves

    def is_settled(self, entry: Entry) -> bool:
        return bool(self.cursors) and all(
            entry < cursor.mark or entry[1] in cursor.settled.get(entry[0], ()) for cursor in self.cursors
        )

    def entries(self) -> Iterable[Entry]:
        return ((ledger_id, i) for ledger_id, times in self.times.items() for i in range(len(times)))

    def is_pending(self, entry: Entry) -> bool:
        return (
            entry < self.state.indexed_through
            and self.effective(entry) > self.state.frontier_ms
            and not self.is_settled(entry)
            and not (entry in self.moves and self.moves[entry][1] > self.state.index_lsn)
        )

    def rows(self, ledger_id: int) -> LedgerRows:
        times = self.times[ledger_id]
        settled = settled_by_all(self.cursors, ledger_id, len(times))
        moves = sorted((entry[1], move) for entry, move in self.moves.items() if entry[0] == ledger_id)
        amendments = Amendments(
            cancelled=BitMap(i for ledger, i in self.cancelled if ledger == ledger_id),
            entry_ids=np.array([i for i, _ in moves], dtype=np.uint32),
            deliver_at_ms=np.array([time for _, (time, _) in moves], dtype=np.int64),
            revisions=np.ones(len(moves), dtype=np.uint32),
            lsns=np.array([lsn for _, (_, lsn) in moves], dtype=np.uint64),
        )
        return LedgerRows(ledger_id, np.array(times, dtype=np.int64), amendments, settled)


def find_faults(world: World) -> Faults:
    """The plainest way to compare entries with rows: one at a time. The oracle."""
    held: Counter[Key] = Counter(key for bucket in world.buckets for key in bucket)
    found: Faults = {kind: set() for kind in Kind}
    for time, *position in held:
        entry = (position[0], position[1])
        if entry[0] not in world.times:
            if time > world.state.frontier_ms:
                found[Kind.MISSING_LEDGER].add(entry)
        elif entry[1] < len(world.times[entry[0]]) and world.is_settled(entry):
            continue
        elif not world.has_row(entry):
            found[Kind.EXTRA].add(entry)
        elif entry in world.moves or entry in world.cancelled:
            # Moved to the time that it had, it was indexed for it a second time.
            if world.effective(entry) == time != 0 and held[(time, *entry)] > 2:
                found[Kind.DUPLICATE].add(entry)
        elif world.effective(entry) != time:
            found[Kind.WRONG_TIME].add(entry)
        elif held[(time, *entry)] > 1:
            found[Kind.DUPLICATE].add(entry)
    for entry in world.entries():
        is_there = held[(world.effective(entry), *entry)] or entry in found[Kind.WRONG_TIME]
        if world.is_pending(entry) and not is_there:
            found[Kind.LOST].add(entry)
    return {kind: entries for kind, entries in found.items() if entries}


@dataclass
class Fed:
    """A bucket as the check is fed it. `segments`: columns, or a sentence that says why they cannot be read."""

    metadata: BucketMetadata
    bitmaps: dict[int, BitMap] | None
    segments: list[tuple[np.ndarray, np.ndarray, np.ndarray] | str]


def feed_of(bucket_id: int, keys: Iterable[Key]) -> Fed:
    """A bucket whose parts agree with each other, whatever it holds."""
    held = sorted(keys)
    times, ledgers, entries = (
        np.array([key[part] for key in held], dtype=dtype)
        for part, dtype in enumerate((np.int64, np.int64, np.uint32))
    )
    spans = tuple(
        LedgerSpan(
            ledger_id, int(entries[ledgers == ledger_id].min()), int(entries[ledgers == ledger_id].max()) + 1
        )
        for ledger_id in sorted(set(ledgers.tolist()))
    )
    bases, total = {}, 0
    for span in spans:
        bases[span.ledger_id] = total - span.first
        total += span.end - span.first
    ordinals = np.array([bases[ledger_id] + entry_id for _, ledger_id, entry_id in held], dtype=np.int64)
    firsts = np.arange(0, len(held), SEGMENT_ENTRIES)
    ends = np.minimum(firsts + SEGMENT_ENTRIES, len(held))
    zeros = np.zeros(len(firsts), dtype=np.int64)  # of what only a reader needs
    columns = SegmentColumns(
        first_ms=times[firsts],
        last_ms=times[ends - 1],
        first_ordinals=ordinals[firsts],
        last_ordinals=ordinals[ends - 1],
        counts=ends - firsts,
        offsets=zeros,
        lengths=zeros,
        crcs=zeros.astype(np.uint32),
    )
    metadata = BucketMetadata(
        topic_id=1,
        bucket_id=bucket_id,
        start=Position(0, 0),
        end=Position(0, 0),
        count=len(held),
        checksum=rows_checksum(times, ledgers, entries),
        spans=spans,
        segments=columns,
    )
    bitmaps = {span.ledger_id: bitmap_of(entries[ledgers == span.ledger_id]) for span in spans}
    bounds = zip(firsts.tolist(), ends.tolist(), strict=True)
    return Fed(metadata, bitmaps, [(times[a:b], ledgers[a:b], entries[a:b]) for a, b in bounds])


def check(world: World, fed: Iterable[Fed] | None = None, check: IndexCheck | None = None) -> list[Finding]:
    """Everything through the check, in the order in which a caller would."""
    check = check or IndexCheck(world.state, named_max=1000)
    findings: list[Finding] = []
    for each in fed if fed is not None else map(feed_of, range(1, 100), world.buckets):
        bucket = check.begin_bucket(each.metadata)
        for columns in each.segments:
            if isinstance(columns, str):
                findings += bucket.skip_segment(columns)
            else:
                findings += bucket.add_segment(*columns)
        findings += check.end_bucket(bucket, each.bitmaps)
    for ledger_id in world.times:
        findings += check.check_ledger(world.rows(ledger_id))
    return findings + check.finish()


def faults_of(findings: Iterable[Finding]) -> Faults:
    """Return the entries that findings name, by kind; those about a whole segment or bucket name none."""
    faults: Faults = {}
    for each in findings:
        entries = faults.setdefault(each.kind, set())
        if each.suspects and each.ledger_id is not None:
            entries |= {(each.ledger_id, suspect.entry_id) for suspect in each.suspects}
    return faults


# -- worlds that hypothesis draws ----------------------------------------------------------------------------

LEDGER_IDS = (3, 5, 9)
ROWS_MAX = 6
LATEST_MS = 9

entries_anywhere = st.tuples(st.sampled_from((*LEDGER_IDS, 7)), st.integers(0, ROWS_MAX))
positions = st.tuples(st.sampled_from((0, *LEDGER_IDS, 10)), st.integers(0, ROWS_MAX)).map(
    lambda pair: Position(*pair)
)
bitmaps = st.frozensets(st.integers(0, ROWS_MAX - 1)).map(BitMap)
cursors = st.builds(CursorView, positions, st.dictionaries(st.sampled_from(LEDGER_IDS), bitmaps))


@st.composite
def topics(draw: st.DrawFn) -> World:
    """Rows, amendments and cursors in any state; no buckets yet."""
    times = {
        ledger_id: draw(st.lists(st.integers(0, LATEST_MS), max_size=ROWS_MAX)) for ledger_id in LEDGER_IDS
    }
    world = World(
        times, IndexState(draw(positions), draw(st.integers(0, 4)), draw(st.integers(0, LATEST_MS)))
    )
    rows = list(world.entries())
    if rows:
        some = st.sets(st.sampled_from(rows), max_size=3)
        world.cancelled = draw(some)
        moves = st.tuples(st.integers(1, LATEST_MS), st.integers(0, 6))
        world.moves = draw(st.dictionaries(st.sampled_from(rows), moves, max_size=3))
    world.cursors = draw(st.lists(cursors, max_size=2))
    return world


@st.composite
def wild_worlds(draw: st.DrawFn) -> World:
    """Topics whose buckets hold anything."""
    world = draw(topics())
    truth = [(world.effective(entry), *entry) for entry in world.entries()]
    keys = st.tuples(st.integers(1, LATEST_MS), entries_anywhere).map(lambda pair: (pair[0], *pair[1]))
    one_of = st.one_of(keys, st.sampled_from(truth)) if truth else keys
    buckets = draw(st.lists(st.lists(one_of, max_size=12), max_size=3))
    return replace(world, buckets=[bucket for bucket in buckets if bucket])


@st.composite
def sound_worlds(draw: st.DrawFn) -> World:
    """Topics with what a broker may leave in buckets: all that is pending, and any of what need not go."""
    world = draw(topics())
    # Rows that were never delayed are neither cancelled nor moved.
    delayed = {entry for entry in world.entries() if world.times[entry[0]][entry[1]]}
    world.cancelled &= delayed
    world.moves = {entry: move for entry, move in world.moves.items() if entry in delayed}
    bucket_count = draw(st.integers(1, 3))
    buckets: list[list[Key]] = [[] for _ in range(bucket_count)]
    somewhere = st.integers(0, bucket_count - 1)
    for entry in sorted(delayed):
        if entry >= world.state.indexed_through:
            continue
        key = (world.effective(entry), *entry)
        if key[0] and (world.is_pending(entry) or draw(st.booleans())):
            buckets[draw(somewhere)].append(key)
        if entry in world.moves or entry in world.cancelled:
            stale_ms = draw(st.sets(st.integers(1, LATEST_MS), max_size=2))
            buckets[draw(somewhere)] += [(time, *entry) for time in stale_ms]
    return replace(world, buckets=[bucket for bucket in buckets if bucket])
