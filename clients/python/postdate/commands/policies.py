"""The settings of topics and subscriptions as options, for creating and for changing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from enum import Enum
from typing import Any, TypeVar, cast

import click

import postdate
from postdate.commands.values import DURATION, SIZE
from postdate.policies import SubscriptionChanges, TopicChanges

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_COUNT = click.IntRange(0)


def _choice(kind: type[Enum]) -> click.Choice[str]:
    return click.Choice([each.name.lower().replace("_", "-") for each in kind])


_ENUMS: Mapping[str, type[Enum]] = {
    "tracker": postdate.Tracker,
    "delayed_delivery": postdate.DelayedDelivery,
    "overdue_action": postdate.OverdueAction,
}

# Names are those of the policies' fields; zero means none wherever that makes sense.
_BUCKETS: Mapping[str, tuple[Any, str]] = {
    "max_buckets": (click.IntRange(1), "Sealed buckets of the index that merging allows."),
    "min_index_count": (click.IntRange(1), "Entries of the index that are sealed together."),
    "seal_after": (DURATION, "When a bucket is sealed at the latest."),
    "ledgers_per_bucket": (click.IntRange(1), "After how many ledgers it is sealed at the latest."),
    "segment_time_step": (DURATION, "Due time that a segment of a bucket covers."),
    "max_segment_entries": (click.IntRange(1), "Entries of such a segment."),
}
_TOPIC: Mapping[str, tuple[Any, str]] = {
    "tracker": (_choice(postdate.Tracker), "Index of what is due when."),
    "tick": (DURATION, "Width of the memory tracker's buckets."),
    "delayed_delivery": (_choice(postdate.DelayedDelivery), "Whether messages with a time are taken."),
    "max_delay": (DURATION, "Greatest accepted delay; 0 is no limit."),
    "overdue_action": (
        _choice(postdate.OverdueAction),
        "For messages that came due while the broker was down.",
    ),
    "default_ttl": (DURATION, "Time to live of messages that name none; 0 is for ever."),
    "retention": (DURATION, "How long settled messages are kept; 0 is not at all."),
    "retention_bytes": (SIZE, "How many bytes of them are kept; 0 leaves it to --retention."),
    "max_pending_messages": (_COUNT, "Messages a subscription may be owed; 0 is no limit."),
    "max_pending_bytes": (SIZE, "The same in bytes; 0 is no limit."),
    "max_produce_rate": (_COUNT, "Messages taken in a second; 0 is no limit."),
    "dedup_window": (DURATION, "How long sequence ids are remembered; 0 is not at all."),
    "dedup_entries": (click.IntRange(1), "Sequence ids remembered of each producer."),
    "ledger_max_age": (DURATION, "When a ledger rolls by age; 0 is never."),
    "ledger_max_bytes": (SIZE, "When it rolls by size."),
    "ledger_max_entries": (click.IntRange(1), "When it rolls by entries."),
    **_BUCKETS,
}
_SUBSCRIPTION: Mapping[str, tuple[Any, str]] = {
    "lease": (DURATION, "How long a consumer may hold a message."),
    "max_delivery_attempts": (_COUNT, "Deliveries after which a message is a dead letter; 0 is never."),
    "initial_backoff": (DURATION, "Before the second delivery of a nacked message."),
    "max_backoff": (DURATION, "Longest back-off."),
    "backoff_multiplier": (click.FloatRange(1), "Growth of the back-off from attempt to attempt."),
    "dead_letter_topic": (str, "Where dead letters go.  [default: TOPIC~NAME~dead-letters]"),
}


def topic_options(command: CommandT) -> CommandT:
    return _options(_TOPIC, command)


def subscription_options(command: CommandT) -> CommandT:
    both = click.option("--honor-delay/--ignore-delay", default=None, help="For exclusive and failover.")
    return _options(_SUBSCRIPTION, both(command))


def inherit_topic_option(command: CommandT) -> CommandT:
    return _inherit(_TOPIC, command)


def inherit_subscription_option(command: CommandT) -> CommandT:
    return _inherit({**_SUBSCRIPTION, "honor_delay": None}, command)


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
    return not _BUCKETS.keys().isdisjoint(_changes(options, inherit))


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


def _options(settings: Mapping[str, tuple[Any, str]], command: CommandT) -> CommandT:
    for name, (kind, text) in reversed(list(settings.items())):
        command = click.option(f"--{name.replace('_', '-')}", type=kind, help=text)(command)
    return command


def _inherit(names: Mapping[str, Any], command: CommandT) -> CommandT:
    choice = click.Choice([name.replace("_", "-") for name in names])
    text = "Let the broker's own setting hold again; may be repeated."
    return click.option("--inherit", multiple=True, type=choice, metavar="SETTING", help=text)(command)


def _changes(options: Mapping[str, Any], inherit: tuple[str, ...]) -> dict[str, Any]:
    changes = _given(options)
    for setting in inherit:
        name = setting.replace("-", "_")
        if name in changes:
            raise click.UsageError(f"give --{setting} or --inherit {setting}, not both")
        changes[name] = None
    if not changes:
        raise click.UsageError("say what to change")
    return changes


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    for name in _ENUMS.keys() & given.keys():
        given[name] = _ENUMS[name][given[name].upper().replace("-", "_")]
    return given
