"""Topics and their subscriptions: counts, consumers, settings in force; pause, resume and skip."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from heapq import nsmallest
from urllib.parse import quote, urlencode

from aiohttp import web

from broker.errors import Refused
from broker.folder.broker import Broker
from broker.model import count_entries
from broker.observe.last_hour import HourOfCounter
from broker.policy import (
    POLICY_SPECS,
    EffectiveSubscriptionPolicy,
    EffectiveTopicPolicy,
    SubscriptionPolicy,
    TopicPolicy,
)
from broker.settings import SettingKind, Spec, Value, show
from broker.subscriptions.subscription import Subscription
from broker.topics.dead_letter_frames import dead_letter_topic_name
from broker.topics.topic import Topic
from broker.web.bulk_changes import list_bulk_changes
from broker.web.overview import quantile_ms
from broker.web.owed import owed_link
from broker.web.refusals import PageRefusal
from broker.web.site import Missing, Visit

TOPICS_PAGE = 50
_CONSUMERS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic in the list."""

    name: str
    scheduled: int
    next_due_ms: int | None
    subscriptions: int
    ready: int
    leased: int
    consumers: int
    data_bytes: int
    hour: float
    """Messages produced a second, over the last hour."""


@dataclass(frozen=True, slots=True)
class TopicList:
    """A page of the list of topics."""

    rows: Sequence[TopicRow]
    count: int
    """Of all topics."""
    is_more: bool
    """Others follow."""


@dataclass(frozen=True, slots=True)
class ConsumerRow:
    """A connected consumer."""

    name: str
    permits: int
    leased: int
    state: str


@dataclass(frozen=True, slots=True)
class SubscriptionRow:
    """A subscription, and who consumes from it."""

    name: str
    type: str
    paused: bool
    paced: str
    """The limit of pacing that ready messages wait for; empty if none."""
    honors_delay: bool
    ready: int
    leased: int
    retrying: int
    scheduled: int
    """Without those that retry."""
    dead_letters: int
    oldest_age_ms: int
    late_p99_ms: float
    paced_p99_ms: float | None
    delivered: int
    early: int
    consumers: Sequence[ConsumerRow]
    consumer_count: int
    permits: int
    settings: Sequence[tuple[str, str, bool]]
    link: str
    """Of the page with its messages."""
    hours: Sequence[tuple[str, HourOfCounter]]
    """Of what is told of the last hour, each with its name."""


async def show_topics(visit: Visit) -> web.Response:
    """GET /topics?q=&after="""
    return await page_of_topics(visit, await list_topics(visit, *asked_topics(visit)))


def asked_topics(visit: Visit) -> tuple[str, str]:
    """Return a part of the names that are wanted, and the name after which the page begins."""
    return visit.query.get("q", "").strip(), visit.query.get("after", "")


async def list_topics(visit: Visit, wanted: str, after: str) -> TopicList:
    """Return the next topics by name."""
    topics = await visit.topics("GetTopic")
    found = [topic for topic in topics if topic.name > after and wanted.lower() in topic.name.lower()]
    rows = [_topic_row(visit, topic) for topic in nsmallest(TOPICS_PAGE, found, key=lambda topic: topic.name)]
    return TopicList(rows, len(topics), len(found) > len(rows))


async def page_of_topics(visit: Visit, listed: TopicList, missing: Sequence[Missing] = ()) -> web.Response:
    """`missing`: what the list lacks."""
    wanted, after = asked_topics(visit)
    following = {"q": wanted, "after": listed.rows[-1].name} if listed.is_more else {}
    return await visit.page(
        "topics.html",
        q=wanted,
        rows=listed.rows,
        count=listed.count,
        next_link="/topics?" + urlencode(following) if following else "",
        first_link="/topics?" + urlencode({"q": wanted}) if after else "",
        missing=missing,
    )


async def show_topic(visit: Visit) -> web.Response:
    """GET /topics/{topic}?after="""
    topic, broker = visit.topic(), visit.broker
    after = visit.query.get("after", "")
    subscriptions = [subscription for subscription in visit.subscriptions(topic) if subscription.name > after]
    page = nsmallest(TOPICS_PAGE, subscriptions, key=lambda subscription: subscription.name)
    for subscription in page:  # a look without a wait tells of the last search, which may never have been
        await topic.counts.find_oldest_age_ms(subscription)
    index = topic.index.tracker.stats()
    counters = topic.counters
    here = f"/topics/{quote(topic.name)}"
    return await visit.page(
        "topic.html",
        topic=topic.name,
        row=_topic_row(visit, topic),
        hours=[("produced", broker.rates.produced(topic))],
        created_ms=topic.create_time_ms,
        produced=counters.produced_messages,
        cancelled=counters.cancelled_messages,
        moved=counters.moved_messages,
        last_due_ms=topic.index.last_due_ms(),
        ledgers=topic.log.ledger_count,
        buckets=index.bucket_count,
        index_bytes=index.disk_bytes,
        subscriptions=[_subscription_row(broker, topic, subscription) for subscription in page],
        settings_rows=_settings(topic.policy, topic.policies.own),
        limits=visit.site.calls.limits_of(topic.name, visit.principal),
        bulk_changes=list_bulk_changes(topic) if visit.may("ListBulkChanges", topic.name) else [],
        next_link=here + "?" + urlencode({"after": page[-1].name}) if len(subscriptions) > len(page) else "",
        first_link=here if after else "",
    )


