"""Dead letters: where they are, what they say, requeue and purge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from aiohttp import web
from pyroaring import BitMap

from broker.model import TIME_MS_MAX, Position, common_entries, count_entries
from broker.runtime.supervise import YieldBudget
from broker.subscriptions.subscription import Subscription
from broker.topics import dead_letter_frames as names
from broker.topics.dead_letter_list import LOOKED_MAX, LetterSearch, letters_after
from broker.topics.dead_letters import HeldLetters
from broker.topics.schedule_values import DueRange
from broker.topics.stored_message import read_message
from broker.topics.topic import Topic
from broker.web.refusals import PageRefusal
from broker.web.scheduled import message_link, preview
from broker.web.search import form_time, parse_time_ms
from broker.web.site import Missing, Visit, entry_set, parse_position

_PAGE = 50
_TEXT_MAX = 1_000
SUBSCRIPTIONS_SHOWN = 200


@dataclass(frozen=True, slots=True)
class LetterCounts:
    """The subscriptions that have dead letters, those with the most first."""

    rows: Sequence[tuple[int, str, str]]
    """Number, topic and subscription."""
    total: int
    more: int
    """Subscriptions that are not listed."""


@dataclass(frozen=True, slots=True)
class LetterRow:
    """A dead letter."""

    id: str
    holder: str
    """Topic that holds it."""
    link: str
    original_id: str
    attempts: str
    reason: str
    last_reason: str
    time_ms: int
    key: str
    preview: str


async def show_all(visit: Visit) -> web.Response:
    """GET /dead-letters: the subscriptions that have any"""
    return await page_of_letters(visit, await list_letters(visit))


async def list_letters(visit: Visit) -> LetterCounts:
    """Return the subscriptions with the most dead letters."""
    broker = visit.broker
    budget = YieldBudget(broker.clock)
    counts: list[tuple[int, str, str]] = []
    for topic in await visit.topics("ListSubscriptions"):
        for subscription in visit.subscriptions(topic):
            if subscription.dead_letters:
                count = count_entries(broker.dead_letters.still_held(subscription))
                if count:
                    counts.append((count, topic.name, subscription.name))
            await budget.spent()
    counts.sort(key=lambda row: (-row[0], row[1:]))
    return LetterCounts(
        counts[:SUBSCRIPTIONS_SHOWN],
        total=sum(count for count, _, _ in counts),
        more=max(0, len(counts) - SUBSCRIPTIONS_SHOWN),
    )


async def page_of_letters(
    visit: Visit, counts: LetterCounts, missing: Sequence[Missing] = ()
) -> web.Response:
    """`missing`: what the list lacks."""
    return await visit.page(
        "dead_letters.html",
        total=counts.total,
        rows=[(count, topic, name, page_link(topic, name)) for count, topic, name in counts.rows],
        more=counts.more,
        missing=missing,
    )


async def show_letters(visit: Visit) -> web.Response:
    """GET /dead-letters/{topic}/{name}?reason=&from=&until=&after="""
    topic, subscription = _named(visit)
    office = visit.broker.dead_letters
    text = visit.query.get("after", "")
    after = parse_position(text) if text else Position(0, 0)
    if after is None:
        raise PageRefusal("The page begins at a place that is none.")
    search, fields = _search_of(visit.query)
    places = office.places(subscription)
    letters, last = await _letters(places, after, search, YieldBudget(visit.broker.clock))
    here = page_link(topic.name, subscription.name)
    following = fields | {"after": f"{last.ledger_id}:{last.entry_id}"} if last is not None else {}
    return await visit.page(
        "letters.html",
        topic=topic.name,
        name=subscription.name,
        here_link=here,
        total=sum(count_entries(place.entries) for place in places),
        holders=sorted({place.topic.name for place in places}),
        rows=await asyncio.to_thread(_rows, letters),
        search=search,
        is_narrowed=bool(fields),
        start=form_time(search.given_up.start_ms),
        end=form_time(search.given_up.end_ms) if "until" in fields else "",
        next_link=f"{here}?" + urlencode(following) if following else "",
        first_link=(f"{here}?" + urlencode(fields) if fields else here) if text else "",
    )


def _search_of(query: Mapping[str, str]) -> tuple[LetterSearch, dict[str, str]]:
    """The search that an address asks for, and its fields that are given."""
    text = query.get("reason", "").strip()
    if len(text) > _TEXT_MAX:
        raise PageRefusal("That is too long to search for.")
    start_ms, end_ms = (parse_time_ms(query.get(name, "")) for name in ("from", "until"))
    if end_ms and end_ms <= start_ms:
        raise PageRefusal("The range ends before it begins.")
    fields = {"reason": text, "from": str(start_ms or ""), "until": str(end_ms or "")}
    search = LetterSearch(text, DueRange(start_ms, end_ms or TIME_MS_MAX + 1))
    return search, {name: value for name, value in fields.items() if value}


async def _letters(
    places: Sequence[HeldLetters], after: Position, search: LetterSearch, budget: YieldBudget
) -> tuple[list[tuple[str, Position, bytes]], Position | None]:
    """The next letters that match, and the last place that was looked at; None: there are no more."""
    letters: list[tuple[str, Position, bytes]] = []
    looked, last = 0, after
    async for place, position, frame in letters_after(places, after, search.step(_PAGE)):
        if len(letters) == _PAGE or looked == LOOKED_MAX:
            return letters, last
        looked += 1
        facts = read_message(frame).properties
        if search.matches(facts.get(names.REASON, ""), facts.get(names.LAST_REASON, ""), _time_ms(facts)):
            letters.append((place.name, position, frame))
        last = position
        await budget.spent()
    return letters, None


def _time_ms(facts: Mapping[str, str]) -> int:
    text = facts.get(names.TIME_MS, "")
    return int(text) if text.isdigit() else 0


async def show_purge(visit: Visit) -> web.Response:
    """GET /dead-letters/{topic}/{name}/purge?id=: what a purge of one letter, or of all, would drop"""
    topic, subscription = _named(visit)
    held = visit.broker.dead_letters.still_held(subscription)
    name = visit.query.get("id", "")
    place = _position(name)
    chosen = held if place is None else {place.ledger_id: BitMap([place.entry_id])}
    return await visit.page(
        "purge.html",
        topic=topic.name,
        name=subscription.name,
        id=name,
        count=count_entries(common_entries(held, chosen)),
        here_link=page_link(topic.name, subscription.name),
    )


async def change_letters(visit: Visit) -> web.Response:
    """POST /dead-letters/{topic}/{name}: requeue or purge one letter, or all"""
    topic, name, form = visit.params["topic"], visit.params["name"], visit.form
    place = _position(form.get("id", ""))
    which = {"all": True} if place is None else {"entries": [entry_set(place)]}
    action = form.get("action")
    if action == "requeue":
        answer = await visit.call("RequeueDeadLetters", topic=topic, subscription=name, **which)
        count, text = int(answer["requeued_messages"]), "Requeued"
    elif action == "purge":
        answer = await visit.call("PurgeDeadLetters", topic=topic, subscription=name, **which)
        count, text = int(answer["purged_messages"]), "Purged"
    else:
        raise PageRefusal("Say what to do: requeue or purge.")
    missing = " Not found: 1." if place is not None and not count else ""
    return visit.done("done" if count else "nothing", f"{text}: {count:,}.{missing}", page_link(topic, name))


def page_link(topic: str, subscription: str) -> str:
    return f"/dead-letters/{quote(topic)}/{quote(subscription)}"


def _named(visit: Visit) -> tuple[Topic, Subscription]:
    topic = visit.topic()
    return topic, topic.subscription(visit.params["name"])


def _position(text: str) -> Position | None:
    """The letter that a form names; None: all of them."""
    if not text:
        return None
    position = parse_position(text)
    if position is None:
        raise PageRefusal("That is not an id.")
    return position


def _rows(letters: Sequence[tuple[str, Position, bytes]]) -> list[LetterRow]:
    rows = []
    for holder, position, frame in letters:
        message = read_message(frame)
        facts = message.properties
        rows.append(
            LetterRow(
                id=f"{position.ledger_id}:{position.entry_id}",
                holder=holder,
                link=message_link(holder, position),
                original_id=f"{facts.get(names.LEDGER_ID, '?')}:{facts.get(names.ENTRY_ID, '?')}",
                attempts=facts.get(names.ATTEMPTS, "?"),
                reason=facts.get(names.REASON, ""),
                last_reason=facts.get(names.LAST_REASON, ""),
                time_ms=_time_ms(facts),
                key=message.key,
                preview=preview(message.payload),
            )
        )
    return rows
