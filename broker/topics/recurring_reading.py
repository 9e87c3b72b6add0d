"""Recurring schedules as they can be read on this machine, whose time zones may be fewer than where they were put."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from broker.errors import Refused
from broker.storage.recurring_values import Definition, RecurringRule
from broker.topics.recurrence import occurrences, zone_of


def read_occurrences(name: str, definition: Definition, after_ms: int) -> Iterator[int]:
    """All occurrences of a schedule after a time, in order; raises Refused if they are not known here."""
    try:
        yield from occurrences(definition, after_ms)
    except (LookupError, ValueError, OSError) as error:
        raise Refused(
            f"The recurring schedule {name!r} cannot be read on the broker's machine, "
            f"which does not know its time zone {definition.rule.zone!r} or its cron",
            reason="RECURRING_NOT_READABLE",
            time_zone=definition.rule.zone,
        ) from error


def wall_time(rule: RecurringRule, time_ms: int) -> datetime:
    """A time on the wall clock of the rule's zone; in UTC if there is no such zone here, or no such year in it."""
    seconds, ms = divmod(time_ms, 1_000)  # not as one float, which is not exact in the year 9999
    try:
        wall = datetime.fromtimestamp(seconds, zone_of(rule.zone))
    except (LookupError, ValueError, OSError, OverflowError):
        wall = datetime.fromtimestamp(seconds, UTC)
    return wall.replace(microsecond=ms * 1_000)
