"""Warnings of the audit about what compaction would mend, with and without errors; they go with compaction."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from broker.jobs.audit import AuditRequest, run_audit
from broker.jobs.engine import InlineEngine
from broker.jobs.work import Line
from tests.jobs.compacting import compact_offline
from tests.jobs.folders import PINNED_IDS, change_manifest, flip, write_pinned_folder

TOPIC = "topics/1"


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ledgers of which little is live, buckets of which most was delivered; the frontier has passed what was due."""
    monkeypatch.setattr("broker.jobs.units._PINNED_BYTES_MIN", 1_000)
    monkeypatch.setattr("broker.jobs.report._STALE_ENTRIES_MIN", 1_000)
    write_pinned_folder(tmp_path / "data")
    change_manifest(tmp_path / "data", frontier_ms=time.time_ns() // 1_000_000 - 60_000)
    return tmp_path / "data"


def audit(path: Path) -> Line:
    return run_audit(AuditRequest(str(path)), InlineEngine(1))


def found(report: Line) -> list[tuple[str, int | None]]:
    return [(line["kind"], line["ledger_id"]) for line in report["findings"]]


def test_what_is_pinned_and_stale_is_a_warning(pinned: Path) -> None:
    report = audit(pinned)
    assert report["exit_code"] == 1
    assert found(report).count(("stale_entries", None)) == 1
    assert {each for each in found(report) if each[0] == "pinned_ledger"} == {
        ("pinned_ledger", ledger_id) for ledger_id in PINNED_IDS
    }
    line = next(line for line in report["findings"] if line["ledger_id"] == PINNED_IDS[1])
    assert line["count"] == 9  # eight are due later, and one was not acknowledged


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("buckets/2.bucket", "lost"),
        ("ledgers/3.0.times", "bad_checksum"),
        ("buckets/9.bucket", "orphan_file"),
    ],
)
def test_warnings_are_told_beside_what_is_wrong(pinned: Path, name: str, kind: str) -> None:
    path = pinned / TOPIC / name
    if path.exists():
        flip(path, -5 if "bucket" in name else 100)
    else:
        path.write_bytes(b"")
    kinds = {each for each, _ in found(audit(pinned))}
    assert {kind, "pinned_ledger", "stale_entries"} <= kinds


def test_compaction_clears_both(pinned: Path) -> None:
    (result,) = compact_offline(pinned, InlineEngine(1))
    assert not result.error
    assert audit(pinned)["findings"] == []
