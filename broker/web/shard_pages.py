"""The pages of a front: what is about a topic is made by the shard of that topic, what is about all is made here.

    Host, who asks (as everywhere) -> a change: made here, as a call to the front's own port
                                   -> topic in path or address -> its shard's page, as it is
                                   -> shard=N in the address   -> that shard's
                                   -> neither                  -> one page of the figures of all shards
    Lists of all topics -> shard=N alone names one; the report of the audit, of which there is one, is shown here

The front keeps sessions and nothing of a page. To a shard it passes on the token of who has logged in, which the shard
judges again, with that of their forms and what the page is to tell.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import chain, zip_longest
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from aiohttp import web

from broker.errors import Unavailable
from broker.topic_shards import shard_of
from broker.web import dead_letters, figures, scheduled, storage, timeline, topics
from broker.web.calendar_window import window
from broker.web.chart import DueBars
from broker.web.guard import FORM_HEADER, SHARD_HEADER, TOLD_HEADER
from broker.web.overview import ATTENTION_MAX, DELIVERED_EARLY
from broker.web.refusals import PageRefusal
from broker.web.routes import FORM_ROUTES, ROUTES
from broker.web.site import Handler, Missing, PageRoute, Visit, local_path, parse_position, route

_PAGE_SECONDS = 55.0
"""Time for a shard to answer: less than a request may take."""
_FIGURES_SECONDS = 5.0
"""Time for the figures of a shard; a page of all shards is made without those that do not come."""
_STATES = ("bad", "waiting", "late", "good")
"""The worst first."""
_MAY_NAME_TOPIC = ("/timeline", "/scheduled")
"""Pages of all topics, or of the one that the address names."""
_PASSED_HEADERS = ("Content-Type", "Content-Security-Policy", "Location", "Retry-After")
T = TypeVar("T")
Note = tuple[str, str, str]
"""Link, name, and what is to be looked at."""


@dataclass(frozen=True, slots=True)
class NoFigures:
    """Reason for which a shard's figures are not there."""

    why: str
    is_elsewhere: bool = False
    """Another node owns the shard, as it should be."""
    link: str = ""
    """Leads to the page there; empty: that node cannot be reached, or has not told how."""


@dataclass(frozen=True, slots=True)
class ShardLine:
    """A shard on the overview."""

    number: int
    figures: figures.ShardFigures | None
    problem: NoFigures | None


def front_routes() -> list[PageRoute]:
    """Return every page of a broker, as its front has it."""
    return [
        page
        if page.method == "POST" or page in FORM_ROUTES or page.template in _MADE_HERE
        else route(page.method, page.template, _passing(page), page.call)
        for page in ROUTES
    ]


def _passing(page: PageRoute) -> Handler:
    of_all = _OF_ALL.get(page.template)
    finds_shard = _shard_for if of_all is None or page.template in _MAY_NAME_TOPIC else _named_shard

    async def answer(visit: Visit) -> web.Response:
        number = finds_shard(visit)
        if number is not None:
            return await _pass_on(visit, number)
        if of_all is None:
            raise PageRefusal("This page belongs to a topic: choose one.", 404)
        return await of_all(visit)

    return answer


def _shard_for(visit: Visit) -> int | None:
    """Return the shard of the topic, or the one that is named. Topics are written as pages read them."""
    for given in (visit.params.get("topic"), visit.query.get("topic", "").strip()):
        if given:
            return shard_of(given, visit.site.shards.count)
    return _named_shard(visit)


