"""Records, groups and segments as bytes: `frame.py` and `segment.py`."""

from __future__ import annotations

import json
import struct
from contextlib import suppress

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import Corrupt
from broker.storage import frame, segment

PATH = "journal/seg"
FIRST_LSN = 7


def group(first_lsn: int, offset: int, *bodies: bytes) -> bytes:
    parts, length = frame.encode_group(first_lsn, offset, [(2, [body], len(body)) for body in bodies])
    data = b"".join(parts)
    assert len(data) == length
    return data


def make(*groups: list[bytes], first_lsn: int = FIRST_LSN) -> tuple[bytes, list[int]]:
    """A segment, and where each of its groups ends."""
    data = segment.encode_header(first_lsn)
    ends = []
    for bodies in groups:
        data += group(first_lsn, len(data), *bodies)
        ends.append(len(data))
    return data, ends


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def bodies_of(data: bytes, first_lsn: int = FIRST_LSN) -> list[list[bytes]]:
    return [[bytes(record.body) for record in found.records] for found in segment.scan(data, first_lsn)]


def test_the_layout_is_what_the_docstrings_say() -> None:
    head = b"PDJ1" + bytes([1, 0, 0, 0]) + struct.pack("<Q", FIRST_LSN)
    header = head + struct.pack("<II", google_crc32c.value(head), 0)
    crc = google_crc32c.value(struct.pack("<QQIB", FIRST_LSN, 24, 3, 9) + b"abc")
    record = struct.pack("<IB3xI", 3, 9, crc) + b"abc" + bytes(1)
    body = struct.pack("<QII", 24, 1, google_crc32c.value(struct.pack("<I", crc)))
    commit_crc = google_crc32c.value(struct.pack("<QQIB", FIRST_LSN, 40, 16, 1) + body)
    commit = struct.pack("<IB3xI", 16, 1, commit_crc) + body + bytes(4)
    assert segment.encode_header(FIRST_LSN) == header
    parts, length = frame.encode_group(FIRST_LSN, 24, [(9, [b"abc"], 3)])
    assert b"".join(parts) == record + commit
    assert length == 48


def test_parts_of_every_kind_are_written_as_bytes() -> None:
    parts: list[frame.Part] = [
        b"a",
        bytearray(b"bc"),
        memoryview(b"xdefx")[1:4],
        np.arange(2, dtype=np.int64),
    ]
    parts += [b"", np.empty(0), np.ones((2, 3), np.float32)]
    flat, length = frame.byte_parts(parts)
    expected = b"abcdef" + struct.pack("<qq", 0, 1) + np.ones(6, np.float32).tobytes()
    assert (b"".join(flat), length) == (expected, len(expected))
    encoded, _ = frame.encode_group(FIRST_LSN, 24, [(2, flat, length)])
    assert bodies_of(segment.encode_header(FIRST_LSN) + b"".join(encoded)) == [[expected]]


def test_a_large_part_is_passed_through() -> None:
    large = bytes(100_000)
    encoded, _ = frame.encode_group(FIRST_LSN, 24, [(2, [b"small", large, b"small"], 100_010)])
    assert [part is large for part in encoded] == [False, True, False]


def test_an_array_with_gaps_is_refused() -> None:
    with pytest.raises(TypeError):
        frame.byte_parts([np.arange(10)[::2]])


def test_scan_numbers_the_records_and_skips_the_commits() -> None:
    data, ends = make([b"a", b""], [b"x" * 5000], [b"b"])
    found = list(segment.scan(data, FIRST_LSN))
    assert [(one.first_lsn, one.end) for one in found] == [(7, ends[0]), (9, ends[1]), (10, ends[2])]
    assert bodies_of(data) == [[b"a", b""], [b"x" * 5000], [b"b"]]
    assert segment.find_end(data, FIRST_LSN, PATH) == (ends[2], 11)


def test_a_group_in_another_place_or_life_never_verifies() -> None:
    data, _ = make([b"a"])
    header, rest = data[: segment.HEADER_BYTES], data[segment.HEADER_BYTES :]
    assert bodies_of(header + bytes(8) + rest) == []
    assert bodies_of(data, FIRST_LSN + 1) == []
    moved = header + rest + rest  # a copy right behind the original, as a backup in a payload could be
    assert segment.find_end(moved, FIRST_LSN, PATH) == (len(data), 8)


def test_torn_last_group_is_dropped_at_every_length() -> None:
    data, ends = make([b"first"], [b"second", b"third" * 9])
    for length in range(ends[0], ends[1]):
        assert segment.find_end(data[:length], FIRST_LSN, PATH) == (ends[0], 8), length


