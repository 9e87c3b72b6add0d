"""What a record of two parts means to the subscriptions of either topic. Pure: called by `Topic.apply`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pyroaring import BitMap

from broker.model import Entries
from broker.storage.records import Produced, SettleReason, Transferred
from broker.subscriptions.subscription import Subscription


def apply_settled_part(subscriptions: Mapping[int, Subscription], record: Transferred) -> None:
    """Messages left a subscription of this topic; given up there, their new places are remembered."""
    if subscription := subscriptions.get(record.settled.subscription_id):
        subscription.apply_settled(record.settled)
        if record.settled.reason is SettleReason.DEAD_LETTERED:
            subscription.apply_dead_letters(_entries_of(record.produced))


def apply_produced_part(
    subscriptions: Mapping[int, Subscription], record: Transferred
) -> Iterator[Subscription]:
    """Messages were stored in this topic for all of its subscriptions, or for the one that the record names.

    Yields each that they are not for.
    """
    for subscription in subscriptions.values() if record.subscription_id else ():
        if subscription.subscription_id != record.subscription_id:
            subscription.apply_not_for(_entries_of(record.produced))
            yield subscription


def _entries_of(record: Produced) -> Entries:
    first = record.first_entry_id
    return {record.ledger_id: BitMap(range(first, first + len(record.times)))}
