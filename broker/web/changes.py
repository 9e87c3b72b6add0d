"""Cancel, send now and move: of one message at once, of all that match a filter after a look at how many these are."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from broker.topics.schedule_values import (
    Cancel,
    Change,
    ChangeResult,
    Move,
)
from broker.topics.topic import Topic
from broker.web.jobs import Job
from broker.web.refusals import PageRefusal
from broker.web.render import duration
from broker.web.scheduled import message_link
from broker.web.search import Search, form_time, parse_change
from broker.web.site import Visit, entry_set, parse_position, see_other

_PAGE = 2_000
_PATIENCE_SECONDS = 1.5
"""A change that ends within it is told on the page it came from; others have a page of their own."""
_COUNT_SECONDS = 8.0
_EXAMPLES = 5

_VERBS = {"cancel": "cancel", "now": "send now", "move": "move"}
_DONE = {"cancel": "Cancelled", "now": "Sent now", "move": "Moved"}


async def change_message(visit: Visit) -> web.Response:
    """POST /topics/{topic}/messages/{id}"""
    topic, position = visit.params["topic"], parse_position(visit.params["id"])
    if position is None:
        raise PageRefusal("That is not an id.", 404)
    action, (call, fields) = visit.form.get("action", ""), _call_of(parse_change(visit.form))
    answer = await visit.call(call, topic=topic, selector={"entries": [entry_set(position)]}, **fields)
    (outcome,) = answer["outcomes"]
    result = _result_of(outcome)
    kind, text = _told(action, visit.params["id"], result, outcome)
    is_there = result is not ChangeResult.NOT_FOUND
    to = message_link(topic, position) if is_there else Search.of({"topic": topic}).link()
    return visit.done(kind, text, to)


def _call_of(change: Change) -> tuple[str, dict[str, int]]:
    """Return the call that makes a change, and its fields beside what is changed."""
    if isinstance(change, Cancel):
        return "CancelScheduled", {}
    assert isinstance(change, Move)
    times = {name: getattr(change, name) for name in ("deliver_at_ms", "deliver_after_ms", "shift_ms")}
    return "Reschedule", {name: time for name, time in times.items() if time is not None}


def _result_of(outcome: Mapping[str, Any]) -> ChangeResult:
    return ChangeResult[str(outcome["result"]).removeprefix("CHANGE_RESULT_")]


def _told(action: str, name: str, result: ChangeResult, outcome: Mapping[str, Any]) -> tuple[str, str]:
    match result:
        case ChangeResult.DONE:
            at = form_time(int(outcome["deliver_at_ms"])).replace("T", " ")
            return "done", f"{_DONE[action]}: {name}{f' to {at} UTC' if action == 'move' else ''}."
        case ChangeResult.ALREADY_DELIVERED:
            told = ", ".join(outcome["delivered_to"][:5])
            return "nothing", f"Nothing was changed: {name} was already delivered to {told}."
        case ChangeResult.ALREADY_CANCELLED:
            return "nothing", f"Nothing was changed: {name} was already cancelled."
        case _:
            return "nothing", f"Nothing was changed: {name} was not found."


# -- all that match a filter ---------------------------------------------------------------------------------


async def show_change(visit: Visit) -> web.Response:
    """GET /scheduled/change?topic=&prefix=&from=&until=&action=: what would be changed."""
    search, change = _asked(visit.query)
    topic = visit.topic(search.topic)
    matched, is_exact = await _count(topic, search, change)
    examples = (await topic.schedule.page(search.due, search.prefix, None, _EXAMPLES)).scheduled
    action = visit.query["action"]
    return await visit.page(
        "change.html",
        search=search,
        action=action,
        verb=_VERBS[action],
        words=_words(change),
        matched=matched,
        is_exact=is_exact,
        examples=[
            (
                f"{entry.position.ledger_id}:{entry.position.entry_id}",
                message_link(topic.name, entry.position),
                entry.schedule_key,
                entry.deliver_at_ms,
            )
            for entry in examples
        ],
        fields=search.fields() | {name: visit.query.get(name, "") for name in ("action", "how", "at", "by")},
    )


async def start_change(visit: Visit) -> web.Response:
    """POST /scheduled/change: the change that was shown and confirmed."""
    search, change = _asked(visit.form)
    visit.check(search.topic)
    action, (call, fields) = visit.form["action"], _call_of(change)
    matched = visit.form.get("matched", "")
    expected = int(matched) if re.fullmatch(r"[0-9]{1,15}", matched) else 0

    async def work(job: Job) -> None:
        due = {"start_ms": search.start_ms, "end_ms": search.end_ms}
        selector = {"filter": {"due": due, "key_prefix": search.prefix}}
        token: str | None = ""
        while token is not None and not job.is_stopped:
            answer = await visit.call(
                call, topic=search.topic, selector=selector, page_size=_PAGE, page_token=token, **fields
            )
            job.results += Counter(_result_of(outcome) for outcome in answer["outcomes"])
            token = answer["next_page_token"] or None

    title = f"{_VERBS[action]} in {search.topic}"
    job = visit.site.jobs.start(title, search.topic, search.link(), expected, work)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await job.done.wait()
    if not job.done.is_set():
        return see_other(f"/changes/{job.job_id}?" + urlencode({"action": action, "topic": search.topic}))
    return visit.done(*summary(action, job), search.link())


async def show_job(visit: Visit) -> web.Response:
    """GET /changes/{job}?action=&topic="""
    job = visit.site.jobs.find(visit.params["job"])
    if job is None:
        raise PageRefusal(
            "Nothing is known of that change: it ended some time ago, or the broker restarted.", 404
        )
    visit.check(job.topic)
    action = visit.query.get("action", "")
    kind, text = summary(action if action in _DONE else "move", job)
    return await visit.page(
        "job.html",
        title=job.title,
        action=action,
        topic=visit.query.get("topic", ""),
        back=job.back,
        started_ms=job.started_ms,
        is_done=job.done.is_set(),
        looked_at=job.looked_at,
        expected=job.expected,
        kind=kind,
        text=text,
    )


async def stop_job(visit: Visit) -> web.Response:
    """POST /changes/{job}: change no more"""
    job = visit.site.jobs.find(visit.params["job"])
    if job is None:
        raise PageRefusal("Nothing is known of that change.", 404)
    visit.check(job.topic)
    job.is_stopped = True
    await job.done.wait()  # for the messages it is at
    action = visit.form.get("action", "")
    return visit.done(*summary(action if action in _DONE else "move", job), job.back)


def summary(action: str, job: Job) -> tuple[str, str]:
    """Return what came of a change, with counts."""
    done, delivered, missing, cancelled = (
        job.results[result]
        for result in (
            ChangeResult.DONE,
            ChangeResult.ALREADY_DELIVERED,
            ChangeResult.NOT_FOUND,
            ChangeResult.ALREADY_CANCELLED,
        )
    )
    text = f"{_DONE[action]}: {done:,}. Already delivered: {delivered:,}. Not found: {missing:,}."
    if cancelled:
        text += f" Already cancelled: {cancelled:,}."
    if job.is_stopped:
        text = f"It was stopped. {text}"
    if job.failure:
        return "failed", f"It ended early: {job.failure} {text}"
    return ("done" if done else "nothing"), text


def _asked(given: Mapping[str, str]) -> tuple[Search, Change]:
    search = Search.of(given)
    if not search.topic:
        raise PageRefusal("Choose a topic: a filter belongs to one.")
    return search, parse_change(given)


async def _count(topic: Topic, search: Search, change: Change) -> tuple[int, bool]:
    """Count the messages that match, and say whether that is exact: a long count ends with what the index knows."""
    counts = await topic.schedule.count(search.due, 0)
    within = sum(messages for _, messages in counts.bars)
    if counts.is_exact and not search.prefix:
        return within, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_COUNT_SECONDS):
            page = await topic.schedule.change_matching(
                search.due, search.prefix, change, 1, None, dry_run=True
            )
            return page.matched, True
    return within, False


def _words(change: Change) -> str:
    """Return what a change does, after "This will move 12 messages"."""
    if isinstance(change, Cancel):
        return "Nobody gets them."
    assert isinstance(change, Move)
    if change.deliver_at_ms is not None:
        return f"All of them to {form_time(change.deliver_at_ms).replace('T', ' ')} UTC."
    if change.shift_ms is not None:
        way = "later" if change.shift_ms >= 0 else "earlier"
        return f"Each {duration(abs(change.shift_ms))} {way}."
    if change.deliver_after_ms:
        return f"All of them to {duration(change.deliver_after_ms)} from now on."
    return "All of them become due at once."