@pytest.mark.parametrize("damage", ["zeros", "noise"])
def test_torn_last_group_is_dropped_wherever_it_is_torn(damage: str) -> None:
    # JOURNAL-3: disks reorder, so the COMMIT may be there and any earlier part of its group not.
    data, ends = make([b"first"], [b"second", b"third" * 9])
    for offset in range(ends[0], ends[1], 8):
        lost = bytes(8) if damage == "zeros" else b"\xa5" * 8
        if data[offset : offset + 8] != lost:
            torn = data[:offset] + lost + data[offset + 8 :]
            assert segment.find_end(torn, FIRST_LSN, PATH) == (ends[0], 8), offset


@pytest.mark.slow
@pytest.mark.parametrize("last", [[b"second"], [b"second", b"third"]], ids=["one", "two"])
def test_any_flipped_bit_in_the_last_group_drops_it_and_can_be_told(last: list[bytes]) -> None:
    data, ends = make([b"first"], last)
    assert segment.torn_bytes(data, FIRST_LSN, ends[1]) == 0
    for bit in range(ends[0] * 8, ends[1] * 8):
        flipped = flip(data, bit)
        assert segment.find_end(flipped, FIRST_LSN, PATH) == (ends[0], 8), bit
        assert segment.torn_bytes(flipped, FIRST_LSN, ends[0]) > 0, bit


@pytest.mark.slow
def test_any_flipped_bit_before_the_last_group_is_damage() -> None:
    data, ends = make([b"first", b""], [b"second"], [b"third"])
    for bit in range(ends[1] * 8):
        with pytest.raises(Corrupt) as raised:
            segment.find_end(flip(data, bit), FIRST_LSN, PATH)
        assert raised.value.path == PATH
        assert raised.value.offset in (0, 4, 24, ends[0]), bit


@pytest.mark.parametrize(
    "tail", [bytes(8), bytes(4096), bytes(5), b"\xff" * 4096, b"\x10\0\0\0\1\0\0\0" * 99]
)
def test_what_follows_the_last_group_is_no_record(tail: bytes) -> None:
    data, ends = make([b"first"])
    assert segment.find_end(data + tail, FIRST_LSN, PATH) == (ends[0], 8)


def test_bytes_of_a_former_life_are_neither_records_nor_damage() -> None:
    former, _ = make(*[[b"old" * 5]] * 50, first_lsn=1)
    for count in range(4):
        data, _ = make(*[[b"new" * 5]] * count)  # the same sizes, so records lie where records lay
        recycled = data + former[len(data) :]
        assert segment.find_end(recycled, FIRST_LSN, PATH) == (len(data), FIRST_LSN + count)
        torn = recycled[: len(data)] + group(FIRST_LSN, len(data), b"new" * 5)[:20] + former[len(data) + 20 :]
        assert segment.find_end(torn, FIRST_LSN, PATH) == (len(data), FIRST_LSN + count)


def test_a_payload_full_of_lookalikes_is_no_commit() -> None:
    # First 8 bytes, crc and group_start as a COMMIT could have them; only the crc is wrong.
    lookalike = struct.pack("<QIQII", 16 | 1 << 32, 0, 64, 1, 0) + bytes(4)
    data, ends = make([b"first"], [lookalike * 1000])
    assert segment.find_end(flip(data, ends[0] * 8 + 100), FIRST_LSN, PATH) == (ends[0], 8)


