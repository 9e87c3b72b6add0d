"""Brokers' settings for tests: an operator's, sizes of the parts, and defaults of policies, all by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from broker.config import SETTINGS, BrokerConfig
from broker.policy import POLICY_SPECS, SubscriptionPolicy, TopicPolicy, policy_value
from broker.tuning import Tuning

_SETTINGS = {each.name for each in SETTINGS}
_TUNING = {each.name for each in fields(Tuning)} - {"topic", "subscription"}
_TOPIC = {each.name for each in fields(TopicPolicy)} - _SETTINGS
_SUBSCRIPTION = {each.name for each in fields(SubscriptionPolicy)} - _SETTINGS


def broker_config(**values: Any) -> BrokerConfig:
    """A configuration with these values of settings, of `Tuning`, and of the broker's own policies."""
    return changed(BrokerConfig(), **values)


def changed(config: BrokerConfig, **values: Any) -> BrokerConfig:
    """The configuration with these values in place of its own."""
    unknown = values.keys() - _SETTINGS - _TUNING - _TOPIC - _SUBSCRIPTION
    if unknown:
        raise TypeError(f"no setting, size or policy has these names: {sorted(unknown)}")

    def policies(names: set[str]) -> dict[str, Any]:
        return {name: policy_value(POLICY_SPECS[name], values[name]) for name in names & values.keys()}

    def chosen(names: set[str]) -> dict[str, Any]:
        return {name: values[name] for name in names & values.keys()}

    tuning = replace(
        config.tuning,
        topic=replace(config.tuning.topic, **policies(_TOPIC)),
        subscription=replace(config.tuning.subscription, **policies(_SUBSCRIPTION)),
        **chosen(_TUNING),
    )
    return replace(config, tuning=tuning, **chosen(_SETTINGS))
