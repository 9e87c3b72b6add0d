"""The times at which a recurring schedule recurs. Pure: no clock, and of the system only the time zones.

A cron is matched against wall-clock times by `cronsim`; this module says which moments they are. Zones have hours that
are missing (clocks go forward) and hours that come twice (clocks go back):

    every hour     The cron counts real time: each matching wall-clock time of each pass. Every five minutes stays every
                   five minutes, also in the hour that comes twice.
    certain hours  Each matching wall-clock time of a day counts once. One in the missing hour comes at the first
                   moment after it; several come once, then. One in the hour that comes twice comes in its first pass.

An interval counts real milliseconds from `start_ms`, or from 1970 in UTC without one, and knows no zone.

Invariants:
  RECURRENCE-1  Occurrences rise strictly, and the one after a time follows from the definition and that time.
  RECURRENCE-2  The jitter of an occurrence follows from the schedule's name and the occurrence, and ends before the
      next one.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import google_crc32c

from broker.errors import InvalidRequest
from broker.model import DELIVER_AT_MS_MAX
from broker.storage.recurring_values import Definition, OverdueRuns, RecurringProgress, RecurringRule

if TYPE_CHECKING:
    from cronsim import CronSim

OVERDUE_AFTER_MS = 60_000
"""An occurrence that is later than this was missed; a shorter delay, such as a restart, only makes it late."""
_HOURS = 24
_EPOCH = datetime(1970, 1, 1)
_SECOND = timedelta(seconds=1)
_LAST_SECOND = DELIVER_AT_MS_MAX // 1_000 - 86_400  # a wall clock may be ahead of UTC
_DAY = 86_400
_LEAST_APART = 7 * _DAY
"""Seconds in which no zone changes its offset twice."""


@dataclass(frozen=True, slots=True)
class DueOccurrence:
    """One time of a schedule, and when it is delivered."""

    time_ms: int
    deliver_at_ms: int


@dataclass(frozen=True, slots=True)
class Due:
    """Occurrences that a schedule stores now, and the one that it stores ahead."""

    now: tuple[DueOccurrence, ...]
    ahead: DueOccurrence | None
    """None: there is no next one, or more of those that are due are left for the next record."""
    progress: RecurringProgress
    dropped: int = 0
    """Occurrences left out by the schedule's `overdue`, as far as they were counted: 0 or 1 for a span of them."""
    is_partial: bool = False
    """There is more to store at once."""


def check_rule(rule: RecurringRule) -> None:
    """Raise InvalidRequest for a cron that cannot be read or never comes, or a zone that is not there."""
    try:
        zone_of(rule.zone)
    except (LookupError, ValueError, OSError) as error:
        raise InvalidRequest(
            f"There is no time zone {rule.zone!r}: give a name of the IANA database, such as Europe/Berlin",
            field="schedule.time_zone",
            reason="INVALID_TIME_ZONE",
        ) from error
    if rule.cron:
        try:
            _cron(rule.cron)
        except ValueError as error:
            raise InvalidRequest(
                f"The cron {rule.cron!r} cannot be read, or names a day that no month has ({error}): it has five "
                "fields, minute, hour, day of month, month and day of week, or six with seconds before them",
                field="schedule.cron",
                reason="INVALID_CRON",
            ) from error


@lru_cache(maxsize=512)
def zone_of(name: str) -> ZoneInfo:
    """The zone of that name; raises ZoneInfoNotFoundError (a LookupError) or ValueError."""
    return ZoneInfo(name)


