"""A stored message taken apart, for people to look at. Pure.

Whoever delivers passes the bytes on; this reads what they say, field by field, as `dead_letter_frames` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from broker.topics.dead_letter_frames import body_at, fields_of, varint_at

_PAYLOAD, _KEY, _PROPERTIES, _SCHEDULE_KEY, _TRACEPARENT = 1, 2, 3, 6, 10
_TEXTS = {_KEY: "key", _SCHEDULE_KEY: "schedule_key", _TRACEPARENT: "traceparent"}
_NUMBERS = {7: "ttl_ms", 8: "sequence_id", 9: "event_time_ms"}


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
    for number, _, content, end in fields_of(message):
        if number == _PAYLOAD:
            values["payload"] = bytes(message[content:end])
        elif number in _TEXTS:
            values[_TEXTS[number]] = _text(message[content:end])
        elif number in _NUMBERS:
            values[_NUMBERS[number]] = varint_at(message, content)[0]
        elif number == _PROPERTIES:
            name, value = _property(message[content:end])
            properties[name] = value
    return StoredMessage(**values, properties=properties)


def _property(entry: memoryview) -> tuple[str, str]:
    parts = {number: _text(entry[content:end]) for number, _, content, end in fields_of(entry)}
    return parts.get(1, ""), parts.get(2, "")


def _text(octets: memoryview) -> str:
    return bytes(octets).decode("utf-8", "replace")
