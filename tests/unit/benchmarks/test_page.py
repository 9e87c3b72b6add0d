"""The tables of docs/benchmarks.md: which are written, and what stands in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import page
from benchmarks.figures import markers
from benchmarks.report import Outcome, row_result
from benchmarks.rows import GROUPS, ROWS

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks.md"
MACHINE = dict.fromkeys(
    ("commit", "date", "cores", "cpu", "memory_gib", "system", "kernel", "file_system", "python"), "here"
)
SHARING = GROUPS["topics that share a broker"]


def results(names: set[str], values: tuple[float, ...] = (1.0,)) -> dict[str, dict[str, Any]]:
    """Results of a run that measured these rows, each figure the same."""
    return {
        row.name: row_result(row, Outcome([{row.figure: value} for value in values]))
        for row in ROWS
        if row.name in names
    }


def written(old: str, found: dict[str, dict[str, Any]]) -> str:
    """The page after a run that found this."""
    return page.write_tables(old, "measure", MACHINE, {}, found, page.measured_groups(found))


def test_the_page_has_a_place_for_each_group():
    text = PAGE.read_text()
    for group in GROUPS:
        begin, end = markers(group)
        assert text.count(begin) == text.count(end) == 1, group


def test_a_table_is_written_once_all_of_its_rows_were_measured():
    found = results({row.name for row in SHARING})
    assert page.measured_groups(found) == ["topics that share a broker"]
    found["stop-topics"]["failed"] = "no room"
    assert page.measured_groups(found) == []
    del found["stop-topics"]
    assert page.measured_groups(found) == []


def test_rows_that_take_long_are_missed_only_where_a_table_has_no_others():
    assert "shards" in page.measured_groups(results({row.name for row in ROWS if not row.on_request}))
    cluster = results({row.name for row in GROUPS["a cluster"]})
    assert page.measured_groups(cluster) == ["a cluster"]
    del cluster["cluster-seed"]
    assert page.measured_groups(cluster) == []


def test_other_tables_stay_as_they_are():
    begin, end = markers("topics that share a broker")
    old = f"# Title\n\n{begin}\n\nold\n\n{end}\n\nmore\n"
    assert written(old, results({"deliver"})) == old
    new = written(old, results({row.name for row in SHARING}))
    assert new.startswith(f"# Title\n\n{begin}\n\n`measure`, commit here") and new.endswith(
        f"{end}\n\nmore\n"
    )
    assert "old" not in new and "| resident memory of an idle topic | 1 B | 20,000 B |  |" in new


def test_what_falls_short_is_bold_and_several_runs_have_a_range():
    begin, end = markers("topics that share a broker")
    found = results({row.name for row in SHARING}, (10.0, 30.0, 90.0))
    text = written(f"{begin}{end}", found)
    assert "worst of five disturbances | **30 ms** (10 to 90) | 20 ms |" in text
    assert "its produce p99, worst of the same | 30 ms (10 to 90) | 50 ms |" in text
