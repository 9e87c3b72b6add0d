"""The overview: is it on time, what is next, what needs somebody."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote
from weakref import WeakKeyDictionary

from aiohttp import web

from broker.folder.broker import Broker
from broker.model import count_entries
from broker.observe.lateness import HistogramStats
from broker.runtime.supervise import YieldBudget
from broker.subscriptions.subscription import Subscription
from broker.topics.counts import SubscriptionCounts
from broker.topics.dead_letter_frames import HOLDER_NAME
from broker.topics.topic import Topic
from broker.web.calendar_window import window
from broker.web.chart import draw
from broker.web.site import Visit
from broker.web.timeline import bar_links, count_window

ATTENTION_MAX = 8
DELIVERED_EARLY = "delivered before its time: this must never happen"
_RATE_SECONDS_MIN = 4.0
_RATE_SECONDS_MAX = 120.0
_SAMPLES_MAX = 60
_VIEWERS_MAX = 100
_LATE_MS = 1_000
"""Later than this at the 99th percentile is worth a colour."""
_WAITING_MS = 60_000
"""A message that has been ready for longer is worth a headline."""
_SEARCH_SECONDS = 1.0
"""So long a look waits for ages that were not known, or the first one calls on time what has stood still for hours."""


@dataclass(slots=True)
class Totals:
    """Sums over all topics and subscriptions at a moment."""

    at_ns: int
    topics: int = 0
    subscriptions: int = 0
    pending: int = 0
    ready: int = 0
    oldest_ready_ms: int = 0
    unattended: int = 0  # of the ready ones, those without a consumer, or paused
    leased: int = 0
    consumers: int = 0
    dead_letters: int = 0
    early: int = 0
    produced: int = 0
    delivered: int = 0
    acked: int = 0
    data_bytes: int = 0
    rebuilds: int = 0
    next_due_ms: int | None = None
    next_due_topic: str = ""
    lateness: list[int] = field(default_factory=list)
    lateness_max_ms: float = 0.0
    attention: list[tuple[str, str, str]] = field(default_factory=list)  # (link, name, what)
    attention_more: int = 0  # of such notes, those that are left out
    sought: list[tuple[Topic, Subscription, SubscriptionCounts]] = field(default_factory=list)
    """Those whose oldest message is looked for."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Messages a second over the last moments that somebody looked, or since the start."""

    produced: float
    delivered: float
    acked: float
    seconds: float
    lateness: HistogramStats | None  # of that time


_samples: WeakKeyDictionary[Broker, OrderedDict[str, deque[Totals]]] = WeakKeyDictionary()
"""Figures that earlier looks found, by who has looked, for each sees other topics: rates are told from them, so that
nothing is measured while nobody looks."""


@dataclass(frozen=True, slots=True)
class OverviewFigures:
    """All topics and subscriptions at a moment, and what became of them since earlier ones."""

    totals: Totals
    lateness: HistogramStats
    rates: Rates
    state: str
    """good, late, waiting or bad."""


async def show_overview(visit: Visit) -> web.Response:
    """GET /"""
    broker = visit.broker
    now_ms = broker.clock.now_ms()
    look = await look_over(visit)
    totals, lateness, rates = look.totals, look.lateness, look.rates
    journal = broker.journal.stats()
    counters = broker.counters
    shown = window("hour", now_ms)
    counted = await visit.topics("CountScheduled")
    due = await count_window(visit, counted, shown)
    return await visit.page(
        "overview.html",
        totals=totals,
        lateness=lateness,
        p50=quantile_ms(lateness, 0.5),
        p99=quantile_ms(lateness, 0.99),
        recent=rates.lateness,
        recent_p99=quantile_ms(rates.lateness, 0.99) if rates.lateness else 0.0,
        rates=rates,
        state=look.state,
        not_ready=broker.not_ready_because,
        started_ms=broker.started_ms,
        broker_id=broker.broker_id,
        journal=journal,
        journal_failed=broker.journal.failed is not None,
        sync_p50=quantile_ms(counters.journal_sync.stats(), 0.5),
        sync_p99=quantile_ms(counters.journal_sync.stats(), 0.99),
        lag_p50=quantile_ms(counters.loop_lag.stats(), 0.5),
        lag_p99=quantile_ms(counters.loop_lag.stats(), 0.99),
        lag_max=counters.loop_lag.stats().max_seconds * 1000,
        free_bytes=broker.disk_free_bytes,
        reserve_bytes=broker.config.disk_reserve_bytes,
        backup_ms=counters.backup_last_ms,
        chart=draw(shown, due.bars, now_ms, height=150),
        link_of=bar_links(shown, visit.scope("")),
        tally=due,
        sees_all_due=len(counted) >= totals.topics,
    )


