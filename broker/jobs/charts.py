"""Charts of a report as inline SVG: bars alone, which stretch to any width; what they mean stands beside them as text.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from html import escape
from typing import NamedTuple

BARS_MAX = 60


class Bar(NamedTuple):
    """One bar, from the bottom up: a part of the height that is filled, and what a pointer reads."""

    label: str
    value: float
    title: str


def bar_chart(bars: Sequence[Bar], *, top: float, axis: tuple[str, str], css: str, name: str) -> str:
    """Bars side by side. `axis`: what stands below the first and the last one."""
    shapes = []
    for place, bar in enumerate(bars):
        height = max(100 * bar.value / top, 0.8) if bar.value else 0.0
        shapes.append(
            f'<rect x="{place + 0.08:.2f}" y="{100 - height:.2f}" width="0.84" height="{height:.2f}">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
    return (
        f'<svg class="bars {css}" viewBox="0 0 {max(len(bars), 1)} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name)}">{"".join(shapes)}</svg>'
        f'<div class="axis"><span>{escape(axis[0])}</span><span>{escape(axis[1])}</span></div>'
    )


def stacked_bar(parts: Sequence[tuple[str, float]], total: float, name: str) -> str:
    """One bar from left to right, of parts with a class each."""
    shapes, at = [], 0.0
    for css, value in parts:
        width = 100 * value / total if total else 0.0
        shapes.append(f'<rect class="{css}" x="{at:.3f}" y="0" width="{width:.3f}" height="1"/>')
        at += width
    return (
        f'<svg class="row" viewBox="0 0 100 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name)}">{"".join(shapes)}</svg>'
    )


class Span(NamedTuple):
    """Days that one bar stands for."""

    first: date
    last: date
    messages: int


def group_days(days: dict[str, int], bars_max: int = BARS_MAX) -> list[Span]:
    """Counts by day as at most so many spans of equal length, those with nothing between them included."""
    if not days:
        return []
    first, last = date.fromisoformat(min(days)), date.fromisoformat(max(days))
    length = -(-((last - first).days + 1) // bars_max)
    counts = [0] * ((last - first).days // length + 1)
    for day, count in days.items():
        counts[(date.fromisoformat(day) - first).days // length] += count
    starts = [first + timedelta(days=place * length) for place in range(len(counts))]
    return [
        Span(start, min(start + timedelta(days=length - 1), last), count)
        for start, count in zip(starts, counts, strict=True)
    ]


def group_evenly(count: int, groups_max: int = BARS_MAX) -> list[tuple[int, int]]:
    """Ranges of about one length that cover `count` things."""
    groups = min(count, groups_max)
    return [(place * count // groups, (place + 1) * count // groups) for place in range(groups)]
