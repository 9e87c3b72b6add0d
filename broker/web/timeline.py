"""The timeline: what is due when, of a topic or of all, from years down to seconds and on to the messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import nlargest
from urllib.parse import urlencode

from aiohttp import web

from broker.topics.schedule_values import DueRange
from broker.topics.topic import Topic
from broker.web.calendar_window import UNITS, CalendarWindow, parse_start, start_name, window
from broker.web.chart import SERIES_MAX, Chart, ChartBar, draw
from broker.web.due_counts import DueCounts, count_due
from broker.web.site import Visit

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


async def show_timeline(visit: Visit) -> web.Response:
    """GET /timeline?unit=&start=&topic="""
    broker, query = visit.broker, visit.query
    now_ms = broker.clock.now_ms()
    name = query.get("topic", "").strip()
    topics = [broker.registry.topic(name)] if name else list(broker.registry.topics.values())
    start_ms = parse_start(query.get("start", ""))
    unit = query.get("unit", "")
    if unit not in UNITS:
        unit = await _first_unit(visit, topics, now_ms)
    shown = window(unit, now_ms if start_ms is None else start_ms)
    scope = visit.scope(name)
    counted, chart = await chart_of(visit, topics, shown)
    by_topic = sorted(((sum(n for _, n in bars), name) for name, bars in counted.bars.items()), reverse=True)
    return await visit.page(
        "timeline.html",
        topic=name,
        topics=_offered(visit, name),
        window=shown,
        chart=chart,
        tally=counted,
        start=start_name(shown.unit, shown.start_ms),
        crumbs=[(crumb, timeline_link(unit, start, scope)) for crumb, unit, start in shown.path()],
        link_of=bar_links(shown, scope),
        topic_link=lambda topic_name: timeline_link(
            shown.unit, start_name(shown.unit, shown.start_ms), visit.scope(topic_name)
        ),
        links=_links(shown, scope),
        presets=_presets(shown, scope, now_ms),
        by_topic=[(name, count) for count, name in by_topic[:_TOPICS_LISTED]],
        more_topics=max(0, len(by_topic) - _TOPICS_LISTED),
        scheduled_link=lambda topic: scheduled_link(visit.scope(topic), shown.start_ms, shown.end_ms),
    )


async def chart_of(
    visit: Visit, topics: list[Topic], shown: CalendarWindow, height: int = 260
) -> tuple[DueCounts, Chart]:
    """Return what is due in a window."""
    clock = visit.broker.clock
    due = DueRange(shown.start_ms, shown.end_ms)
    counted = await visit.site.due_counts.of(topics, due, shown.count_width_ms)
    counts = [(topic.index.scheduled_count(), topic.name) for topic in visit.broker.registry.topics.values()]
    coloured = [name for count, name in nlargest(SERIES_MAX, counts) if count]
    return counted, draw(shown, counted.bars, coloured, clock.now_ms(), height)


def scheduled_link(scope: Mapping[str, str], start_ms: int, end_ms: int) -> str:
    """The list of messages due in a range. `scope`: see `Visit.scope`."""
    return "/scheduled?" + urlencode({**scope} | {"from": start_ms, "until": end_ms})


def timeline_link(unit: str, start: str, scope: Mapping[str, str]) -> str:
    """A window of the timeline."""
    return "/timeline?" + urlencode({"unit": unit, "start": start, **scope})


async def _first_unit(visit: Visit, topics: list[Topic], now_ms: int) -> str:
    """The narrowest window from now on that shows most of what is due."""
    if sum(topic.index.scheduled_count() > 0 for topic in topics) > _TOPICS_LOOKED_AT:
        return "day"
    hour_ms = now_ms - now_ms % _HOUR_MS
    ahead = DueRange(hour_ms, hour_ms + _AHEAD_MS)
    counted = await count_due(topics, ahead, _HOUR_MS, visit.broker.clock)
    total = counted.within + counted.after
    if not total:
        return "hour"
    for _, unit, span_ms in PRESETS[1:-1]:
        within = sum(n for bars in counted.bars.values() for at, n in bars if at < hour_ms + span_ms)
        if within >= _MOST * total:
            return unit
    return "month" if counted.within >= total / 2 else "year"


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


def _offered(visit: Visit, chosen: str) -> list[str]:
    """Topics to choose from: those with something scheduled, the fullest first; the chosen one is among them."""
    topics = visit.broker.registry.topics.values()
    counts = [(topic.index.scheduled_count(), topic.name) for topic in topics]
    fullest = nlargest(_TOPICS_OFFERED, (topic_count for topic_count in counts if topic_count[0]))
    return sorted({name for _, name in fullest} | ({chosen} if chosen else set()))
