"""The pure parts of `bench replay`: times of log lines, the timeline, the tally."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postdate.commands.logtimes import parse_log, parse_time, read_log
from postdate.commands.tally import Arrival, Expected, percentile, tally
from postdate.commands.timeline import plan_timeline
from postdate.model import MessageId

NOW = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "iso"),
    [
        (b"2024-01-02 10:11:12 install gcc", "2024-01-02T10:11:12+00:00"),
        (b"2024-01-02T10:11:12Z x", "2024-01-02T10:11:12+00:00"),
        (b"2024-01-02T10:11:12.123456789+02:00 x", "2024-01-02T10:11:12.123456+02:00"),
        (b"2024-01-02T10:11:12-0530 x", "2024-01-02T10:11:12-05:30"),
        (b"2024-01-02 10:11:12,345 ERROR x", "2024-01-02T10:11:12.345000+00:00"),
        (b"2024-01-02 10:11:12.5 UTC [77] LOG", "2024-01-02T10:11:12.500000+00:00"),
        (b"[2024-01-02 10:11:12] x", "2024-01-02T10:11:12+00:00"),
        (b"2024-01-02 10:11:12 Zebra", "2024-01-02T10:11:12+00:00"),
        (b"2024-01-02 10:11:60 leap", "2024-01-02T10:11:59+00:00"),
        (b"2024-01-02 10:11:12 -9999", "2024-01-02T10:11:12+00:00"),
        (b"2024-01-02 10:11:12", "2024-01-02T10:11:12+00:00"),
    ],
)
def test_times_with_a_year(line: bytes, iso: str) -> None:
    assert parse_time(line) == (datetime.fromisoformat(iso), True)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"  at Foo.bar",
        b"2024-13-02 10:11:12 x",
        b"2024-01-02",
        b"Jux  2 10:11:12",
        b"\xff\xfe",
        b"Feb 30 10:00:00",
    ],
)
def test_lines_without_a_time(line: bytes) -> None:
    assert parse_time(line)[0] is None


@given(st.binary(max_size=60))
def test_any_bytes_are_a_line(line: bytes) -> None:
    parse_time(line)
    parse_log([line], NOW)


def times(*lines: bytes) -> list[str]:
    log = parse_log(lines, NOW)
    return [f"{datetime.fromtimestamp(entry.time_ms / 1000, UTC):%Y-%m-%d %H}" for entry in log.entries]


def test_syslog_gets_the_year_that_ends_before_now() -> None:
    assert times(b"Jan  2 10:00:00 host a", b"Feb 29 11:00:00 host b") == ["2026-01-02 10", "2026-02-28 11"]
    assert times(b"Apr  2 10:00:00 host a") == ["2025-04-02 10"]


def test_december_comes_before_january() -> None:
    lines = [b"Nov  1 01:00:00", b"Dec 31 23:00:00", b"Jan  1 00:00:00", b"Dec 31 22:00:00"]
    assert times(*lines[:3]) == ["2025-11-01 01", "2025-12-31 23", "2026-01-01 00"]
    assert times(b"Feb  1 01:00:00", b"Jan 31 23:00:00") == ["2026-02-01 01", "2026-01-31 23"]


def test_lines_without_a_time_belong_to_the_line_before() -> None:
    log = parse_log(
        [b"noise\n", b"2024-01-02 10:11:12 ERROR\r\n", b"  at a\n", b"\n", b"2024-01-02 10:11:13 ok"], NOW
    )
    assert [entry.text for entry in log.entries] == [
        b"2024-01-02 10:11:12 ERROR\n  at a\n",
        b"2024-01-02 10:11:13 ok",
    ]
    assert (log.line_count, log.skipped_count) == (5, 1)


def test_no_entry_grows_without_bound() -> None:
    log = parse_log([b"2024-01-02 10:11:12 x", *[b"y" * 1000] * 200], NOW)
    assert len(log.entries) > 1
    assert max(len(entry.text) for entry in log.entries) <= 64 * 1024
    assert len({entry.time_ms for entry in log.entries}) == 1


def test_packed_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dpkg.log.1.gz"
    path.write_bytes(gzip.compress(b"2024-01-02 10:11:12 x\n"))
    assert len(read_log(str(path), NOW).entries) == 1


def test_timeline_squeezes_and_cuts() -> None:
    plan = plan_timeline([5000, 1000, 1000, 3_605_000], 10, gap_max_ms=1000, within_ms=0)
    assert plan.offsets_ms == [400, 0, 0, 1400]
    assert (plan.length_ms, plan.original_ms, plan.cut_count) == (1400, 3_604_000, 1)


def test_timeline_fits_by_cutting_the_longest_gaps_only() -> None:
    plan = plan_timeline([0, 10, 1010, 101_010], 1, gap_max_ms=None, within_ms=2010)
    assert plan.offsets_ms == [0, 10, 1010, 2010]
    assert (plan.cut_count, plan.gap_max_ms) == (1, 1000)
    untouched = plan_timeline([0, 10, 1010], 1, gap_max_ms=None, within_ms=60_000)
    assert (untouched.offsets_ms, untouched.cut_count) == ([0, 10, 1010], 0)
    assert plan_timeline([7], 1, gap_max_ms=None, within_ms=1).offsets_ms == [0]


@given(st.lists(st.integers(0, 10**12), min_size=1), st.floats(0.1, 1e6), st.integers(1, 10**6))
def test_timeline_keeps_the_order_and_fits(moments: list[int], speed: float, within_ms: int) -> None:
    plan = plan_timeline(moments, speed, gap_max_ms=None, within_ms=within_ms)
    paired = sorted(zip(moments, plan.offsets_ms, strict=True))
    offsets = [offset for _, offset in paired]
    assert offsets == sorted(offsets)
    assert 0 <= plan.length_ms <= within_ms + 1


def arrival(
    entry_id: int, due_ms: int, arrived_ms: float, payload: bytes = b"x", publish_ms: int = 0
) -> Arrival:
    return Arrival(MessageId(1, entry_id), arrived_ms, due_ms, publish_ms, payload)


def test_tally_of_a_good_run() -> None:
    expected = {MessageId(1, number): Expected(100 + number, b"x") for number in range(3)}
    result = tally([arrival(number, 100 + number, 101.5 + number) for number in range(3)], expected)
    assert result.good
    assert (result.arrived, result.out_of_order, result.late_p50_ms, result.late_max_ms) == (3, 0, 1.5, 1.5)


def test_tally_finds_every_kind_of_fault() -> None:
    expected = {MessageId(1, number): Expected(100 + number, b"x") for number in range(5)}
    arrivals = [
        arrival(1, 101, 200),
        arrival(0, 100, 201),
        arrival(0, 100, 202),
        arrival(2, 102, 101.9),
        arrival(3, 103, 300, b"changed"),
    ]
    result = tally(arrivals, expected)
    assert (result.missing, result.duplicated, result.altered, result.early, result.out_of_order) == (
        1,
        1,
        1,
        1,
        1,
    )
    assert not result.good


def test_due_time_that_the_broker_changed_does_not_hide_earliness() -> None:
    expected = {MessageId(1, 0): Expected(500, b"x")}
    assert tally([arrival(0, 100, 200)], expected).early == 1


def test_lateness_of_what_was_stored_late_counts_from_then() -> None:
    expected = {MessageId(1, 0): Expected(100, b"x")}
    assert tally([arrival(0, 100, 505, publish_ms=500)], expected).late_max_ms == 5


def test_percentiles() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.01) == 3
