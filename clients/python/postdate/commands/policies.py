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
    "max_buckets": (click.IntRange(1), "Maximum number of sealed buckets; beyond it, small ones are merged."),
    "min_index_count": (click.IntRange(1), "Number of index entries that are sealed as one bucket."),
    "seal_after": (DURATION, "Age of the oldest unsealed index entry at which a bucket is sealed."),
    "ledgers_per_bucket": (click.IntRange(1), "Number of ledgers after which a bucket is sealed."),
    "segment_time_step": (DURATION, "Range of due times in one bucket segment."),
    "max_segment_entries": (click.IntRange(1), "Maximum number of entries in one bucket segment."),
}
_TOPIC: Mapping[str, tuple[Any, str]] = {
    "tracker": (_choice(postdate.Tracker), "Index of delayed messages."),
    "tick": (DURATION, "Width of the time buckets of the memory tracker; delivery is exact regardless."),
    "delayed_delivery": (_choice(postdate.DelayedDelivery), "Acceptance of messages with a delivery time."),
    "max_delay": (DURATION, "Longest delay accepted; 0: no limit."),
    "overdue_action": (
        _choice(postdate.OverdueAction),
        "Treatment of messages that became due while the broker was down.",
    ),
    "default_ttl": (DURATION, "Time to live after the due time, for messages that set none; 0: no expiry."),
    "retention": (DURATION, "Retention time of messages that every subscription has settled; 0: none."),
    "retention_bytes": (
        SIZE,
        "Maximum size of retained messages, the oldest are dropped first; 0: the time alone decides.",
    ),
    "max_pending_messages": (
        _COUNT,
        "Backlog of a subscription, in messages, at which Produce is refused; 0: no limit.",
    ),
    "max_pending_bytes": (
        SIZE,
        "Backlog of a subscription, in bytes, at which Produce is refused; 0: no limit.",
    ),
    "max_produce_rate": (_COUNT, "Maximum number of messages accepted per second and topic; 0: no limit."),
    "dedup_window": (
        DURATION,
        "Time for which sequence ids of producers are remembered; 0: no deduplication.",
    ),
    "dedup_entries": (click.IntRange(1), "Maximum number of sequence ids remembered per producer."),
    "ledger_max_age": (DURATION, "Age at which a ledger is rolled; 0: no limit."),
    "ledger_max_bytes": (SIZE, "Size at which a ledger is rolled."),
    "ledger_max_entries": (click.IntRange(1), "Number of entries at which a ledger is rolled."),
    **_BUCKETS,
}
_SUBSCRIPTION: Mapping[str, tuple[Any, str]] = {
    "lease": (DURATION, "Lease of a delivered message: time to acknowledge it before it is redelivered."),
    "max_delivery_attempts": (
        _COUNT,
        "Number of deliveries after which a message is dead-lettered; 0: never.",
    ),
    "initial_backoff": (
        DURATION,
        "Delay before the first redelivery of a nacked message; jitter takes off up to half.",
    ),
    "max_backoff": (DURATION, "Maximum delay before a redelivery; jitter takes off up to half."),
    "backoff_multiplier": (click.FloatRange(1), "Growth of the redelivery delay from attempt to attempt."),
    "dead_letter_topic": (str, "Topic of dead letters; unset: TOPIC~NAME~dead-letters."),
}


def topic_options(command: CommandT) -> CommandT:
    return _options(_TOPIC, command)


def subscription_options(command: CommandT) -> CommandT:
    both = click.option(
        "--honor-delay/--ignore-delay",
        default=None,
        help="Honouring of delivery times by an exclusive or failover subscription.",
    )
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
