"""A histogram as numbers that a template turns into SVG: widths in percent, heights in pixels. Pure.

So it is as wide as the page and its text stays crisp, on a phone as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from broker.web.calendar_window import CalendarWindow

SERIES_MAX = 5
"""Topics with a colour of their own; the others share one."""

_HEIGHT = 260
_BAR_MIN = 3.0
_PART_MIN = 0.05
_LABELS_MAX = 12


@dataclass(frozen=True, slots=True)
class DueBars:
    """Messages of each bar of a window."""

    topics: Mapping[str, Sequence[int]]
    """Those with a colour of their own, the same in every window."""
    others: Sequence[int]
    other_topics: int
    """Topics that the others are of."""


@dataclass(frozen=True, slots=True)
class BarPart:
    """A piece of a bar: the messages of one series."""

    series: int
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class ChartBar:
    """One bar, with its whole column for the pointer."""

    x: float
    width: float
    column_x: float
    column_width: float
    name: str
    messages: int
    start_ms: int
    end_ms: int
    bar: int
    parts: Sequence[BarPart]


@dataclass(frozen=True, slots=True)
class Label:
    """Below the bars; `is_minor` ones go where there is little room."""

    x: float
    text: str
    is_minor: bool


@dataclass(frozen=True, slots=True)
class Chart:
    """See the module's description."""

    height: int
    bars: Sequence[ChartBar]
    labels: Sequence[Label]
    grid: Sequence[tuple[float, int]]  # (y, messages)
    series: Sequence[tuple[int, str, int]]  # (colour, topic, messages); no topic: the others
    others: int  # how many topics the last series stands for
    now_x: float | None
    total: int


def stack(
    counted: Iterable[tuple[str, Sequence[int]]],
    coloured: Sequence[str],
    others: Sequence[DueBars],
    bars: int,
) -> DueBars:
    """Return what was counted, by topic, in so many bars.

    The first `coloured` topics have a colour of their own. `others`: bars that hold more of those without one.
    """
    topics: dict[str, Sequence[int]] = {name: [0] * bars for name in coloured[:SERIES_MAX]}
    rest = [0] * bars
    for part in others:
        rest = [a + b for a, b in zip(rest, part.others, strict=True)]
    other_topics = sum(part.other_topics for part in others)
    for name, totals in counted:
        if name in topics:
            topics[name] = totals
        elif sum(totals):
            rest = [a + b for a, b in zip(rest, totals, strict=True)]
            other_topics += 1
    return DueBars(topics, rest, other_topics)


def draw(window: CalendarWindow, due: DueBars, now_ms: int, height: int = _HEIGHT) -> Chart:
    """The chart of the messages due in a window."""
    names = dict(enumerate(sorted(due.topics)))
    series = [(place, due.topics[name]) for place, name in names.items()] + [(SERIES_MAX, due.others)]
    stacks = [(place, heights) for place, heights in series if sum(heights)]
    bar_count = len(window.starts_ms) - 1
    totals = [sum(stack[1][bar] for stack in stacks) for bar in range(bar_count)]
    top = nice_ceiling(max(totals, default=0))
    column = 100 / bar_count
    bars = [
        ChartBar(
            x=round((bar + 0.12) * column, 3),
            width=round(0.76 * column, 3),
            column_x=round(bar * column, 3),
            column_width=round(column, 3),
            name=window.name(bar),
            messages=total,
            start_ms=window.starts_ms[bar],
            end_ms=window.starts_ms[bar + 1],
            bar=bar,
            parts=_parts([(place, heights[bar]) for place, heights in stacks], top, height),
        )
        for bar, total in enumerate(totals)
        if total
    ]
    step = -(-bar_count // _LABELS_MAX)
    labels = [
        Label(round((bar + 0.5) * column, 3), window.label(bar), place % 2 == 1)
        for place, bar in enumerate(range(0, bar_count, step))
    ]
    return Chart(
        height=height,
        bars=bars,
        labels=labels,
        grid=[
            (round(height - height * part / 4, 1), top * part // 4)
            for part in (1, 2, 3, 4)
            if top * part % 4 == 0
        ],
        series=[(place, names.get(place, ""), sum(heights)) for place, heights in stacks],
        others=due.other_topics,
        now_x=_now_x(window, now_ms),
        total=sum(totals),
    )


def nice_ceiling(value: int) -> int:
    """The least of 4, 8, 12, 20, 24, 32, 40, 80 ... that is no less: a quarter of it is a whole number."""
    scale = 4
    while True:
        for step in (1, 2, 3, 5, 6, 8):
            if value <= step * scale:
                return step * scale
        scale *= 10


def _parts(counts: Sequence[tuple[int, int]], top: int, height: int) -> list[BarPart]:
    """The pieces of one bar from below; what is there is seen, however little it is."""
    total = sum(count for _, count in counts)
    scale = height / top
    if total * scale < _BAR_MIN:
        series = max(counts, key=lambda pair: pair[1])[0]
        return [BarPart(series, round(height - _BAR_MIN, 2), _BAR_MIN)]
    parts: list[BarPart] = []
    y = float(height)
    for series, count in counts:
        y -= count * scale
        if count * scale >= _PART_MIN:
            parts.append(BarPart(series, round(y, 2), round(count * scale, 2)))
    return parts


def _now_x(window: CalendarWindow, now_ms: int) -> float | None:
    bar = window.bar_of(now_ms)
    if bar is None:
        return None
    start_ms, end_ms = window.starts_ms[bar], window.starts_ms[bar + 1]
    return round(100 * (bar + (now_ms - start_ms) / (end_ms - start_ms)) / (len(window.starts_ms) - 1), 3)
