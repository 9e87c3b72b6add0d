"""Cancel, send now and move: of one message at once, of all that match a filter after a look at how many these are."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from broker.topics.schedule_values import (
    Cancel,
    Change,
    ChangeResult,
    Move,
)
from broker.topics.topic import Topic
from broker.web.bulk_changes import bulk_change_link
from broker.web.refusals import PageRefusal
from broker.web.render import duration
from broker.web.scheduled import message_link
from broker.web.search import Search, form_time, parse_change
from broker.web.site import Visit, entry_set, parse_position, see_other

_LOOKS = 10
_LOOK_SECONDS = 0.1
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
    return "Reschedule", _time_of(change)


def _time_of(move: Move) -> dict[str, int]:
    times = {name: getattr(move, name) for name in ("deliver_at_ms", "deliver_after_ms", "shift_ms")}
    return {name: time for name, time in times.items() if time is not None}


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
    matched, is_exact = await _count(topic, search)
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
        fields=search.fields()
        | {name: visit.query.get(name, "") for name in ("action", "how", "at", "by")}
        | {"request_id": secrets.token_urlsafe(12)},  # a form that is sent twice begins one change
    )


async def start_change(visit: Visit) -> web.Response:
    """POST /scheduled/change: the change that was shown and confirmed."""
    search, change = _asked(visit.form)
    answer = await visit.call(
        "StartBulkChange",
        topic=search.topic,
        filter={
            "due": {"start_ms": search.start_ms, "end_ms": search.end_ms},
            "key_prefix": search.prefix,
        },
        request_id=visit.form.get("request_id", ""),
        **({"cancel": True} if isinstance(change, Cancel) else _time_of(change)),
    )
    bulk_id = int(answer["bulk_change"]["id"])
    for _ in range(_LOOKS):  # a short one is shown with what came of it
        answer = await visit.call("GetBulkChange", topic=search.topic, id=bulk_id)
        if int(answer["bulk_change"]["end_time_ms"]):
            break
        await asyncio.sleep(_LOOK_SECONDS)
    return see_other(bulk_change_link(search.topic, bulk_id))


def _asked(given: Mapping[str, str]) -> tuple[Search, Change]:
    search = Search.of(given)
    if not search.topic:
        raise PageRefusal("Choose a topic: a filter belongs to one.")
    return search, parse_change(given)


async def _count(topic: Topic, search: Search) -> tuple[int, bool]:
    """Count the messages that match, and say whether that is exact: a long count ends with what the index knows."""
    counts = await topic.schedule.count(search.due, 0)
    within = sum(messages for _, messages in counts.bars)
    if counts.is_exact and not search.prefix:
        return within, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_COUNT_SECONDS):
            return await topic.schedule.count_matching(search.due, search.prefix), True
    return within, False


def _words(change: Change) -> str:
    """Return what a change does, after "This will move 12 messages"."""
    if isinstance(change, Cancel):
        return "Nobody gets them."
    if change.deliver_at_ms is not None:
        return f"All of them to {form_time(change.deliver_at_ms).replace('T', ' ')} UTC."
    if change.shift_ms is not None:
        way = "later" if change.shift_ms >= 0 else "earlier"
        return f"Each {duration(abs(change.shift_ms))} {way}."
    if change.deliver_after_ms:
        return f"All of them to {duration(change.deliver_after_ms)} from now on."
    return "All of them become due at once."