async def look_over(visit: Visit) -> OverviewFigures:
    """Sum up all topics that somebody may see, and keep the sums for the rates that later looks tell."""
    broker = visit.broker
    totals, bounds = await _sum(visit)
    lateness = _stats(totals.lateness, bounds, totals.lateness_max_ms)
    samples = _samples_of(broker, visit.principal)
    rates = _rates(totals, samples, (broker.clock.now_ms() - broker.started_ms) / 1000, bounds)
    if not samples or (totals.at_ns - samples[-1].at_ns) / 1e9 >= 1.0:
        samples.append(totals)
    return OverviewFigures(totals, lateness, rates, _state(broker, totals, rates.lateness or lateness))


def quantile_ms(stats: HistogramStats, part: float) -> float:
    """The bound of the histogram below which that part of all lies; the maximum where that is less."""
    wanted, seen = stats.count * part, 0
    for bound, count in zip(stats.bounds_seconds, stats.counts, strict=False):
        seen += count
        if seen >= wanted:
            return min(bound, stats.max_seconds) * 1000
    return stats.max_seconds * 1000


def _samples_of(broker: Broker, principal: str) -> deque[Totals]:
    viewers = _samples.setdefault(broker, OrderedDict())
    samples = viewers.setdefault(principal, deque(maxlen=_SAMPLES_MAX))
    viewers.move_to_end(principal)
    if len(viewers) > _VIEWERS_MAX:
        viewers.popitem(last=False)
    return samples


async def _sum(visit: Visit) -> tuple[Totals, tuple[float, ...]]:
    broker = visit.broker
    totals = Totals(broker.clock.monotonic_ns())
    budget = YieldBudget(broker.clock)
    bounds: tuple[float, ...] = ()
    for topic in await visit.topics("GetStats"):
        totals.topics += 1
        totals.pending += topic.index.scheduled_count()
        totals.produced += topic.counters.produced_messages
        totals.data_bytes += topic.log.data_bytes
        totals.rebuilds += topic.index.rebuilds
        next_ms = topic.index.next_due_ms()
        if next_ms is not None and (totals.next_due_ms is None or next_ms < totals.next_due_ms):
            totals.next_due_ms, totals.next_due_topic = next_ms, topic.name
        for subscription in visit.subscriptions(topic):
            bounds = _add(totals, broker, topic, subscription)
            await budget.spent()
        await budget.spent()
    await _find_oldest(totals)
    return totals, bounds


async def _find_oldest(totals: Totals) -> None:
    searches = {topic.counts.search for topic, *_ in totals.sought if topic.counts.search is not None}
    if searches:
        await asyncio.wait(searches, timeout=_SEARCH_SECONDS)
    for topic, subscription, counts in totals.sought:
        if not subscription.deleted:
            age_ms = topic.counts.known_oldest_age_ms(subscription, counts)
            totals.oldest_ready_ms = max(totals.oldest_ready_ms, age_ms)
    totals.sought.clear()


