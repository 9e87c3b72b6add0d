"""Pages of pending messages on their wire form: written as columns, they say what they say written one by one."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.delayed.due_rows import DueRows
from broker.rpc import schedule_answers
from broker.rpc.decode import ProduceEnvelope
from broker.rpc.schedule_answers import encode_scheduled
from broker.topics.schedule_values import ScheduledColumns, ScheduledState
from postdate_api.v1 import message_pb2, schedule_pb2

plain = st.builds(
    message_pb2.Message,
    payload=st.binary(max_size=200),
    key=st.text(max_size=4),
    properties=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    deliver_after_ms=st.integers(0, 1 << 40),
    schedule_key=st.sampled_from(("", "a", "kä", "k" * 200)),
    sequence_id=st.integers(0, (1 << 64) - 1),
    traceparent=st.sampled_from(("", "00-a-b-01")),
)
UNUSUAL = (
    b"",
    b"\x0a\x00",
    b"\x0a\x01x\x0a\x01y",  # its payload twice
    b"\x32\x01a\x0a\x01y",  # its payload last
    b"\x32\x01a\x32\x01b",  # its key twice
    b"\x32\x00",
    b"\x0a\x81\x00x",  # a length wider than it must be
    b"\xf8\x07\x05\x0a\x01x",  # a field that nobody knows
    b"\x0a\x01x\xf8\x07\x05",
)
messages = st.lists(
    st.one_of(plain.map(lambda message: message.SerializeToString()), st.sampled_from(UNUSUAL)),
    min_size=1,
    max_size=40,
)
numbers = st.sampled_from((0, 1, 127, 128, 1 << 20, 1 << 40))


def page_of(bodies: list[bytes], deliver_at_ms: int, revision: int) -> ScheduledColumns:
    count = len(bodies)
    has_key = [bool(message_pb2.Message.FromString(body).schedule_key) for body in bodies]
    return ScheduledColumns(
        DueRows(
            np.full(count, deliver_at_ms, dtype=np.int64),
            np.arange(count, dtype=np.int64) * 1_000 + 1,
            np.arange(count, dtype=np.uint32),
        ),
        np.arange(count, dtype=np.int64),
        np.array(has_key, dtype=np.uint64) * np.uint64(7),
        np.full(count, revision & 0xFFFF, dtype=np.uint32),
        ScheduledState.WAITING,
        [bytes(ProduceEnvelope(messages=[body]).SerializeToString()) for body in bodies],
    )


def parsed(encoded: bytes) -> list[schedule_pb2.ScheduledMessage]:
    return list(schedule_pb2.ListScheduledResponse.FromString(encoded).scheduled)


@pytest.mark.slow
@given(messages, numbers, numbers, st.booleans(), st.sampled_from((1_100, 3_000, 1 << 20)))
def test_a_page_written_as_columns_says_what_it_says_one_by_one(
    bodies, deliver_at_ms, revision, is_full, frame_bytes_max
):
    page = page_of(bodies, deliver_at_ms, revision)
    expected = parsed(encode_scheduled(list(page), 1 << 30, is_full=is_full)[0])
    with patch.object(schedule_answers, "_FEW_SCHEDULED", 0):
        encoded, following = encode_scheduled(page, frame_bytes_max, is_full=is_full)
    shown = parsed(encoded)
    assert shown == expected[: len(shown)]
    assert len(encoded) <= frame_bytes_max or len(shown) == 1
    if following is None:
        assert len(shown) == len(bodies)
    else:
        assert following == page.entries.key(len(shown))


@pytest.mark.parametrize("is_full", [False, True])
def test_a_page_of_plain_messages_is_not_written_one_by_one(monkeypatch: pytest.MonkeyPatch, is_full: bool):
    bodies = [
        message_pb2.Message(payload=b"p" * place, schedule_key=f"k{place}").SerializeToString()
        for place in range(300)
    ]
    page = page_of(bodies, 5, 0)
    expected = parsed(encode_scheduled(list(page), 1 << 30, is_full=is_full)[0])
    monkeypatch.delattr(schedule_pb2, "ScheduledMessage")
    encoded, _ = encode_scheduled(page, 1 << 30, is_full=is_full)
    assert parsed(encoded) == expected


def test_of_a_page_that_does_not_fit_as_many_go_in_as_fit():
    page = page_of([message_pb2.Message(payload=bytes(1_000)).SerializeToString()] * 100, 5, 0)
    encoded, following = encode_scheduled(page, 51 << 10, is_full=True)
    assert 48 <= len(parsed(encoded)) <= 50
    assert following == page.entries.key(len(parsed(encoded)))
