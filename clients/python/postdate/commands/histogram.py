"""`postdate schedule histogram`: how much is due when, drawn in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click

import postdate
from postdate.commands.completion import TOPIC
from postdate.commands.output import emit_lines, emit_one, stdout_width
from postdate.commands.settings import Command, Settings, run
from postdate.commands.values import (
    DURATION,
    WHEN,
    counted,
    later,
    local,
    local_time,
    local_zone,
    show_duration,
)

_BARS = 24  # about so many lines, where no width is asked for
_GROWTH = 100  # so many times wider are bars of which there were too many; the broker takes 10,000
_LINES_MAX = 400  # beyond them, runs of empty bars are drawn as one line
_BLOCKS = " ▏▎▍▌▋▊▉█"
_SECOND, _MINUTE, _HOUR, _DAY = (
    timedelta(seconds=1),
    timedelta(minutes=1),
    timedelta(hours=1),
    timedelta(days=1),
)
_WIDTHS = (
    *(timedelta(milliseconds=each) for each in (1, 10, 100)),
    *(_SECOND * each for each in (1, 5, 10, 30)),
    *(_MINUTE * each for each in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * each for each in (1, 2, 3, 6, 12)),
    *(_DAY * each for each in (1, 2, 7, 14, 28, 91, 182, 364)),
)


@click.command("histogram", cls=Command)
@click.argument("topics", type=TOPIC, nargs=-1, required=True, metavar="TOPIC...")
@click.option(
    "--from", "start", type=WHEN, metavar="WHEN", help="Due at this time or later: 15m (from now), or a time."
)
@click.option(
    "--until", "end", type=WHEN, metavar="WHEN", help="Due before this time: 15m (from now), or a time."
)
@click.option("--width", type=DURATION, help="Width of a bar.  [default: chosen automatically]")
@click.pass_obj
def histogram(
    settings: Settings,
    topics: tuple[str, ...],
    start: datetime | None,
    end: datetime | None,
    width: timedelta | None,
) -> None:
    """Draw a histogram of the due times of pending messages. The broker counts them without reading messages."""
    if width is not None and not width:
        raise click.UsageError("--width must be greater than 0")
    if start is not None and end is not None and end <= start:
        raise click.UsageError("--until must be later than --from")

    async def work() -> None:
        async with settings.client() as client:
            first, last = await _extent(client, topics, start, end)
            if width is None:
                begins, step, counts = await _fitted(client, topics, start, end, first, last)
            else:
                begins, step = start or _aligned(first, width), width
                counts = await client.schedule.count(*topics, start=begins, end=end, width=step)
        if settings.output == "json":
            emit_one(settings, _record(counts, step))
        elif settings.output == "jsonl":
            emit_lines(_record(counts, step)["bars"])
        else:
            for line in draw(counts, begins, step, Screen.of_stdout()):
                print(line)

    run(work())


class Screen:
    """A screen: how wide its lines may be, and whether they may hold more than ASCII."""

    def __init__(self, width: int, *, has_blocks: bool) -> None:
        self.width = width
        self.has_blocks = has_blocks

    @classmethod
    def of_stdout(cls) -> Screen:
        width = stdout_width(80)
        try:
            _BLOCKS.encode(sys.stdout.encoding or "ascii")
        except UnicodeEncodeError:
            return cls(width, has_blocks=False)
        return cls(width, has_blocks=True)


def fitting_width(span: timedelta) -> timedelta:
    """The least of the usual widths that cuts a range into few bars."""
    for width in _WIDTHS:
        if span <= width * _BARS:
            return width
    return _WIDTHS[-1] * -(-span // (_WIDTHS[-1] * _BARS))


def draw(
    counts: postdate.ScheduledCounts, begins: datetime, step: timedelta, screen: Screen
) -> Iterator[str]:
    """A line a bar; `begins` is where the first bar could begin."""
    messages = f"{counted(counts.messages, 'message')} due"
    about = "" if counts.exact else ", about so many in each"
    bars = f", in bars of {show_duration(step)}{about}" if counts.bars else ""
    yield f"{messages}{bars}; times in {local_zone(begins)}"
    if counts.before:
        yield f"{counts.before:,} before {local_time(begins)}"
    if counts.bars:
        most = max(bar.messages for bar in counts.bars)
        labels = _Labels(counts.bars[0].start, counts.bars[-1].start, step)
        number = len(f"{most:,}")
        room = max(1, screen.width - labels.width - number - 2)
        for start, count in _lines(counts.bars, step):
            if count is None:
                yield "..."
            else:
                bar = _bar(count, most, room, screen)
                yield f"{labels.of(start)} {count:>{number},} {bar}".rstrip()
    if counts.after:
        yield f"{counts.after:,} later"


def _lines(bars: Sequence[postdate.ScheduledBar], step: timedelta) -> Iterator[tuple[datetime, int | None]]:
    """Every bar from the first to the last, empty ones too unless they are too many; None for a run left out."""
    keeps_empty = (bars[-1].start - bars[0].start) // step < _LINES_MAX
    expected = bars[0].start
    for bar in bars:
        if expected < bar.start and not keeps_empty:
            yield expected, None
            expected = bar.start
        while expected < bar.start:
            yield expected, 0
            expected = later(expected, step)
        yield bar.start, bar.messages
        expected = later(bar.start, step)


def _bar(messages: int, most: int, room: int, screen: Screen) -> str:
    if not screen.has_blocks:
        return "#" * max(bool(messages), round(messages / most * room))
    # What is there is seen, if only as the thinnest of bars.
    eighths = max(bool(messages), round(messages / most * room * 8))
    return _BLOCKS[8] * (eighths // 8) + _BLOCKS[eighths % 8].strip()


class _Labels:
    """Times as short as they can be told apart."""

    def __init__(self, first: datetime, last: datetime, step: timedelta) -> None:
        first, last = local(first), local(last)
        past_midnight = first - first.replace(hour=0, minute=0, second=0, microsecond=0)
        grain = (step, past_midnight)
        clock = (
            "%H:%M:%S.%f"
            if any(each % _SECOND for each in grain)
            else "%H:%M:%S"
            if any(each % _MINUTE for each in grain)
            else "%H:%M"
        )
        if not step % _DAY and not past_midnight:
            self._format = "%Y-%m-%d"
        elif first.year != last.year:
            self._format = f"%Y-%m-%d {clock}"
        elif first.date() != last.date():
            self._format = f"%a %m-%d {clock}"
        else:
            self._format = clock
        self.width = len(self.of(first))

    def of(self, moment: datetime) -> str:
        text = local(moment).strftime(self._format)
        return text[:-3] if self._format.endswith("%f") else text


async def _extent(
    client: postdate.Client, topics: Sequence[str], start: datetime | None, end: datetime | None
) -> tuple[datetime, datetime]:
    """Between which times there is something to draw."""
    stats = await client.stats(*topics)
    first = start or min(
        (each.next_due_time for each in stats if each.next_due_time), default=datetime.now(UTC)
    )
    if end is not None:
        first = min(first, end - _WIDTHS[0])  # all may be later
    last = end or max((each.last_due_time for each in stats if each.last_due_time), default=first)
    return first, max(first, last)


async def _fitted(
    client: postdate.Client,
    topics: Sequence[str],
    start: datetime | None,
    end: datetime | None,
    first: datetime,
    last: datetime,
) -> tuple[datetime, timedelta, postdate.ScheduledCounts]:
    """Counts in about `_BARS` bars from the first message to the last one.

    Between `first` and `last` is only where they are said to be: one of those may be cancelled by now, and others may
    be later. So the width grows until the broker has room for all bars, and then follows where messages are.
    """
    step = fitting_width(last - first)
    # Not tried again: where counts are spread, other widths have them elsewhere.
    too_narrow = timedelta(0)
    while True:
        begins = start or _aligned(first, step)
        try:
            counts = await client.schedule.count(*topics, start=begins, end=end, width=step)
        except postdate.InvalidRequest as error:
            if error.reason != "TOO_MANY_BARS":
                raise
            step = fitting_width(step * _BARS * _GROWTH)
            continue
        if not counts.bars:
            return begins, step, counts
        first = counts.bars[0].start if start is None else start
        span = counts.bars[-1].start - first + step
        fitting = fitting_width(span)
        if too_narrow < fitting < step:
            # The broker must not count bars up to a message that is cancelled by now.
            end = _end_of(counts.bars[-1], step, end)
            step = fitting
        elif fitting > step and span > step * _BARS * 2:
            too_narrow, step = step, fitting
        else:
            return begins, step, counts


def _end_of(bar: postdate.ScheduledBar, step: timedelta, end: datetime | None) -> datetime:
    """The end of a bar; no later than the range does, and than time does here."""
    latest = end or datetime.max.replace(tzinfo=UTC)
    return latest if latest - bar.start < step else bar.start + step


def _aligned(moment: datetime, step: timedelta) -> datetime:
    """The last whole multiple of a width before a time, on this machine's clock."""
    here = local(moment)
    midnight = here.replace(hour=0, minute=0, second=0, microsecond=0)
    if step >= _DAY:
        return midnight
    return midnight + (here - midnight) // step * step


def _record(counts: postdate.ScheduledCounts, step: timedelta) -> dict[str, Any]:
    return {
        "width_ms": round(step / timedelta(milliseconds=1)),
        "messages": counts.messages,
        "before": counts.before,
        "after": counts.after,
        "exact": counts.exact,
        "bars": [
            {"start": bar.start.isoformat(), "messages": bar.messages, "bytes": bar.bytes}
            for bar in counts.bars
        ],
    }
