"""The settings of topics and subscriptions as options, for creating and for changing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import click

import postdate
from postdate._policy_messages import CHOICES
from postdate.commands.policy_options import (
    BUCKET_OPTIONS,
    SUBSCRIPTION_OPTIONS,
    TOPIC_OPTIONS,
    PolicyOption,
)
from postdate.commands.values import DURATION, SIZE
from postdate.policies import SubscriptionChanges, TopicChanges

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_TYPES = {"duration": DURATION, "name": str, "size": SIZE, "switch": bool}
_OFF = {"honor_delay": "--ignore-delay"}
_BUCKETS = {option.name for option in BUCKET_OPTIONS}


def topic_options(command: CommandT) -> CommandT:
    return _options((*TOPIC_OPTIONS, *BUCKET_OPTIONS), command)


def subscription_options(command: CommandT) -> CommandT:
    return _options(SUBSCRIPTION_OPTIONS, command)


def inherit_topic_option(command: CommandT) -> CommandT:
    return _inherit((*TOPIC_OPTIONS, *BUCKET_OPTIONS), command)


def inherit_subscription_option(command: CommandT) -> CommandT:
    return _inherit(SUBSCRIPTION_OPTIONS, command)


def topic_policy(options: Mapping[str, Any]) -> postdate.TopicPolicy:
    """The policy of a new topic: what was given."""
    given = _given(options)
    buckets = {name: given.pop(name) for name in _BUCKETS if name in given}
    return postdate.TopicPolicy(**given, buckets=postdate.BucketPolicy(**buckets) if buckets else None)


def subscription_policy(options: Mapping[str, Any]) -> postdate.SubscriptionPolicy:
    """The policy of a new subscription: what was given."""
    return postdate.SubscriptionPolicy(**_given(options))


def changes_buckets(options: Mapping[str, Any], inherit: tuple[str, ...]) -> bool:
    """Tell whether an update is about the index, whose settings are replaced together."""
    return not _BUCKETS.isdisjoint(_changes(options, inherit))


def topic_changes(
    options: Mapping[str, Any], inherit: tuple[str, ...], buckets: postdate.BucketPolicy | None
) -> TopicChanges:
    """The changes of an update; `buckets` are the settings of the index that the topic has."""
    changes = _changes(options, inherit)
    of_index = {name: changes.pop(name) for name in _BUCKETS if name in changes}
    if of_index:
        changed = replace(buckets or postdate.BucketPolicy(), **of_index)
        unset = all(getattr(changed, field.name) is None for field in fields(changed))
        changes["buckets"] = None if unset else changed
    return cast(TopicChanges, changes)


def subscription_changes(options: Mapping[str, Any], inherit: tuple[str, ...]) -> SubscriptionChanges:
    """The changes of an update."""
    return cast(SubscriptionChanges, _changes(options, inherit))


def _options(options: Sequence[PolicyOption], command: CommandT) -> CommandT:
    for option in reversed(options):
        flag = "--" + option.name.replace("_", "-")
        if option.kind == "switch":
            flag = f"{flag}/{_OFF[option.name]}"
        command = click.option(flag, default=None, type=_value_type(option), help=option.help)(command)
    return command


def _value_type(option: PolicyOption) -> Any:
    match option.kind:
        case "choice":
            return click.Choice([each.name.lower().replace("_", "-") for each in CHOICES[option.name]])
        case "count":
            return click.IntRange(int(option.least))
        case "factor":
            return click.FloatRange(option.least)
    return _TYPES[option.kind]


def _inherit(options: Sequence[PolicyOption], command: CommandT) -> CommandT:
    choice = click.Choice([option.name.replace("_", "-") for option in options])
    text = "Inherit SETTING from the broker again; may be repeated."
    return click.option("--inherit", multiple=True, type=choice, metavar="SETTING", help=text)(command)


def _changes(options: Mapping[str, Any], inherit: tuple[str, ...]) -> dict[str, Any]:
    changes = _given(options)
    for setting in inherit:
        name = setting.replace("-", "_")
        if name in changes:
            raise click.UsageError(f"give --{setting} or --inherit {setting}, not both")
        changes[name] = None
    if not changes:
        raise click.UsageError("give at least one setting to change")
    return changes


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    for name in CHOICES.keys() & given.keys():
        given[name] = CHOICES[name][given[name].upper().replace("-", "_")]
    return given
