"""The audit without Spark: clean where nothing is wrong, and every planted fault named by its kind and place."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyroaring import BitMap

from broker.cli import main
from broker.delayed.check import Kind, Severity
from broker.errors import Fenced, NotFound
from broker.jobs import units
from broker.jobs.audit import AuditRequest, run_audit
from broker.jobs.engine import InlineEngine
from broker.jobs.folder import ReadOnlyVfs, open_folder
from broker.jobs.plan import plan_audit
from broker.jobs.values import Level, TopicFinding, Unit, UnitResult
from broker.jobs.work import Line, pack_units, run_units
from broker.model import LEDGER_ID_MAX, START
from broker.runtime.vfs import LocalVfs
from broker.storage.amendments import HEADER_BYTES as AMENDMENTS_HEADER_BYTES
from broker.storage.amendments import AmendmentsImage, decode_amendments, encode_amendments
from broker.storage.blocks import HEADER_BYTES, KINDS
from broker.storage.manifest import CursorImage, encode_cursor
from broker.storage.sparse_writer import open_source, write_generation
from broker.testing.data_folder import NOW_MS, FolderWriter, StoredLedger
from tests.jobs.folders import (
    LEDGER_IDS,
    ROWS,
    SETTLED,
    WRONG,
    change_manifest,
    die,
    flip,
    settled_of,
    times_of,
    write_folder,
    write_wrong_folder,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "data"
    write_folder(path)
    return path


@pytest.fixture
def data(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "data"))


def audit(path: Path, level: Level = Level.STANDARD, **request: Any) -> Line:
    return run_audit(AuditRequest(str(path), level, **request), InlineEngine(1))


def kinds(report: Line) -> set[str]:
    return {line["kind"] for line in report["findings"]}


# -- nothing is wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", Level)
def test_a_whole_folder_is_clean_at_every_level(whole: Path, level: Level) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    report = audit(whole, level)
    assert (report["outcome"], report["exit_code"], report["findings"]) == ("clean", 0, [])
    assert {path: path.read_bytes() for path in before} == before


def test_counts_are_those_of_the_rows(whole: Path) -> None:
    report = audit(whole)
    orders = next(line for line in report["topics"] if line["topic"] == "orders")
    live = pending = 0
    for ledger_id in LEDGER_IDS:
        for entry, time in enumerate(times_of(ledger_id).tolist()):
            is_live = (entry == 0 or entry % SETTLED) and not (ledger_id == 2 and entry in (11, 12))
            live += bool(is_live)
            pending += bool(is_live and time)
    assert (orders["messages"], orders["live"], orders["pending"]) == (ROWS * len(LEDGER_IDS), live, pending)
    assert sum(report["pending_by_day"].values()) == report["totals"]["pending"]
    assert orders["index_owed"] == pending
    assert report["totals"]["topics"] == 3


def test_topics_can_be_chosen(whole: Path) -> None:
    report = audit(whole, topics=("mails",))
    assert [line["topic"] for line in report["topics"]] == ["mails"]
    assert report["journal"]["checked"] is False
    with pytest.raises(NotFound, match="'nobody'"):
        audit(whole, topics=("nobody",))


def test_units_of_a_topic_find_what_one_unit_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wrong_folder(tmp_path / "data")
    whole = audit(tmp_path / "data")
    monkeypatch.setattr("broker.jobs.plan.UNIT_WEIGHT_MAX", 500)
    with open_folder(str(tmp_path / "data")) as folder:
        assert len(plan_audit(folder, (), Level.STANDARD).units) > 3
    parts = audit(tmp_path / "data")
    assert parts["topics"] == whole["topics"]
    assert sorted(map(json.dumps, parts["findings"])) == sorted(map(json.dumps, whole["findings"]))


def test_units_are_shared_out_by_weight() -> None:
    weights = [100, 1, 1, 50, 49, 1]
    some = [Unit("d", i, str(i), 0, LEDGER_ID_MAX, weight, Level.QUICK) for i, weight in enumerate(weights)]
    tasks = pack_units(some, 2)
    assert sorted(sum(unit.weight for unit in task) for task in tasks) == [101, 101]
    assert sorted(unit.topic_id for task in tasks for unit in task) == list(range(6))
    assert pack_units([], 2) == []


def test_results_travel_as_json(tmp_path: Path) -> None:
    write_wrong_folder(tmp_path / "data")
    with open_folder(str(tmp_path / "data")) as folder:
        (unit,) = plan_audit(folder, (), Level.STANDARD).units
    assert Unit.from_line(json.loads(json.dumps(unit.to_line()))) == unit
    (result,) = run_units(units.AUDIT, [unit])
    assert result.findings and result.ledgers
    assert UnitResult.from_line(json.loads(json.dumps(result.to_line()))) == result


# -- what buckets should not hold ------------------------------------------------------------------------------------


def test_what_buckets_hold_wrongly_is_named(tmp_path: Path) -> None:
    write_wrong_folder(tmp_path / "data")
    report = audit(tmp_path / "data")
    assert {(line["kind"], line["ledger_id"], line["count"]) for line in report["findings"]} == WRONG
    assert (report["outcome"], report["exit_code"]) == ("findings", 2)
    lost = next(line for line in report["findings"] if line["kind"] == "lost")
    assert lost["suspects"][0]["entry_id"] == 3
    assert lost["suspects"][0]["expected_ms"] == times_of(1)[3]


def test_a_quick_audit_sees_what_bitmaps_tell(tmp_path: Path) -> None:
    write_wrong_folder(tmp_path / "data")
    report = audit(tmp_path / "data", Level.QUICK)
    found = {(line["kind"], line["ledger_id"], line["count"]) for line in report["findings"]}
    assert found == {each for each in WRONG if each[0] in ("lost", "extra", "duplicate")}


# -- files -----------------------------------------------------------------------------------------------------------

TOPIC = "topics/1"
NAMED = (
    f"{TOPIC}/manifest",
    f"{TOPIC}/ledgers/1.0.data",
    f"{TOPIC}/ledgers/1.0.times",
    f"{TOPIC}/ledgers/6.0.rows",
    f"{TOPIC}/ledgers/2.64.amend",
    f"{TOPIC}/cursors/1.64",
    f"{TOPIC}/buckets/2.bucket",
)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("level", Level)
def test_a_missing_file_is_named(data: Path, name: str, level: Level) -> None:
    (data / name).unlink()
    report = audit(data, level)
    assert report["exit_code"] == 2
    (line,) = (line for line in report["findings"] if line["kind"] == "missing_file")
    assert line["path"] == str(data / name)


@pytest.mark.parametrize("name", [name for name in NAMED if "/ledgers/" in name and "amend" not in name])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_is_named(data: Path, name: str, change: int) -> None:
    file = data / name
    os.truncate(file, file.stat().st_size + change)
    report = audit(data, Level.QUICK)
    if change > 0 and "/6." in name:
        assert (
            report["exit_code"] == 0
        )  # the last ledger takes entries; what a crash left is cut at the start
        return
    assert report["exit_code"] == 2
    assert ("size_mismatch", str(file)) in {(line["kind"], line["path"]) for line in report["findings"]}


def test_a_snapshot_of_another_length_is_named(data: Path) -> None:
    file = data / TOPIC / "buckets/1.bucket"
    os.truncate(file, file.stat().st_size - 1)
    assert {"size_mismatch", "lost"} <= kinds(audit(data))


@pytest.mark.parametrize(
    ("name", "offset", "level", "kind"),
    [
        (f"{TOPIC}/manifest", 40, Level.QUICK, "bad_checksum"),
        ("broker.manifest", 40, Level.QUICK, "bad_checksum"),
        (f"{TOPIC}/cursors/1.64", 40, Level.QUICK, "bad_checksum"),
        (f"{TOPIC}/ledgers/2.64.amend", AMENDMENTS_HEADER_BYTES + 3, Level.QUICK, "bad_checksum"),
        (f"{TOPIC}/ledgers/3.0.times", HEADER_BYTES + 80, Level.QUICK, "bad_checksum"),
        (f"{TOPIC}/ledgers/6.0.times", HEADER_BYTES + 80, Level.QUICK, "bad_checksum"),
        (f"{TOPIC}/ledgers/3.0.rows", 9, Level.QUICK, "bad_checksum"),
        (f"{TOPIC}/ledgers/3.0.rows", HEADER_BYTES + 80, Level.DEEP, "bad_checksum"),
        (f"{TOPIC}/ledgers/5.0.packed", 9, Level.QUICK, "bad_checksum"),
        (f"{TOPIC}/ledgers/5.0.packed", HEADER_BYTES + 80, Level.DEEP, "bad_checksum"),
        (f"{TOPIC}/ledgers/3.0.data", HEADER_BYTES + 80, Level.DEEP, "bad_checksum"),
        (f"{TOPIC}/buckets/1.bucket", 50, Level.QUICK, "bad_checksum"),
        (f"{TOPIC}/buckets/1.bucket", -5, Level.STANDARD, "bad_checksum"),
    ],
)
def test_a_damaged_byte_is_named(data: Path, name: str, offset: int, level: Level, kind: str) -> None:
    flip(data / name, offset)
    report = audit(data, level)
    assert report["exit_code"] == 2
    found = [line for line in report["findings"] if line["kind"] == kind]
    assert str(data / name) in {line["path"] for line in found}


def test_a_missing_run_of_schedule_keys_is_named(data: Path) -> None:
    change_manifest(data, key_run_ids=(3,), next_key_run_id=4, keys_through=START)
    report = audit(data)
    assert [(line["kind"], line["path"]) for line in report["findings"]] == [
        ("missing_file", str(data / TOPIC / "keys/3.keys"))
    ]


def test_files_that_nobody_names_are_a_warning(data: Path) -> None:
    for name in ("ledgers/9.0.data", "buckets/17.bucket", "cursors/1.63", "keys/3.keys", "strange"):
        (data / TOPIC / name).write_bytes(b"left by a crash")
    (data / "topics/9").mkdir()
    (data / "broker.manifest.new").write_bytes(b"")
    report = audit(data)
    assert (report["outcome"], report["exit_code"], kinds(report)) == ("warnings", 1, {"orphan_file"})
    assert report["finding_count"] == 7


def test_manifests_that_contradict_each_other_are_named(data: Path) -> None:
    image = change_manifest(data, index_lsn=1 << 40)
    report = audit(data)
    assert kinds(report) == {"bad_state"}
    change_manifest(data, index_lsn=image.index_lsn, topic_id=1)
    manifest = data / TOPIC / "manifest"
    manifest.write_bytes((data / "topics/2/manifest").read_bytes())
    assert "bad_state" in kinds(audit(data))


# -- what is deep ----------------------------------------------------------------------------------------------------


def test_rows_that_were_not_made_of_their_messages_are_found_by_deep_alone(tmp_path: Path) -> None:
    times = times_of(1)
    asked = times.copy()
    asked[7] += 60_000
    asked[5] = NOW_MS
    with FolderWriter(str(tmp_path / "data")) as folder:
        folder.add_topic("orders", [StoredLedger(1, times, asked=asked), StoredLedger(2, times)])
    assert audit(tmp_path / "data")["exit_code"] == 0
    report = audit(tmp_path / "data", Level.DEEP)
    assert kinds(report) == {"bad_rows"}
    texts = [line["what"] for line in report["findings"]]
    assert [text.split(":")[0] for text in texts] == ["entry 5", "entry 7"]
    assert f"its row says deliver_at_ms {times[7]}, its message {asked[7]}" in texts[1]


def test_a_sample_is_a_part_and_the_same_for_a_seed(whole: Path) -> None:
    unit = Unit(str(whole), 1, "orders", 0, LEDGER_ID_MAX, 1, Level.DEEP, sample=0.1, seed=7)
    chosen = units._sampled(1_000, unit, 3)
    assert chosen == units._sampled(1_000, unit, 3) != units._sampled(1_000, unit, 4)
    assert len(chosen) == 100
    assert len(units._sampled(3, unit, 3)) == 1
    assert audit(whole, Level.DEEP, sample=0.01)["totals"]["rows_compared"] > 0


def test_a_rewritten_ledger_is_checked_as_any_other(data: Path) -> None:
    """Sparse generations: what is gone is cancelled, what was moved has its new time in the rows."""
    image = change_manifest(data)
    old = image.ledgers[1]
    vfs, folder = LocalVfs(), str(data / TOPIC / "ledgers")
    path = f"{folder}/{old.amendments_file}"
    amendments = decode_amendments(Path(path).read_bytes(), path).amendments
    capture = old.capture
    live = BitMap([1, 21, 23, 40, 41])
    live -= amendments.cancelled
    target = capture.name(folder)._replace(generation=1, sparse=True)
    with open_source(vfs, folder, capture, amendments) as source:
        made = write_generation(vfs, source, live, target)
    settled = settled_of(LEDGER_IDS)
    settled[2] |= BitMap(range(ROWS)) - live
    gone = amendments.cancel(BitMap(range(ROWS)) - live)
    Path(path).write_bytes(encode_amendments(AmendmentsImage(1, 2, gone)))
    for number, name in ((1, "1.64"), (2, "2.64")):
        cursor = CursorImage(1, number, settled, {}, {})
        (data / TOPIC / "cursors" / name).write_bytes(encode_cursor(cursor))
    ledgers = list(image.ledgers)
    ledgers[1] = dataclasses.replace(
        old,
        capture=dataclasses.replace(capture, generation=1, data_bytes=made.data_bytes, sparse=made.sparse),
    )
    change_manifest(data, ledgers=tuple(ledgers))
    for kind in KINDS:
        (data / TOPIC / "ledgers" / f"2.0.{kind}").unlink()
    for level in Level:
        assert audit(data, level)["findings"] == []
    flip(data / TOPIC / "ledgers/2.1.data", -3)
    assert kinds(audit(data, Level.DEEP)) == {"bad_checksum"}
    (data / TOPIC / "ledgers/2.1.times").unlink()
    assert "missing_file" in kinds(audit(data))


# -- what could not be looked at -------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["emptied", "removed"])
def test_an_empty_listing_of_a_known_topic_is_incomplete_and_not_clean(data: Path, change: str) -> None:
    shutil.rmtree(data / TOPIC)
    if change == "emptied":
        (data / TOPIC).mkdir()
    report = audit(data)
    assert (report["outcome"], report["exit_code"]) == ("incomplete", 3)
    assert [(line["kind"], line["topic"]) for line in report["findings"]] == [("not_checked", "orders")]
    assert {line["topic"] for line in report["topics"]} == {"orders", "mails", "empty"}


class BrokenDisk(ReadOnlyVfs):
    """Fails for some files, so many times."""

    def __init__(self, part: str, times: int = 1 << 30) -> None:
        super().__init__()
        self.part = part
        self.times = times

    def open(self, path: str, *, create: bool = False) -> Any:
        if self.part in path and self.times:
            self.times -= 1
            raise OSError(5, "Input/output error", path)
        return super().open(path, create=create)


def unit_of(path: Path) -> Unit:
    return Unit(str(path), 1, "orders", 0, LEDGER_ID_MAX, 1, Level.STANDARD)


@pytest.mark.parametrize("part", ["manifest", "1.bucket", "2.0.times", "2.64.amend", "cursors"])
def test_a_disk_that_does_not_read_makes_it_incomplete(whole: Path, part: str) -> None:
    result = units.audit_unit(unit_of(whole), BrokenDisk(part))
    assert {each.severity for each in result.findings} == {Severity.INCOMPLETE}


def test_what_a_second_read_does_not_find_is_told_and_no_fault(whole: Path) -> None:
    result = units.audit_unit(unit_of(whole), BrokenDisk("1.bucket", times=1))
    assert [each.finding.kind for each in result.findings] == [Kind.UNCONFIRMED]
    assert result.ledgers


def test_a_second_read_that_fails_clears_nothing(data: Path) -> None:
    (data / TOPIC / "ledgers/5.0.data").unlink()
    reads = 0

    class WorseDisk(ReadOnlyVfs):
        def open(self, path: str, *, create: bool = False) -> Any:
            nonlocal reads
            reads += path.endswith("/manifest")
            if reads == 2 and path.endswith("/1.bucket"):
                raise OSError(5, "Input/output error", path)
            return super().open(path, create=create)

    result = units.audit_unit(unit_of(data), WorseDisk())
    found = {each.finding.kind for each in result.findings}
    assert found == {Kind.MISSING_FILE, Kind.NOT_CHECKED}


def test_what_only_the_second_read_finds_is_told_and_no_fault(data: Path) -> None:
    (data / TOPIC / "ledgers/5.0.data").unlink()
    reads = 0

    class LosingDisk(ReadOnlyVfs):
        def open(self, path: str, *, create: bool = False) -> Any:
            nonlocal reads
            reads += path.endswith("/manifest")
            if reads == 2 and path.endswith("/4.0.data"):
                raise FileNotFoundError(2, "No such file", path)
            return super().open(path, create=create)

    result = units.audit_unit(unit_of(data), LosingDisk())
    found = {each.finding.kind: each.finding.ledger_id for each in result.findings}
    assert found == {Kind.MISSING_FILE: 5, Kind.UNCONFIRMED: 4}


def test_a_task_that_dies_does_not_end_the_run(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = units.audit_unit

    def wrong(unit: Unit) -> UnitResult:
        if unit.topic == "mails":
            raise RuntimeError("a bug")
        return right(unit)

    monkeypatch.setattr("broker.jobs.audit.AUDIT", dataclasses.replace(units.AUDIT, run=wrong))
    report = audit(whole)
    assert report["exit_code"] == 3
    assert [(line["kind"], line["topic"]) for line in report["findings"]] == [("not_checked", "mails")]
    assert "a bug" in report["findings"][0]["what"]


def test_a_process_that_is_killed_leaves_its_units_unchecked(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.jobs.engine.run_units", die)
    report = run_audit(AuditRequest(str(whole)), InlineEngine(2))
    assert report["exit_code"] == 3
    assert {line["topic"] for line in report["findings"]} == {"orders", "mails", "empty"}
    assert kinds(report) == {"not_checked"}


def test_processes_find_what_one_finds(tmp_path: Path) -> None:
    write_wrong_folder(tmp_path / "data")
    request = AuditRequest(str(tmp_path / "data"))
    assert run_audit(request, InlineEngine(2))["findings"] == run_audit(request, InlineEngine(1))["findings"]


def test_damage_is_told_before_what_was_not_checked(data: Path) -> None:
    shutil.rmtree(data / "topics/2")
    (data / NAMED[2]).unlink()
    assert audit(data)["exit_code"] == 2


# -- whose folder it is ----------------------------------------------------------------------------------------------


def test_a_running_brokers_folder_is_refused(data: Path) -> None:
    held = LocalVfs().lock(str(data / "lock"))
    assert held is not None
    with pytest.raises(Fenced, match="audit a backup"):
        audit(data)
    result = CliRunner().invoke(main, ["audit", str(data), "--engine", "inline"])
    assert result.exit_code == 4
    (data / "backup.json").write_bytes(b"{}")  # a backup never changes, so nobody has to be kept out
    assert audit(data)["folder_kind"] == "backup"
    held.close()


def test_what_is_not_whole_or_nothing_at_all_is_refused(data: Path, tmp_path: Path) -> None:
    (data / "unfinished").write_bytes(b"")
    with pytest.raises(NotFound, match="is incomplete"):
        audit(data)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(NotFound, match="neither"):
        audit(tmp_path / "nothing")


PLANTED: dict[str, Callable[[Path], object]] = {
    "missing_file": lambda data: (data / TOPIC / "ledgers/4.0.data").unlink(),
    "bad_checksum": lambda data: flip(data / TOPIC / "ledgers/3.0.times", HEADER_BYTES + 80),
    "lost": lambda data: flip(data / TOPIC / "buckets/1.bucket", -5),
    "orphan_file": lambda data: (data / TOPIC / "buckets/9.bucket").write_bytes(b""),
    "not_checked": lambda data: shutil.rmtree(data / "topics/2"),
    "bad_state": lambda data: change_manifest(data, index_lsn=1 << 40),
    "size_mismatch": lambda data: os.truncate(data / TOPIC / "ledgers/5.0.data", 40),
}


@pytest.mark.parametrize("first", PLANTED)
@pytest.mark.parametrize("second", PLANTED)
def test_faults_of_files_are_found_beside_each_other(data: Path, first: str, second: str) -> None:
    for kind in {first, second}:
        PLANTED[kind](data)
    assert {first, second} <= kinds(audit(data))


def test_a_finding_says_where_it_is(data: Path) -> None:
    (data / NAMED[2]).unlink()
    (finding,) = (TopicFinding.from_line(line) for line in audit(data)["findings"])
    assert str(finding).startswith("missing_file: ledger 1: ")
    assert NAMED[2] in str(finding)
    assert str(finding).endswith("(topic orders)")
