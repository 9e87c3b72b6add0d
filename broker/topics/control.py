"""Control of subscriptions by operators: seek, pause, change of settings.

Each is one record that states the outcome; `Subscription.apply` does the rest, and what consumers hold or are about
to be sent follows from it in the same step.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from broker.errors import NotFound
from broker.model import START, Position
from broker.policy import SubscriptionPolicy
from broker.storage.ledger import Ledger
from broker.storage.records import Seeked, SubscriptionChanged
from broker.subscriptions.subscription import Subscription
from broker.topics.policies import check_subscription_policy
from broker.topics.refusals import subscription_not_found
from broker.topics.topic import Topic


async def seek(topic: Topic, subscription: Subscription, start: Position) -> int:
    """Let a subscription begin at a position: nothing before it is owed, everything from there on is.

    Returns, once that is durable, how many messages were owed until then.
    """
    _check_there(topic, subscription)
    record = Seeked(topic.topic_id, subscription.subscription_id, start)
    owed_before = 0

    def apply(lsn: int) -> None:
        nonlocal owed_before
        owed_before = subscription.unsettled_count()
        topic.apply(record, lsn)

    await asyncio.shield(topic.submit_record(record, apply))
    return owed_before


async def skip_all(topic: Topic, subscription: Subscription) -> int:
    """Let a subscription be owed nothing of what was submitted so far; how many messages that skips."""
    return await seek(topic, subscription, topic.latest_position())


async def pause(topic: Topic, subscription: Subscription, *, paused: bool) -> None:
    """Stop delivery, or let it go on; returns when that is durable."""
    _check_there(topic, subscription)
    await topic.subscriptions.change(replace(_decided(topic, subscription), paused=paused))


async def update_policy(
    topic: Topic, subscription: Subscription, given: SubscriptionPolicy, named: set[str]
) -> None:
    """Set the named fields of a subscription's policy; returns when that is durable."""
    _check_there(topic, subscription)
    decided = _decided(topic, subscription)
    policy = replace(decided.policy, **{name: getattr(given, name) for name in named})
    check_subscription_policy(subscription.type, policy, topic.subscriptions.effective(policy))
    if named & {"max_delivery_attempts", "dead_letter_topic"}:
        topic.subscriptions.check_dead_letters(subscription.name, policy)
    await topic.subscriptions.change(replace(decided, policy=policy))


def position_of_id(topic: Topic, position: Position) -> Position:
    """The message of that id, or the next one that is there; NotFound for what lies beyond the last one."""
    latest = topic.latest_position()
    if position > latest != START:
        raise NotFound(
            f"Topic {topic.name!r} has no message {position.ledger_id}:{position.entry_id} and none after it",
            reason="POSITION_NOT_FOUND",
            topic=topic.name,
        )
    return first_at_or_after(topic, position)


async def position_of_time(topic: Topic, publish_time_ms: int) -> Position:
    """The first message stored at or after a time, or the next one to come.

    The times at which messages were stored rise, but where the clock was stepped back; there it is one of those that
    lie around the step.
    """
    while True:
        with contextlib.suppress(NotFound):  # the ledger was dropped meanwhile: among those that are left
            return await _position_of_time(topic, publish_time_ms)


async def _position_of_time(topic: Topic, publish_time_ms: int) -> Position:
    before: Ledger | None = None  # the last ledger that begins earlier: the message may lie in it
    for ledger in topic.log:
        if topic.ledgers.facts[ledger.name.ledger_id].first_publish_ms >= publish_time_ms:
            break
        before = ledger
    if before is None:
        return topic.log.begin
    low, high = 0, before.entry_count  # the answer lies in [low, high]
    while low < high:
        middle = (low + high) // 2
        # By its id: another generation may take its place meanwhile.
        rows = await topic.log.read_rows(before.name.ledger_id, middle, 1)
        if int(rows["publish_time_ms"][0]) < publish_time_ms:
            low = middle + 1
        else:
            high = middle
    return first_at_or_after(topic, Position(before.name.ledger_id, low))


def first_at_or_after(topic: Topic, position: Position) -> Position:
    """The first message at or after a position, or the next one to come."""
    log, (ledger_id, entry_id) = topic.log, position
    count = log.entry_count(ledger_id)
    if count is not None and entry_id < count:
        return position
    following = log.next_ledger_id(ledger_id)
    if following is not None:
        return Position(following, 0)
    return min(max(log.end, position), topic.latest_position())  # perhaps on its way to the disk


def _check_there(topic: Topic, subscription: Subscription) -> None:
    if topic.deleted or subscription.deleted:
        raise subscription_not_found(topic.name, subscription.name)


def _decided(topic: Topic, subscription: Subscription) -> SubscriptionChanged:
    """Return the settings, counting changes on their way: two at once must not undo each other."""
    return subscription.decided or SubscriptionChanged(
        topic.topic_id, subscription.subscription_id, subscription.image.policy, subscription.paused
    )
