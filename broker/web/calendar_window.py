"""The windows that the timeline shows: a unit of the calendar, and the bars of that unit in a window. Pure; UTC.

    years > months of a year > days of a month > hours of a day > minutes of an hour > seconds of a minute

A click on a bar opens the window below it. A window may begin anywhere: the next 24 hours are bars of an hour too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

UNITS = ("year", "month", "day", "hour", "minute", "second")

_COUNTS = {"year": 20, "month": 12, "day": 31, "hour": 24, "minute": 60, "second": 60}
_SMALL_MS = {"day": 86_400_000, "hour": 3_600_000, "minute": 60_000, "second": 1_000}
_LABELS = {"year": "%Y", "month": "%b", "day": "%-d", "hour": "%H:%M", "minute": "%H:%M", "second": ":%S"}
_NAMES = {
    "year": "%Y",
    "month": "%B %Y",
    "day": "%a %-d %B %Y",
    "hour": "%-d %B %Y, %H:%M",
    "minute": "%-d %B %Y, %H:%M",
    "second": "%-d %B %Y, %H:%M:%S",
}
_STARTS = {"year": "%Y", "month": "%Y-%m", "day": "%Y-%m-%d"}
_FIRST = datetime(1970, 1, 1, tzinfo=UTC)
_LAST = datetime(9998, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class CalendarWindow:
    """Consecutive bars of one unit; bar `i` spans [starts_ms[i], starts_ms[i + 1])."""

    unit: str
    starts_ms: Sequence[int]  # one more than there are bars

    @property
    def start_ms(self) -> int:
        return self.starts_ms[0]

    @property
    def end_ms(self) -> int:
        return self.starts_ms[-1]

    @property
    def count_width_ms(self) -> int:
        """The width of what is counted for it: months and years are put together from days."""
        return _SMALL_MS.get(self.unit, _SMALL_MS["day"])

    @property
    def title(self) -> str:
        """Return what it shows, for people."""
        first, last = _at(self.start_ms), _at(self.end_ms - 1)
        if self.unit == "year":
            return f"{first.year} to {last.year}"
        if self.unit == "month" and first.month == 1:
            return str(first.year)
        if self.unit == "day" and first.day == 1:
            return first.strftime("%B %Y")
        if self.unit == "hour" and first.hour == 0:
            return first.strftime("%A %-d %B %Y")
        if self.unit == "second" or (self.unit == "minute" and first.minute == 0):
            return f"{first.strftime('%-d %B %Y, %H:%M')} to {_at(self.end_ms).strftime('%H:%M')}"
        style = {"month": "%B %Y", "day": "%-d %B %Y"}.get(self.unit, "%-d %B %H:%M")
        return f"{first.strftime(style)} to {last.strftime(style)}"

    def label(self, bar: int) -> str:
        """Return what stands below a bar."""
        at = _at(self.starts_ms[bar])
        if self.unit == "day" and (bar == 0 or at.day == 1):
            return at.strftime("%-d %b")
        return at.strftime(_LABELS[self.unit])

    def name(self, bar: int) -> str:
        """A bar's whole name."""
        return _at(self.starts_ms[bar]).strftime(_NAMES[self.unit])

    def bar_of(self, time_ms: int) -> int | None:
        """The bar that a time lies in."""
        if not self.start_ms <= time_ms < self.end_ms:
            return None
        return next(i for i, end_ms in enumerate(self.starts_ms[1:]) if time_ms < end_ms)

    def inside(self, bar: int) -> tuple[str, str] | None:
        """Unit and start of the window of one bar; None: there is nothing finer."""
        place = UNITS.index(self.unit) + 1
        return (UNITS[place], start_name(UNITS[place], self.starts_ms[bar])) if place < len(UNITS) else None

    def beside(self, step: int) -> tuple[str, str] | None:
        """Unit and start of the window before (-1) or after (1) this one; None: dates end there."""
        start = _at(self.start_ms)
        try:
            match self.unit:
                case "year" | "month":
                    moved = start.replace(year=start.year + step * (20 if self.unit == "year" else 1))
                case "day" if start.day == 1:
                    moved = (start + timedelta(days=31 if step > 0 else -1)).replace(day=1)
                case _:
                    moved = start + step * timedelta(milliseconds=self.end_ms - self.start_ms)
        except (ValueError, OverflowError):
            return None
        return (self.unit, start_name(self.unit, _ms(moved))) if _FIRST <= moved < _LAST else None

    def path(self) -> list[tuple[str, str, str]]:
        """The windows around this one, widest first: (name, unit, start)."""
        start = _at(self.start_ms)
        names = ("All", str(start.year), start.strftime("%B"), start.strftime("%-d"), start.strftime("%H:00"))
        return [
            (names[place], unit, start_name(unit, _ms(_floor(start, _AROUND[unit]))))
            for place, unit in enumerate(UNITS[: UNITS.index(self.unit)])
        ]


