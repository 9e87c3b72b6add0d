"""The list of what is scheduled, and one message."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from urllib.parse import quote

from aiohttp import web

from broker.delayed.due_rows import Key
from broker.errors import NotFound
from broker.model import Position
from broker.topics.message_look import look_at
from broker.topics.schedule_values import Scheduled
from broker.topics.stored_message import StoredMessage, read_message
from broker.topics.topic import Topic
from broker.web.refusals import PageRefusal
from broker.web.search import Search, form_time
from broker.web.site import Missing, Visit, parse_position, see_other

SCHEDULED_PAGE = 50
_TOPICS_MERGED = 50
"""Without a topic the next messages are shown of so many topics: those whose turn comes first."""
_FURTHER_PAGES = 20
"""Beyond the first of each topic, so many are read to find what comes between, where large messages make them short."""
TOPICS_OFFERED = 500
_PREVIEW_CHARS = 120
_PAYLOAD_SHOWN = 64 << 10
_HEX_SHOWN = 4 << 10
_SUBSCRIPTIONS_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One message of a list."""

    topic: str
    id: str
    link: str
    schedule_key: str
    deliver_at_ms: int
    publish_time_ms: int
    revision: int
    size: int
    preview: str


@dataclass(frozen=True, slots=True)
class ScheduledList:
    """A page of the list of scheduled messages."""

    rows: Sequence[Row]
    counted: tuple[int, bool] | None
    """Number of messages in the list, and whether that is exact; None where only reading them would tell."""
    topics: Sequence[str]
    """Topics to choose from."""
    has_gaps: bool = False
    """True where messages may be missing between those of the list."""


async def show_scheduled(visit: Visit) -> web.Response:
    """GET /scheduled?topic=&id=&key=&prefix=&from=&until=&after="""
    search = asked_search(visit)
    if search.id or search.key:
        return await _find_one(visit, search)
    return await page_of_scheduled(visit, search, *await list_scheduled(visit, search))


def asked_search(visit: Visit) -> Search:
    search = Search.of(visit.query)
    if (search.id or search.key) and not search.topic:
        raise PageRefusal("An id or a key belongs to a topic: choose one.")
    return search


async def list_scheduled(visit: Visit, search: Search) -> tuple[ScheduledList, Key | None]:
    """Return a page of the list, and where the next one begins."""
    following, has_gaps = None, False
    if search.topic:
        topic = visit.topic(search.topic)
        topics = [topic]
        page = await topic.schedule.page(search.due, search.prefix, search.after, SCHEDULED_PAGE)
        listed = [(topic.name, entry) for entry in page.scheduled]
        following = page.next
    else:
        topics = await visit.topics()
        listed, has_gaps = await _first_of_all(topics, search)
    counted = await _count(visit, topics, search)
    rows = await asyncio.to_thread(_rows, listed)
    offered = nsmallest(TOPICS_OFFERED, (topic.name for topic in await visit.topics()))
    return ScheduledList(rows, counted, offered, has_gaps), following


async def page_of_scheduled(
    visit: Visit,
    search: Search,
    listed: ScheduledList,
    following: Key | None = None,
    missing: Sequence[Missing] = (),
) -> web.Response:
    """`following`: where the next page begins. `missing`: what the list lacks."""
    return await visit.page(
        "scheduled.html",
        search=search,
        start=form_time(search.start_ms),
        end=form_time(search.end_ms),
        topics=listed.topics,
        rows=listed.rows,
        counted=listed.counted,
        next_link=search.link(following) if following is not None else "",
        first_link=search.link() if search.after is not None else "",
        is_capped=not search.topic and len(listed.rows) == SCHEDULED_PAGE,
        has_gaps=listed.has_gaps,
        missing=missing,
    )


async def show_message(visit: Visit) -> web.Response:
    """GET /topics/{topic}/messages/{id}"""
    topic = visit.topic()
    position = parse_position(visit.params["id"])
    if position is None:
        raise PageRefusal("That is not an id: ids look like 7:1234.", 404)
    looked = await look_at(topic, position, _SUBSCRIPTIONS_SHOWN)
    seen = tuple(each for each in looked.owed if visit.may("GetSubscription", topic.name, each.subscription))
    message, body = await asyncio.to_thread(_taken_apart, looked.frame)
    return await visit.page(
        "message.html",
        topic=topic.name,
        id=visit.params["id"],
        looked=replace(looked, owed=seen) if visit.site.calls.has_rules else looked,
        message=message,
        body=body,
        size=len(looked.frame),
        at=form_time(looked.deliver_at_ms),
    )


def message_link(topic: str, position: Position) -> str:
    return f"/topics/{quote(topic)}/messages/{position.ledger_id}:{position.entry_id}"


async def _find_one(visit: Visit, search: Search) -> web.Response:
    topic = visit.topic(search.topic)
    name: Position | str | None = search.key
    if search.id:
        name = parse_position(search.id)
        if name is None:
            raise PageRefusal("That is not an id: ids look like 7:1234.")
        return see_other(message_link(topic.name, name))
    assert name
    try:
        message = await topic.schedule.get(name)
    except NotFound:
        raise PageRefusal(
            f"No message of {topic.name} waits under the key {search.key[:200]!r}.", 404
        ) from None
    return see_other(message_link(topic.name, message.position))


