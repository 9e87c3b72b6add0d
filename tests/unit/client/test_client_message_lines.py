"""The JSON lines that export writes and import reads: nothing of a message is lost, and nothing wrong is taken."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postdate import OutgoingMessage, ScheduledMessage
from postdate.commands.message_lines import (
    BadLine,
    end_line,
    header_line,
    message_line,
    read_header,
    read_messages,
)
from postdate_api.v1 import message_pb2, schedule_pb2

NOW = datetime(2026, 11, 22, 10, 0, 0, 123000, tzinfo=UTC)
HEADER = header_line("some-id", "orders", "broker", NOW)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
MOMENT_MS = st.integers(0, 4_000_000_000_000)
MESSAGES = st.builds(
    schedule_pb2.ScheduledMessage,
    id=st.builds(message_pb2.MessageId, ledger_id=st.integers(1, 9), entry_id=st.integers(0, 9)),
    schedule_key=TEXT,
    deliver_at_ms=MOMENT_MS,
    message=st.builds(
        message_pb2.Message,
        key=TEXT,
        properties=st.dictionaries(TEXT, TEXT, max_size=3),
        ttl_ms=st.integers(0, 10**12),
        event_time_ms=MOMENT_MS,
        traceparent=TEXT,
        payload=st.binary(max_size=50),
    ),
).map(lambda scheduled: ScheduledMessage(scheduled, has_payload=True))


def read(*lines: str) -> list[OutgoingMessage]:
    return [message for _, _, message in read_messages(line.encode() for line in lines)]


@pytest.mark.slow
@given(st.lists(MESSAGES, max_size=3))
def test_every_field_comes_back(messages: list[ScheduledMessage]) -> None:
    found = read(*map(message_line, messages), end_line(len(messages)))
    assert found == [
        OutgoingMessage(
            each.payload or b"",
            key=each.key,
            properties=dict(each.properties) or None,
            deliver_at=each.deliver_at,
            schedule_key=each.schedule_key,
            ttl=each.ttl,
            event_time=each.event_time,
            traceparent=each.traceparent,
        )
        for each in messages
    ]


@given(st.binary(max_size=60))
def test_any_bytes_are_a_header_or_a_bad_line(line: bytes) -> None:
    with pytest.raises(BadLine, match=r"^line 1: "):
        read_header(line)


@given(st.lists(st.binary(max_size=60).map(lambda line: line.replace(b"\n", b"") + b"\n"), max_size=3))
def test_any_bytes_are_bad_lines(lines: list[bytes]) -> None:
    with pytest.raises(BadLine):
        list(read_messages(lines))


def test_the_header_names_the_export() -> None:
    assert read_header(HEADER.encode()) == "some-id"


AT = '"deliver_at": "2026-12-24T18:00:00+01:00"'
GOOD = f'{{{AT}, "payload": "x"}}\n'


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("", "is empty"),
        ("{}\n", "does not begin with"),
        ("hello\n", "no JSON"),
        ('{"postdate_export": 2, "id": "a"}\n', "version 2"),
        ('{"postdate_export": true, "id": "a"}\n', "version True"),
        ('{"postdate_export": 1}\n', "id names the file"),
        ('{"postdate_export": 1, "id": "a b"}\n', "id names the file"),
    ],
)
def test_a_bad_header_is_said(header: str, says: str) -> None:
    with pytest.raises(BadLine, match=says):
        read_header(header.encode())


@pytest.mark.parametrize(
    ("lines", "number", "says"),
    [
        ([], 1, "was cut off"),
        ([GOOD], 2, "was cut off"),
        ([GOOD, GOOD[:-5]], 3, "was cut off"),
        ([GOOD, end_line(1)[:-1]], 3, "was cut off"),
        ([GOOD, end_line(2)], 3, "1 messages, and says that it had 2"),
        ([GOOD, end_line(1), GOOD], 4, "more behind"),
        (["\n"], 2, "no JSON"),
        (["[" * 100_000 + "\n"], 2, "no JSON"),
        (["[1]\n"], 2, "no JSON object"),
        (["{}\n"], 2, "either payload or payload_base64"),
        ([f"{{{AT}}}\n"], 2, "either payload or payload_base64"),
        ([f'{{{AT}, "payload": "x", "payload_base64": ""}}\n'], 2, "either payload or payload_base64"),
        ([f'{{{AT}, "payload": 3}}\n'], 2, "payload must be a string"),
        ([f'{{{AT}, "payload": "\\ud800"}}\n'], 2, "half of a surrogate pair"),
        ([f'{{{AT}, "payload_base64": "?"}}\n'], 2, "is not base64"),
        ([f'{{{AT}, "payload_base64": "\\u00e4"}}\n'], 2, "payload_base64"),
        (['{"payload": "x"}\n'], 2, "deliver_at is a time"),
        (['{"payload": "x", "deliver_at": 5}\n'], 2, "deliver_at is a time"),
        (['{"payload": "x", "deliver_at": "soon"}\n'], 2, "is not a time"),
        (['{"payload": "x", "deliver_at": "2026-12-24T18:00:00"}\n'], 2, "no time zone"),
        (['{"payload": "x", "deliver_at": "1969-12-31T23:59:59Z"}\n'], 2, "deliver_at is before 1970"),
        ([f'{{{AT}, "payload": "x", "delay": 5}}\n'], 2, "no field 'delay'"),
        ([f'{{{AT}, "payload": "x", "key": null}}\n'], 2, "key must be a string"),
        ([f'{{{AT}, "payload": "x", "ttl_ms": 0}}\n'], 2, "ttl_ms"),
        ([f'{{{AT}, "payload": "x", "ttl_ms": 1.5}}\n'], 2, "ttl_ms"),
        ([f'{{{AT}, "payload": "x", "properties": ["a"]}}\n'], 2, "object of strings"),
        ([f'{{{AT}, "payload": "x", "properties": {{"a": 1}}}}\n'], 2, "property a must be a string"),
        ([GOOD, f'{{{AT}, "payload": "x", "event_time": "noon"}}\n'], 3, "is not a time"),
    ],
)
def test_a_bad_line_is_named(lines: list[str], number: int, says: str) -> None:
    with pytest.raises(BadLine, match=says) as caught:
        read(*lines)
    assert caught.value.number == number


@pytest.mark.parametrize("name", ["deliver_at_ms", "event_time_ms"])
@pytest.mark.parametrize("ms", [253402300800000, 2**53 - 1])
def test_a_time_after_the_year_9999_is_refused(name: str, ms: int) -> None:
    """The SDK shows it as the end of that year; a line would move the message there in silence."""
    message = schedule_pb2.ScheduledMessage(deliver_at_ms=1, message=message_pb2.Message())
    setattr(message if name == "deliver_at_ms" else message.message, name, ms)
    with pytest.raises(ValueError, match="9999"):
        message_line(ScheduledMessage(message, has_payload=True))
