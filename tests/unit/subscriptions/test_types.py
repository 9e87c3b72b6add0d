"""Every subscription type against the table in its module's head, and against the numbers of the API and of manifests."""

from __future__ import annotations

import pytest

from broker.errors import Refused
from broker.storage.manifest import SUBSCRIPTION_TYPES
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.types import SubscriptionType
from postdate_api.v1 import consumer_pb2

RULES = {
    #            by key, in order, Receive, admits a second, honours delays without and with the policy
    "SHARED": (False, False, True, True, True, True),
    "KEY_SHARED": (True, False, False, True, True, True),
    "EXCLUSIVE": (False, True, False, False, False, True),
    "FAILOVER": (False, True, False, True, False, True),
}
TYPES = pytest.mark.parametrize("type_", SubscriptionType)


@TYPES
def test_rules_of_every_type(type_: SubscriptionType) -> None:
    assert RULES[type_.name] == (
        type_.by_key,
        type_.in_order,
        type_.allows_receive,
        type_.admits(1),
        type_.honors_delay(None),
        type_.honors_delay(True),
    )
    assert type_.admits(0)
    assert type_.honors_delay(False) == type_.honors_delay(None)


def test_numbers_are_those_of_the_api_and_of_manifests() -> None:
    assert list(SUBSCRIPTION_TYPES) == list(SubscriptionType)
    named = {f"SUBSCRIPTION_TYPE_{type_.name}": int(type_) for type_ in SubscriptionType}
    assert {"SUBSCRIPTION_TYPE_UNSPECIFIED": 0, **named} == dict(consumer_pb2.SubscriptionType.items())


@TYPES
def test_next_entry_goes_to_candidates_that_do_not_leave(type_: SubscriptionType) -> None:
    consumers = [Consumer(name, name, 1000) for name in ("first", "second", "third")]
    consumers[0].draining = True
    candidates = consumers[1:2] if type_ is SubscriptionType.FAILOVER else consumers
    assert list(type_.candidates(consumers)) == candidates
    for consumer in consumers:
        consumer.draining = True
    assert not any(each.can_take for each in type_.candidates(consumers))
    assert list(type_.candidates([])) == []


@TYPES
def test_only_types_that_may_ignore_delivery_times_can_be_asked_to(type_: SubscriptionType) -> None:
    type_.check_honor_delay(None)
    type_.check_honor_delay(True)
    if type_.in_order:
        type_.check_honor_delay(False)
        return
    with pytest.raises(Refused) as refusal:
        type_.check_honor_delay(False)
    assert refusal.value.reason == "HONOR_DELAY_MISMATCH"