async def _count(visit: Visit, topics: Sequence[Topic], search: Search) -> tuple[int, bool] | None:
    """Return how many messages the list has, and whether that is exact; None where only reading them would tell."""
    if search.prefix:
        return None
    if not search.is_narrowed:
        return sum(topic.index.scheduled_count() for topic in topics), True
    whole = await visit.site.due_counts.of(topics, search.due, search.due.end_ms - search.due.start_ms)
    return whole.within, whole.is_exact


async def _first_of_all(topics: Sequence[Topic], search: Search) -> tuple[list[tuple[str, Scheduled]], bool]:
    """Return the next messages of several topics, soonest first, and whether some may be missing between them."""
    waiting = [topic for topic in topics if topic.index.scheduled_count()]
    turns = nsmallest(
        _TOPICS_MERGED + 1, ((topic.index.next_due_ms() or 0, topic.name, topic) for topic in waiting)
    )
    listed: list[tuple[str, Scheduled]] = []
    unread: dict[Topic, Key] = {}  # topics of which there is more, and where that begins

    async def read(topic: Topic, start: Key | None) -> None:
        nonlocal listed
        page = await topic.schedule.page(search.due, search.prefix, start, SCHEDULED_PAGE)
        listed += [(topic.name, entry) for entry in page.scheduled]
        listed = nsmallest(SCHEDULED_PAGE, listed, key=_place)
        unread.pop(topic, None)
        if page.next is not None:
            unread[topic] = page.next

    def place_of_unread(topic: Topic) -> tuple[int, str, Position]:
        due_ms, *position = unread[topic]
        return due_ms, topic.name, Position(*position)

    def behind() -> Topic | None:
        """Return the topic whose unread messages come first, if they may come before one of the list."""
        topic = min(unread, key=place_of_unread, default=None)
        is_full = len(listed) == SCHEDULED_PAGE
        return None if topic is None or (is_full and _place(listed[-1]) < place_of_unread(topic)) else topic

    def may_lack_others() -> bool:
        """Return whether topics beyond those read may have messages that come before one of the list."""
        if not (left := turns[_TOPICS_MERGED:]):
            return False
        due_ms, name, _ = left[0]
        if len(listed) < SCHEDULED_PAGE:
            return due_ms < search.due.end_ms
        return (due_ms, name) < _place(listed[-1])[:2]

    for _, _, topic in turns[:_TOPICS_MERGED]:
        await read(topic, None)
    for _ in range(_FURTHER_PAGES):
        if (first := behind()) is None:
            break
        await read(first, unread[first])
    return listed, behind() is not None or may_lack_others()


def _place(row: tuple[str, Scheduled]) -> tuple[int, str, Position]:
    return row[1].deliver_at_ms, row[0], row[1].position


def _rows(listed: Sequence[tuple[str, Scheduled]]) -> list[Row]:
    return [
        Row(
            topic=topic,
            id=f"{entry.position.ledger_id}:{entry.position.entry_id}",
            link=message_link(topic, entry.position),
            schedule_key=entry.schedule_key,
            deliver_at_ms=entry.deliver_at_ms,
            publish_time_ms=entry.publish_time_ms,
            revision=entry.revision,
            size=len(entry.frame),
            preview=preview(read_message(entry.frame).payload),
        )
        for topic, entry in listed
    ]


def preview(payload: bytes) -> str:
    """The beginning of a payload in one line; its size if it is no text."""
    part = payload[: 4 * _PREVIEW_CHARS]
    text = part.decode("utf-8", "ignore")
    if not payload or "\0" in text or len(text) < len(part) // 4:
        return f"{len(payload):,} bytes"
    line = " ".join(text.split())
    return line if len(line) <= _PREVIEW_CHARS else f"{line[:_PREVIEW_CHARS]}…"


def _taken_apart(frame: bytes) -> tuple[StoredMessage, dict[str, str | int | bool]]:
    message = read_message(frame)
    # The template is handed what it shows and no more: payloads may be large.
    return replace(message, payload=b""), payload_views(message.payload)


def payload_views(payload: bytes) -> dict[str, str | int | bool]:
    """A payload as JSON, text and hexadecimal, as far as it is that; and what was left out."""
    shown = payload[:_PAYLOAD_SHOWN]
    views: dict[str, str | int | bool] = {
        "size": len(payload),
        "is_cut": len(payload) > len(shown),
        "json": "",
        "text": "",
    }
    try:
        text = shown.decode("utf-8", "strict" if len(payload) == len(shown) else "ignore")
        if text.isprintable() or not any(_is_control(character) for character in text):
            views["text"] = text
            if text.lstrip()[:1] in ("{", "[") and not views["is_cut"]:
                views["json"] = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (UnicodeDecodeError, ValueError, RecursionError):
        pass  # what it is not is left empty
    views["hex"] = hex_dump(payload[:_HEX_SHOWN])
    views["is_hex_cut"] = len(payload) > _HEX_SHOWN
    return views


def _is_control(character: str) -> bool:
    """Return whether it has no place in a text; what only turns or hides text is shown escaped."""
    return unicodedata.category(character) == "Cc" and character not in "\n\r\t"


def hex_dump(octets: bytes) -> str:
    """Sixteen bytes a line: offset, hexadecimal, and characters that can be shown."""
    lines = []
    for at in range(0, len(octets), 16):
        part = octets[at : at + 16]
        text = "".join(chr(code) if 32 <= code < 127 else "." for code in part)
        lines.append(f"{at:06x}  {part.hex(' '):<47}  {text}")
    return "\n".join(lines)
