"""Subscription types: for each, who gets the next entry, in which order, when, and who may attach. Pure.

| type       | the next entry goes to          | what comes back      | delivery times      | consumers | Receive |
| ---------- | ------------------------------- | -------------------- | ------------------- | --------- | ------- |
| SHARED     | the consumers in turn           | when its time comes  | always honoured     | many      | yes     |
| KEY_SHARED | the owner of its key            | first, of each key   | always honoured     | many      | no      |
| EXCLUSIVE  | the one consumer                | before all others    | as the policy says  | one       | no      |
| FAILOVER   | the first that does not leave   | before all others    | as the policy says  | many      | no      |

Every rule of a type stands here, and whoever needs one asks the type. `Dispatcher` chooses its `Steps` by `by_key`: a
type that hands out in a way of its own needs a third one. The SDK has an enum of the same names and numbers, in
postdate/model.py. Numbers are those of the API and of manifests.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from broker.errors import Refused
from broker.subscriptions.consumer import Consumer


class SubscriptionType(IntEnum):
    """Type of a subscription; fixed when the subscription is created."""

    SHARED = 1
    KEY_SHARED = 2
    EXCLUSIVE = 3
    FAILOVER = 4

    @property
    def by_key(self) -> bool:
        """Return whether messages of one key go to one consumer at a time; else each batch goes to one consumer."""
        return self is SubscriptionType.KEY_SHARED

    @property
    def in_order(self) -> bool:
        """Return whether entries on their way back hold up all others, so that the next consumer gets them first."""
        return self in (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER)

    @property
    def allows_receive(self) -> bool:
        """Return whether messages may be taken one call at a time, by consumers that do not stay."""
        return self is SubscriptionType.SHARED

    def admits(self, consumer_count: int) -> bool:
        """Return whether one more consumer may attach to so many."""
        return self is not SubscriptionType.EXCLUSIVE or not consumer_count

    def honors_delay(self, policy_honors_delay: bool | None) -> bool:
        """Return whether no message is sent before its delivery time, under a policy."""
        return not self.in_order or bool(policy_honors_delay)

    def check_honor_delay(self, asked: bool | None) -> None:
        """Raise Refused if it is asked to ignore delivery times, and the type always honours them."""
        if asked is False and self.honors_delay(False):
            raise Refused(f"A {self.name} subscription honours delivery times", reason="HONOR_DELAY_MISMATCH")

    def candidates(self, consumers: Sequence[Consumer]) -> Sequence[Consumer]:
        """Return the consumers that may be given the next entry, if they can take it; in turn if there are several."""
        if self is not SubscriptionType.FAILOVER:
            return consumers
        return next(([consumer] for consumer in consumers if not consumer.draining), [])
