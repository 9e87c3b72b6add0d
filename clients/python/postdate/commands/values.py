"""Durations, times, sizes and ids as people type them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from postdate.model import InitialPosition, MessageId

_UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(KiB|MiB|GiB|TiB)?")
_SIZE_UNITS = ("", "KiB", "MiB", "GiB", "TiB")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")


def parse_duration(text: str) -> timedelta:
    """`15m`, `1h30m`, `250ms`, `0`."""
    if text == "0":
        return timedelta(0)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a duration; write 250ms, 90s, 15m, 1h30m or 3d")
    try:
        return sum((float(number) * _UNITS[unit] for number, unit in parts), timedelta(0))
    except OverflowError:
        raise ValueError(f"{text!r} is too long") from None


def parse_time(text: str) -> datetime:
    """ISO 8601 with a time zone."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time; write 2026-12-24T18:00:00+01:00") from None
    if when.tzinfo is None:
        full = when.isoformat()
        raise ValueError(f"{text!r} has no time zone; write {full}Z for UTC, or {full}+01:00")
    return when


def parse_when(text: str) -> datetime:
    """A time, or a duration from now."""
    return _parse_near(text, 1, "from now")


def parse_ago(text: str) -> datetime:
    """A time, or a duration before now."""
    return _parse_near(text, -1, "ago")


def _parse_near(text: str, sign: int, direction: str) -> datetime:
    try:
        return datetime.now(UTC) + sign * parse_duration(text)
    except ValueError:
        pass
    except OverflowError:
        raise ValueError(f"{text!r} is too long") from None
    try:
        return parse_time(text)
    except ValueError as error:
        raise ValueError(f"{error}; or so long {direction}: 15m, 1h30m, 3d") from None


def parse_shift(text: str) -> timedelta:
    """A duration in either direction: `10m`, `-1h`."""
    span = parse_duration(text.removeprefix("-").removeprefix("+"))
    return -span if text.startswith("-") else span


def parse_rate(text: str) -> float:
    """A speed or rate above zero."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e12:
        raise ValueError(f"{text!r} is not a number above 0")
    return rate


def parse_size(text: str) -> int:
    """Bytes: `4096`, `64KiB`, `1.5GiB`."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a size; write 4096, 64KiB, 256MiB or 1.5GiB")
    number, unit = found.groups()
    return round(float(number) * (1 << 10 * _SIZE_UNITS.index(unit or "")))


def parse_target(text: str) -> MessageId | datetime | InitialPosition:
    """Read where a seek goes: `earliest`, `latest`, a message id, or a time."""
    if text.upper() in InitialPosition.__members__:
        return InitialPosition[text.upper()]
    try:
        return MessageId.parse(text)
    except ValueError:
        pass
    try:
        return parse_time(text)
    except ValueError as error:
        raise ValueError(
            f"{error}; a message id looks like 7:1234, and earliest and latest are the ends"
        ) from None


class _Parsed(click.ParamType[Any]):
    """A click type around one of the parsers above."""

    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = _Parsed("duration", parse_duration)
TIME = _Parsed("time", parse_time)
WHEN = _Parsed("when", parse_when)
AGO = _Parsed("when", parse_ago)
SHIFT = _Parsed("duration", parse_shift)
RATE = _Parsed("number", parse_rate)
SIZE = _Parsed("size", parse_size)
MESSAGE_ID = _Parsed("id", MessageId.parse)
TARGET = _Parsed("target", parse_target)


def limit_option(order: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The `--limit` of a list that shows all, in this order, where none is given."""
    return click.option(
        "--limit", type=click.IntRange(1), help=f"Maximum number shown, {order}.  [default: all]"
    )


def show_duration(span: timedelta) -> str:
    """As `parse_duration` reads it, in at most two units."""
    ms = round(span / _UNITS["ms"])
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    parts = []
    for unit in ("w", "d", "h", "m", "s"):
        count, ms = divmod(ms, round(_UNITS[unit] / _UNITS["ms"]))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])


def counted(count: int, noun: str) -> str:
    """`1 message`, `2,000 messages`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def local(moment: datetime) -> datetime:
    """A time in this machine's zone; one that would be in the year 10,000 there stays in its own."""
    try:
        return moment.astimezone()
    except (OverflowError, ValueError):
        return moment


def later(moment: datetime, step: timedelta) -> datetime:
    """So long after a time, or the end of the year 9999: there is no `datetime` beyond it."""
    last = datetime.max.replace(tzinfo=moment.tzinfo)
    return moment + step if step <= last - moment else last


def local_time(moment: datetime) -> str:
    """A time on this machine's clock, to the second; `local_zone` names the zone."""
    return local(moment).isoformat(" ", "seconds")[:19]


def local_time_ms(moment: datetime) -> str:
    """The same, to the millisecond."""
    return local(moment).isoformat(" ", "milliseconds")[:23]


def local_zone(moment: datetime) -> str:
    """The name of this machine's time zone at some time."""
    return local(moment).tzname() or "local time"