def _named_shard(visit: Visit) -> int | None:
    count = visit.site.shards.count
    text = visit.query.get("shard", "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < count):
        raise PageRefusal(f"There is no such shard: there are {count}, from 0.", 404)
    return int(text)


def _headers_for(visit: Visit, number: int) -> dict[str, str]:
    """Return what a shard is told of a request that was judged here."""
    headers = {SHARD_HEADER: str(number), FORM_HEADER: visit.csrf}
    if visit.authorization:
        headers["Authorization"] = visit.authorization
    return headers


async def _pass_on(visit: Visit, number: int) -> web.Response:
    """Return the page of a shard."""
    request = visit.request
    headers = _headers_for(visit, number)
    if visit.told is not None:
        headers[TOLD_HEADER] = f"{visit.told.kind} {quote(visit.told.text)}"
    try:
        shard = visit.site.shards.find(number)
    except Unavailable as error:
        link = _owner_link(error, request.path, visit.query)
        if not link:
            raise
        return await visit.page("on_owner.html", status=503, message=error.told, link=link)
    answer = await shard.page(str(request.rel_url), headers, _PAGE_SECONDS)
    visit.is_told = visit.told is not None and answer.status == 200
    passed = {name: answer.headers[name] for name in _PASSED_HEADERS if name in answer.headers}
    if "Location" in passed:
        passed["Location"] = local_path(passed["Location"])
    return web.Response(status=answer.status, body=answer.body, headers=passed)


# -- pages of all shards -------------------------------------------------------------------------------------


async def _ask_all(visit: Visit, path: str, read: Callable[[Any], T]) -> list[T | NoFigures]:
    """Return the figures of each shard, or why there are none."""
    shards = visit.site.shards

    async def ask(number: int) -> T | NoFigures:
        try:
            headers = _headers_for(visit, number)
            answer = await shards.find(number).figures(path, headers, _FIGURES_SECONDS)
        except Unavailable as error:
            link = _owner_link(error, visit.request.path, {**visit.query, "shard": str(number)})
            return NoFigures(error.told, error.reason == "NOT_OWNER", link)
        if answer.status != 200:
            return NoFigures(f"Shard {number} does not serve")
        try:
            return read(json.loads(answer.body))
        except (ValueError, TypeError, KeyError):
            return NoFigures(f"Shard {number} is of another version: start the broker anew")

    return await asyncio.gather(*(ask(number) for number in range(shards.count)))


def _owner_link(error: Unavailable, path: str, query: Mapping[str, str]) -> str:
    """Return what leads to a page on the node that owns the shard; empty where that is not known."""
    pages = str(error.facts.get("pages", ""))
    return f"{pages}{quote(path)}" + (f"?{urlencode(query)}" if query else "") if pages else ""


def _missing(answers: Sequence[object]) -> list[Missing]:
    """Return what a list lacks."""
    return [
        Missing(f"{answer.why}. Its topics are not shown here", answer.is_elsewhere, answer.link)
        for answer in answers
        if isinstance(answer, NoFigures)
    ]


async def _ask_topics(visit: Visit) -> tuple[topics.TopicList, list[Missing]]:
    wanted, after = topics.asked_topics(visit)

    def read(given: Any) -> topics.TopicList:
        rows = [topics.TopicRow(**row) for row in given["rows"]]
        return topics.TopicList(rows, given["count"], given["is_more"])

    answers = await _ask_all(visit, f"{figures.TOPICS}?" + urlencode({"q": wanted, "after": after}), read)
    return merge_topic_lists([part for part in answers if not isinstance(part, NoFigures)]), _missing(answers)


def merge_topic_lists(parts: Sequence[topics.TopicList]) -> topics.TopicList:
    """Return the next topics by name of several shards, each of which has told its own next ones."""
    rows = nsmallest(
        topics.TOPICS_PAGE, (row for part in parts for row in part.rows), key=lambda row: row.name
    )
    is_more = any(part.is_more for part in parts) or sum(len(part.rows) for part in parts) > len(rows)
    return topics.TopicList(rows, sum(part.count for part in parts), is_more)


async def _show_topics(visit: Visit) -> web.Response:
    return await topics.page_of_topics(visit, *await _ask_topics(visit))


async def _show_letters(visit: Visit) -> web.Response:
    def read(given: Any) -> dead_letters.LetterCounts:
        rows = [(count, topic, name) for count, topic, name in given["rows"]]
        return dead_letters.LetterCounts(rows, given["total"], given["more"])

    answers = await _ask_all(visit, figures.DEAD_LETTERS, read)
    parts = [part for part in answers if not isinstance(part, NoFigures)]
    rows = sorted((row for part in parts for row in part.rows), key=lambda row: (-row[0], row[1:]))
    shown = rows[: dead_letters.SUBSCRIPTIONS_SHOWN]
    more = len(rows) - len(shown) + sum(part.more for part in parts)
    counts = dead_letters.LetterCounts(shown, sum(part.total for part in parts), more)
    return await dead_letters.page_of_letters(visit, counts, _missing(answers))


def read_figures(given: Any) -> figures.ShardFigures:
    """Return the figures of a shard. Raises ValueError, TypeError or KeyError for what are none."""
    told = figures.ShardFigures(**given)
    if told.state not in _STATES:
        raise ValueError(told.state)
    return replace(told, attention=[(link, name, what) for link, name, what in told.attention])


def merge_notes(parts: Sequence[Sequence[Note]]) -> list[Note]:
    """Return the notes of shards in turn, those of early deliveries before all others."""
    in_turn = (note for note in chain.from_iterable(zip_longest(*parts)) if note is not None)
    return sorted(in_turn, key=lambda note: note[2] != DELIVERED_EARLY)


async def _show_overview(visit: Visit) -> web.Response:
    answers, (listed, missing) = await asyncio.gather(
        _ask_all(visit, figures.OVERVIEW, read_figures), _ask_topics(visit)
    )
    lines = [
        ShardLine(number, None, answer) if isinstance(answer, NoFigures) else ShardLine(number, answer, None)
        for number, answer in enumerate(answers)
    ]
    known = [line.figures for line in lines if line.figures is not None]
    next_due = min(
        ((each.next_due_ms, each.next_due_topic) for each in known if each.next_due_ms is not None),
        default=None,
    )
    notes = merge_notes([each.attention for each in known])
    shown = notes[:ATTENTION_MAX]
    return await visit.page(
        "shards.html",
        lines=lines,
        known=known,
        away=sum(line.problem is not None and not line.problem.is_elsewhere for line in lines),
        state=min((each.state for each in known), key=_STATES.index, default="good"),
        oldest_ready_ms=max((each.oldest_ready_ms for each in known), default=0),
        next_due=next_due,
        attention=shown,
        attention_more=len(notes) - len(shown) + sum(each.attention_more for each in known),
        topics=listed.rows,
        topic_count=listed.count,
        missing=[each for each in missing if not each.is_elsewhere],  # its line tells
    )


def read_due(given: Any, bars: int) -> timeline.DueFigures:
    """Return what a shard has counted in so many bars. Raises as `read_figures`."""
    told = timeline.DueFigures(**given)
    due = DueBars(**given["bars"])
    if any(len(each) != bars for each in (due.others, *due.topics.values())):
        raise ValueError(bars)
    by_topic, fullest = ([(count, topic) for count, topic in each] for each in (told.by_topic, told.fullest))
    return replace(told, bars=due, by_topic=by_topic, fullest=fullest)


async def _show_timeline(visit: Visit) -> web.Response:
    shown = timeline.asked_window(visit)
    if shown is None:
        ahead = await _ask_all(visit, figures.AHEAD, lambda given: timeline.DueAhead(**given))
        unit = timeline.first_unit([part for part in ahead if not isinstance(part, NoFigures)])
        shown = window(unit, timeline.asked_start_ms(visit))
    asked = urlencode({"unit": shown.unit, "start_ms": shown.start_ms})
    bars = len(shown.starts_ms) - 1
    answers = await _ask_all(visit, f"{figures.TIMELINE}?{asked}", lambda given: read_due(given, bars))
    due = timeline.merge_due(shown, [part for part in answers if not isinstance(part, NoFigures)])
    return await timeline.page_of_timeline(visit, shown, due, missing=_missing(answers))


def merge_scheduled(parts: Sequence[scheduled.ScheduledList]) -> scheduled.ScheduledList:
    """Return the next messages of several shards, each of which has told its own next ones."""
    rows = nsmallest(
        scheduled.SCHEDULED_PAGE,
        chain.from_iterable(part.rows for part in parts),
        key=lambda row: (row.deliver_at_ms, row.topic, parse_position(row.id)),
    )
    counts = [part.counted for part in parts if part.counted is not None]
    counted = sum(count for count, _ in counts), all(is_exact for _, is_exact in counts)
    offered = nsmallest(scheduled.TOPICS_OFFERED, chain.from_iterable(part.topics for part in parts))
    has_gaps = any(part.has_gaps for part in parts)
    return scheduled.ScheduledList(rows, counted if len(counts) == len(parts) else None, offered, has_gaps)


async def _show_scheduled(visit: Visit) -> web.Response:
    def read(given: Any) -> scheduled.ScheduledList:
        rows = [scheduled.Row(**row) for row in given["rows"]]
        counted = given["counted"] and (given["counted"][0], given["counted"][1])
        return scheduled.ScheduledList(rows, counted, given["topics"], bool(given["has_gaps"]))

    search = scheduled.asked_search(visit)
    asked = {name: text for name, text in visit.query.items() if name in ("prefix", "from", "until")}
    answers = await _ask_all(visit, f"{figures.SCHEDULED}?{urlencode(asked)}", read)
    listed = merge_scheduled([part for part in answers if not isinstance(part, NoFigures)])
    return await scheduled.page_of_scheduled(visit, search, listed, missing=_missing(answers))


async def _show_storage(visit: Visit) -> web.Response:
    def read(given: Any) -> storage.StorageFigures:
        rows = [(data, name, ledgers, index, n) for data, name, ledgers, index, n in given["rows"]]
        return replace(storage.StorageFigures(**given), rows=rows)

    answers = await _ask_all(visit, figures.STORAGE, read)
    shards = [(number, part) for number, part in enumerate(answers) if not isinstance(part, NoFigures)]
    sums = storage.merge_storage([part for _, part in shards]) if shards else None
    return await storage.page_of_storage(visit, sums, shards, _missing(answers))


_OF_ALL: dict[str, Handler] = {
    "/": _show_overview,
    "/timeline": _show_timeline,
    "/scheduled": _show_scheduled,
    "/topics": _show_topics,
    "/dead-letters": _show_letters,
    "/storage": _show_storage,
}
_MADE_HERE = frozenset({"/audit", "/audit/report.html"})
"""A broker has one folder of reports."""
