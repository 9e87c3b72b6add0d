"""The timeline's windows: the calendar's own, whole or from anywhere, each bar leading to the window inside it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from broker.web.calendar_window import UNITS, CalendarWindow, group, parse_start, start_name, window

DAY_MS = 86_400_000


def ms(*parts: int) -> int:
    return int(datetime(*parts, tzinfo=UTC).timestamp() * 1000)  # type: ignore[misc, arg-type]


@pytest.mark.parametrize(
    ("unit", "at", "bars", "start", "end", "title"),
    [
        ("year", ms(2026, 5, 4), 20, ms(2026, 1, 1), ms(2046, 1, 1), "2026 to 2045"),
        ("month", ms(2026, 1, 9), 12, ms(2026, 1, 1), ms(2027, 1, 1), "2026"),
        ("month", ms(2026, 11, 22), 12, ms(2026, 11, 1), ms(2027, 11, 1), "November 2026 to October 2027"),
        ("day", ms(2028, 2, 1), 29, ms(2028, 2, 1), ms(2028, 3, 1), "February 2028"),
        ("day", ms(2026, 11, 22, 14), 31, ms(2026, 11, 22), ms(2026, 12, 23), "22 November 2026 to 22 December 2026"),
        ("hour", ms(2026, 11, 22), 24, ms(2026, 11, 22), ms(2026, 11, 23), "Sunday 22 November 2026"),
        ("hour", ms(2026, 11, 22, 14, 5), 24, ms(2026, 11, 22, 14), ms(2026, 11, 23, 14), "22 November 14:00 to 23 November 13:59"),
        ("minute", ms(2026, 11, 22, 14), 60, ms(2026, 11, 22, 14), ms(2026, 11, 22, 15), "22 November 2026, 14:00 to 15:00"),
        ("second", ms(2026, 11, 22, 23, 59), 60, ms(2026, 11, 22, 23, 59), ms(2026, 11, 23), "22 November 2026, 23:59 to 00:00"),
    ],
)  # fmt: skip
def test_a_window_begins_with_its_first_bar(unit, at, bars, start, end, title):
    found = window(unit, at)
    assert (len(found.starts_ms) - 1, found.start_ms, found.end_ms, found.title) == (bars, start, end, title)
    assert list(found.starts_ms) == sorted(set(found.starts_ms))


def test_every_bar_leads_to_the_window_that_is_exactly_that_bar():
    at = ms(2028, 2, 29, 23, 59, 59)
    for unit in UNITS[:-1]:
        outer = window(unit, at)
        bar = outer.bar_of(at)
        assert bar is not None
        inside = outer.inside(bar)
        assert inside is not None
        start = parse_start(inside[1])
        assert start is not None
        inner = window(inside[0], start)
        assert (inner.start_ms, inner.end_ms) == (outer.starts_ms[bar], outer.starts_ms[bar + 1])
    assert window("second", at).inside(3) is None


def test_the_path_leads_out_again():
    found = window("second", ms(2026, 11, 22, 14, 3))
    assert found.path() == [
        ("All", "year", "2026"),
        ("2026", "month", "2026-01"),
        ("November", "day", "2026-11-01"),
        ("22", "hour", "2026-11-22T00:00"),
        ("14:00", "minute", "2026-11-22T14:00"),
    ]


@pytest.mark.parametrize(
    ("unit", "at", "before", "after"),
    [
        ("day", ms(2026, 3, 1), ("day", "2026-02-01"), ("day", "2026-04-01")),
        ("day", ms(2026, 3, 5), ("day", "2026-02-02"), ("day", "2026-04-05")),
        ("month", ms(2026, 11, 1), ("month", "2025-11"), ("month", "2027-11")),
        ("hour", ms(2026, 1, 1), ("hour", "2025-12-31"), ("hour", "2026-01-02")),
        ("year", ms(1970, 1, 1), None, ("year", "1990")),
        ("year", ms(9990, 1, 1), ("year", "9970"), None),
    ],
)
def test_steps_go_by_a_window(unit, at, before, after):
    def place(step: int) -> tuple[str, str] | None:
        found = window(unit, at).beside(step)
        if found is None:
            return None
        start = parse_start(found[1])
        assert start is not None
        return found[0], start_name(found[0], start)[:10]

    assert (place(-1), place(1)) == (before, after)


@pytest.mark.parametrize("text", ["", "x", "2026-13", "1969", "9998", "99999", "2026-11-22T25:00", "²⁰²⁶"])
def test_what_is_no_start_is_none(text):
    assert parse_start(text) is None


def test_times_beyond_the_calendar_are_shown_at_its_end():
    found = window("day", (1 << 53) - 1)
    assert found.start_ms < found.end_ms <= ms(9999, 1, 1)
    assert all(found.label(bar) and found.name(bar) for bar in range(len(found.starts_ms) - 1))


def test_days_add_up_to_months_and_what_lies_outside_counts_nowhere():
    found = window("month", ms(2026, 11, 1))
    days = [
        (ms(2026, 10, 31), 7),
        (ms(2026, 11, 1), 1),
        (ms(2026, 11, 30), 2),
        (ms(2026, 12, 1), 4),
        (ms(2027, 10, 31), 8),
        (ms(2027, 11, 1), 16),
    ]
    assert group(found, days) == [3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8]


def test_an_empty_count_is_all_zero():
    assert group(CalendarWindow("hour", [0, 10, 20]), []) == [0, 0]
