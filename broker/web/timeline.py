"""The timeline: what is due when, of a topic or of all, from years down to seconds and on to the messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain
from urllib.parse import urlencode

from aiohttp import web

from broker.topics.schedule_values import DueRange
from broker.topics.topic import Topic
from broker.web.calendar_window import UNITS, CalendarWindow, group, parse_start, start_name, window
from broker.web.chart import ChartBar, DueBars, draw, stack
from broker.web.due_counts import count_due
from broker.web.site import Missing, Visit

_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
_AHEAD_MS = 366 * _DAY_MS
_MOST = 0.9
"""The first look shows this part of all messages, if a window does."""
_TOPICS_LOOKED_AT = 100
_TOPICS_LISTED = 50
_TOPICS_OFFERED = 200

PRESETS = (
    ("Next hour", "minute", _HOUR_MS),
    ("Next 24 hours", "hour", _DAY_MS),
    ("Next 31 days", "day", 31 * _DAY_MS),
    ("Next 12 months", "month", 365 * _DAY_MS),
    ("All years", "year", 0),
)


@dataclass(frozen=True, slots=True)
class DueFigures:
    """Messages due in a window and around it, by time and by topic."""

    bars: DueBars
    by_topic: Sequence[tuple[int, str]]
    """Messages due in the window and topic, those with the most first."""
    more_topics: int
    """Topics that are not listed."""
    fullest: Sequence[tuple[int, str]]
    """Scheduled messages and topic, those with the most first."""
    before: int
    after: int
    is_exact: bool
    is_outside_exact: bool
    not_indexed: int


@dataclass(frozen=True, slots=True)
class DueAhead:
    """Messages due in the time ahead, by which the first window is chosen."""

    topics: int
    """Those with anything scheduled. If there are many, nothing is counted."""
    spans: Sequence[int]
    """Messages in the span of each preset between the first and the last."""
    within: int
    total: int


async def show_timeline(visit: Visit) -> web.Response:
    """GET /timeline?unit=&start=&topic="""
    name = visit.query.get("topic", "").strip()
    topics = [visit.topic(name)] if name else await visit.topics()
    shown = asked_window(visit)
    if shown is None:
        shown = window(first_unit([await look_ahead(visit, topics)]), asked_start_ms(visit))
    return await page_of_timeline(visit, shown, await count_window(visit, topics, shown), topic=name)


def asked_window(visit: Visit) -> CalendarWindow | None:
    """Return the window that is asked for; None if its unit is to be chosen."""
    unit = visit.query.get("unit", "")
    return window(unit, asked_start_ms(visit)) if unit in UNITS else None


def asked_start_ms(visit: Visit) -> int:
    start_ms = parse_start(visit.query.get("start", ""))
    return visit.site.clock.now_ms() if start_ms is None else start_ms


async def page_of_timeline(
    visit: Visit, shown: CalendarWindow, due: DueFigures, topic: str = "", missing: Sequence[Missing] = ()
) -> web.Response:
    """`missing`: what the counts lack."""
    now_ms = visit.site.clock.now_ms()
    scope = visit.scope(topic)
    return await visit.page(
        "timeline.html",
        topic=topic,
        topics=sorted({name for _, name in due.fullest} | ({topic} if topic else set())),
        window=shown,
        chart=draw(shown, due.bars, now_ms),
        tally=due,
        start=start_name(shown.unit, shown.start_ms),
        crumbs=[(crumb, timeline_link(unit, start, scope)) for crumb, unit, start in shown.path()],
        link_of=bar_links(shown, scope),
        topic_link=lambda topic_name: timeline_link(
            shown.unit, start_name(shown.unit, shown.start_ms), visit.scope(topic_name)
        ),
        links=_links(shown, scope),
        presets=_presets(shown, scope, now_ms),
        by_topic=[(name, count) for count, name in due.by_topic],
        more_topics=due.more_topics,
        scheduled_link=lambda topic: scheduled_link(visit.scope(topic), shown.start_ms, shown.end_ms),
        missing=missing,
    )


async def count_window(visit: Visit, topics: Sequence[Topic], shown: CalendarWindow) -> DueFigures:
    """Return what is due in a window."""
    due = DueRange(shown.start_ms, shown.end_ms)
    counted = await visit.site.due_counts.of(topics, due, shown.count_width_ms)
    offered = await visit.topics("CountScheduled")
    counts = ((topic.index.scheduled_count(), topic.name) for topic in offered)
    fullest = nlargest(_TOPICS_OFFERED, (count for count in counts if count[0]))
    by_topic = nlargest(
        _TOPICS_LISTED, ((sum(n for _, n in bars), name) for name, bars in counted.bars.items())
    )
    in_bars = ((name, group(shown, bars)) for name, bars in counted.bars.items())
    return DueFigures(
        stack(in_bars, [name for _, name in fullest], (), len(shown.starts_ms) - 1),
        by_topic,
        len(counted.bars) - len(by_topic),
        fullest,
        counted.before,
        counted.after,
        counted.is_exact,
        counted.is_outside_exact,
        counted.not_indexed,
    )


def merge_due(shown: CalendarWindow, parts: Sequence[DueFigures]) -> DueFigures:
    """Return what is due in a window on several shards."""
    fullest = nlargest(_TOPICS_OFFERED, chain.from_iterable(part.fullest for part in parts))
    by_topic = nlargest(_TOPICS_LISTED, chain.from_iterable(part.by_topic for part in parts))
    bars = [part.bars for part in parts]
    # Of the topics with the most messages each is among those of its shard, and so has bars of its own there.
    in_bars = chain.from_iterable(part.topics.items() for part in bars)
    return DueFigures(
        stack(in_bars, [name for _, name in fullest], bars, len(shown.starts_ms) - 1),
        by_topic,
        sum(len(part.by_topic) + part.more_topics for part in parts) - len(by_topic),
        fullest,
        sum(part.before for part in parts),
        sum(part.after for part in parts),
        all(part.is_exact for part in parts),
        all(part.is_outside_exact for part in parts),
        sum(part.not_indexed for part in parts),
    )


def scheduled_link(scope: Mapping[str, str], start_ms: int, end_ms: int) -> str:
    """The list of messages due in a range. `scope`: see `Visit.scope`."""
    return "/scheduled?" + urlencode({**scope} | {"from": start_ms, "until": end_ms})


def timeline_link(unit: str, start: str, scope: Mapping[str, str]) -> str:
    """A window of the timeline."""
    return "/timeline?" + urlencode({"unit": unit, "start": start, **scope})


async def look_ahead(visit: Visit, topics: Sequence[Topic]) -> DueAhead:
    """Count what is due in the time ahead."""
    waiting = sum(topic.index.scheduled_count() > 0 for topic in topics)
    if waiting > _TOPICS_LOOKED_AT:
        return DueAhead(waiting, (), 0, 0)
    clock = visit.site.clock
    hour_ms = clock.now_ms() // _HOUR_MS * _HOUR_MS
    counted = await count_due(topics, DueRange(hour_ms, hour_ms + _AHEAD_MS), _HOUR_MS, clock)
    spans = [
        sum(n for bars in counted.bars.values() for at, n in bars if at < hour_ms + span_ms)
        for _, _, span_ms in PRESETS[1:-1]
    ]
    return DueAhead(waiting, spans, counted.within, counted.within + counted.after)


def first_unit(parts: Sequence[DueAhead]) -> str:
    """Return the unit of the narrowest window from now on that shows most of what is due, on all shards."""
    if sum(part.topics for part in parts) > _TOPICS_LOOKED_AT:
        return "day"
    total = sum(part.total for part in parts)
    if not total:
        return "hour"
    for place, (_, unit, _) in enumerate(PRESETS[1:-1]):
        if sum(part.spans[place] for part in parts) >= _MOST * total:
            return unit
    return "month" if sum(part.within for part in parts) >= total / 2 else "year"


def bar_links(shown: CalendarWindow, scope: Mapping[str, str]) -> Callable[[ChartBar], str]:
    """Return where each bar leads: to the window inside it, or to its messages."""

    def link_of(bar: ChartBar) -> str:
        inside = shown.inside(bar.bar)
        return timeline_link(*inside, scope) if inside else scheduled_link(scope, bar.start_ms, bar.end_ms)

    return link_of


def _links(shown: CalendarWindow, scope: Mapping[str, str]) -> dict[str, str]:
    """To the windows before, after and around this one; a link that leads nowhere is empty."""
    path = shown.path()
    before, after = shown.beside(-1), shown.beside(1)
    return {
        "before": timeline_link(*before, scope) if before else "",
        "after": timeline_link(*after, scope) if after else "",
        "out": timeline_link(*path[-1][1:], scope) if path else "",
        "list": scheduled_link(scope, shown.start_ms, shown.end_ms),
    }


def _presets(shown: CalendarWindow, scope: Mapping[str, str], now_ms: int) -> list[tuple[str, str, bool]]:
    presets = []
    for name, unit, _ in PRESETS:
        wanted = window(unit, now_ms)
        is_here = wanted.unit == shown.unit and wanted.start_ms == shown.start_ms
        presets.append((name, timeline_link(unit, start_name(unit, wanted.start_ms), scope), is_here))
    return presets
