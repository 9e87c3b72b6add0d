"""The schedule_key in a stored frame, found without a parser of protobuf."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import Corrupt
from broker.storage.varint import encode_varint
from broker.topics.schedule_frames import schedule_key_of
from postdate_api.v1.message_pb2 import Message

texts = st.text(max_size=300)
numbers = st.integers(0, (1 << 53) - 1)


def frame(body: bytes) -> bytes:
    return b"\x12" + encode_varint(len(body)) + body


@given(
    st.builds(
        Message,
        payload=st.binary(max_size=300),
        key=texts,
        properties=st.dictionaries(texts, texts, max_size=2),
        deliver_at_ms=numbers,
        schedule_key=texts,
        sequence_id=st.integers(0, (1 << 64) - 1),
        traceparent=texts,
    )
)
def test_any_message_gives_its_key(message):
    assert schedule_key_of(frame(message.SerializeToString())) == message.schedule_key


def test_of_several_keys_the_last_one_counts_as_in_protobuf():
    body = (
        Message(schedule_key="first").SerializeToString() + Message(schedule_key="last").SerializeToString()
    )
    assert schedule_key_of(frame(body)) == Message.FromString(body).schedule_key == "last"


def test_fields_that_nobody_knows_are_passed_over():
    unknown = b"\x79" + bytes(8) + b"\x7d" + bytes(4) + b"\x82\x01\x03abc" + b"\x88\x01\x96\x01"
    body = unknown + Message(schedule_key="here").SerializeToString() + unknown
    assert schedule_key_of(frame(body)) == "here"


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x12",
        b"\x12\x05ab",
        b"\x0a\x00",
        frame(b"\x32\x05ab"),
        frame(b"\x32"),
        frame(b"\x33"),
        frame(b"\x32\x01\xff"),
        frame(b"\x08" + b"\xff" * 11),
        frame(b"\x79ab"),
    ],
)
def test_damage_is_told(damaged):
    with pytest.raises(Corrupt):
        schedule_key_of(damaged)


@given(st.binary(max_size=40))
def test_any_bytes_give_a_key_or_corrupt(content):
    for each in (content, frame(content)):
        with contextlib.suppress(Corrupt):
            assert isinstance(schedule_key_of(each), str)
