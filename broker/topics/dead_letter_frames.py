"""Frames of dead letters and of requeued messages, and the topics they go to. Pure.

Payload, key, properties, event time and traceparent stay as they were. What said when and how often the message was to
be stored (deliver_at_ms, deliver_after_ms, schedule_key, ttl_ms, sequence_id) goes, for it was obeyed. The reserved
properties below say where the dead letter comes from; requeued, it loses them again.

A frame is `0x12 length message`, and is rewritten field by field: this layer knows of messages no more than the numbers
of their fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from broker.errors import Corrupt, Refused
from broker.policy import SubscriptionPolicy
from broker.settings import is_name
from broker.storage.varint import encode_varint

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
_FRAME_TAG = b"\x12"
_PROPERTIES = 3
_OBEYED = frozenset({4, 5, 6, 7, 8})
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def dead_letter_topic_name(topic: str, subscription: str, policy: SubscriptionPolicy) -> str:
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
    topic: str, subscription: str, own: SubscriptionPolicy, in_force: SubscriptionPolicy
) -> None:
    """Refuse settings under which messages are given up, or a topic is named for them, where there is no place."""
    if in_force.max_delivery_attempts or own.dead_letter_topic:
        dead_letter_topic_name(topic, subscription, in_force)


def dead_letter_frame(frame: bytes, properties: Mapping[str, str]) -> bytes:
    """A stored frame as a dead letter with these reserved properties."""
    added = b"".join(_property(name.encode(), value.encode()) for name, value in properties.items())
    return _rewritten(frame, added)


def damaged_letter_frame(properties: Mapping[str, str]) -> bytes:
    """A dead letter with these reserved properties in the place of a message that cannot be read: it has no payload."""
    return dead_letter_frame(_FRAME_TAG + b"\0", {**properties, DAMAGED: "true"})


def is_damaged_letter(frame: bytes) -> bool:
    """Return whether a dead letter stands for a message that could not be read."""
    message = memoryview(frame)[body_at(frame) :]
    return any(
        number == _PROPERTIES and _name_of(message[content:end]) == _DAMAGED_NAME
        for number, _, content, end in fields_of(message)
    )


def requeued_frame(frame: bytes) -> bytes:
    """The frame of a dead letter as a message like any other."""
    return _rewritten(frame, b"")


def _rewritten(frame: bytes, added: bytes) -> bytes:
    message = memoryview(frame)[body_at(frame) :]
    kept = [
        message[start:end]
        for number, start, content, end in fields_of(message)
        if number not in _OBEYED
        and not (number == _PROPERTIES and _name_of(message[content:end]) in _RESERVED_NAMES)
    ]
    body = b"".join((*kept, added))
    return b"".join((_FRAME_TAG, encode_varint(len(body)), body))


def body_at(frame: bytes) -> int:
    """Return where the message in a frame begins; raises Corrupt."""
    if frame[:1] != _FRAME_TAG:
        raise Corrupt("A stored frame does not begin as one")
    length, at = varint_at(memoryview(frame), 1)
    if at + length != len(frame):
        raise Corrupt("A stored frame is not as long as it says")
    return at


def fields_of(message: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Each field: its number, where it starts, where its content starts, where it ends. Raises Corrupt."""
    at = 0
    while at < len(message):
        start = at
        tag, at = varint_at(message, at)
        kind = tag & 7
        content = at
        if kind == _VARINT:
            _, at = varint_at(message, at)
        elif kind == _LENGTH:
            length, content = varint_at(message, at)
            at = content + length
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
        else:
            raise Corrupt(f"A stored message has a field of the unknown kind {kind}")
        if at > len(message):
            raise Corrupt("A field of a stored message is cut short")
        yield tag >> 3, start, content, at


def _name_of(entry: memoryview) -> bytes:
    """The name in an entry of `properties`; the last one counts, and without one it is empty."""
    name = b""
    for number, _, content, end in fields_of(entry):
        if number == 1:
            name = bytes(entry[content:end])
    return name


def _property(name: bytes, value: bytes) -> bytes:
    entry = b"".join((b"\x0a", encode_varint(len(name)), name, b"\x12", encode_varint(len(value)), value))
    return b"".join((b"\x1a", encode_varint(len(entry)), entry))


def varint_at(octets: memoryview, at: int) -> tuple[int, int]:
    """The varint at a place, and the place after it."""
    value = shift = 0
    while at < len(octets) and shift < 70:
        octet = octets[at]
        value |= (octet & 0x7F) << shift
        at += 1
        if octet < 0x80:
            return value, at
        shift += 7
    raise Corrupt("A number in a stored message never ends")
