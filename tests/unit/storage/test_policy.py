"""Settings as they are stored: what is unset stays unset, and what is out of range is neither written nor read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import InvalidRequest
from broker.policy import EffectiveSubscriptionPolicy, SubscriptionPolicy, TopicPolicy, effective
from broker.storage.policy import (
    subscription_policy_from_record,
    subscription_policy_to_record,
    topic_policy_from_record,
    topic_policy_to_record,
)
from broker.storage.v1 import manifest_pb2 as pb

MS = st.integers(0, 1 << 53)
UINT32 = st.integers(1, (1 << 32) - 1)

topic_policies = st.builds(
    TopicPolicy,
    tracker=st.none() | st.integers(0, 2),
    tick_ms=st.none() | st.integers(1, 3_600_000),
    max_delay_ms=st.none() | MS,
    default_ttl_ms=st.none() | MS,
    ledger_max_age_ms=st.none() | MS,
    ledger_max_bytes=st.none() | UINT32,
    ledger_max_entries=st.none() | UINT32,
)
subscription_policies = st.builds(
    SubscriptionPolicy,
    lease_ms=st.none() | st.integers(1, 1 << 53),
    initial_backoff_ms=st.none() | MS,
    max_backoff_ms=st.none() | MS,
    backoff_multiplier=st.none() | st.floats(1, 100),
    honor_delay=st.none() | st.booleans(),
)


@given(topic_policies)
def test_topic_policies_come_back_as_they_were(policy: TopicPolicy) -> None:
    assert topic_policy_from_record(topic_policy_to_record(policy)) == policy


@given(subscription_policies)
def test_subscription_policies_come_back_as_they_were(policy: SubscriptionPolicy) -> None:
    assert subscription_policy_from_record(subscription_policy_to_record(policy)) == policy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tracker", 3),
        ("tick_ms", 0),
        ("tick_ms", -1),
        ("max_delay_ms", -1),
        ("max_delay_ms", (1 << 53) + 1),
        ("default_ttl_ms", -(1 << 63)),
        ("ledger_max_age_ms", -5),
        ("ledger_max_bytes", 1 << 32),
        ("ledger_max_bytes", 0),
        ("ledger_max_entries", 0),
    ],
)
def test_topic_settings_out_of_range_are_refused_in_both_directions(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        topic_policy_from_record(pb.TopicPolicyRecord(**{name: value}))
    with pytest.raises(InvalidRequest) as refused:
        topic_policy_to_record(TopicPolicy(**{name: value}))
    assert refused.value.field == f"policy.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease_ms", 0),
        ("lease_ms", -1),
        ("initial_backoff_ms", -1),
        ("max_backoff_ms", (1 << 53) + 1),
        ("backoff_multiplier", 0.5),
        ("backoff_multiplier", math.nan),
        ("backoff_multiplier", math.inf),
        ("backoff_multiplier", 1e300),
    ],
)
def test_subscription_settings_out_of_range_are_refused_in_both_directions(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        subscription_policy_from_record(pb.SubscriptionPolicyRecord(**{name: value}))
    with pytest.raises(InvalidRequest) as refused:
        subscription_policy_to_record(SubscriptionPolicy(**{name: value}))
    assert refused.value.field == f"policy.{name}"


def test_only_what_is_unset_is_taken_from_the_defaults() -> None:
    defaults = EffectiveSubscriptionPolicy(
        lease_ms=1, initial_backoff_ms=2, max_backoff_ms=3, backoff_multiplier=4.0, honor_delay=True
    )
    policy = SubscriptionPolicy(max_backoff_ms=0, honor_delay=False)
    assert effective(policy, defaults) == replace(defaults, max_backoff_ms=0, honor_delay=False)