_AROUND = {
    "year": "year",
    "month": "year",
    "day": "month",
    "hour": "day",
    "minute": "hour",
    "second": "minute",
}
"""The start of the window of a unit that is a whole one of the unit above."""


def window(unit: str, start_ms: int) -> CalendarWindow:
    """The window of a unit that begins with the bar in which a time lies."""
    start = _floor(min(max(_at(max(start_ms, 0)), _FIRST), _LAST), unit)
    count = _COUNTS[unit]
    if unit == "day" and start.day == 1:
        count = (_add_month(start, 1) - start).days
    if unit in ("year", "month"):
        months = [number * (12 if unit == "year" else 1) for number in range(count + 1)]
        starts = [_ms(_add_month(start, month)) for month in months if start.year + month // 12 < 9999]
        return CalendarWindow(unit, starts)
    width = _SMALL_MS[unit]
    return CalendarWindow(unit, [_ms(start) + number * width for number in range(count + 1)])


def start_name(unit: str, time_ms: int) -> str:
    """The start of a window as links have it."""
    at = _at(time_ms)
    return at.strftime(_STARTS.get(unit, "%Y-%m-%dT%H:%M")).zfill(4)


def parse_start(text: str) -> int | None:
    """Return what `start_name` gave, in milliseconds; None for anything else."""
    for style in ("%Y", "%Y-%m", "%Y-%m-%d", "%Y-%m-%dT%H:%M"):
        try:
            at = datetime.strptime(text, style).replace(tzinfo=UTC)
        except ValueError:
            continue
        return _ms(at) if _FIRST <= at < _LAST else None
    return None


def group(window: CalendarWindow, counted: Sequence[tuple[int, int]]) -> list[int]:
    """The messages of each bar, from what was counted in narrower ones: (start_ms, messages), rising."""
    totals = [0] * (len(window.starts_ms) - 1)
    bar = 0
    for start_ms, messages in counted:
        while bar < len(totals) and start_ms >= window.starts_ms[bar + 1]:
            bar += 1
        if bar < len(totals) and start_ms >= window.starts_ms[bar]:
            totals[bar] += messages
    return totals


def _at(time_ms: int) -> datetime:
    return _FIRST + timedelta(milliseconds=min(time_ms, _ms(_LAST.replace(year=9999))))


def _ms(at: datetime) -> int:
    return int((at - _FIRST) // timedelta(milliseconds=1))


def _floor(at: datetime, unit: str) -> datetime:
    year, month, day, hour, minute, second = (at.year, at.month, at.day, at.hour, at.minute, at.second)
    match unit:
        case "year":
            return datetime(year, 1, 1, tzinfo=UTC)
        case "month":
            return datetime(year, month, 1, tzinfo=UTC)
        case "day":
            return datetime(year, month, day, tzinfo=UTC)
        case "hour":
            return datetime(year, month, day, hour, tzinfo=UTC)
        case "minute":
            return datetime(year, month, day, hour, minute, tzinfo=UTC)
        case _:
            return datetime(year, month, day, hour, minute, second, tzinfo=UTC)


def _add_month(at: datetime, months: int) -> datetime:
    years, month = divmod(at.month - 1 + months, 12)
    return at.replace(year=at.year + years, month=month + 1)
