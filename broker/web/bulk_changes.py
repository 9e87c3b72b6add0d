"""Bulk changes of a topic: how far each has come, and an end to one that goes on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from urllib.parse import quote

from aiohttp import web

from broker.model import TIME_MS_MAX
from broker.storage.bulk import BulkDefinition, BulkEnd, BulkKind, BulkStanding
from broker.topics.topic import Topic
from broker.web.refusals import PageRefusal
from broker.web.render import duration, plural
from broker.web.search import Search, form_time
from broker.web.site import Visit, see_other

_ENDED_SHOWN = 10


@dataclass(frozen=True, slots=True)
class BulkChangeRow:
    """A bulk change in the list of its topic."""

    link: str
    words: str
    key_prefix: str
    start_ms: int
    end_ms: int
    """0: no end."""
    begin_ms: int
    principal: str
    state: str
    examined: int
    total: int
    text: str


def bulk_change_link(topic: str, bulk_id: int) -> str:
    return f"/topics/{quote(topic)}/bulk-changes/{bulk_id}"


def list_bulk_changes(topic: Topic) -> list[BulkChangeRow]:
    """Return those that have not ended and the last that have, the newest first."""
    unended = set(topic.bulk.unended_ids())
    newest = list(reversed(topic.bulk.ids()))
    ended = set(islice((bulk_id for bulk_id in newest if bulk_id not in unended), _ENDED_SHOWN))
    rows = []
    for bulk_id in newest:
        standing = topic.bulk.get(bulk_id)
        if standing is not None and (bulk_id in unended or bulk_id in ended):
            rows.append(_row(topic, bulk_id, standing))
    return rows


async def show_bulk_change(visit: Visit) -> web.Response:
    """GET /topics/{topic}/bulk-changes/{id}"""
    topic, bulk_id = visit.topic(), _id_of(visit)
    standing = visit.broker.bulk_changes.standing(topic, bulk_id)
    row = _row(topic, bulk_id, standing)
    search = Search(topic.name, "", "", row.key_prefix, row.start_ms, row.end_ms, None)
    return await visit.page(
        "bulk_change.html",
        topic=topic.name,
        row=row,
        search=search,
        kind=_kind(standing),
        is_ended=bool(standing.end),
        end_ms=standing.end_ms,
    )


async def cancel_bulk_change(visit: Visit) -> web.Response:
    """POST /topics/{topic}/bulk-changes/{id}: change no more"""
    topic, bulk_id = visit.params["topic"], _id_of(visit)
    await visit.call("CancelBulkChange", topic=topic, id=bulk_id)
    return see_other(bulk_change_link(topic, bulk_id))


def _id_of(visit: Visit) -> int:
    text = visit.params["id"]
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        raise PageRefusal("That is not the number of a bulk change.", 404)
    return int(text)


def _row(topic: Topic, bulk_id: int, standing: BulkStanding) -> BulkChangeRow:
    definition, progress = standing.definition, standing.progress
    if standing.end:
        state = standing.end.name.lower()
    else:
        state = "running" if topic.bulk.unended_ids()[0] == bulk_id else "queued"
    return BulkChangeRow(
        link=bulk_change_link(topic.name, bulk_id),
        words=_words(definition),
        key_prefix=definition.key_prefix,
        start_ms=definition.start_ms,
        end_ms=definition.end_ms if definition.end_ms <= TIME_MS_MAX else 0,
        begin_ms=definition.begin_ms,
        principal=definition.principal,
        state=state,
        examined=progress.examined,
        total=max(definition.total, progress.examined),
        text=_told(standing),
    )


def _words(definition: BulkDefinition) -> str:
    """Return what a bulk change does."""
    match definition.kind:
        case BulkKind.CANCEL:
            words = "Cancel"
        case BulkKind.SHIFT:
            way = "later" if definition.new_ms >= 0 else "earlier"
            words = f"Move {duration(abs(definition.new_ms))} {way}"
        case BulkKind.DELAY if definition.new_ms == definition.begin_ms:
            words = "Send now"
        case BulkKind.MOVE | BulkKind.DELAY:
            words = f"Move to {form_time(definition.new_ms).replace('T', ' ')} UTC"
    return f"{words} (dry run)" if definition.dry_run else words


def _told(standing: BulkStanding) -> str:
    """Return what came of a bulk change so far, with counts."""
    definition, progress = standing.definition, standing.progress
    done = "Cancelled" if definition.kind is BulkKind.CANCEL else "Moved"
    if definition.dry_run:
        done = f"Would be {done.lower()}"
    text = f"{done}: {progress.done:,} of {plural(progress.matched, 'message')} that matched."
    if left := progress.matched - progress.done:
        text += f" Already delivered: {left:,}."
    match standing.end:
        case BulkEnd.CANCELLED:
            return f"It was cancelled. {text}"
        case BulkEnd.FAILED:
            return f"It failed: {standing.failure} {text}"
        case _:
            return text


def _kind(standing: BulkStanding) -> str:
    if standing.end is BulkEnd.FAILED:
        return "failed"
    return "done" if standing.progress.done else "nothing"
