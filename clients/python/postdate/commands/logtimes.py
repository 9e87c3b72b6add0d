"""Reads logs whose lines begin with a date and time.

    2024-01-02 10:11:12 ...              dpkg.log, alternatives.log
    2024-01-02 10:11:12,345 ...          Python, PostgreSQL (with a point)
    2024-01-02T10:11:12.345678+02:00 ... rsyslog, journalctl -o short-iso, Kubernetes (Z)
    Jan  2 10:11:12 ...                  syslog; the year is guessed

A line without a time belongs to the line before: a stack trace stays with its error. A time without
a zone counts as UTC, because only the distance between lines matters.

Pure but for `read_log`.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone

_ISO = re.compile(
    rb"\[?(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
    rb"(?: ?(Z|[+-]\d\d:?\d\d)(?![0-9A-Za-z]))?"
)
_SYSLOG = re.compile(rb"(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(\d{1,2}) (\d\d):(\d\d):(\d\d)")
_MONTHS = {
    name: number for number, name in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)
}
_LEAP_YEAR = 2000  # stands for the unknown year, so that 29 February is a date
_NEW_YEAR_MONTHS = 6  # a fall by more is a new year, by less a line out of order
_ENTRY_BYTES_MAX = 64 * 1024
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class TimedEntry:
    """One line with a time, and the lines without one that follow it."""

    time_ms: int
    text: bytes


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log in file order."""

    entries: list[TimedEntry]
    line_count: int
    skipped_count: int  # lines before the first time


def read_log(path: str, now: datetime) -> LogFile:
    """Read a log file, packed by gzip or not."""
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        return parse_log(file, now)


def parse_log(lines: Iterable[bytes], now: datetime) -> LogFile:
    """The entries of a log; `now` settles the year where lines have none."""
    times: list[datetime] = []
    texts: list[list[bytes]] = []
    size = line_count = skipped_count = 0
    yearless = False
    for raw in lines:
        line = raw.rstrip(b"\r\n")
        line_count += 1
        when, has_year = parse_time(line)
        if when is not None:
            yearless |= not has_year
            times.append(when)
            texts.append([line])
            size = len(line)
        elif not texts:
            skipped_count += 1
        elif size + len(line) < _ENTRY_BYTES_MAX:
            texts[-1].append(line)
            size += len(line) + 1
        else:  # no message may grow without bound, whatever the file is
            times.append(times[-1])
            texts.append([line])
            size = len(line)
    if yearless:
        times = list(_with_years(times, now))
    entries = [TimedEntry(_ms(when), b"\n".join(text)) for when, text in zip(times, texts, strict=True)]
    return LogFile(entries, line_count, skipped_count)


def parse_time(line: bytes) -> tuple[datetime | None, bool]:
    """The time at the beginning of a line, and whether it came with a year."""
    if found := _ISO.match(line):
        year, month, day, hour, minute, second, fraction, zone = found.groups()
        micros = int((fraction or b"").ljust(6, b"0")[:6])
        return _datetime((year, month, day, hour, minute, second), micros, _zone(zone)), True
    if found := _SYSLOG.match(line):
        name, day, hour, minute, second = found.groups()
        return _datetime((_LEAP_YEAR, _MONTHS[name], day, hour, minute, second), 0, UTC), False
    return None, True


def _datetime(parts: Iterable[int | bytes], micros: int, zone: timezone) -> datetime | None:
    year, month, day, hour, minute, second = map(int, parts)
    try:
        # A leap second is the last of its minute to everybody else.
        return datetime(year, month, day, hour, minute, min(second, 59), micros, zone)
    except ValueError:
        return None  # it looked like a time and is none


def _zone(text: bytes | None) -> timezone:
    if text is None or text == b"Z":
        return UTC
    minutes = int(text[1:3]) * 60 + int(text[-2:])
    if minutes >= 24 * 60:
        return UTC
    return timezone(timedelta(minutes=-minutes if text.startswith(b"-") else minutes))


def _with_years(times: list[datetime], now: datetime) -> Iterator[datetime]:
    """Give lines a year: the last line is not in the future, and December comes before January."""
    turns = []
    turn = 0
    for before, after in zip([times[0], *times], times, strict=False):
        if before.month - after.month > _NEW_YEAR_MONTHS:
            turn += 1
        turns.append(turn)
    last_year = now.year
    if _in_year(times[-1], last_year) > now + timedelta(days=1):
        last_year -= 1
    for when, each in zip(times, turns, strict=True):
        yield _in_year(when, last_year - turn + each) if when.year == _LEAP_YEAR else when


def _in_year(when: datetime, year: int) -> datetime:
    try:
        return when.replace(year=year)
    except ValueError:  # 29 February, and the guess was wrong
        return when.replace(year=year, day=28)


def _ms(when: datetime) -> int:
    return (when - _EPOCH) // timedelta(milliseconds=1)
