"""Applies records that cancel or move messages: to the log, the index, the keys and every subscription."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.model import Entries, count_entries
from broker.storage.changes import Cancelled, Moved
from broker.storage.log import TopicLog
from broker.storage.records import Settled, SettleReason
from broker.subscriptions.subscription import Subscription

if TYPE_CHECKING:
    from broker.topics.topic import Topic


def apply_cancelled(topic: Topic, record: Cancelled) -> None:
    """Nobody gets the entries any more: for every subscription they are done."""
    entries = record.entries
    topic.counts.changed(record.ledgers)
    topic.log.cancel(entries)
    topic.counters.cancelled_messages += count_entries(entries)
    for subscription in topic.subscriptions.values():
        _settle_cancelled(subscription, entries)
    topic.log.release(entries)


def apply_moved(topic: Topic, record: Moved, lsn: int) -> None:
    """The entries are due at another time; those of a ledger that is gone are nobody's."""
    topic.counts.changed(record.ledgers)
    for ledger_id, changed in record.ledgers.items():
        facts = topic.ledger_facts.get(ledger_id)
        if facts is not None and changed.new_ms is not None:
            topic.log.move(ledger_id, changed.entry_ids, changed.new_ms, lsn)
            topic.ledger_facts[ledger_id] = facts.moved(changed)
            topic.counters.moved_messages += len(changed.entry_ids)
    topic.keys.moved(record.ledgers)
    entries = record.entries
    for subscription in topic.subscriptions.values():
        subscription.apply_moved(entries)
    topic.log.release(entries)


def settle_cancelled(log: TopicLog, subscription: Subscription) -> None:
    """A subscription is new, or begins elsewhere: what was cancelled before it is not owed."""
    for ledger_id, amendments in log.amendments.items():
        if amendments.cancelled:
            _settle_cancelled(subscription, {ledger_id: amendments.cancelled})


def _settle_cancelled(subscription: Subscription, entries: Entries) -> None:
    subscription.apply_settled(
        Settled(subscription.topic_id, subscription.subscription_id, SettleReason.CANCELLED, entries)
    )