async def change_subscription(visit: Visit) -> web.Response:
    """POST /topics/{topic}/subscriptions/{name}: pause or resume"""
    topic, name = visit.params["topic"], visit.params["name"]
    action = visit.form.get("action")
    if action not in ("pause", "resume"):
        raise PageRefusal("The form says neither pause nor resume: nothing was changed.")
    paused = action == "pause"
    await visit.call("Pause" if paused else "Resume", topic=topic, subscription=name)
    return visit.done("done", f"{'Paused' if paused else 'Resumed'}: {name}.", f"/topics/{quote(topic)}")


async def show_skip(visit: Visit) -> web.Response:
    """GET /topics/{topic}/subscriptions/{name}/skip: what skipping would skip"""
    topic = visit.topic()
    subscription = topic.subscription(visit.params["name"])
    return await visit.page(
        "skip.html",
        topic=topic.name,
        name=subscription.name,
        owed=subscription.unsettled_count(),
        scheduled=topic.subscription_counts(subscription).scheduled,
    )


async def skip_all(visit: Visit) -> web.Response:
    """POST /topics/{topic}/subscriptions/{name}/skip"""
    topic, name = visit.params["topic"], visit.params["name"]
    skipped = int((await visit.call("SkipAll", topic=topic, subscription=name))["skipped_messages"])
    text = f"Skipped for {name}: {skipped:,}. It begins with the next message that is stored."
    return visit.done("done" if skipped else "nothing", text, f"/topics/{quote(topic)}")


def _topic_row(visit: Visit, topic: Topic) -> TopicRow:
    subscriptions = visit.subscriptions(topic)
    counts = [topic.subscription_counts(subscription) for subscription in subscriptions]
    return TopicRow(
        name=topic.name,
        scheduled=topic.index.scheduled_count(),
        next_due_ms=topic.index.next_due_ms(),
        subscriptions=len(subscriptions),
        ready=sum(count.ready for count in counts),
        leased=sum(count.leased for count in counts),
        consumers=sum(len(subscription.consumers) for subscription in subscriptions),
        data_bytes=topic.log.data_bytes,
        hour=visit.broker.rates.produced(topic).rate,
    )


def _subscription_row(broker: Broker, topic: Topic, subscription: Subscription) -> SubscriptionRow:
    subscription.consumers.expire_leases()  # without consumers nobody does it
    counts = topic.subscription_counts(subscription)
    effective = subscription.policy
    with contextlib.suppress(Refused):  # the names are too long for one of their own
        place = dead_letter_topic_name(topic.name, subscription.name, effective)
        effective = replace(effective, dead_letter_topic=place)
    consumers = list(subscription.consumers)
    held = {
        consumer.consumer_id: count_entries(subscription.states.leases.held(consumer.consumer_id))
        for consumer in consumers[:_CONSUMERS_SHOWN]
    }
    retrying = min(counts.scheduled, subscription.states.redelivery.count_after(broker.clock.now_ms()))
    paced_lateness = subscription.counters.paced_lateness.stats()
    return SubscriptionRow(
        name=subscription.name,
        type=subscription.type.name,
        paused=subscription.paused,
        paced=_paced(subscription, broker.clock.now_ms()) if counts.ready else "",
        honors_delay=subscription.honors_delay,
        ready=counts.ready,
        leased=counts.leased,
        retrying=retrying,
        scheduled=counts.scheduled - retrying,
        dead_letters=count_entries(broker.dead_letters.still_held(subscription)),
        oldest_age_ms=topic.counts.known_oldest_age_ms(subscription, counts),
        late_p99_ms=quantile_ms(subscription.counters.lateness.stats(), 0.99),
        paced_p99_ms=quantile_ms(paced_lateness, 0.99) if paced_lateness.count else None,
        delivered=subscription.counters.delivered_messages,
        early=subscription.counters.early_deliveries,
        consumers=[
            ConsumerRow(
                name=consumer.name or consumer.consumer_id,
                permits=consumer.permits,
                leased=held[consumer.consumer_id],
                state=_state(consumer.draining, consumer.silent, consumer.permits),
            )
            for consumer in consumers[:_CONSUMERS_SHOWN]
        ],
        consumer_count=len(consumers),
        permits=sum(consumer.permits for consumer in consumers),
        settings=_settings(effective, subscription.image.policy),
        link=owed_link(topic.name, subscription.name),
        hours=list(
            zip(("delivered", "acked"), broker.rates.delivered_and_acked(topic, subscription), strict=True)
        ),
    )


def _paced(subscription: Subscription, now_ms: int) -> str:
    pacing = subscription.pacing
    if not pacing.holds(now_ms):
        return ""
    if pacing.waits_for_leases:
        return "paced: as many leased as may be"
    return f"paced: next in {show(SettingKind.DURATION, pacing.held_through_ms - now_ms)}"


def _state(draining: bool, silent: bool, permits: int) -> str:
    if draining:
        return "draining"
    return "silent" if silent else "takes more" if permits > 0 else "has no permits"


def _settings(
    effective: EffectiveTopicPolicy | EffectiveSubscriptionPolicy, own: TopicPolicy | SubscriptionPolicy
) -> list[tuple[str, str, bool]]:
    """Each effective setting: its name, its value, and whether it was set here rather than inherited."""
    return [
        (
            field.name,
            _shown(POLICY_SPECS[field.name], getattr(effective, field.name)),
            getattr(own, field.name) is not None,
        )
        for field in fields(effective)
    ]


def _shown(spec: Spec, value: Value | None) -> str:
    """A policy's value as people read it."""
    if value is None:
        return "none"
    if spec.choices and isinstance(value, int):
        return spec.choices[value - 1]
    return f"{value:,}" if spec.kind is SettingKind.COUNT else show(spec.kind, value)
