"""Figures of one shard for its front, which makes pages about all shards of them: JSON, on the shard's socket alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from broker.web.dead_letters import list_letters
from broker.web.overview import look_over
from broker.web.site import PageRoute, Visit, route
from broker.web.topics import asked_topics, list_topics

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OVERVIEW, TOPICS, DEAD_LETTERS = "/figures", "/figures/topics", "/figures/dead-letters"


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
    look = await look_over(broker)
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
    return _json(list_topics(visit.broker, *asked_topics(visit)))


async def _show_letters(visit: Visit) -> web.Response:
    return _json(await list_letters(visit.broker))


def _json(figures: DataclassInstance) -> web.Response:
    return web.json_response(asdict(figures))


FIGURE_ROUTES: list[PageRoute] = [
    route("GET", OVERVIEW, _show_overview),
    route("GET", TOPICS, _show_topics),
    route("GET", DEAD_LETTERS, _show_letters),
]