HEADER = segment.encode_header(FIRST_LSN)
BAD_HEADERS = {
    "empty": b"",
    "short": HEADER[:23],
    "magic": b"X" + HEADER[1:],
    "zeros": bytes(24),
    "version 0": HEADER[:4] + bytes(1) + HEADER[5:],
    "zero bytes": HEADER[:5] + b"\1" + HEADER[6:],
    "first_lsn": HEADER[:8] + b"\xff" + HEADER[9:],
    "crc": HEADER[:16] + b"\xff" + HEADER[17:],
    "last bytes": HEADER[:23] + b"\1",
    "lsn 0": segment.encode_header(0),
    "other name": segment.encode_header(FIRST_LSN - 1),
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_a_bad_header_is_damage_unless_it_is_a_cut_roll(header: bytes) -> None:
    with pytest.raises(Corrupt):
        segment.find_end(header, FIRST_LSN, PATH)
    assert segment.is_cut_roll(header, FIRST_LSN)
    if len(header) == segment.HEADER_BYTES:
        assert not segment.is_cut_roll(header + group(FIRST_LSN, 24, b"answered"), FIRST_LSN)
        assert segment.is_cut_roll(header + group(FIRST_LSN - 1, 24, b"former life"), FIRST_LSN)


def test_a_newer_version_is_refused_by_name_and_never_a_cut_roll() -> None:
    header = HEADER[:4] + b"\2" + HEADER[5:]
    with pytest.raises(Corrupt, match="version 2"):
        segment.decode_header(header, PATH)
    assert not segment.is_cut_roll(header, FIRST_LSN)
    assert not segment.is_cut_roll(header[:6], FIRST_LSN)


def test_a_group_holds_only_the_records_that_its_commit_names() -> None:
    # Records of an earlier attempt at this place verify one by one; the COMMIT tells them apart.
    data, ends = make([b"first"], [b"second", b"third"])
    earlier, _ = make([b"first"], [b"SECOND", b"third"])
    record_end = ends[0] + frame.framed_bytes(6)
    mixed = earlier[:record_end] + data[record_end:]
    assert segment.find_end(mixed, FIRST_LSN, PATH) == (ends[0], 8)


@pytest.mark.parametrize(("next_lsn", "groups"), [(7, 0), (8, 1), (9, 1), (11, 2)])
def test_a_segment_that_does_not_lead_to_the_next_is_damage(next_lsn: int, groups: int) -> None:
    data, _ = make([b"a"], [b"b", b"c"])
    found = segment.replay(data, FIRST_LSN, next_lsn, PATH)
    assert [next(found).start for _ in range(groups)] == [24, 72][:groups]
    with pytest.raises(Corrupt, match=f"lsn {next_lsn} comes next"):
        next(found)
    assert len(list(segment.replay(data, FIRST_LSN, 10, PATH))) == 2


def test_describe_shows_records_and_verdict() -> None:
    data, ends = make([b"first"], [b"second", b"third"])
    lines = list(segment.describe(data, FIRST_LSN, PATH))
    kinds = [line["kind"] for line in lines]
    assert kinds == ["header", "record", "commit", "record", "record", "commit", "end"]
    assert lines[3] == {
        "kind": "record",
        "lsn": 8,
        "offset": ends[0],
        "type": 2,
        "length": 6,
        "crc_ok": True,
        "group": ends[0],
        "committed": True,
    }
    assert lines[-1] == {"kind": "end", "offset": ends[1], "next_lsn": 10, "damaged": False}
    torn = list(segment.describe(data[:-8], FIRST_LSN, PATH))
    assert [line.get("committed") for line in torn if line["kind"] == "record"] == [True, False, False]
    bad = list(segment.describe(flip(data, 300), FIRST_LSN, PATH))
    assert bad[-1]["damaged"] is True
    assert bad[1]["crc_ok"] is False


def decode_all(data: bytes, first_lsn: int) -> None:
    """Everything that decodes: values or Corrupt, never another exception."""
    for line in segment.describe(data, first_lsn, PATH):
        json.dumps(line)
    segment.is_cut_roll(data, first_lsn)
    for found in segment.scan(data, first_lsn):
        assert found.records
    for decode in (
        lambda: segment.decode_header(data, PATH),
        lambda: segment.find_end(data, first_lsn, PATH),
        lambda: list(segment.replay(data, first_lsn, first_lsn + 1, PATH)),
    ):
        with suppress(Corrupt):
            decode()


@given(st.binary(max_size=400), st.integers(1, 2**64 - 1), st.booleans())
def test_any_bytes_decode_or_are_corrupt(data: bytes, first_lsn: int, with_header: bool) -> None:
    decode_all(segment.encode_header(first_lsn) + data if with_header else data, first_lsn)


@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=4), max_size=5),
    st.lists(st.tuples(st.integers(0, 500), st.binary(max_size=12)), max_size=3),
    st.integers(0, 60),
)
def test_a_changed_segment_gives_its_groups_in_order_or_is_corrupt(
    groups: list[list[bytes]], changes: list[tuple[int, bytes]], cut: int
) -> None:
    data, _ = make(*groups)
    changed = bytearray(data[: len(data) - cut])
    for offset, noise in changes:
        at = offset % (len(changed) + 1)
        changed[at : at + len(noise)] = noise[: max(len(changed) - at, 0)]
    decode_all(bytes(changed), FIRST_LSN)
    found = bodies_of(bytes(changed))
    assert found == groups[: len(found)]