def _add(totals: Totals, broker: Broker, topic: Topic, subscription: Subscription) -> tuple[float, ...]:
    counts, counters = topic.subscription_counts(subscription), subscription.counters
    letters = count_entries(broker.dead_letters.still_held(subscription))
    totals.subscriptions += 1
    if (
        subscription.name != HOLDER_NAME
    ):  # what it holds waits for an operator, and is counted as dead letters
        totals.ready += counts.ready
        if counts.ready:
            _wait(totals, topic, subscription, counts)
    totals.leased += counts.leased
    totals.consumers += len(subscription.consumers)
    totals.dead_letters += letters
    totals.early += counters.early_deliveries
    totals.delivered += counters.delivered_messages
    totals.acked += counters.acked_messages
    stats = counters.lateness.stats()
    if stats.max_seconds or any(stats.counts):
        totals.lateness = [
            a + b for a, b in zip(totals.lateness or [0] * len(stats.counts), stats.counts, strict=True)
        ]
        totals.lateness_max_ms = max(totals.lateness_max_ms, stats.max_seconds * 1000)
    _note(totals, topic, subscription, counts.ready, letters)
    return stats.bounds_seconds


def _wait(totals: Totals, topic: Topic, subscription: Subscription, counts: SubscriptionCounts) -> None:
    """Count as late what is ready and stays so, though nothing was delivered that could be called so."""
    age_ms = topic.counts.known_oldest_age_ms(subscription, counts)
    totals.oldest_ready_ms = max(totals.oldest_ready_ms, age_ms)
    if topic.counts.search is not None:
        totals.sought.append((topic, subscription, counts))
    if subscription.paused or not subscription.consumers:
        totals.unattended += counts.ready


def _note(totals: Totals, topic: Topic, subscription: Subscription, ready: int, letters: int) -> None:
    """Note what somebody should look at: early deliveries first, of others those that are met first."""
    place = f"/topics/{quote(topic.name)}"
    if subscription.counters.early_deliveries:
        _keep_note(totals, 0, place, topic, subscription, DELIVERED_EARLY)
    end = len(totals.attention)
    if subscription.paused:
        _keep_note(totals, end, place, topic, subscription, f"paused, {ready:,} ready")
    elif ready and not subscription.consumers and subscription.name != HOLDER_NAME:
        _keep_note(totals, end, place, topic, subscription, f"{ready:,} ready and nobody consumes")
    if letters:
        link = f"/dead-letters/{quote(topic.name)}/{quote(subscription.name)}"
        told = f"{letters:,} dead letter{'s' if letters > 1 else ''}"
        _keep_note(totals, len(totals.attention), link, topic, subscription, told)


def _keep_note(
    totals: Totals, at: int, link: str, topic: Topic, subscription: Subscription, what: str
) -> None:
    totals.attention.insert(at, (link, f"{topic.name} / {subscription.name}", what))
    if len(totals.attention) > ATTENTION_MAX:
        totals.attention.pop()
        totals.attention_more += 1


def _stats(counts: Sequence[int], bounds: tuple[float, ...], max_ms: float) -> HistogramStats:
    return HistogramStats(bounds, tuple(counts) or (0,) * (len(bounds) + 1), 0.0, max_ms / 1000)


def _rates(now: Totals, samples: deque[Totals], uptime_seconds: float, bounds: tuple[float, ...]) -> Rates:
    """From the oldest earlier look that is not too old."""
    for sample in samples:
        seconds = (now.at_ns - sample.at_ns) / 1e9
        if _RATE_SECONDS_MIN <= seconds <= _RATE_SECONDS_MAX:
            counts = [
                a - b for a, b in zip(now.lateness, sample.lateness or [0] * len(now.lateness), strict=True)
            ]
            is_sound = (
                counts and min(counts) >= 0 and sum(counts)
            )  # else something was deleted, or nothing was sent
            return Rates(
                max(0, now.produced - sample.produced) / seconds,
                max(0, now.delivered - sample.delivered) / seconds,
                max(0, now.acked - sample.acked) / seconds,
                seconds,
                _stats(counts, bounds, now.lateness_max_ms) if is_sound else None,
            )
    seconds = max(uptime_seconds, 1.0)
    return Rates(now.produced / seconds, now.delivered / seconds, now.acked / seconds, seconds, None)


def _state(broker: Broker, totals: Totals, lateness: HistogramStats) -> str:
    """good, late, waiting or bad."""
    if totals.early or broker.not_ready_because is not None:
        return "bad"
    if totals.ready and totals.oldest_ready_ms > _WAITING_MS:
        return "waiting"
    return "late" if quantile_ms(lateness, 0.99) > _LATE_MS else "good"
