"""Messages that a subscription gives up: those that came back too often, or that a consumer does not want. Pure.

The subscription decides which; the topics above it know where they go.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from broker.model import Entries, bitmap_of, ids_of
from broker.subscriptions.attempts import Attempts

TOO_OFTEN = "max_delivery_attempts"
OVERDUE = "overdue"
NACKED = "nack"
DAMAGED = "damaged"
"""Reasons why a message was given up, in its dead letter; of a nack, if it gives no reason of its own."""

UNSENT = frozenset({OVERDUE, DAMAGED})
"""Reasons for which a message is given up that nobody was sent just now."""


class DeadLetterSink(Protocol):
    """Place where subscriptions leave what they give up; it knows them by their ids."""

    def check_place(self, topic_id: int, subscription_id: int) -> None:
        """Raise Refused if there is no place for dead letters of this subscription."""

    def give_up(
        self, topic_id: int, subscription_id: int, entries: Entries, reason: str, last_reason: str
    ) -> asyncio.Future[None]:
        """Make dead letters of entries that the subscription is `giving_up`.

        Done once that is durable, or once it is that they wait for redelivery because it cannot be.
        """

    def letters_held(self, topic_id: int, subscription_id: int) -> Entries:
        """The part of a subscription's `dead_letters` that nobody has dealt with."""


def worn_out(entries: Entries, attempts: Attempts, deliveries_max: int) -> Entries:
    """The part of a set that was delivered as often as it may be, once its present delivery has failed."""
    if not deliveries_max:
        return {}
    worn: Entries = {}
    for ledger_id, bitmap in entries.items():
        ids = ids_of(bitmap)
        last = ids[attempts.counts(ledger_id, ids) + 1 >= deliveries_max]
        if len(last):
            worn[ledger_id] = bitmap_of(last)
    return worn
