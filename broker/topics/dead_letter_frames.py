"""Frames of dead letters and of requeued messages, and the topics they go to. Pure.

Payload, key, properties, event time and traceparent stay as they were. What said when and how often the message was to
be stored (deliver_at_ms, deliver_after_ms, schedule_key, ttl_ms, sequence_id) goes, for it was obeyed. The reserved
properties below say where the dead letter comes from; requeued, it loses them again.

A frame is rewritten field by field: its message is not parsed.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.errors import Refused
from broker.policy import EffectiveSubscriptionPolicy
from broker.settings import is_name
from broker.storage.message_fields import (
    FRAME_HEAD,
    PROPERTY_NAME_TAG,
    body_at,
    message_tags,
    property_field,
    walk_fields,
)
from broker.storage.varint import encode_varint
from broker.topic_shards import TopicShard

HOLDER_NAME = "dead-letters"
"""The subscription of a dead-letter topic that holds what nobody has dealt with yet."""

PREFIX = "postdate.dead-letter."
TOPIC = PREFIX + "topic"
SUBSCRIPTION = PREFIX + "subscription"
LEDGER_ID = PREFIX + "ledger-id"
ENTRY_ID = PREFIX + "entry-id"
ATTEMPTS = PREFIX + "attempts"
REASON = PREFIX + "reason"
LAST_REASON = PREFIX + "last-reason"
TIME_MS = PREFIX + "time-ms"
DAMAGED = PREFIX + "damaged"
"""Only in a letter without a message: what was stored could not be read."""
RESERVED = frozenset(
    {TOPIC, SUBSCRIPTION, LEDGER_ID, ENTRY_ID, ATTEMPTS, REASON, LAST_REASON, TIME_MS, DAMAGED}
)

_DAMAGED_NAME = DAMAGED.encode()
_RESERVED_NAMES = frozenset(name.encode() for name in RESERVED)
_KEPT_NAMES = ("payload", "key", "event_time_ms", "traceparent")
_OBEYED_NAMES = ("deliver_at_ms", "deliver_after_ms", "schedule_key", "ttl_ms", "sequence_id")
_TAGS = message_tags("properties", *_KEPT_NAMES, *_OBEYED_NAMES)
_PROPERTIES = _TAGS["properties"]
_OBEYED = frozenset(_TAGS[name] for name in _OBEYED_NAMES)


def dead_letter_topic_name(topic: str, subscription: str, policy: EffectiveSubscriptionPolicy) -> str:
    """Return where a subscription's dead letters go; Refused if that cannot be."""
    # With a "~" in one of the names only the length says where the first one ends: "a" and "b~c" are not "a~b" and "c".
    length = f"{len(topic)}~" if "~" in topic or "~" in subscription else ""
    name = policy.dead_letter_topic or f"{topic}~{subscription}~{length}{HOLDER_NAME}"
    if not is_name(name):
        raise Refused(
            f"The names of topic and subscription are too long for a dead-letter topic named after them: set "
            f"dead_letter_topic for subscription {subscription!r}",
            reason="NO_DEAD_LETTER_TOPIC",
        )
    if name == topic:
        raise Refused(
            f"Topic {topic!r} cannot be the dead-letter topic of its own subscription {subscription!r}",
            reason="NO_DEAD_LETTER_TOPIC",
        )
    return name


def check_dead_letter_topic(
    topic: str,
    subscription: str,
    policy: EffectiveSubscriptionPolicy,
    topic_shard: TopicShard,
) -> None:
    """Refuse settings under which messages are given up, or a topic is named for them, where there is no place.

    A topic of another shard is none: a message that moves is one record of two topics, in one log.
    """
    if not (policy.max_delivery_attempts or policy.dead_letter_topic):
        return
    name = dead_letter_topic_name(topic, subscription, policy)
    if not topic_shard.holds(name):
        beside = f"{topic.partition('~')[0]}~{name}"
        suggested = beside if is_name(beside) else ""
        hint = f"name it {beside!r}" if suggested else 'begin its name with that of the topic and a "~"'
        raise Refused(
            f"Dead-letter topic {name!r} belongs to another shard than topic {topic!r}: {hint}",
            reason="DEAD_LETTER_TOPIC_ELSEWHERE",
            suggested=suggested,
        )


def dead_letter_frame(frame: bytes, properties: Mapping[str, str]) -> bytes:
    """A stored frame as a dead letter with these reserved properties."""
    added = b"".join(property_field(name.encode(), value.encode()) for name, value in properties.items())
    return _rewritten(frame, added)


def damaged_letter_frame(properties: Mapping[str, str]) -> bytes:
    """A dead letter with these reserved properties in the place of a message that cannot be read: it has no payload."""
    return dead_letter_frame(FRAME_HEAD + b"\0", {**properties, DAMAGED: "true"})


def is_damaged_letter(frame: bytes) -> bool:
    """Return whether a dead letter stands for a message that could not be read."""
    message = memoryview(frame)[body_at(frame) :]
    return any(
        tag == _PROPERTIES and _name_of(message[content:end]) == _DAMAGED_NAME
        for tag, _, content, end in walk_fields(message)
    )


def requeued_frame(frame: bytes) -> bytes:
    """The frame of a dead letter as a message like any other."""
    return _rewritten(frame, b"")


def _rewritten(frame: bytes, added: bytes) -> bytes:
    message = memoryview(frame)[body_at(frame) :]
    kept = [
        message[start:end]
        for tag, start, content, end in walk_fields(message)
        if tag not in _OBEYED
        and not (tag == _PROPERTIES and _name_of(message[content:end]) in _RESERVED_NAMES)
    ]
    body = b"".join((*kept, added))
    return b"".join((FRAME_HEAD, encode_varint(len(body)), body))


def _name_of(entry: memoryview) -> bytes:
    """The name in an entry of `properties`; the last one counts, and without one it is empty."""
    name = b""
    for tag, _, content, end in walk_fields(entry):
        if tag == PROPERTY_NAME_TAG:
            name = bytes(entry[content:end])
    return name
