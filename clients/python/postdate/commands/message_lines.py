"""Pending messages as JSON lines: what `postdate export` writes and `postdate import` reads. Pure.

    {"postdate_export": 1, "id": "2f0c...", "topic": "orders", "broker_id": "...", "time": "2026-11-22T10:00:00+00:00"}
    {"deliver_at": "2026-11-25T09:00:00+00:00", "payload": "close order 17", "schedule_key": "order-17"}
    {"postdate_export_end": 1, "messages": 1}

The first line names the format and this export; the last one counts, so that a file that was cut off is noticed.
Of a message `deliver_at` is required, and one of `payload` and `payload_base64`; what is left out is not set.
`source_id`, its id where it came from, is for people: an imported message gets a new one.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from postdate.commands.values import parse_time
from postdate.model import OutgoingMessage
from postdate.scheduled import ScheduledMessage

VERSION = 1
LINE_BYTES_MAX = 64 << 20
"""Far above what a message may have; whoever reads a line wants an end of it."""

_BEGIN, _END = "postdate_export", "postdate_export_end"
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_MS = timedelta(milliseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BEYOND = datetime.max.replace(tzinfo=UTC)
"""Stands in the SDK for times that Python does not have. It is no whole millisecond, so no message is due then."""

_TEXTS = ("key", "schedule_key", "traceparent")
_KNOWN = {
    "source_id",
    "deliver_at",
    "payload",
    "payload_base64",
    "properties",
    "ttl_ms",
    "event_time",
    *_TEXTS,
}


class BadLine(ValueError):
    """A line that is not as it should be; `number` counts from 1."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"line {number:,}: {text}")
        self.number = number


def header_line(id: str, topic: str, broker_id: str, time: datetime) -> str:
    fields = {_BEGIN: VERSION, "id": id, "topic": topic, "broker_id": broker_id, "time": time.isoformat()}
    return json.dumps(fields) + "\n"


def end_line(messages: int) -> str:
    return json.dumps({_END: VERSION, "messages": messages}) + "\n"


def message_line(message: ScheduledMessage) -> str:
    """A pending message with all that its producer gave it; its payload was asked for.

    Raises ValueError for times after the year 9999, which a line cannot say.
    """
    for name in ("deliver_at", "event_time"):
        if getattr(message, name) == _BEYOND:
            raise ValueError(
                f"{name} of message {message.id} is after the year 9999, which a line cannot contain"
            )
    fields: dict[str, Any] = {"source_id": str(message.id), "deliver_at": message.deliver_at.isoformat()}
    payload = message.payload or b""
    try:
        fields["payload"] = payload.decode()
    except UnicodeDecodeError:
        fields["payload_base64"] = base64.b64encode(payload).decode()
    if message.key:
        fields["key"] = message.key
    if message.schedule_key:
        fields["schedule_key"] = message.schedule_key
    if message.properties:
        fields["properties"] = dict(message.properties)
    if message.ttl is not None:
        fields["ttl_ms"] = message.ttl // _MS
    if message.event_time is not None:
        fields["event_time"] = message.event_time.isoformat()
    if message.traceparent:
        fields["traceparent"] = message.traceparent
    return json.dumps(fields) + "\n"


def read_header(line: bytes) -> str:
    """The export's id, which names it for good: what was imported of it is known by it."""
    if not line:
        raise BadLine(1, "the file is empty")
    fields = _object(1, line)
    if _BEGIN not in fields:
        raise BadLine(1, f'the file does not begin with {{"{_BEGIN}": {VERSION}, "id": "..."}}')
    if fields[_BEGIN] != VERSION or isinstance(fields[_BEGIN], bool):
        raise BadLine(1, f"this is version {fields[_BEGIN]!r} of the format; version {VERSION} is known here")
    name = fields.get("id")
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise BadLine(1, "id names the file for good: up to 64 letters, digits, '.', '_' and '-'")
    return name


def read_messages(lines: Iterable[bytes]) -> Iterator[tuple[int, int, OutgoingMessage]]:
    """The messages behind the header, each with the number of its line and its bytes; the end is checked."""
    count, number, is_over = 0, 1, False
    for number, line in enumerate(lines, 2):
        if is_over:
            raise BadLine(number, "there is more behind the line that ends the file")
        if not line.endswith(b"\n"):
            raise BadLine(number, "the file was cut off: this line has no end")
        fields = _object(number, line)
        if _END in fields:
            if fields.get("messages") != count:
                stated = fields.get("messages")
                raise BadLine(number, f"the file has {count:,} messages, and says that it had {stated!r}")
            is_over = True
            continue
        count += 1
        yield number, len(line), _message(number, fields)
    if not is_over:
        raise BadLine(
            number, f'the file was cut off: it does not end with {{"{_END}": {VERSION}, "messages": ...}}'
        )


def _object(number: int, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # of JSON, and of UTF-8
        raise BadLine(number, f"this is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadLine(number, "this is no JSON object")
    return value


def _message(number: int, fields: dict[str, Any]) -> OutgoingMessage:
    if not fields.keys() <= _KNOWN:
        unknown = sorted(fields.keys() - _KNOWN)[0]
        raise BadLine(number, f"a message has no field {unknown!r}; it has {', '.join(sorted(_KNOWN))}")
    try:
        payload, deliver_at = _payload(fields), _time(fields, "deliver_at")
        if deliver_at < _EPOCH:
            raise ValueError("deliver_at is before 1970, which brokers refuse")
        message = OutgoingMessage(payload, deliver_at=deliver_at)
        for name in _TEXTS:
            if name in fields:
                setattr(message, name, _text(name, fields[name]))
        if "properties" in fields:
            message.properties = _properties(fields["properties"])
        if (ttl_ms := fields.get("ttl_ms")) is not None:
            if not isinstance(ttl_ms, int) or isinstance(ttl_ms, bool) or not 0 < ttl_ms < 1 << 53:
                raise ValueError("ttl_ms is a whole number of milliseconds above 0")
            message.ttl = ttl_ms * _MS
        if fields.get("event_time") is not None:
            message.event_time = _time(fields, "event_time")
    except (ValueError, OverflowError) as error:
        raise BadLine(number, str(error)) from None
    return message


def _payload(fields: dict[str, Any]) -> bytes:
    if ("payload" in fields) == ("payload_base64" in fields):
        raise ValueError("a message needs either payload or payload_base64")
    if "payload" in fields:
        return _text("payload", fields["payload"]).encode()
    try:
        return base64.b64decode(_text("payload_base64", fields["payload_base64"]), validate=True)
    except ValueError as error:
        raise ValueError(f"payload_base64 is not base64: {error}") from None


def _time(fields: dict[str, Any], name: str) -> datetime:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f'{name} is a time such as "2026-12-24T18:00:00+01:00"')
    return parse_time(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} contains half of a surrogate pair") from None
    return value


def _properties(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise ValueError("properties must be an object of strings")
    return {
        _text("a property's name", name): _text(f"the property {name}", text) for name, text in value.items()
    }
