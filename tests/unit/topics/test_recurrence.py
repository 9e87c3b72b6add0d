"""Times of recurring schedules: against real zones, against every minute of some days, and what is stored of them."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import InvalidRequest
from broker.storage.recurring_values import Definition, OverdueRuns, RecurringProgress, RecurringRule
from broker.topics import recurrence
from broker.topics.recurrence import (
    OVERDUE_AFTER_MS,
    check_rule,
    last_within,
    next_after,
    occurrence,
    occurrences,
    plan_due,
)

BERLIN, NEW_YORK, LORD_HOWE, KOLKATA = (
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Asia/Kolkata",
)
MINUTE_MS = 60_000


def moment(text: str, zone: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1_000)


def times(cron: str, zone: str, after: str, count: int) -> list[str]:
    """The next occurrences as local times with their offset."""
    definition = Definition(RecurringRule(cron=cron, zone=zone), b"")
    found = itertools.islice(occurrences(definition, moment(after, zone)), count)
    return [datetime.fromtimestamp(each / 1_000, ZoneInfo(zone)).isoformat()[5:] for each in found]


@pytest.mark.parametrize(
    ("cron", "zone", "after", "expected"),
    [
        # The missing hour: at the first moment after it, and once if there are several.
        ("30 2 * * *", BERLIN, "2026-03-28T12:00", ["03-29T03:00:00+02:00", "03-30T02:30:00+02:00"]),
        ("0,30 2 * * *", BERLIN, "2026-03-28T12:00", ["03-29T03:00:00+02:00", "03-30T02:00:00+02:00"]),
        ("0 2,3 * * *", BERLIN, "2026-03-28T12:00", ["03-29T03:00:00+02:00", "03-30T02:00:00+02:00"]),
        ("*/15 2 * * *", NEW_YORK, "2026-03-07T12:00", ["03-08T03:00:00-04:00", "03-09T02:00:00-04:00"]),
        ("15 2 * * *", LORD_HOWE, "2026-10-03T12:00", ["10-04T02:30:00+11:00", "10-05T02:15:00+11:00"]),
        # The hour that comes twice: in its first pass.
        ("30 2 * * *", BERLIN, "2026-10-24T12:00", ["10-25T02:30:00+02:00", "10-26T02:30:00+01:00"]),
        ("30 1 * * *", NEW_YORK, "2026-10-31T12:00", ["11-01T01:30:00-04:00", "11-02T01:30:00-05:00"]),
        ("45 1 * * *", LORD_HOWE, "2026-04-04T12:00", ["04-05T01:45:00+11:00", "04-06T01:45:00+10:30"]),
        ("0 */2 * * *", BERLIN, "2026-10-25T01:00", ["10-25T02:00:00+02:00", "10-25T04:00:00+01:00"]),
        # Every hour: real time, in both passes.
        ("30 * * * *", BERLIN, "2026-10-25T02:00", ["10-25T02:30:00+02:00", "10-25T02:30:00+01:00"]),
        ("30 * * * *", BERLIN, "2026-03-29T01:00", ["03-29T01:30:00+01:00", "03-29T03:30:00+02:00"]),
        ("0 * * * *", LORD_HOWE, "2026-10-04T01:00", ["10-04T03:00:00+11:00", "10-04T04:00:00+11:00"]),
        ("*/30 * * * *", LORD_HOWE, "2026-10-04T01:30", ["10-04T02:30:00+11:00", "10-04T03:00:00+11:00"]),
        # A zone without; and what is rare.
        ("30 2 * * *", KOLKATA, "2026-03-28T12:00", ["03-29T02:30:00+05:30", "03-30T02:30:00+05:30"]),
        ("0 12 29 2 *", BERLIN, "2026-03-01T00:00", ["02-29T12:00:00+01:00", "02-29T12:00:00+01:00"]),
        ("0 12 L * *", BERLIN, "2026-02-01T00:00", ["02-28T12:00:00+01:00", "03-31T12:00:00+02:00"]),
        ("0 9 * * MON-FRI", BERLIN, "2026-11-27T10:00", ["11-30T09:00:00+01:00", "12-01T09:00:00+01:00"]),
        ("*/20 0 9 * * *", BERLIN, "2026-11-27T09:00:20", ["11-27T09:00:40+01:00", "11-28T09:00:00+01:00"]),
    ],
)
def test_crons_in_zones(cron: str, zone: str, after: str, expected: list[str]) -> None:
    assert times(cron, zone, after, 2) == expected


CHANGES = [
    (BERLIN, "2026-03-28"),
    (BERLIN, "2026-10-24"),
    (LORD_HOWE, "2026-04-04"),
    (LORD_HOWE, "2026-10-03"),
]
FIELDS = st.sampled_from(["*", "*/7", "0", "15", "30,45", "59"])
HOURS = st.sampled_from(["*", "1", "2", "1-3", "*/3", "0,2,23"])


@pytest.mark.slow
@given(st.sampled_from(CHANGES), FIELDS, HOURS)
def test_each_minute_of_the_days_around_a_change(change: tuple[str, str], minute: str, hour: str) -> None:
    """Against a walk through every minute: wall-clock times of certain hours once, of every hour whenever they are."""
    zone, day = change
    cron = f"{minute} {hour} * * *"
    start_ms, tz = moment(f"{day}T00:00", zone), ZoneInfo(zone)
    end_ms = start_ms + 3 * 86_400_000
    walls = [datetime.fromtimestamp(ms / 1_000, tz) for ms in range(start_ms, end_ms, MINUTE_MS)]
    # What a cron matches of naive wall-clock times is the library's business.
    naive = Definition(RecurringRule(cron=cron), b"")
    first = datetime.fromisoformat(day)
    last_ms = as_utc(first + timedelta(days=4))
    matching = {
        datetime.fromtimestamp(ms / 1_000, ZoneInfo("UTC")).replace(tzinfo=None)
        for ms in itertools.takewhile(
            lambda ms: ms < last_ms, occurrences(naive, as_utc(first - timedelta(hours=1)))
        )
    }
    if hour == "*":
        expected = [wall for wall in walls if wall.replace(tzinfo=None, fold=0) in matching]
    else:
        seen: set[datetime] = set()
        expected = []
        for before, wall in itertools.pairwise([walls[0] - timedelta(minutes=1), *walls]):
            # Of a jump forward the minutes in between are made up for by this one.
            begin = max(
                before.replace(tzinfo=None, fold=0), wall.replace(tzinfo=None, fold=0) - timedelta(minutes=61)
            )
            span, at = [], wall.replace(tzinfo=None, fold=0)
            while at > begin or at == wall.replace(tzinfo=None, fold=0):
                span.append(at)
                at -= timedelta(minutes=1)
            due = matching.intersection(span) - seen
            seen |= due
            if due:
                expected.append(wall)
    definition = Definition(RecurringRule(cron=cron, zone=zone), b"")
    found = list(itertools.takewhile(lambda ms: ms < end_ms, occurrences(definition, start_ms - 1)))
    assert found == [round(wall.timestamp() * 1_000) for wall in expected]


def as_utc(wall: datetime) -> int:
    return round(wall.replace(tzinfo=ZoneInfo("UTC")).timestamp() * 1_000)


def test_intervals_and_lists_with_a_start_and_an_end() -> None:
    interval = Definition(RecurringRule(interval_ms=10_000), b"", start_ms=5_000_000, end_ms=5_030_000)
    assert list(occurrences(interval, 0)) == [5_000_000, 5_010_000, 5_020_000]
    assert next_after(interval, 5_010_000) == 5_020_000
    assert next_after(Definition(RecurringRule(interval_ms=60_000), b""), 61_000) == 120_000
    listed = Definition(RecurringRule(times_ms=(10, 20, 30)), b"", start_ms=15)
    assert list(occurrences(listed, 0)) == [20, 30]


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (RecurringRule(cron="* * *"), "INVALID_CRON"),
        (RecurringRule(cron="61 * * * *"), "INVALID_CRON"),
        (RecurringRule(cron="0 0 30 2 *"), "INVALID_CRON"),
        (RecurringRule(cron="@daily"), "INVALID_CRON"),
        (RecurringRule(cron="0 0 * * *", zone="Europe/Bonn"), "INVALID_TIME_ZONE"),
        (RecurringRule(cron="0 0 * * *", zone="../etc/passwd"), "INVALID_TIME_ZONE"),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused(rule: RecurringRule, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_rule(rule)
    assert refusal.value.reason == reason


def test_the_jitter_is_the_same_each_time_and_ends_before_the_next_occurrence() -> None:
    definition = Definition(RecurringRule(interval_ms=10_000), b"", jitter_ms=60_000)
    delays = []
    for time_ms in itertools.islice(occurrences(definition, 0), 200):
        one = occurrence("report", definition, time_ms)
        assert one == occurrence("report", definition, time_ms)
        delays.append(one.deliver_at_ms - time_ms)
    assert 0 <= min(delays) < 1_000 and 9_000 < max(delays) < 10_000
    other = [
        occurrence("other", definition, time_ms).deliver_at_ms for time_ms in range(10_000, 30_000, 10_000)
    ]
    assert other != [10_000 + delays[0], 20_000 + delays[1]]
    short = Definition(RecurringRule(interval_ms=10_000), b"", jitter_ms=5)
    assert {occurrence("x", short, ms).deliver_at_ms - ms for ms in range(0, 10_000_000, 10_000)} == set(
        range(6)
    )


def test_the_last_one_of_a_month_of_seconds_is_found_at_once() -> None:
    definition = Definition(RecurringRule(cron="* * * * * *"), b"")
    assert last_within(definition, 0, 2_592_000_500) == 2_592_000_000
    assert last_within(definition, 5_000, 5_999) is None
    assert last_within(Definition(RecurringRule(times_ms=(10, 2_000)), b""), 0, 1_999) == 10


def test_little_is_looked_at_for_what_lies_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    inner = recurrence._wall_after

    def noted(text: str, wall: datetime) -> datetime | None:
        nonlocal looked
        looked += 1
        return inner(text, wall)

    monkeypatch.setattr(recurrence, "_wall_after", noted)
    new_year = Definition(RecurringRule(cron="* * * 1 1 *"), b"")
    assert last_within(new_year, moment("2026-12-31", "UTC"), moment("2027-01-06", "UTC")) == moment(
        "2027-01-01T23:59:59", "UTC"
    )
    assert looked < 100
    looked = 0
    rare = Definition(RecurringRule(cron="0 * 29 2 */7", zone=BERLIN), b"")
    assert next_after(rare, moment("2027-01-01", BERLIN)) is not None
    assert looked < 10


def test_an_occurrence_that_waits_for_its_jitter_was_not_missed() -> None:
    definition = Definition(
        RecurringRule(interval_ms=60 * MINUTE_MS), b"", jitter_ms=30 * MINUTE_MS, overdue=OverdueRuns.NONE
    )
    (name,) = [
        name
        for name in map(str, range(1_000))
        if occurrence(name, definition, 120 * MINUTE_MS).deliver_at_ms > 145 * MINUTE_MS
    ][:1]
    due = plan_due(name, definition, RecurringProgress(0), 123 * MINUTE_MS, 10)
    assert ([each.time_ms // MINUTE_MS for each in due.now], due.dropped) == ([120], 1)
    due = plan_due(name, definition, RecurringProgress(60 * MINUTE_MS), 123 * MINUTE_MS, 10)
    assert ([each.time_ms // MINUTE_MS for each in due.now], due.dropped) == ([120], 0)


def plan(overdue: OverdueRuns, late_ms: int, limit: int = 100) -> tuple[list[int], int, int]:
    """Return the occurrences stored now, the next one, and the progress, of a schedule a minute whose last one was at 0."""
    definition = Definition(RecurringRule(interval_ms=MINUTE_MS), b"", overdue=overdue)
    progress = RecurringProgress(0, MINUTE_MS, MINUTE_MS)
    due = plan_due("a", definition, progress, MINUTE_MS + late_ms, limit)
    return (
        [each.time_ms // MINUTE_MS for each in due.now],
        due.ahead.time_ms // MINUTE_MS if due.ahead else 0,
        due.progress.through_ms // MINUTE_MS,
    )


def test_what_is_stored_when_an_occurrence_is_due() -> None:
    for overdue in OverdueRuns:
        assert plan(overdue, 5) == ([], 2, 2)
        assert plan(overdue, MINUTE_MS) == ([2], 3, 3)  # late, and not missed
        assert plan(overdue, MINUTE_MS + OVERDUE_AFTER_MS) == ([2, 3], 4, 4)
    late_ms = 10 * MINUTE_MS + 1
    assert plan(OverdueRuns.ALL, late_ms) == ([2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 12, 12)
    assert plan(OverdueRuns.ONE, late_ms) == ([11], 12, 12)
    assert plan(OverdueRuns.NONE, late_ms) == ([11], 12, 12)  # a minute late at most
    assert plan(OverdueRuns.NONE, late_ms + 30_000) == ([11], 12, 12)
    assert plan(OverdueRuns.ALL, late_ms, 4) == ([2, 3, 4, 5], 0, 5)  # the rest by the next record


@given(
    st.integers(0, 20 * MINUTE_MS),
    st.sampled_from(OverdueRuns),
    st.integers(1, 5),
)
def test_no_record_skips_or_repeats_an_occurrence(late_ms: int, overdue: OverdueRuns, limit: int) -> None:
    """Also where several records follow each other, and a crash takes the last of them: each begins where one ended."""
    definition = Definition(RecurringRule(cron="*/20 * * * * *"), b"", overdue=overdue)
    progress, now_ms = RecurringProgress(0, 20_000, 20_000), 20_000 + late_ms
    stored = [20_000]
    while True:
        due = plan_due("a", definition, progress, now_ms, limit)
        stored += [each.time_ms for each in due.now]
        progress = due.progress
        assert next_after(definition, progress.after_ms) == (
            progress.ahead_ms or next_after(definition, stored[-1])
        )
        if due.ahead is not None:
            stored.append(due.ahead.time_ms)
            break
    assert stored == sorted(set(stored)) and stored[-1] == next_after(definition, now_ms)
    if overdue is OverdueRuns.ALL or late_ms <= OVERDUE_AFTER_MS:
        assert stored == list(range(20_000, stored[-1] + 1, 20_000))
