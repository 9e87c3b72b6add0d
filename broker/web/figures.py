"""Figures of one shard for its front, which makes pages about all shards of them: JSON, on the shard's socket alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from broker.web.calendar_window import UNITS, window
from broker.web.dead_letters import list_letters
from broker.web.overview import look_over
from broker.web.refusals import PageRefusal
from broker.web.scheduled import asked_search, list_scheduled
from broker.web.site import PageRoute, Visit, route
from broker.web.storage import list_storage
from broker.web.timeline import count_window, look_ahead
from broker.web.topics import asked_topics, list_topics

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OVERVIEW, TOPICS, DEAD_LETTERS = "/figures", "/figures/topics", "/figures/dead-letters"
TIMELINE, AHEAD, SCHEDULED = "/figures/timeline", "/figures/ahead", "/figures/scheduled"
STORAGE = "/figures/storage"


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """Figures of a shard, as the overview of a front shows them."""

    state: str
    not_ready_because: str | None
    topics: int
    subscriptions: int
    pending: int
    next_due_ms: int | None
    next_due_topic: str
    ready: int
    oldest_ready_ms: int
    leased: int
    consumers: int
    dead_letters: int
    early: int
    produced: float
    """Messages a second, as the next two."""
    delivered: float
    acked: float
    data_bytes: int
    free_bytes: int
    reserve_bytes: int
    attention: Sequence[tuple[str, str, str]]
    """Link, name, and what is to be looked at."""
    attention_more: int
    """Of these, those that are left out."""


async def _show_overview(visit: Visit) -> web.Response:
    broker = visit.broker
    look = await look_over(visit)
    totals, rates = look.totals, look.rates
    return _json(
        ShardFigures(
            state=look.state,
            not_ready_because=broker.not_ready_because,
            topics=totals.topics,
            subscriptions=totals.subscriptions,
            pending=totals.pending,
            next_due_ms=totals.next_due_ms,
            next_due_topic=totals.next_due_topic,
            ready=totals.ready,
            oldest_ready_ms=totals.oldest_ready_ms,
            leased=totals.leased,
            consumers=totals.consumers,
            dead_letters=totals.dead_letters,
            early=totals.early,
            produced=rates.produced,
            delivered=rates.delivered,
            acked=rates.acked,
            data_bytes=totals.data_bytes,
            free_bytes=broker.disk_free_bytes,
            reserve_bytes=broker.config.disk_reserve_bytes,
            attention=totals.attention,
            attention_more=totals.attention_more,
        )
    )


async def _show_topics(visit: Visit) -> web.Response:
    return _json(await list_topics(visit, *asked_topics(visit)))


async def _show_letters(visit: Visit) -> web.Response:
    return _json(await list_letters(visit))


async def _show_timeline(visit: Visit) -> web.Response:
    unit, start = visit.query.get("unit", ""), visit.query.get("start_ms", "")
    if not (unit in UNITS and start.isascii() and start.isdigit() and len(start) < 16):
        raise PageRefusal("That is no window.")
    return _json(await count_window(visit, await visit.topics(), window(unit, int(start))))


async def _show_ahead(visit: Visit) -> web.Response:
    return _json(await look_ahead(visit, await visit.topics()))


async def _show_scheduled(visit: Visit) -> web.Response:
    listed, _ = await list_scheduled(visit, asked_search(visit))
    return _json(listed)


async def _show_storage(visit: Visit) -> web.Response:
    return _json(await list_storage(visit))


def _json(figures: DataclassInstance) -> web.Response:
    return web.json_response(asdict(figures))


FIGURE_ROUTES: list[PageRoute] = [
    route("GET", OVERVIEW, _show_overview, "GetStats"),
    route("GET", TOPICS, _show_topics, "GetTopic"),
    route("GET", DEAD_LETTERS, _show_letters, "ListDeadLetters"),
    route("GET", TIMELINE, _show_timeline, "CountScheduled"),
    route("GET", AHEAD, _show_ahead, "CountScheduled"),
    route("GET", SCHEDULED, _show_scheduled, "ListScheduled"),
    route("GET", STORAGE, _show_storage, "GetStats"),
]
