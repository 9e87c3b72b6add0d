"""The pages of a front: what is about a topic is made by the shard of that topic, what is about all is made here.

    Host, session, form (as everywhere) -> topic in path, address or form -> its shard's page, as it is
                                        -> shard=N in the address         -> that shard's
                                        -> neither                        -> one page of the figures of all shards

The front keeps sessions and nothing of a page. It vouches to a shard for who has logged in (`guard.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from aiohttp import web

from broker.errors import Unavailable
from broker.topic_shards import shard_of
from broker.web import dead_letters, figures, topics
from broker.web.guard import LOGIN_HEADER, SHARD_HEADER
from broker.web.refusals import PageRefusal
from broker.web.routes import ROUTES
from broker.web.site import Handler, PageRoute, Visit, local_path, route

_PAGE_SECONDS = 55.0
"""Time for a shard to answer: less than a request may take."""
_FIGURES_SECONDS = 5.0
"""Time for the figures of a shard; a page of all shards is made without those that do not come."""
_ATTENTION_MAX = 8
_STATES = ("bad", "waiting", "late", "good")
"""The worst first."""
_SHARD_PAGE = {"/timeline": "Timeline", "/scheduled": "Scheduled", "/storage": "Storage", "/audit": "Audit"}
"""Pages of each shard by itself, of those that name no topic."""
_PASSED_HEADERS = ("Content-Type", "Content-Security-Policy", "Location", "Retry-After")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardLine:
    """A shard on the overview."""

    number: int
    figures: figures.ShardFigures | None
    problem: str
    """Reason for which there are no figures."""


def front_routes() -> list[PageRoute]:
    """Return every page of a broker, as its front has it."""
    own: dict[str, Handler] = {
        "/": _show_overview,
        "/topics": _show_topics,
        "/dead-letters": _show_letters,
        **dict.fromkeys(_SHARD_PAGE, _choose_shard),
    }
    return [
        route(page.method, page.template, _passing(own.get(page.template) if page.method == "GET" else None))
        for page in ROUTES
    ]


def _passing(own: Handler | None) -> Handler:
    async def answer(visit: Visit) -> web.Response:
        number = _shard_for(visit)
        if number is not None:
            return await _pass_on(visit, number)
        if own is None:
            raise PageRefusal("This page belongs to a topic: choose one.", 404)
        return await own(visit)

    return answer


def _shard_for(visit: Visit) -> int | None:
    count = visit.site.shards.count
    for given in (visit.params, visit.form, visit.query):
        if topic := given.get("topic", ""):
            return shard_of(topic, count)
    text = visit.query.get("shard", "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < count):
        raise PageRefusal(f"There is no such shard: there are {count}, from 0.", 404)
    return int(text)


async def _pass_on(visit: Visit, number: int) -> web.Response:
    """Return the answer of a shard. The request was judged here, so it goes on as one of a page of that shard."""
    request = visit.request
    headers = {SHARD_HEADER: str(number), "Sec-Fetch-Site": "same-origin"}
    if visit.session is not None:
        headers[LOGIN_HEADER] = visit.site.guard.vouch(visit.session, visit.address)
    body = urlencode(visit.form).encode() if request.method == "POST" else None
    if body is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
        visit.is_noted = True
    try:
        shard = visit.site.shards.find(number)
        answer = await shard.page(request.method, str(request.rel_url), headers, body, _PAGE_SECONDS)
    except Unavailable as error:
        # Not on the page of the form, which is the shard's as well.
        doubt = " Whether anything was changed is not known." if body is not None else ""
        return await visit.page("error.html", status=503, message=f"{error.told}.{doubt}", code=503)
    passed = {name: answer.headers[name] for name in _PASSED_HEADERS if name in answer.headers}
    if "Location" in passed:
        passed["Location"] = local_path(passed["Location"])
    return web.Response(status=answer.status, body=answer.body, headers=passed)


# -- pages of all shards -------------------------------------------------------------------------------------


async def _ask_all(visit: Visit, path: str, read: Callable[[Any], T]) -> list[T | str]:
    """Return the figures of each shard, or why there are none."""
    shards = visit.site.shards

    async def ask(number: int) -> T | str:
        headers = {SHARD_HEADER: str(number)}
        if visit.session is not None:
            headers[LOGIN_HEADER] = visit.site.guard.vouch(visit.session, visit.address)
        try:
            answer = await shards.find(number).page("GET", path, headers, None, _FIGURES_SECONDS)
        except Unavailable as error:
            return error.told
        return read(json.loads(answer.body)) if answer.status == 200 else f"Shard {number} does not serve"

    return await asyncio.gather(*(ask(number) for number in range(shards.count)))


def _missing(answers: Sequence[object]) -> list[str]:
    return [f"{answer}: its topics are not shown" for answer in answers if isinstance(answer, str)]


async def _ask_topics(visit: Visit) -> tuple[topics.TopicList, list[str]]:
    wanted, after = topics.asked_topics(visit)

    def read(given: Any) -> topics.TopicList:
        rows = [topics.TopicRow(**row) for row in given["rows"]]
        return topics.TopicList(rows, given["count"], given["is_more"])

    answers = await _ask_all(visit, f"{figures.TOPICS}?" + urlencode({"q": wanted, "after": after}), read)
    return merge_topic_lists([part for part in answers if not isinstance(part, str)]), _missing(answers)


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
    parts = [part for part in answers if not isinstance(part, str)]
    rows = sorted((row for part in parts for row in part.rows), key=lambda row: (-row[0], row[1:]))
    shown = rows[: dead_letters.SUBSCRIPTIONS_SHOWN]
    more = len(rows) - len(shown) + sum(part.more for part in parts)
    counts = dead_letters.LetterCounts(shown, sum(part.total for part in parts), more)
    return await dead_letters.page_of_letters(visit, counts, _missing(answers))


async def _show_overview(visit: Visit) -> web.Response:
    answers, (listed, missing) = await asyncio.gather(
        _ask_all(visit, figures.OVERVIEW, lambda given: figures.ShardFigures(**given)), _ask_topics(visit)
    )
    lines = [
        ShardLine(number, None, answer) if isinstance(answer, str) else ShardLine(number, answer, "")
        for number, answer in enumerate(answers)
    ]
    known = [line.figures for line in lines if line.figures is not None]
    next_due = min(
        ((each.next_due_ms, each.next_due_topic) for each in known if each.next_due_ms is not None),
        default=None,
    )
    attention = [tuple(note) for each in known for note in each.attention][:_ATTENTION_MAX]
    return await visit.page(
        "shards.html",
        lines=lines,
        known=known,
        state=min((each.state for each in known), key=_STATES.index, default="bad"),
        oldest_ready_ms=max((each.oldest_ready_ms for each in known), default=0),
        next_due=next_due,
        attention=attention,
        topics=listed.rows,
        topic_count=listed.count,
        missing=missing,
    )


async def _choose_shard(visit: Visit) -> web.Response:
    """A page that each shard has for itself, and no one topic."""
    query = {name: text for name, text in visit.query.items() if name not in ("topic", "shard")}
    path = visit.request.path
    links = [
        (number, f"{quote(path)}?" + urlencode({**query, "shard": number}))
        for number in range(visit.site.shards.count)
    ]
    return await visit.page(
        "choose_shard.html", name=_SHARD_PAGE[path], links=links, has_topics=path != "/audit", query=query
    )
