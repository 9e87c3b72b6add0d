"""The rights that each call needs, and on what: one table for every method of every service.

Nothing is allowed that is not in the table. Where the need hangs on what a request names, `Rule.of` finds it in the
request once that is parsed; a stream is asked about its first frame, and a produce stream about each of its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from broker.folder.broker import Broker


class Right(Enum):
    """Rights: what somebody may do with a topic."""

    PRODUCE = "produce"
    CONSUME = "consume"
    SCHEDULE = "schedule"
    MANAGE = "manage"
    COMPACT = "compact"


class TopicScope(Enum):
    """Instead of one topic."""

    ANY = "any topic"  # whichever: the answer is about the broker, or shows only what the caller may see
    ALL = "all topics, as a grant on * would allow"  # the pattern must be *


class SubscriptionScope(Enum):
    """Instead of one subscription."""

    ANY = "any subscription"  # whichever: the answer is that the topic is there, or shows only what the caller may see


@dataclass(frozen=True, slots=True)
class Ask:
    """One thing that a caller must be allowed: one of these rights, on a topic, or on one subscription of it."""

    rights: frozenset[Right]
    topic: str | TopicScope
    subscription: str | SubscriptionScope | None = None
    """None: it is about the topic itself, which a grant for some of its subscriptions never allows."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Needs of one method: `always` by the headers of a call, and by `of` those of its requests.

    Whoever has none of the rights that requests of a method need, on whatever topic, is refused by the headers.
    """

    always: tuple[Ask, ...] = ()
    of: Callable[[Any, Broker], Iterable[Ask]] | None = None
    is_public: bool = False
    waits: bool = False
    """Of a unary method: its answer may come long after it was allowed, so it ends like a stream."""


def _any(*rights: Right) -> frozenset[Right]:
    return frozenset(rights)


EVERY_RIGHT = frozenset(Right)
"""Whoever has one of them on a topic may see that it is there."""
SUBSCRIPTION_RIGHTS = _any(Right.CONSUME, Right.MANAGE)
"""Rights that a grant may give on some subscriptions of a topic; the others are about a topic as a whole."""
SHOW_SUBSCRIPTION = SUBSCRIPTION_RIGHTS
"""Whoever has one of them on a subscription may see it, with its settings and counts."""


def _named(
    needed: frozenset[Right], of: Callable[[Any, Broker], Iterable[Ask]], *, waits: bool = False
) -> Rule:
    """One whose requests name what they need a right on."""
    return Rule(always=(Ask(needed, TopicScope.ANY),), of=of, waits=waits)


def _topic(*rights: Right, field: str = "topic") -> Rule:
    needed = frozenset(rights)
    return _named(needed, lambda request, _: (Ask(needed, getattr(request, field)),))


def _shown(*rights: Right, field: str) -> Rule:
    """To see a topic, which a grant for one of its subscriptions is enough for."""
    needed = frozenset(rights)
    return _named(needed, lambda request, _: (Ask(needed, getattr(request, field), SubscriptionScope.ANY),))


def _subscription(*rights: Right, field: str = "subscription", waits: bool = False) -> Rule:
    needed = frozenset(rights)
    return _named(
        needed, lambda request, _: (Ask(needed, request.topic, getattr(request, field)),), waits=waits
    )


def _settings_of_subscription(request: Any, _: Broker) -> Iterable[Ask]:
    yield Ask(_any(Right.MANAGE), request.topic, request.name)
    if request.policy.dead_letter_topic:  # or the right on one topic would be a way to write into every other
        yield Ask(_any(Right.MANAGE), request.policy.dead_letter_topic)


def _topics(*rights: Right, subscription: SubscriptionScope | None = None) -> Rule:
    needed = frozenset(rights)

    def asks(request: Any, _: Broker) -> Iterable[Ask]:
        return [Ask(needed, topic, subscription) for topic in request.topics] or [Ask(needed, TopicScope.ANY)]

    return _named(needed, asks)


def _of_compaction(request: Any, broker: Broker) -> Iterable[Ask]:
    # An id that is not known any more may be a repeat of what was done; ids are random, so nothing is told by it.
    held = (
        lease.topic for lease in broker.compactions.leases() if lease.compaction_id == request.compaction_id
    )
    return (Ask(_any(Right.COMPACT), next(held, TopicScope.ANY)),)


def _always(*rights: Right, topic: TopicScope) -> Rule:
    return Rule(always=(Ask(frozenset(rights), topic),))


_PRODUCE, _CONSUME, _SCHEDULE = Right.PRODUCE, Right.CONSUME, Right.SCHEDULE
_MANAGE, _COMPACT = Right.MANAGE, Right.COMPACT
_SOMEBODY = _always(*EVERY_RIGHT, topic=TopicScope.ANY)

_SERVICES: Mapping[str, Mapping[str, Rule]] = {
    "postdate.v1.ProducerService": {
        "Produce": _topic(_PRODUCE),
        "ProduceStream": _topic(_PRODUCE),
    },
    "postdate.v1.ConsumerService": {
        "Subscribe": _subscription(_CONSUME),
        "Receive": _subscription(_CONSUME, waits=True),
        "Acknowledge": _subscription(_CONSUME),
        "Nack": _subscription(_CONSUME),
        "ExtendLease": _subscription(_CONSUME),
        "ListOwed": _subscription(_CONSUME, _MANAGE),
    },
    "postdate.v1.ScheduleService": {
        "GetScheduled": _topic(_SCHEDULE),
        "ListScheduled": _topic(_SCHEDULE),
        "CountScheduled": _topics(_SCHEDULE),
        "CancelScheduled": _topic(_SCHEDULE),
        "Reschedule": _topic(_SCHEDULE),
        "StartBulkChange": _topic(_SCHEDULE),
        "GetBulkChange": _topic(_SCHEDULE),
        "ListBulkChanges": _topic(_SCHEDULE),
        "CancelBulkChange": _topic(_SCHEDULE),
        "PutRecurring": _topic(_PRODUCE),
        "GetRecurring": _topic(_PRODUCE, _SCHEDULE),
        "ListRecurring": _topic(_PRODUCE, _SCHEDULE),
        "DeleteRecurring": _topic(_SCHEDULE),
        "PauseRecurring": _topic(_SCHEDULE),
        "TriggerRecurring": _topic(_PRODUCE),
        "BackfillRecurring": _topic(_PRODUCE),
        "PreviewRecurring": _topic(_PRODUCE, _SCHEDULE),
    },
    "postdate.v1.AdminService": {
        "CreateTopic": _topic(_MANAGE, field="name"),
        "GetTopic": _shown(*EVERY_RIGHT, field="name"),
        "UpdateTopic": _topic(_MANAGE, field="name"),
        "DeleteTopic": _topic(_MANAGE, field="name"),
        "ListTopics": _SOMEBODY,
        "CreateSubscription": _named(_any(Right.MANAGE), _settings_of_subscription),
        "GetSubscription": _subscription(*SHOW_SUBSCRIPTION, field="name"),
        "UpdateSubscription": _named(_any(Right.MANAGE), _settings_of_subscription),
        "DeleteSubscription": _subscription(_MANAGE, field="name"),
        "ListSubscriptions": _shown(*SHOW_SUBSCRIPTION, field="topic"),
        "Seek": _subscription(_MANAGE),
        "SkipAll": _subscription(_MANAGE),
        "Pause": _subscription(_MANAGE),
        "Resume": _subscription(_MANAGE),
        "ListDeadLetters": _subscription(_CONSUME, _MANAGE),
        "RequeueDeadLetters": _subscription(_MANAGE),
        "PurgeDeadLetters": _subscription(_MANAGE),
        "GetStats": _topics(*EVERY_RIGHT, subscription=SubscriptionScope.ANY),
        "VerifyTopic": _topic(_MANAGE, field="name"),
        "GetServerInfo": _SOMEBODY,
        "GetCluster": _SOMEBODY,
        "MoveShard": _always(_MANAGE, topic=TopicScope.ALL),
        "CreateBackup": _always(_MANAGE, topic=TopicScope.ALL),
        "ListBackups": _always(_MANAGE, topic=TopicScope.ALL),
        "DeleteBackup": _always(_MANAGE, topic=TopicScope.ALL),
    },
    "postdate.v1.CompactionService": {
        "BeginCompaction": _topic(_COMPACT),
        "CommitCompaction": _named(_any(Right.COMPACT), _of_compaction),
        "AbortCompaction": _named(_any(Right.COMPACT), _of_compaction),
        "ListCompactions": _always(_COMPACT, topic=TopicScope.ANY),
    },
    "grpc.health.v1.Health": {
        "Check": Rule(is_public=True),  # probes have no credentials, and it says no more than SERVING
        "Watch": _SOMEBODY,
        "List": _SOMEBODY,
    },
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": _SOMEBODY},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _SOMEBODY},
}

RULES: Mapping[str, Rule] = {
    f"/{service}/{method}": rule for service, methods in _SERVICES.items() for method, rule in methods.items()
}
"""By the path of the method, as gRPC has it."""
