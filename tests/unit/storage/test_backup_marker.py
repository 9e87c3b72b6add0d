"""backup.json, names of backups, and which of them are pruned."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import Corrupt, InvalidRequest, NotFound
from broker.storage.backup_marker import (
    Backup,
    backup_name,
    check_backup_name,
    check_label,
    decode_marker,
    encode_marker,
    is_backup_name,
    plan_prune,
)

BACKUP = Backup("20261121T205812345Z-a", "a", "id", 1_795_294_692_345, 7, 2, 9, 1000, 300, 12)


def test_what_was_encoded_is_decoded():
    assert decode_marker(encode_marker(BACKUP), "p") == BACKUP


def test_every_changed_byte_is_noticed():
    data = encode_marker(BACKUP)
    for at in range(len(data)):
        for change in (1, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[at] ^= change
            try:
                assert decode_marker(bytes(damaged), "p") == BACKUP, at
            except Corrupt:
                continue
        try:
            assert decode_marker(data[:at], "p") == BACKUP
        except Corrupt:
            continue


@given(
    st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)
)
def test_any_bytes_give_a_backup_or_corrupt(data):
    with pytest.raises(Corrupt):
        decode_marker(data if isinstance(data, bytes) else data.encode(), "p")


def test_a_version_of_tomorrow_is_refused_by_name():
    content = json.loads(encode_marker(BACKUP)) | {"version": 2}
    with pytest.raises(Corrupt, match="version 2"):
        decode_marker(json.dumps(content).encode(), "p")


def test_fields_of_another_kind_are_refused():
    with pytest.raises(Corrupt):
        decode_marker(encode_marker(replace(BACKUP, lsn="7")), "p")  # type: ignore[arg-type]


def test_names_sort_as_times_do_and_are_safe():
    names = [backup_name(1_795_294_692_345 + 977 * each, "x") for each in range(1000)]
    assert names == sorted(names)
    assert all(map(is_backup_name, names))
    assert backup_name(0, "") == "19700101T000000000Z"
    for name in ("lock", "", ".", "..", "a/b", names[0] + "/..", names[0] + ".partial", names[0] + "\n"):
        with pytest.raises(NotFound):
            check_backup_name(name)


@pytest.mark.parametrize("label", ["-a", ".a", "a/b", "a\n", "é", "a" * 65, "x.partial"])
def test_labels_that_would_not_be_safe_are_refused(label):
    with pytest.raises(InvalidRequest) as caught:
        check_label(label)
    assert caught.value.reason == "INVALID_LABEL"


@pytest.mark.parametrize("label", ["", "a", "nightly-2", "before.upgrade_3", "a" * 64])
def test_labels_become_a_part_of_a_name(label):
    check_label(label)
    assert is_backup_name(backup_name(1, label))


def aged(number: int, ms: int, broker_id: str = "id") -> Backup:
    return replace(BACKUP, name=f"n{number}", create_time_ms=ms, broker_id=broker_id)


@pytest.mark.parametrize(
    ("keep_count", "max_age_ms", "gone"),
    [
        (0, 0, set()),
        (2, 0, {"n1", "n2"}),
        (1, 0, {"n1", "n2", "n3"}),
        (0, 250, {"n1", "n2"}),
        (0, 1, {"n1", "n2", "n3"}),
        (3, 250, {"n1", "n2"}),
        (9, 1_000, set()),
    ],
)
def test_too_many_and_too_old_ones_go_but_never_the_newest_nor_anothers(keep_count, max_age_ms, gone):
    backups = [aged(number, number * 100) for number in (3, 1, 4, 2)] + [aged(9, 5, "another")]
    assert set(plan_prune(backups, "id", 500, keep_count, max_age_ms)) == gone
