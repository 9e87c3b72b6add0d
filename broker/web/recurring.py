"""Recurring schedules of a topic, and the next times of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from urllib.parse import quote, urlencode

from aiohttp import web

from broker.errors import Refused
from broker.storage.recurring import RecurringStanding
from broker.storage.recurring_values import Definition
from broker.topics.recurrence import occurrence
from broker.topics.recurring_reading import read_occurrences, wall_time
from broker.web.render import duration, plural
from broker.web.site import Visit

_SCHEDULES_SHOWN = 50
_TIMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A schedule in the list."""

    name: str
    recurs: str
    zone: str
    paused: bool
    next_ms: int
    next_wall: str
    link: str


@dataclass(frozen=True, slots=True)
class TimeRow:
    """One of the next times of a schedule."""

    time_ms: int
    wall: str
    deliver_at_ms: int


async def show_schedules(visit: Visit) -> web.Response:
    """GET /topics/{topic}/recurring?after="""
    topic, after = visit.topic(), visit.query.get("after", "")
    here = f"/topics/{quote(topic.name)}/recurring"
    names = topic.recurring.names()
    first = bisect_right(names, after) if after else 0
    page = names[first : first + _SCHEDULES_SHOWN]
    states = [(name, topic.recurring.get(name)) for name in page]
    rows = [_row(visit, here, name, state) for name, state in states if state is not None]
    return await visit.page(
        "recurring.html",
        topic=topic.name,
        count=len(names),
        rows=rows,
        next_link=here + "?" + urlencode({"after": page[-1]}) if len(names) > first + len(page) else "",
        first_link=here if after else "",
    )


async def show_schedule(visit: Visit) -> web.Response:
    """GET /topics/{topic}/recurring/{name}"""
    topic, name = visit.topic(), visit.params["name"]
    state = visit.broker.recurring.state(topic, name)
    definition = state.definition
    following = visit.broker.recurring.next_of(name, state)
    times: Sequence[TimeRow] = []
    unreadable = ""
    try:
        if following is not None:
            times = _times(name, definition, following.time_ms - 1)
        else:
            next(read_occurrences(name, definition, 0), None)
    except Refused as refusal:
        unreadable = str(refusal)
    return await visit.page(
        "recurring_one.html",
        topic=topic.name,
        name=name,
        recurs=_recurs(definition),
        definition=definition,
        overdue=definition.overdue.name.lower(),
        message_bytes=len(definition.message),
        times=times,
        unreadable=unreadable,
    )


def _row(visit: Visit, here: str, name: str, state: RecurringStanding) -> ScheduleRow:
    definition = state.definition
    following = visit.broker.recurring.next_of(name, state)
    return ScheduleRow(
        name=name,
        recurs=_recurs(definition),
        zone=definition.rule.zone if definition.rule.cron else "",
        paused=definition.paused,
        next_ms=0 if following is None else following.time_ms,
        next_wall="" if following is None else _wall(definition, following.time_ms),
        link=f"{here}/{quote(name)}",
    )


def _times(name: str, definition: Definition, after_ms: int) -> Sequence[TimeRow]:
    return [
        TimeRow(
            time_ms,
            _wall(definition, time_ms),
            occurrence(name, definition, time_ms).deliver_at_ms if definition.jitter_ms else 0,
        )
        for time_ms in islice(read_occurrences(name, definition, after_ms), _TIMES_SHOWN)
    ]


def _recurs(definition: Definition) -> str:
    rule = definition.rule
    if rule.cron:
        return rule.cron
    return f"every {duration(rule.interval_ms)}" if rule.interval_ms else plural(len(rule.times_ms), "time")


def _wall(definition: Definition, time_ms: int) -> str:
    """A time on the wall clock of the schedule's zone."""
    return f"{wall_time(definition.rule, time_ms):%a %Y-%m-%d %H:%M:%S %Z}"
