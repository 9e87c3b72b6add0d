"""The format of a run of schedule keys and its filter: what is encoded comes back, and other bytes are `Corrupt`."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
from google_crc32c import value
from hypothesis import assume, given
from hypothesis import strategies as st

from broker.errors import Corrupt
from broker.model import LEDGER_ID_MAX
from broker.runs.tally import rows_checksum
from broker.storage.key_filter import (
    BITS_PER_KEY,
    FILTER_BLOCK_BYTES,
    KeyFilter,
    KeyFilterBuilder,
    OpenFilter,
    Probe,
    filter_blocks,
)
from broker.storage.key_run import (
    BLOCK_ENTRIES,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Fences,
    KeyRunHeader,
    decode_block,
    decode_fences,
    decode_filter,
    decode_header,
    encode_block,
    encode_fences,
    encode_header,
    sort_keys,
)
from tests.unit.storage.key_entries import (
    HASH_MAX,
    RUN_ID,
    TOPIC_ID,
    columns,
    disk,
    entries,
    read_all,
    rows,
    scattered,
    storage_of,
    write,
)

COUNT = 2_500  # two whole blocks and a partial one

# Never edit this line: a change of the format is a new version.
GOLDEN_SHA256 = "f8a53cf5558b4b86aa480695a97b127dde796d9c07d04f43636d5ad21ed13838"


def file_of(count: int, bits: int = 64) -> bytes:
    vfs = disk()
    write(storage_of(vfs), scattered(count, bits=bits))
    return vfs.snapshot()[f"keys/{RUN_ID}.keys"]


# What is written


def test_the_file_is_the_one_that_was_frozen() -> None:
    assert hashlib.sha256(file_of(COUNT)).hexdigest() == GOLDEN_SHA256


def test_the_file_is_laid_out_as_the_docstring_says() -> None:
    """Read by hand, with nothing of the decoder."""
    data, expected = file_of(COUNT), scattered(COUNT)
    head = struct.unpack_from("<4sB3s7Q4IQII", data)
    magic, version, zeros, topic_id, run_id, count, checksum, first_ledger, last_ledger, filter_at = head[:10]
    block_count, filter_count, filter_crc, fences_crc, zero, crc, end = head[10:]
    assert (magic, version, zeros, zero, end) == (b"PDK1", 2, bytes(3), 0, 0)
    assert (topic_id, run_id, count) == (TOPIC_ID, RUN_ID, COUNT)
    assert (first_ledger, last_ledger) == (4, 604)
    assert crc == value(data[:88])
    assert (block_count, filter_count) == (3, filter_blocks(COUNT))
    keys = columns(expected)
    assert checksum == rows_checksum(keys.hashes.view(np.int64), keys.ledger_ids, keys.entry_ids)
    fences = data[filter_at + FILTER_BLOCK_BYTES * filter_count :]
    assert len(fences) == 16 * block_count and value(fences) == fences_crc
    assert value(data[filter_at : filter_at + FILTER_BLOCK_BYTES * filter_count]) == filter_crc
    first_hashes, lengths, crcs = (
        struct.unpack_from(f"<3{kind}", fences, at) for kind, at in (("Q", 0), ("I", 24), ("I", 36))
    )
    at, found = 96, []
    for index in range(block_count):
        block = data[at : at + lengths[index]]
        at += lengths[index]
        assert value(block) == crcs[index]
        first, items, width, padding = struct.unpack_from("<QIB3s", block)
        assert (width, padding) == (2, bytes(3))  # ledgers 4 to 604
        hashes = struct.unpack_from(f"<{items}Q", block, 16)
        ledgers = struct.unpack_from(f"<{items}H", block, 16 + 8 * items)
        ids = struct.unpack_from(f"<{items}I", block, 16 + 10 * items)
        assert hashes[0] == first_hashes[index] and len(block) == 16 + 14 * items
        found += [(h, first + ledger, i) for h, ledger, i in zip(hashes, ledgers, ids, strict=True)]
    assert at == filter_at
    assert found == expected


@given(st.sets(entries, min_size=1, max_size=200), st.integers(1, 90))
def test_what_is_written_comes_back(held, step) -> None:
    vfs = disk()
    header = write(storage_of(vfs), sorted(held), step=step)
    assert read_all(storage_of(vfs)) == sorted(held)
    assert decode_header(encode_header(header)) == header
    assert (header.count, header.block_count) == (len(held), 1)
    assert (header.first_ledger_id, header.last_ledger_id) == (
        min(entry[1] for entry in held),
        max(entry[1] for entry in held),
    )


@pytest.mark.parametrize(
    ("span", "width"),
    [(0, 0), (1, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 4), ((1 << 32) - 1, 4), (1 << 32, 8)],
)
def test_ledger_ids_take_the_bytes_that_their_span_needs(span: int, width: int) -> None:
    for first in (1, LEDGER_ID_MAX - span):
        held = [(1, first, 0), (2, first + span, 0)]
        assert len(encode_block(columns(held))) == 16 + 2 * (8 + width + 4)
        vfs = disk()
        write(storage_of(vfs), held)
        assert read_all(storage_of(vfs)) == held


@pytest.mark.slow
@given(st.lists(entries, max_size=60))
def test_sorting_keeps_each_entry_once(held) -> None:
    assert rows(sort_keys(columns(held))) == sorted(set(held))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [64, 4])
def test_fences_lead_to_every_block_of_a_hash_and_to_no_other_keyrun_1(bits: int) -> None:
    data, held = file_of(4 * BLOCK_ENTRIES + 9, bits), scattered(4 * BLOCK_ENTRIES + 9, bits=bits)
    header = decode_header(data)
    fences = decode_fences(data[header.fences_at :], header)
    blocks_of: dict[int, set[int]] = {}
    for row, entry in enumerate(held):
        blocks_of.setdefault(entry[0], set()).add(row // BLOCK_ENTRIES)
    assert bits == 64 or max(map(len, blocks_of.values())) > 1
    for wanted, blocks in blocks_of.items():
        found = set(fences.blocks_of(np.array([wanted], np.uint64)))
        assert blocks <= found and len(found - blocks) <= 1  # the block before one that begins with the hash
    everything = np.array(sorted(blocks_of), np.uint64)
    assert fences.blocks_of(everything) == list(range(5))
    assert fences.blocks_of(np.array([0], np.uint64)) == []


# The filter


@given(
    st.lists(st.one_of(st.integers(0, HASH_MAX), st.integers(0, 15)), min_size=1, max_size=300),
    st.integers(1, 100),
)
def test_the_filter_passes_what_was_added_in_whatever_parts_filter_1_filter_2(held, step) -> None:
    hashes = np.sort(np.array(held, np.uint64))
    builder = KeyFilterBuilder(len(hashes))
    parts = [builder.add(hashes[at : at + step]) for at in range(0, len(hashes), step)]
    data = b"".join([*parts, builder.end()])
    assert len(data) == filter_blocks(len(hashes)) * FILTER_BLOCK_BYTES
    at_once = KeyFilterBuilder(len(hashes))
    assert data == at_once.add(hashes) + at_once.end()
    assert KeyFilter(data).maybe(Probe(hashes)).all()


@given(
    st.lists(
        st.lists(st.one_of(st.integers(0, HASH_MAX), st.integers(0, 15)), max_size=100),
        min_size=1,
        max_size=5,
    )
)
def test_a_filter_that_takes_hashes_in_any_order_has_the_bits_of_one_that_is_written_filter_1(parts) -> None:
    hashes = np.sort(np.array([value for part in parts for value in part], np.uint64))
    assume(len(hashes))
    builder = KeyFilterBuilder(len(hashes))
    written = KeyFilter(builder.add(hashes) + builder.end())
    key_filter = OpenFilter(len(hashes))
    assert not key_filter.maybe(Probe(hashes)).any()
    for part in parts:
        key_filter.add(Probe(np.array(part, np.uint64)))
        assert key_filter.maybe(Probe(np.array(part, np.uint64))).all()
    assert np.array_equal(key_filter._words, written._words)


@pytest.mark.slow
def test_one_of_fifty_thousand_hashes_passes_that_was_not_added() -> None:
    rng = np.random.default_rng(11)
    hashes = np.sort(rng.integers(1, 1 << 64, 100_000, dtype=np.uint64))
    builder = KeyFilterBuilder(len(hashes))
    key_filter = KeyFilter(builder.add(hashes) + builder.end())
    others = rng.integers(1, 1 << 64, 1_000_000, dtype=np.uint64)
    passed = np.count_nonzero(key_filter.maybe(Probe(others)))
    assert passed < 20, f"{passed} of a million"  # about 11 are expected
    assert key_filter.memory_bytes * 8 / len(hashes) == pytest.approx(BITS_PER_KEY, rel=0.01)


# Damage


@pytest.mark.slow
def test_every_changed_byte_and_every_truncation_is_found_keyrun_3() -> None:
    content = file_of(40)
    for at in range(len(content)):
        changed = content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        for damaged in (changed, content[:at], content + bytes(at + 1)):
            vfs = disk()
            vfs.open(f"keys/{RUN_ID}.keys", create=True).pwrite([damaged], 0)
            with pytest.raises(Corrupt) as caught:
                read_all(storage_of(vfs))
            assert caught.value.path == f"keys/{RUN_ID}.keys"


@given(st.binary(max_size=120))
def test_any_bytes_give_a_header_or_corrupt(data) -> None:
    decode_or_corrupt(data)
    decode_or_corrupt(MAGIC + data)


@given(st.binary(min_size=80, max_size=80), st.binary(max_size=8))
def test_a_header_with_a_good_checksum_holds_what_one_can_hold_or_is_corrupt(fields, more) -> None:
    head = MAGIC + bytes([VERSION, 0, 0, 0]) + fields
    decode_or_corrupt(head + struct.pack("<II", value(head), 0) + more)


def decode_or_corrupt(data: bytes) -> None:
    try:
        header = decode_header(data)
    except Corrupt:
        return
    assert encode_header(header) == data[:HEADER_BYTES]


@pytest.mark.parametrize(
    "change",
    [
        {"topic_id": 0},
        {"run_id": 0},
        {"count": 0, "block_count": 0},
        {"count": COUNT + BLOCK_ENTRIES},
        {"block_count": 2},
        {"filter_blocks": 0},
        {"filter_blocks": COUNT + 1},
        {"first_ledger_id": 700},
        {"last_ledger_id": LEDGER_ID_MAX + 1},
        {"filter_at": HEADER_BYTES},
        {"filter_at": HEADER_BYTES + COUNT * 21},
    ],
)
def test_an_impossible_header_is_corrupt(change: dict[str, int]) -> None:
    header = decode_header(file_of(COUNT))
    with pytest.raises(Corrupt, match="impossible values"):
        decode_header(encode_header(replace(header, **change)), "a")


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_version_is_refused(version: int) -> None:
    head = bytearray(file_of(40)[:88])
    head[4] = version
    with pytest.raises(Corrupt, match=f"version {version} is not supported"):
        decode_header(bytes(head) + struct.pack("<II", value(bytes(head)), 0))


def forged(block: bytes, count: int = 4, first_hash: int = 5) -> tuple[KeyRunHeader, Fences]:
    """Header and fences that vouch for a block."""
    header = KeyRunHeader(TOPIC_ID, RUN_ID, count, 0, 0, LEDGER_ID_MAX, HEADER_BYTES + len(block), 1, 1, 0, 0)
    lengths, crcs = np.array([len(block)]), np.array([value(block)], np.uint32)
    return header, Fences(np.array([first_hash], np.uint64), np.array([HEADER_BYTES]), lengths, crcs)


@given(st.binary(max_size=100), st.integers(1, 6))
def test_any_block_with_a_good_checksum_gives_entries_in_order_or_corrupt(data, count) -> None:
    header, fences = forged(data, count)
    try:
        keys = decode_block(data, header, fences, 0)
    except Corrupt:
        return
    assert rows(keys) == sorted(set(rows(keys))) and len(keys) == count


WHOLE = [(5, 4, 1), (5, 4, 2), (5, 5, 1), (6, 4, 0)]


@pytest.mark.parametrize(
    "held",
    [
        [(6, 4, 1), *WHOLE[1:]],
        [(5, 4, 2), *WHOLE[1:]],
        [(5, 5, 2), *WHOLE[1:]],
        [*WHOLE[:3], (4, 9, 9)],
        WHOLE[:3],
    ],
    ids=["not its first hash", "twice", "a later ledger first", "a lower hash last", "too few"],
)
def test_a_block_out_of_order_is_corrupt_keyrun_1(held) -> None:
    block = encode_block(columns(WHOLE))
    assert rows(decode_block(block, *forged(block), 0)) == WHOLE
    block = encode_block(columns(held))
    with pytest.raises(Corrupt, match="impossible values"):
        decode_block(block, *forged(block), 0)


def test_a_block_is_corrupt_where_the_ledgers_or_the_next_fence_say_other_things_keyrun_1() -> None:
    block = encode_block(columns(WHOLE))
    header, fences = forged(block)
    for wrong in (replace(header, first_ledger_id=5), replace(header, last_ledger_id=4)):
        with pytest.raises(Corrupt):
            decode_block(block, wrong, fences, 0)
    two = encode_fences(np.array([5, 5]), np.array([len(block)] * 2), np.array([value(block)] * 2))
    header = replace(
        header,
        count=BLOCK_ENTRIES + 4,
        block_count=2,
        filter_at=HEADER_BYTES + 2 * len(block),
        fences_crc=value(two),
    )
    with pytest.raises(Corrupt):
        decode_block(block, header, decode_fences(two, header), 1 - 1)
    assert rows(decode_block(block, header, decode_fences(two, header), 1)) == WHOLE


@pytest.mark.parametrize(
    ("firsts", "lengths"),
    [([6, 5], [60, 40]), ([5, 6], [60, 41]), ([5, 6], [50, 49]), ([5, 6], [30_000, 70_000])],
)
def test_fences_that_cannot_be_are_corrupt_keyrun_1(firsts: list[int], lengths: list[int]) -> None:
    data = encode_fences(np.array(firsts, np.uint64), np.array(lengths), np.array([1, 2]))
    total = 100 if sum(lengths) < 1000 else sum(lengths)
    header = KeyRunHeader(TOPIC_ID, RUN_ID, 1_025, 0, 1, 1, HEADER_BYTES + total, 2, 1, 0, value(data))
    with pytest.raises(Corrupt, match="impossible values"):
        decode_fences(data, header)


def test_a_filter_of_another_length_or_checksum_is_corrupt() -> None:
    data = file_of(COUNT)
    header = decode_header(data)
    whole = data[header.filter_at : header.fences_at]
    assert decode_filter(whole, value(whole), header).memory_bytes == header.filter_bytes
    for part, crc in ((whole[:-64], header.filter_crc), (whole, header.filter_crc ^ 1)):
        with pytest.raises(Corrupt, match="filter"):
            decode_filter(part, crc, header)
