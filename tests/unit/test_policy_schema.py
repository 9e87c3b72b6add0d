"""One schema of policies: stored records, the API, the SDK, the command and the settings agree with it field by field."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import postdate
from broker.config import BrokerConfig
from broker.policy import POLICY_SPECS, SubscriptionPolicy, TopicPolicy
from broker.settings import SettingKind
from broker.storage.v1 import manifest_pb2
from postdate import policies as sdk
from postdate.commands import policies as command
from postdate.commands.values import DURATION, SIZE
from postdate_api.v1 import admin_pb2
from tools.policies import FILES

BUCKETS = set(admin_pb2.BucketPolicy.DESCRIPTOR.fields_by_name)
KINDS = [
    (
        TopicPolicy,
        admin_pb2.TopicPolicy,
        manifest_pb2.TopicPolicyRecord,
        postdate.TopicPolicy,
        sdk.TopicChanges,
    ),
    (
        SubscriptionPolicy,
        admin_pb2.SubscriptionPolicy,
        manifest_pb2.SubscriptionPolicyRecord,
        postdate.SubscriptionPolicy,
        sdk.SubscriptionChanges,
    ),
]


def names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def without_unit(kinds: set[str]) -> set[str]:
    return {name.removesuffix("_ms") for name in kinds}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_sdk_and_the_command_have_what_is_made_from_the_schema(path: Path) -> None:
    assert path.read_text() == FILES[path](), "run: python -m tools.policies"


@pytest.mark.parametrize(("policy", "message", "record", "of_sdk", "changes"), KINDS)
def test_each_field_is_in_the_api_in_the_records_and_in_the_sdk(
    policy: Any, message: Any, record: Any, of_sdk: Any, changes: Any
) -> None:
    on_the_wire = set(message.DESCRIPTOR.fields_by_name)
    if "buckets" in on_the_wire:
        on_the_wire = on_the_wire - {"buckets"} | BUCKETS
        assert names(postdate.BucketPolicy) == without_unit(BUCKETS)
    assert names(policy) == on_the_wire == set(record.DESCRIPTOR.fields_by_name)
    assert (
        names(of_sdk) == set(changes.__annotations__) == without_unit(set(message.DESCRIPTOR.fields_by_name))
    )


def test_choices_have_the_numbers_and_names_of_the_api() -> None:
    choices = {name: spec for name, spec in POLICY_SPECS.items() if spec.choices}
    assert choices
    for name, spec in choices.items():
        kind = admin_pb2.TopicPolicy.DESCRIPTOR.fields_by_name[name].enum_type
        assert kind is not None
        known = {each.number: each.name.lower().removeprefix(f"{name}_") for each in kind.values}
        assert known == {0: "unspecified"} | {spec.number(each): each for each in spec.choices}


def test_a_setting_that_policies_inherit_is_the_policy() -> None:
    for field in dataclasses.fields(BrokerConfig):
        if field.name in POLICY_SPECS:
            assert field.metadata["spec"] is POLICY_SPECS[field.name]


@pytest.mark.parametrize("name", sorted(POLICY_SPECS))
def test_the_options_of_the_command_say_what_the_schema_says(name: str) -> None:
    spec = POLICY_SPECS[name]
    decorated = command.topic_options if name in names(TopicPolicy) else command.subscription_options
    shown: Any = decorated(lambda: None)
    options = {option.name: option for option in shown.__click_params__}
    option = options.pop(name.removesuffix("_ms"))
    assert option.help == spec.help
    if spec.kind in (SettingKind.DURATION, SettingKind.SIZE):
        assert option.type is (DURATION if spec.kind is SettingKind.DURATION else SIZE)
    elif spec.kind is SettingKind.CHOICE:
        assert option.type.choices == tuple(each.replace("_", "-") for each in spec.choices)
    elif spec.kind in (SettingKind.COUNT, SettingKind.FACTOR):
        assert option.type.min == spec.low
    assert without_unit(names(TopicPolicy)) >= options.keys() or name in names(SubscriptionPolicy)
