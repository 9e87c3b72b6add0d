"""Amendments: what they do to rows and to what an index says, and their file."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import numpy as np
import pytest
from google_crc32c import extend, value
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, TIME_MS_MAX, bitmap_of
from broker.storage.amendments import (
    HEADER_BYTES,
    NONE,
    Amendments,
    AmendmentsImage,
    decode_amendments,
    encode_amendments,
)
from broker.storage.manifest import ID_MAX

Moves = dict[int, tuple[int, int, int]]  # entry_id -> deliver_at_ms, revision, lsn


def amendments_of(cancelled: set[int], moves: Moves, left_out: set[int] | None = None) -> Amendments:
    rows = [(entry_id, *moves[entry_id]) for entry_id in sorted(moves)]
    entry_ids, times, revisions, lsns = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Amendments(
        BitMap(cancelled),
        np.array(entry_ids, np.uint32),
        np.array(times, np.int64),
        np.array(revisions, np.uint32),
        np.array(lsns, np.uint64),
        BitMap(left_out or ()),
    )


def facts(amendments: Amendments) -> tuple[BitMap, list[int], list[int], list[int], list[int], BitMap]:
    return (
        amendments.cancelled,
        amendments.entry_ids.tolist(),
        amendments.deliver_at_ms.tolist(),
        amendments.revisions.tolist(),
        amendments.lsns.tolist(),
        amendments.left_out,
    )


SOME = amendments_of({2, 5}, {3: (900, 1, 70), 5: (800, 2, 71), 9: (700, 1, 72)})
IDS = np.array([9, 1, 2, 3, 5, 7], np.uint32)  # in no order


def test_effective_times() -> None:
    times = np.array([10, 20, 30, 40, 50, 0], np.int64)
    assert SOME.effective(IDS, times).tolist() == [700, 20, 0, 900, 0, 0]
    assert times.tolist() == [10, 20, 30, 40, 50, 0]  # not changed
    assert NONE.effective(IDS, times).tolist() == times.tolist()
    assert SOME.effective(IDS[:0], times[:0]).tolist() == []


def test_what_is_current() -> None:
    row = [10, 20, 30, 40, 50, 60]
    moved = [700, 21, 30, 900, 800, 61]
    assert SOME.is_current(IDS, np.array(row)).tolist() == [False, True, False, False, False, True]
    assert SOME.is_current(IDS, np.array(moved)).tolist() == [True, True, False, True, False, True]
    assert NONE.is_current(IDS, np.array(row)).all()
    assert SOME.is_current(IDS[:0], np.array([], np.int64)).tolist() == []


ENTRY_ID = st.one_of(st.integers(0, 12), st.integers(0, ENTRY_ID_MAX))
CANCELLED = st.sets(ENTRY_ID, max_size=8)
MOVES = st.dictionaries(
    ENTRY_ID,
    st.tuples(st.integers(1, TIME_MS_MAX), st.integers(0, (1 << 32) - 1), st.integers(0, ID_MAX)),
    max_size=8,
)


@pytest.mark.slow
@given(CANCELLED, MOVES, st.lists(st.tuples(ENTRY_ID, st.integers(0, TIME_MS_MAX)), max_size=12))
def test_columns_say_what_the_plainest_model_says(
    cancelled: set[int], moves: Moves, rows: list[tuple[int, int]]
) -> None:
    amendments = amendments_of(cancelled, moves)
    rows += [(entry_id, move[0]) for entry_id, move in moves.items()]
    entry_ids = np.array([entry_id for entry_id, _ in rows], np.uint32)
    times = np.array([time for _, time in rows], np.int64)
    effective = [0 if i in cancelled else moves[i][0] if i in moves else time for i, time in rows]
    assert amendments.effective(entry_ids, times).tolist() == effective
    current = [i not in cancelled and (i not in moves or moves[i][0] == time) for i, time in rows]
    assert amendments.is_current(entry_ids, times).tolist() == current


# The file


@given(CANCELLED, MOVES, st.integers(1, ID_MAX), st.integers(1, LEDGER_ID_MAX))
def test_any_amendments_come_back(cancelled: set[int], moves: Moves, topic_id: int, ledger_id: int) -> None:
    amendments = amendments_of(cancelled, moves, {each for each in cancelled if each % 2})
    image = decode_amendments(encode_amendments(AmendmentsImage(topic_id, ledger_id, amendments)))
    assert (image.topic_id, image.ledger_id) == (topic_id, ledger_id)
    assert facts(image.amendments) == facts(amendments)
    assert [column.dtype for column in (image.amendments.entry_ids, image.amendments.lsns)] == [
        np.uint32,
        np.uint64,
    ]


@pytest.mark.parametrize(
    "amendments",
    [
        NONE,
        amendments_of({0, ENTRY_ID_MAX}, {}),
        amendments_of({0, 1, ENTRY_ID_MAX}, {}, {0, ENTRY_ID_MAX}),
        amendments_of(set(), {0: (1, 0, 0), ENTRY_ID_MAX: (TIME_MS_MAX, (1 << 32) - 1, ID_MAX)}),
        amendments_of(set(range(100_000)), {i: (i + 1, i, i) for i in range(1000)}),
    ],
    ids=["none", "cancelled only", "left out", "moved only", "many"],
)
def test_extremes_come_back(amendments: Amendments) -> None:
    image = decode_amendments(encode_amendments(AmendmentsImage(ID_MAX, LEDGER_ID_MAX, amendments)))
    assert facts(image.amendments) == facts(amendments)


DATA = encode_amendments(AmendmentsImage(3, 11, SOME))


def pack(
    topic_id: int,
    ledger_id: int,
    cancelled: bytes,
    *rows: tuple[int, int, int, int],
    left_out: bytes = b"",
) -> bytes:
    """A file from (entry_id, deliver_at_ms, revision, lsn), by hand."""
    body = b"".join(struct.pack("<q", row[1]) for row in rows)
    body += b"".join(struct.pack("<Q", row[3]) for row in rows)
    body += b"".join(struct.pack("<I", row[0]) for row in rows)
    body += b"".join(struct.pack("<I", row[2]) for row in rows) + cancelled + left_out
    lengths = len(cancelled), len(rows), len(left_out)
    head = b"PDA1\1\0\0\0" + struct.pack("<QQIII", topic_id, ledger_id, *lengths)
    return head + struct.pack("<I", extend(value(head), body)) + body


def test_layout_is_the_documented_one() -> None:
    rows = [(3, 900, 1, 70), (5, 800, 2, 71), (9, 700, 1, 72)]
    assert pack(3, 11, BitMap([2, 5]).serialize(), *rows) == DATA
    left_out = amendments_of({2, 5}, {3: (900, 1, 70)}, {2})
    data = pack(3, 11, BitMap([2, 5]).serialize(), rows[0], left_out=BitMap([2]).serialize())
    assert data == encode_amendments(AmendmentsImage(3, 11, left_out))


def test_what_is_left_out_counts_as_cancelled_and_what_was_cancelled_stays_known() -> None:
    once = SOME.leave_out(BitMap([1, 2, 3]))
    assert facts(once) == facts(amendments_of({1, 2, 3, 5}, {9: (700, 1, 72)}, {1, 3}))
    later = once.cancel(BitMap([7])).leave_out(BitMap([1, 2, 3, 5, 7, 9]))
    assert facts(later) == facts(amendments_of({1, 2, 3, 5, 7, 9}, {}, {1, 3, 9}))


def test_what_was_left_out_and_does_not_count_as_cancelled_is_refused() -> None:
    data = pack(3, 11, BitMap([2]).serialize(), left_out=BitMap([2, 4]).serialize())
    with pytest.raises(Corrupt):
        decode_amendments(data)


def test_every_changed_bit_and_every_truncation_is_found() -> None:
    for bit in range(len(DATA) * 8):
        changed = bytearray(DATA)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            decode_amendments(bytes(changed))
    for length in range(len(DATA)):
        with pytest.raises(Corrupt) as caught:
            decode_amendments(DATA[:length], "x")
        assert caught.value.path == "x" and caught.value.offset >= 0
    with pytest.raises(Corrupt):
        decode_amendments(DATA + b"\0")


EMPTY = BitMap().serialize()
IMPOSSIBLE = {
    "no topic": pack(0, 11, EMPTY),
    "no ledger": pack(3, 0, EMPTY),
    "a ledger beyond all": pack(3, 1 << 48, EMPTY),
    "an entry twice": pack(3, 11, EMPTY, (4, 9, 1, 1), (4, 9, 1, 1)),
    "entries out of order": pack(3, 11, EMPTY, (5, 9, 1, 1), (4, 9, 1, 1)),
    "moved to no time": pack(3, 11, EMPTY, (4, 0, 1, 1)),
    "moved to a time beyond all": pack(3, 11, EMPTY, (4, TIME_MS_MAX + 1, 1, 1)),
    "an lsn beyond all": pack(3, 11, EMPTY, (4, 9, 1, 1 << 63)),
    "no bitmap": pack(3, 11, b""),
    "no bitmap at all": pack(3, 11, b"no bitmap at all"),
    "a bitmap with a rest": pack(3, 11, EMPTY + b"\0"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_amendments_hold_is_refused_in_spite_of_its_checksum(name: str) -> None:
    with pytest.raises(Corrupt, match="impossible values"):
        decode_amendments(IMPOSSIBLE[name])


def test_a_later_version_is_refused() -> None:
    with pytest.raises(Corrupt, match="Version 2"):
        decode_amendments(DATA[:4] + b"\2" + DATA[5:])


@given(st.binary(max_size=90), st.integers(0, 4), st.integers(0, 60))
def test_any_bytes_are_amendments_or_corrupt(body: bytes, moved_count: int, cancelled_bytes: int) -> None:
    for count in (cancelled_bytes, max(0, len(body) - 24 * moved_count)):
        head = b"PDA1\1\0\0\0" + struct.pack("<QQIII", 3, 11, count, moved_count, 0)
        for data in (body, head + body, head + struct.pack("<I", extend(value(head), body)) + body):
            with suppress(Corrupt):
                decode_amendments(data)
    assert len(head) + 4 == HEADER_BYTES


def test_cancels_and_moves_gather_and_what_was_before_does_not_change():
    rng = random.Random(3)
    amendments, cancelled = NONE, set()
    moved: dict[int, tuple[int, int]] = {}
    for lsn in range(1, 60):
        before = amendments
        ids = np.array(sorted(rng.sample(range(40), rng.randint(1, 6))), dtype=np.uint32)
        if rng.random() < 0.3:
            amendments = amendments.cancel(bitmap_of(ids))
            cancelled |= set(ids.tolist())
        else:
            times = np.array([rng.randint(1, 1_000) for _ in ids], dtype=np.int64)
            amendments = amendments.move(ids, times, lsn)
            for entry_id, time in zip(ids.tolist(), times.tolist(), strict=True):
                moved[entry_id] = (time, moved.get(entry_id, (0, 0))[1] + 1)
        assert before is not amendments
    every = np.arange(40, dtype=np.uint32)
    rows = np.full(40, 7, dtype=np.int64)
    expected = [0 if i in cancelled else moved.get(i, (7, 0))[0] for i in range(40)]
    assert amendments.effective(every, rows).tolist() == expected
    assert amendments.revisions_of(every).tolist() == [moved.get(i, (0, 0))[1] for i in range(40)]
    assert decode_amendments(
        encode_amendments(AmendmentsImage(1, 2, amendments))
    ).amendments.lsns.tolist() == (amendments.lsns.tolist())
    assert not NONE.cancelled
    assert not len(NONE.entry_ids)
