"""`dump`: every kind of file comes out as JSON lines, and so do any other bytes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from broker.cli import main
from broker.errors import Corrupt
from broker.storage.amendments import MAGIC as MAGIC_AMENDMENTS
from broker.storage.blocks import MAGICS, decode_footer, decode_header, frame_length, peek_row_count
from broker.storage.bucket_snapshot import MAGIC as MAGIC_BUCKET
from broker.storage.dump import dump_file
from broker.storage.frame import encode_group
from broker.storage.manifest import MAGIC_BROKER, MAGIC_CURSOR, MAGIC_TOPIC, VERSION, frame_content
from broker.storage.producers_file import MAGIC_PRODUCERS
from broker.storage.segment import MAGIC, encode_header, find_end, is_cut_roll, replay, scan
from broker.storage.segment import decode_header as decode_segment_header
from broker.testing.mem_vfs import MemVfs
from tests.golden import make

Line = dict[str, Any]
FILES = make.build()
SMALL = {name: content for name, content in FILES.items() if len(content) < 4096}
MAGIC_BYTES = [
    MAGIC,
    MAGIC_BROKER,
    MAGIC_TOPIC,
    MAGIC_CURSOR,
    MAGIC_BUCKET,
    MAGIC_AMENDMENTS,
    MAGIC_PRODUCERS,
    *MAGICS.values(),
]


def dump(content: bytes, name: str = "file") -> list[Line]:
    vfs = MemVfs()
    vfs.open(name, create=True).pwrite([content], 0)
    lines = [json.loads(json.dumps(line)) for line in dump_file(vfs, name)]
    assert all("line" in line for line in lines)
    assert all(line["line"] != "error" for line in lines[:-1])
    assert vfs.snapshot() == {name: content}
    return lines


def dump_golden(name: str) -> list[Line]:
    return dump(FILES[name])


# What is in the lines


def test_a_root() -> None:
    header, broker, *topics = dump_golden("broker-v1.manifest")
    assert header == {"line": "header", "file": "broker manifest", "version": 1, "file_bytes": 98}
    assert (broker["checkpoint_lsn"], broker["next_topic_id"]) == (0x1233, 8)
    assert topics == [
        {"line": "topic", "topic_id": 3, "name": "orders"},
        {"line": "topic", "topic_id": 7, "name": "übung"},
    ]


def test_a_topic() -> None:
    lines = dump_golden("topic-v1.manifest")
    assert [line["line"] for line in lines] == ["header", "topic", *["ledger"] * 2, *["subscription"] * 2]
    assert lines[1]["policy"] == {"tick_ms": 500, "ledger_max_entries": 50_000}
    assert (lines[2]["ledger_id"], lines[2]["entry_count"], lines[3]["sealed"]) == (11, 4100, False)
    assert (lines[4]["name"], lines[4]["mark"], lines[4]["policy"]["honor_delay"]) == (
        "billing",
        [11, 8],
        True,
    )


def test_a_cursor_shows_counts_and_the_first_ids() -> None:
    lines = dump_golden("cursor-v1")
    assert lines[2] == {
        "line": "settled",
        "ledger_id": 11,
        "count": 3901,
        "first_ids": [9, *range(100, 109)],
    }
    assert [line["bit"] for line in lines if line["line"] == "attempts"] == [0, 1, 0, 1]
    assert [line for line in lines if line["line"] == "reason"][-1] == {
        "line": "reason",
        "ledger_id": 11,
        "entry_id": 8,
        "text": "boom",
    }
    assert [line for line in lines if line["line"] == "waiting"][-1] == {
        "line": "waiting",
        "ledger_id": 12,
        "count": 2,
        "first_ids": [1, 3],
        "first_not_before_ms": make.NOW_MS,
        "last_not_before_ms": make.NOW_MS + 9,
    }


def test_producers_show_what_is_remembered_of_each() -> None:
    header, producers, *lines = dump_golden("producers-v1")
    assert header["file"] == "producers"
    assert producers == {"line": "producers", "topic_id": 3}
    assert lines[0] == {
        "line": "producer",
        "name": "orders-7",
        "highest_sequence_id": 40,
        "floor": 41,
        "runs": 0,
        "sequence_ids": 0,
    }
    assert (lines[1]["runs"], lines[1]["sequence_ids"]) == (3, 1_003)


def test_a_segment_shows_what_its_records_say() -> None:
    lines = dump_golden("segment-v1.seg")
    *records, torn = [line for line in lines if line["line"] == "record"]
    assert (torn["committed"], "error" in torn) == (False, True)
    assert [line["record"] for line in records] == [type(record).__name__ for record in make.records()]
    assert [line["lsn"] for line in records] == list(range(0x1234, 0x1234 + len(records)))
    produced = records[2]
    assert (produced["ledger_id"], produced["count"], produced["delayed_count"]) == (13, 3, 2)
    assert (produced["first_deliver_at_ms"], produced["last_deliver_at_ms"]) == (
        make.NOW_MS + 1000,
        make.NOW_MS + 2000,
    )
    assert records[3]["reason"] == "ACKED"
    assert records[3]["entries"][0] == {"ledger_id": 11, "count": 3, "first_ids": [4, 5, 9]}
    assert records[6]["entries"][0]["count"] == 100_000 and len(records[6]["entries"][0]["first_ids"]) == 10
    assert lines[-2] == torn
    assert (lines[-1]["line"], lines[-1]["next_lsn"], lines[-1]["damaged"]) == (
        "end",
        0x1234 + len(records),
        False,
    )


def test_a_bucket_shows_its_metadata_bitmaps_and_segments_but_not_its_entries() -> None:
    header, bucket, *lines = dump_golden("uniform-v1.bucket")
    assert (header["file"], header["segments_at"], header["file_bytes"]) == ("bucket", 226, 325)
    assert bucket == {
        "line": "bucket",
        "topic_id": 3,
        "bucket_id": 6,
        "start": [11, 4000],
        "end": [(1 << 48) - 1, 1 << 32],
        "count": 1000,
        "checksum": "baf9423f490f0ba1",
        "segment_count": 3,
    }
    assert [line["line"] for line in lines] == ["ledger", "ledger", "segment", "segment", "segment"]
    assert (lines[0]["ledger_id"], lines[0]["first"], lines[0]["end"], lines[0]["count"]) == (
        11,
        4000,
        4100,
        100,
    )
    assert lines[0]["first_ids"] == list(range(4000, 4010))
    assert (lines[2]["count"], lines[2]["first_ms"], lines[2]["last_ms"]) == (
        400,
        make.NOW_MS,
        make.NOW_MS + 3,
    )
    assert (lines[2]["first_position"], lines[4]["last_position"]) == (
        [11, 4000],
        [(1 << 48) - 1, (1 << 32) - 1],
    )
    assert all(line["ok"] for line in lines)


def test_amendments() -> None:
    header, amendments, *moved = dump_golden("ledger-v1.amend")
    assert (header["file"], header["version"]) == ("amendments", 1)
    assert (amendments["cancelled_count"], amendments["moved_count"]) == (3901, 3)
    assert amendments["first_cancelled_ids"] == [9, *range(100, 109)]
    assert moved[1] == {
        "line": "moved",
        "entry_id": 9,
        "deliver_at_ms": make.NOW_MS,
        "revision": 2,
        "lsn": 0x1236,
        "cancelled": True,
    }
    assert [line["cancelled"] for line in moved] == [False, True, False]


def test_damage_of_a_bucket_is_named_after_everything_that_can_be_read() -> None:
    content = bytearray(FILES["scattered-v1.bucket"])
    content[1024] ^= 1  # in the first segment
    bitmap_at = 32 + dump(bytes(content))[0]["metadata_bytes"]
    content[bitmap_at] ^= 1  # in the first bitmap
    *lines, error = dump(bytes(content))
    assert [line["line"] for line in lines if line.get("ok") is False] == ["ledger", "segment"]
    assert len(lines) == len(dump_golden("scattered-v1.bucket"))
    assert (error["line"], error["offset"]) == ("error", bitmap_at)
    longer = dump(FILES["scattered-v1.bucket"] + b"x")
    assert longer[-1]["message"].startswith("A snapshot has 4432 bytes where there are 4431")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data", "times", "rows"])
def test_a_ledger(kind: str) -> None:
    times, rows, _ = make.columns(make.SEALED_COUNT)
    lines = dump_golden(make.SEALED.path(kind))
    header = {
        "line": "header",
        "kind": kind,
        "topic_id": 3,
        "ledger_id": 11,
        "generation": 0,
        "sparse": False,
    }
    assert lines[0] == header
    if kind == "data":
        assert [line["crc"] for line in lines[1:]] == rows["crc"].tolist()
        return
    assert (lines[-1]["line"], lines[-1]["entry_count"]) == ("footer", make.SEALED_COUNT)
    column = "deliver_at_ms" if kind == "times" else "offset"
    expected = times.tolist() if kind == "times" else rows["offset"].tolist()
    assert [line[column] for line in lines[1:-1]] == expected


# Damage


def test_a_file_that_is_none_of_ours_says_so() -> None:
    for content in (b"", b"P", b"\x7fELF and more", b"PDM?" + bytes(40)):
        (line,) = dump(content)
        assert line["line"] == "error"
    assert "empty" in dump(b"")[0]["message"]
    with pytest.raises(FileNotFoundError):
        list(dump_file(MemVfs(), "nowhere"))


@pytest.mark.parametrize("name", ["broker-v1.manifest", "topic-v1.manifest", "cursor-v1"])
def test_a_manifest_with_a_bad_checksum_is_printed_as_far_as_it_can_be_read(name: str) -> None:
    content = bytearray(FILES[name])
    content[12] ^= 1
    lines = dump(bytes(content))
    assert lines[:-1] == dump_golden(name)
    assert (lines[-1]["line"], lines[-1]["offset"]) == ("error", 8)
    content[4] = 9
    lines = dump(bytes(content))
    assert [line["line"] for line in lines] == ["header", "error"]
    assert "version 9" in lines[1]["message"]


def test_a_damaged_group_ends_in_an_error_and_hides_nothing_before_it() -> None:
    content = bytearray(FILES["segment-v1.seg"])
    content[30] ^= 1  # in the first group
    lines = dump(bytes(content))
    assert [line["line"] for line in lines] == ["header", "rest", "end", "error"]
    content = bytearray(FILES["segment-v1.seg"])
    second = next(line["end"] for line in dump_golden("segment-v1.seg") if line["line"] == "commit")
    content[second + 20] ^= 1  # in the last group: it looks torn, which is no damage
    lines = dump(bytes(content))
    assert sum(line["line"] == "record" for line in lines) == 5
    assert lines[-1]["line"] == "end"


def test_a_segment_with_a_bad_header_is_read_by_its_name_or_by_what_the_header_says() -> None:
    content = bytearray(FILES["segment-v1.seg"])
    content[17] ^= 1  # the header's crc
    for name in ("file", f"{make.FIRST_LSN:016x}.seg"):
        lines = dump(bytes(content), name)
        assert sum(line["line"] == "commit" for line in lines) == 2
        assert lines[-1]["line"] == "error"
    content[8] ^= 1  # and the lsn in it
    assert sum(line["line"] == "commit" for line in dump(bytes(content), f"{make.FIRST_LSN:016x}.seg")) == 2


def test_a_record_that_cannot_be_decoded_is_an_error_once_it_is_committed() -> None:
    content = encode_header(1)
    group = b"".join(encode_group(1, len(content), [(200, [b"?"], 1), (3, [b"short"], 5)])[0])
    lines = dump(content + group)
    assert [line["line"] for line in lines] == ["header", "record", "record", "commit", "end", "error"]
    assert "lsn 1" in lines[-1]["message"]
    torn = dump(content + group[:-8])
    assert torn[-1]["line"] == "end"
    assert all("error" in line for line in torn if line["line"] == "record")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["times", "rows"])
def test_damaged_rows_and_footers_of_a_sealed_column_end_in_an_error(kind: str) -> None:
    content = bytearray(FILES[make.SEALED.path(kind)])
    whole = dump(bytes(content))
    content[5000] ^= 1
    lines = dump(bytes(content))
    assert (len(lines), lines[-1]["line"]) == (len(whole) + 1, "error")
    content = bytearray(FILES[make.SEALED.path(kind)])
    content[-1] ^= 1
    assert dump(bytes(content))[-1]["line"] == "error"


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_cut_files_are_printed_to_their_end(name: str) -> None:
    content = FILES[name]
    for length in range(0, len(content), 1 if len(content) < 300 else 7):
        assert dump(content[:length])


# Any bytes


@given(st.sampled_from(MAGIC_BYTES), st.binary(max_size=300))
def test_any_bytes_behind_any_magic_are_printed(magic: bytes, content: bytes) -> None:
    dump(content)
    dump(magic + content)
    dump(magic + b"\1\0\0\0" + content)


@given(st.sampled_from([MAGIC_BROKER, MAGIC_TOPIC, MAGIC_CURSOR]), st.binary(max_size=100))
def test_any_content_of_a_manifest_is_printed(magic: bytes, content: bytes) -> None:
    assert VERSION == 1
    dump(frame_content(magic, content))


@given(st.sampled_from(sorted(SMALL)), st.data())
def test_changed_files_are_printed(name: str, data: st.DataObject) -> None:
    content = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    dump(bytes(content))


@given(
    st.integers(1, (1 << 64) - 1),
    st.lists(st.tuples(st.integers(2, 255), st.binary(max_size=60)), max_size=4),
)
def test_any_records_in_a_good_segment_are_printed(first_lsn: int, records: list[tuple[int, bytes]]) -> None:
    content = encode_header(first_lsn)
    if records:
        group = [(record_type, [body], len(body)) for record_type, body in records]
        content += b"".join(encode_group(first_lsn, len(content), group)[0])
    lines = dump(content)
    assert sum(line["line"] == "record" for line in lines) == len(records)


@given(st.binary(max_size=200), st.integers(0, (1 << 64) - 1), st.booleans())
def test_any_bytes_are_a_segment_or_corrupt(content: bytes, first_lsn: int, with_header: bool) -> None:
    data = encode_header(first_lsn) + content if with_header else content
    for decode in (
        lambda: decode_segment_header(data, ""),
        lambda: list(scan(data, first_lsn)),
        lambda: find_end(data, first_lsn, ""),
        lambda: is_cut_roll(data, first_lsn),
        lambda: list(replay(data, first_lsn, first_lsn + 1, "")),
    ):
        value_or_corrupt(decode)


@given(st.data())
def test_a_changed_segment_gives_a_part_of_its_groups_and_nothing_else(data: st.DataObject) -> None:
    original = FILES["segment-v1.seg"]
    content = bytearray(original)
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << bit % 8
    groups = [[bytes(each.body) for each in group.records] for group in scan(original, make.FIRST_LSN)]
    found = [[bytes(each.body) for each in group.records] for group in scan(bytes(content), make.FIRST_LSN)]
    assert found == groups[: len(found)]


@given(st.binary(max_size=200), st.sampled_from([8, 44]))
def test_any_bytes_are_a_header_or_footer_of_a_ledger_or_corrupt(content: bytes, itemsize: int) -> None:
    value_or_corrupt(lambda: decode_header(content))
    value_or_corrupt(lambda: decode_footer(content, itemsize))
    trailer = FILES[make.SEALED.path("times")][-24:]
    value_or_corrupt(lambda: decode_footer(content + trailer, itemsize))
    peek_row_count(content)
    frame_length(content[:6])


def value_or_corrupt(decode: Any) -> None:
    with suppress(Corrupt):
        decode()


# The command


def test_the_command_prints_lines_and_tells_damage_by_its_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(FILES["broker-v1.manifest"])
    whole = CliRunner().invoke(main, ["dump", str(path)])
    assert whole.exit_code == 0
    assert [json.loads(line)["line"] for line in whole.output.splitlines()] == [
        "header",
        "broker",
        "topic",
        "topic",
    ]
    path.write_bytes(FILES["broker-v1.manifest"][:-1])
    damaged = CliRunner().invoke(main, ["dump", str(path)])
    assert damaged.exit_code == 1
    assert "Error: A broker manifest's checksum does not match" in damaged.output
    path.write_bytes(b"hello")
    assert CliRunner().invoke(main, ["dump", str(path)]).exit_code == 1
    absent = CliRunner().invoke(main, ["dump", str(tmp_path / "y")])
    assert (absent.exit_code, absent.output.count("\n")) == (1, 1)
    assert CliRunner().invoke(main, ["dump", str(tmp_path)]).exit_code == 1
