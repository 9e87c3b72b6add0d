"""Counts of topics and subscriptions, as the API shows them."""

from __future__ import annotations

import asyncio

from broker.config import check_name
from broker.errors import InvalidRequest
from broker.folder.broker import Broker
from broker.model import count_entries
from broker.rpc.access_rules import SHOW_SUBSCRIPTION
from broker.rpc.caller import may_see
from broker.rpc.entries import api_type
from broker.rpc.paging import check_page_size, decode_token, encode_token
from broker.subscriptions.subscription import Subscription
from broker.topics.topic import Topic
from postdate_api.v1 import admin_pb2

TOPICS_MAX = 1_000
"""Of one page."""
SUBSCRIPTIONS_MAX = 10_000
"""A page ends when it has so many: it must fit into a frame."""
_EXACT_SECONDS = 2.0
"""Seconds that an answer waits for counts that are being found out, for a moment after a start or a seek."""


async def get_stats(broker: Broker, request: admin_pb2.GetStatsRequest) -> admin_pb2.GetStatsResponse:
    """One page of counts, by name."""
    if len(request.topics) > TOPICS_MAX:
        raise InvalidRequest(f"At most {TOPICS_MAX} topics at once", field="topics", reason="TOO_MANY_NAMES")
    for index, name in enumerate(request.topics):
        check_name("topic", name, f"topics[{index}]")
    page_size = check_page_size(request.page_size) if request.page_size else TOPICS_MAX
    after = decode_token(request.page_token)
    asked = set(request.topics) or filter(may_see, broker.registry.by_name)
    names = [name for name in sorted(asked) if name > after]
    response = admin_pb2.GetStatsResponse()
    loop = asyncio.get_running_loop()
    patient_until = loop.time() + _EXACT_SECONDS
    subscriptions = 0
    for index, name in enumerate(names):
        if index == page_size or subscriptions > SUBSCRIPTIONS_MAX:
            response.next_page_token = encode_token(names[index - 1])
            break
        topic = broker.registry.by_name.get(name)
        if topic is None and not request.topics:
            continue  # deleted since the page was begun
        topic = broker.registry.topic(name)
        await topic.counts.wait_exact(max(0.0, patient_until - loop.time()))
        response.topics.append(await _topic_stats(broker, topic))
        subscriptions += len(topic.subscriptions)
    return response


async def _topic_stats(broker: Broker, topic: Topic) -> admin_pb2.TopicStats:
    subscriptions = [
        await _subscription_stats(broker, topic, subscription)
        for subscription in sorted(topic.subscriptions.values(), key=lambda listed: listed.name)
        if may_see(topic.name, SHOW_SUBSCRIPTION, subscription.name)
    ]
    index, scheduled = topic.index.tracker.stats(), topic.index.scheduled_count()
    return admin_pb2.TopicStats(
        topic=topic.name,
        scheduled_messages=scheduled,
        scheduled_bytes=scheduled * topic.log.data_bytes // max(1, topic.log.entry_total),
        next_due_time_ms=topic.index.next_due_ms() or 0,
        last_due_time_ms=topic.index.last_due_ms() or 0,
        ledgers=topic.log.ledger_count,
        storage_bytes=topic.log.data_bytes + 52 * topic.log.entry_total,
        index=admin_pb2.IndexStats(
            buckets=index.bucket_count,
            loaded_entries=index.loaded_count,
            memory_bytes=index.memory_bytes,
            disk_bytes=index.disk_bytes,
            rebuilds=topic.index.rebuilds,
        ),
        subscriptions=subscriptions,
    )


async def _subscription_stats(
    broker: Broker, topic: Topic, subscription: Subscription
) -> admin_pb2.SubscriptionStats:
    subscription.consumers.expire_leases()  # without consumers nobody does it, and nobody holds what is overdue
    age_ms = await topic.counts.find_oldest_age_ms(subscription)
    counts = topic.subscription_counts(subscription)
    pacing = subscription.pacing
    paced = bool(counts.ready) and pacing.holds(broker.clock.now_ms())
    return admin_pb2.SubscriptionStats(
        name=subscription.name,
        type=api_type(subscription),
        ready_messages=counts.ready,
        leased_messages=counts.leased,
        scheduled_messages=counts.scheduled,
        dead_letter_messages=count_entries(broker.dead_letters.still_held(subscription)),
        oldest_ready_age_ms=age_ms if counts.ready else 0,
        consumers=len(subscription.consumers),
        paused=subscription.paused,
        paced=paced,
        paced_until_ms=pacing.held_through_ms if paced and not pacing.waits_for_leases else 0,
    )
