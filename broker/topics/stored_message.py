"""A stored message taken apart, for people to look at. Pure.

Whoever delivers passes the bytes on; this reads what they say, field by field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from broker.storage.message_fields import (
    PROPERTY_NAME_TAG,
    PROPERTY_VALUE_TAG,
    body_at,
    message_tags,
    varint_at,
    walk_fields,
)

_TEXT_NAMES = ("key", "schedule_key", "traceparent")
_NUMBER_NAMES = ("ttl_ms", "sequence_id", "event_time_ms")
_IN_ROW = ("deliver_at_ms", "deliver_after_ms")
"""Fields of the due time, which the row tells, through amendments."""
_TAGS = message_tags("payload", "properties", *_TEXT_NAMES, *_NUMBER_NAMES, *_IN_ROW)
_PAYLOAD, _PROPERTIES = _TAGS["payload"], _TAGS["properties"]
_TEXTS = {_TAGS[name]: name for name in _TEXT_NAMES}
_NUMBERS = {_TAGS[name]: name for name in _NUMBER_NAMES}


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """As its producer sent it. 0 and empty mean unset; texts that are not UTF-8 have their bad bytes replaced."""

    payload: bytes = b""
    key: str = ""
    properties: dict[str, str] = field(default_factory=dict)
    schedule_key: str = ""
    ttl_ms: int = 0
    sequence_id: int = 0
    event_time_ms: int = 0
    traceparent: str = ""


def read_message(frame: bytes) -> StoredMessage:
    """Decode a stored frame; raises Corrupt."""
    message = memoryview(frame)[body_at(frame) :]
    values: dict[str, Any] = {}
    properties: dict[str, str] = {}
    for tag, _, content, end in walk_fields(message):
        if tag == _PAYLOAD:
            values["payload"] = bytes(message[content:end])
        elif tag in _TEXTS:
            values[_TEXTS[tag]] = _text(message[content:end])
        elif tag in _NUMBERS:
            values[_NUMBERS[tag]] = varint_at(message, content)[0]
        elif tag == _PROPERTIES:
            name, value = _property(message[content:end])
            properties[name] = value
    return StoredMessage(**values, properties=properties)


def _property(entry: memoryview) -> tuple[str, str]:
    parts = {tag: _text(entry[content:end]) for tag, _, content, end in walk_fields(entry)}
    return parts.get(PROPERTY_NAME_TAG, ""), parts.get(PROPERTY_VALUE_TAG, "")


def _text(octets: memoryview) -> str:
    return bytes(octets).decode("utf-8", "replace")