def next_after(definition: Definition, time_ms: int) -> int | None:
    """The first occurrence after a time; None: there is none."""
    rule = definition.rule
    after_ms = max(time_ms, definition.start_ms - 1)
    if rule.times_ms:
        at = bisect_right(rule.times_ms, after_ms)
        found = rule.times_ms[at] if at < len(rule.times_ms) else None
    elif rule.interval_ms:
        anchor_ms = definition.start_ms
        found = anchor_ms + ((after_ms - anchor_ms) // rule.interval_ms + 1) * rule.interval_ms
    else:
        found = _cron_after(rule, after_ms)
    if found is None or found > DELIVER_AT_MS_MAX or (definition.end_ms and found >= definition.end_ms):
        return None
    return found


def occurrences(definition: Definition, after_ms: int) -> Iterator[int]:
    """All occurrences after a time, in order."""
    while (time_ms := next_after(definition, after_ms)) is not None:
        yield time_ms
        after_ms = time_ms


def last_within(definition: Definition, after_ms: int, through_ms: int) -> int | None:
    """The last occurrence after one time and not after another; None: there is none."""
    # Halves the span, so that a day of seconds is not walked through: none lies in (high, through].
    last, low, high = None, after_ms, through_ms
    while low < high:
        middle = (low + high) // 2
        found = next_after(definition, middle)
        if found is None or found > through_ms:
            high = middle
        else:
            last = low = found
    return last


def occurrence(name: str, definition: Definition, time_ms: int) -> DueOccurrence:
    """An occurrence with its jitter (RECURRENCE-2)."""
    if not definition.jitter_ms:
        return DueOccurrence(time_ms, time_ms)
    following = next_after(definition, time_ms)
    span_ms = (
        definition.jitter_ms + 1 if following is None else min(definition.jitter_ms + 1, following - time_ms)
    )
    # The high bits of a product: crc32c alone maps rising times to rising differences.
    chance = google_crc32c.value(f"{name}/{time_ms}".encode()) * 0x9E3779B97F4A7C15 >> 32 & 0xFFFFFFFF
    return DueOccurrence(time_ms, min(time_ms + chance * span_ms // (1 << 32), DELIVER_AT_MS_MAX))


def plan_due(name: str, definition: Definition, progress: RecurringProgress, now_ms: int, limit: int) -> Due:
    """Decide what is stored of a schedule whose stored occurrence, if there was one, is due.

    `limit`: so many at most at once, beside the one ahead.
    """
    through_ms = progress.through_ms
    begin_ms = through_ms
    first = next_after(definition, through_ms)
    if definition.overdue is not OverdueRuns.ALL and first is not None and first < now_ms - OVERDUE_AFTER_MS:
        begin_ms = now_ms - OVERDUE_AFTER_MS - 1
        is_one = definition.overdue is OverdueRuns.ONE
        if is_one or definition.jitter_ms:
            last = last_within(definition, through_ms, now_ms)
            assert last is not None  # at least the first one
            if is_one or occurrence(name, definition, last).deliver_at_ms >= now_ms - OVERDUE_AFTER_MS:
                begin_ms = last - 1 if is_one else min(begin_ms, last - 1)
    dropped = int(first is not None and first <= begin_ms)
    due: list[DueOccurrence] = []
    for time_ms in occurrences(definition, begin_ms):
        if time_ms > now_ms:
            ahead = occurrence(name, definition, time_ms)
            after_ms = max(through_ms, due[-1].time_ms if due else begin_ms)
            return Due(
                tuple(due), ahead, RecurringProgress(after_ms, ahead.time_ms, ahead.deliver_at_ms), dropped
            )
        if len(due) == limit:
            return Due(tuple(due), None, RecurringProgress(due[-1].time_ms), dropped, is_partial=True)
        due.append(occurrence(name, definition, time_ms))
    return Due(tuple(due), None, RecurringProgress(due[-1].time_ms if due else begin_ms), dropped)


# -- crons ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1_024)
def _cron(text: str) -> CronSim:
    """A cron, parsed: copied for each use, as it is an iterator. Raises ValueError."""
    from cronsim import CronSim, CronSimError  # noqa: PLC0415 - by the first cron: few brokers have one, and each starts without

    try:
        return CronSim(text, _EPOCH)
    except CronSimError as error:
        raise ValueError(str(error)) from error


def _wall_after(text: str, wall: datetime) -> datetime | None:
    """The first wall-clock time after one that matches."""
    cron = copy.copy(_cron(text))
    cron.dt = wall
    try:
        return next(cron)
    except (StopIteration, OverflowError, ValueError):  # not within 50 years, or after the year 9999
        return None


def _cron_after(rule: RecurringRule, after_ms: int) -> int | None:
    zone, seconds = zone_of(rule.zone), max(0, after_ms // 1_000)
    if seconds >= _LAST_SECOND:
        return None
    every_hour = len(_cron(rule.cron).hours) == _HOURS
    found = (_real_after if every_hour else _once_after)(rule.cron, zone, seconds)
    return None if found is None else found * 1_000


def _once_after(text: str, zone: ZoneInfo, seconds: int) -> int | None:
    """The moment after `seconds` at which the next wall-clock time that matches counts."""
    wall: datetime | None = _wall(seconds + _offset(zone, seconds))
    while wall is not None and (wall := _wall_after(text, wall)) is not None:
        found = _moment_of(wall, zone)
        if found > seconds:  # else it was in the first pass, or came with another one after the missing hour
            return found
    return None


def _real_after(text: str, zone: ZoneInfo, seconds: int) -> int | None:
    """The first moment after `seconds` at which the wall clock matches."""
    while seconds < _LAST_SECOND:
        offset = _offset(zone, seconds + 1)
        wall = _wall_after(text, _wall(seconds + offset))
        if wall is None:
            return None
        found = _count(wall) - offset
        change = _first_change(zone, seconds + 1, found)
        if change is None:
            return found
        # Wall-clock times that the change brings once more were passed without a match, if it is not near: what comes
        # next is about where it was found, and the years between need not be walked through for each change.
        seconds = max(change - 1, found - 2 * _DAY) if change - seconds > _DAY else change - 1
    return None


def _moment_of(wall: datetime, zone: ZoneInfo) -> int:
    """The moment of a wall-clock time: of one that comes twice the first; of a missing one the first after the gap."""
    first, second = (_offset_at_wall(wall.replace(fold=fold, tzinfo=zone)) for fold in (0, 1))
    if second <= first:
        return _count(wall) - first
    change = _first_change(zone, _count(wall) - second, _count(wall) - first)
    assert change is not None, "a wall-clock time is missing without a change of the zone's offset"
    return change


def _first_change(zone: ZoneInfo, low: int, high: int) -> int | None:
    """The first moment after `low`, and not after `high`, with another offset from UTC than `low`."""
    offset = _offset(zone, low)
    while low < high:
        end = min(high, low + _LEAST_APART)
        if _offset(zone, end) != offset:
            while end - low > 1:
                middle = (low + end) // 2
                low, end = (middle, end) if _offset(zone, middle) == offset else (low, middle)
            return end
        low = end
    return None


def _offset(zone: ZoneInfo, seconds: int) -> int:
    return _offset_at_wall(datetime.fromtimestamp(min(seconds, _LAST_SECOND), zone))


def _offset_at_wall(wall: datetime) -> int:
    offset = wall.utcoffset()
    assert offset is not None
    return offset // _SECOND


def _wall(count: int) -> datetime:
    return _EPOCH + timedelta(seconds=count)


def _count(wall: datetime) -> int:
    return (wall - _EPOCH) // _SECOND
