"""Groups as objects: bytes, and what is refused of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.cluster.group_head import (
    HEAD_BYTES,
    VERSION,
    GroupKind,
    Head,
    Shard,
    blank,
    decode_entry,
    decode_head,
    encode_entry,
    encode_head,
    is_blank,
)
from broker.errors import Corrupt
from broker.storage.frame import encode_group
from broker.storage.segment import HEADER_BYTES

SHARD = Shard(bytes(range(16)), 3, 8)
RECORDS = [(2, [b"body", b"of two"], 10), (3, [b"x"], 1)]
HEAD = Head(GroupKind.RECORDS, SHARD, 7, 1000, 1_700_000_000_000, 1_700_000_004_000, b"8 random", "node-a")

heads = st.builds(
    Head,
    st.sampled_from(GroupKind),
    st.builds(Shard, st.binary(min_size=16, max_size=16), st.integers(0, 65_535), st.integers(1, 65_535)),
    st.integers(0, (1 << 32) - 1),
    st.integers(1, (1 << 63) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.binary(min_size=8, max_size=8),
    st.text(st.characters(max_codepoint=0x7FF, exclude_categories=["Cs"]), max_size=16),
)


@pytest.mark.slow
@given(heads)
def test_a_head_is_read_as_it_was_written(head: Head) -> None:
    data = encode_head(head)
    assert len(data) == HEAD_BYTES
    assert decode_head(data, "name") == head


def test_a_group_is_the_same_as_in_a_journal_segment() -> None:
    data = encode_entry(HEAD, RECORDS)
    parts, length = encode_group(1000, HEADER_BYTES, RECORDS)
    assert data[HEAD_BYTES:] == b"".join(parts) and len(data) == HEAD_BYTES + length
    entry = decode_entry(data, 1000, SHARD, "name")
    assert (entry.head, entry.bytes, entry.next_index) == (HEAD, len(data), 1002)
    assert [(record.type, bytes(record.body)) for record in entry.group.records] == [
        (2, b"bodyof two"),
        (3, b"x"),
    ]


def test_blanks_have_no_effect_and_records_have() -> None:
    assert is_blank(blank()) and not is_blank(RECORDS) and not is_blank([*blank(), *RECORDS])
    entry = decode_entry(
        encode_entry(HEAD._replace(kind=GroupKind.HEARTBEAT), blank()), HEAD.first_lsn, SHARD, "name"
    )
    assert entry.next_index == 1001


def test_no_changed_byte_passes() -> None:
    data = encode_entry(HEAD, RECORDS)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= random.Random(place).randint(1, 255)
        with pytest.raises(Corrupt):
            decode_entry(bytes(changed), HEAD.first_lsn, SHARD, "name")


@pytest.mark.parametrize("change", [-1, 1])
def test_no_cut_and_no_longer_group_passes(change: int) -> None:
    data = encode_entry(HEAD, RECORDS)
    lengths = range(len(data)) if change < 0 else [len(data) + 1, len(data) + 64]
    for length in lengths:
        with pytest.raises(Corrupt):
            decode_entry(data[:length].ljust(length, b"\0"), HEAD.first_lsn, SHARD, "name")


@given(st.binary(max_size=300))
def test_any_bytes_give_a_group_or_are_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_entry(data, 1, SHARD, "name")


@pytest.mark.parametrize(
    ("index", "shard", "problem"),
    [
        (1000, Shard(bytes(16), 3, 8), "is of shard 3 of 8 of cluster 000102"),
        (1000, Shard(SHARD.cluster, 2, 8), "not of shard 2 of 8"),
        (1000, Shard(SHARD.cluster, 3, 9), "not of shard 3 of 9"),
        (1001, SHARD, "begins with lsn 1000"),
    ],
)
def test_a_group_of_another_place_is_refused(index: int, shard: Shard, problem: str) -> None:
    with pytest.raises(Corrupt, match=problem):
        decode_entry(encode_entry(HEAD, RECORDS), index, shard, "name")


@pytest.mark.parametrize("kind", [GroupKind.HEARTBEAT, GroupKind.TAKE_OVER, GroupKind.RESIGN])
def test_records_under_a_head_that_promises_none_are_refused(kind: GroupKind) -> None:
    with pytest.raises(Corrupt, match="does not match the kind"):
        decode_entry(encode_entry(HEAD._replace(kind=kind), RECORDS), 1000, SHARD, "name")


def test_blanks_under_a_head_that_promises_records_are_refused() -> None:
    with pytest.raises(Corrupt, match="does not match the kind"):
        decode_entry(encode_entry(HEAD, blank()), 1000, SHARD, "name")


def test_a_newer_version_is_told_from_damage() -> None:
    data = bytearray(encode_entry(HEAD, RECORDS))
    data[4] = VERSION + 1
    with pytest.raises(Corrupt, match=f"has version {VERSION + 1}"):
        decode_head(bytes(data), "name")
