"""Messages that a subscription is owed and are due: ready, with a consumer, or waiting for their next attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import quote, urlencode

from aiohttp import web

from broker.model import Position
from broker.settings import MIB
from broker.topics.owed_list import LISTED, OwedList, OwedMessage
from broker.topics.stored_message import read_message
from broker.web.refusals import PageRefusal
from broker.web.scheduled import message_link, preview
from broker.web.site import Visit, parse_position

_PAGE = 50
_PAGE_BYTES = 16 * MIB
_STATES = {state.name.lower(): state for state in LISTED}


async def show_owed(visit: Visit) -> web.Response:
    """GET /topics/{topic}/subscriptions/{name}/owed?state=&after="""
    topic = visit.topic()
    subscription = topic.subscription(visit.params["name"])
    name, text = visit.query.get("state", ""), visit.query.get("after", "")
    if name and name not in _STATES:
        raise PageRefusal("A message is ready, leased or retrying.")
    after = parse_position(text) if text else Position(0, 0)
    if after is None:
        raise PageRefusal("The page begins at a place that is none.")
    states = (_STATES[name],) if name else LISTED
    page = await OwedList(topic, subscription, states).page(after, _PAGE, _PAGE_BYTES)
    counts = topic.subscription_counts(subscription)
    retrying = subscription.states.redelivery.count_after(visit.broker.clock.now_ms())
    here = owed_link(topic.name, subscription.name)
    asked = {"state": name} if name else {}
    following = asked | {"after": f"{page.last.ledger_id}:{page.last.entry_id}"} if page.last else {}
    return await visit.page(
        "owed.html",
        topic=topic.name,
        name=subscription.name,
        state=name,
        choices=[
            ("", "all", counts.ready + counts.leased + retrying, here),
            *(
                (each, each, count, f"{here}?state={each}")
                for each, count in zip(_STATES, (counts.ready, counts.leased, retrying), strict=True)
            ),
        ],
        rows=await asyncio.to_thread(_rows, topic.name, page.messages),
        next_link=f"{here}?{urlencode(following)}" if following else "",
        first_link=(f"{here}?{urlencode(asked)}" if asked else here) if text else "",
    )


def owed_link(topic: str, subscription: str) -> str:
    return f"/topics/{quote(topic)}/subscriptions/{quote(subscription)}/owed"


def _rows(topic: str, messages: Sequence[OwedMessage]) -> list[tuple[OwedMessage, str, str, str]]:
    """Each message with its id, its link and the beginning of its payload."""
    rows = []
    for message in messages:
        id_ = f"{message.position.ledger_id}:{message.position.entry_id}"
        shown = preview(read_message(message.frame).payload)
        rows.append((message, id_, message_link(topic, message.position), shown))
    return rows
