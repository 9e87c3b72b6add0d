"""Fields of messages that are read or written by hand: all that the protos have, under the tags that protobuf gives."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, type_pb2, wrappers_pb2

from broker.rpc.wire import scan_messages
from broker.storage import message_fields
from broker.storage.message_fields import FRAME_HEAD, body_at, tag_of, tags_of, walk_fields
from broker.storage.varint import encode_varint
from broker.topics.dead_letter_frames import requeued_frame
from broker.topics.schedule_frames import schedule_key_of
from broker.topics.stored_message import StoredMessage, read_message
from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2, schedule_pb2
from postdate_api.v1.message_pb2 import Message

COUNT = 20
NAMES = [field.name for field in Message.DESCRIPTOR.fields]
KINDS = [
    Message,
    Message.PropertiesEntry,
    message_pb2.MessageId,
    producer_pb2.ProduceRequest,
    consumer_pb2.SubscribeRequest,
    consumer_pb2.Confirmed,
    consumer_pb2.Delivery,
    consumer_pb2.EntryFailure,
    schedule_pb2.ChangeOutcome,
    schedule_pb2.ScheduledMessage,
    # Packed numbers, and numbers of fixed width.
    message_pb2.EntrySet,
    wrappers_pb2.DoubleValue,
    wrappers_pb2.FloatValue,
    wrappers_pb2.BoolValue,
    type_pb2.Enum,
]


def sample(kind: Any, name: str) -> Any:
    """A message with a value in one field."""
    field = kind.DESCRIPTOR.fields_by_name[name]
    message = kind()
    value: Any
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, name)["a"] = "b"
        return message
    if field.message_type is not None:
        target = getattr(message, name)
        (target.add() if field.is_repeated else target).SetInParent()
        return message
    if field.type == field.TYPE_STRING:
        value = "text"
    elif field.type == field.TYPE_BYTES:
        value = b"bytes"
    else:
        value = 1
    if field.is_repeated:
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)
    return message


def frame_of(message: Message) -> bytes:
    raw = message.SerializeToString()
    return FRAME_HEAD + encode_varint(len(raw)) + raw


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.DESCRIPTOR.full_name)
def test_a_tag_is_the_first_byte_that_protobuf_writes(kind: Any):
    for field in kind.DESCRIPTOR.fields:
        assert sample(kind, field.name).SerializeToString()[0] == tag_of(field.name, kind), field.name


def test_whoever_forgets_a_field_or_names_one_too_many_learns_it_at_once():
    with pytest.raises(LookupError, match="traceparent"):
        tags_of(Message, *(name for name in NAMES if name != "traceparent"))
    with pytest.raises(LookupError, match="colour"):
        tags_of(Message, *NAMES, "colour")
    assert list(tags_of(Message, *reversed(NAMES))) == NAMES[::-1]


def test_a_field_has_one_tag_in_all_the_messages_that_share_it():
    assert tag_of("deliveries", consumer_pb2.Batch, consumer_pb2.ReceiveResponse) == 0x0A
    with pytest.raises(LookupError, match="request_id"):
        tag_of("request_id", producer_pb2.ProduceRequest, producer_pb2.ProduceResponse)


def test_a_tag_of_two_bytes_is_refused():
    file = descriptor_pb2.FileDescriptorProto(name="wide.proto", package="wide", syntax="proto3")
    kind = descriptor_pb2.FieldDescriptorProto
    file.message_type.add(name="Wide").field.add(
        name="far", number=16, type=kind.TYPE_INT64, label=kind.LABEL_OPTIONAL
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    wide = message_factory.GetMessageClass(pool.FindMessageTypeByName("wide.Wide"))
    with pytest.raises(LookupError, match="more than one byte"):
        tag_of("far", wide)


@pytest.mark.parametrize("name", NAMES)
def test_each_field_is_read_in_bulk(name: str):
    raw = sample(Message, name).SerializeToString()
    ends = np.arange(1, COUNT + 1) * len(raw)
    assert scan_messages(raw * COUNT, ends - len(raw), ends, len(NAMES)) is not None


@pytest.mark.parametrize("name", NAMES)
def test_each_field_is_shown_to_people_or_is_in_the_row(name: str):
    message = read_message(frame_of(sample(Message, name)))
    assert (message != StoredMessage()) is (name not in {"deliver_at_ms", "deliver_after_ms"})


def test_what_is_shown_of_a_message_has_the_names_of_its_fields():
    assert {field.name for field in fields(StoredMessage)} == {
        name for name in NAMES if name not in {"deliver_at_ms", "deliver_after_ms"}
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_requeued_message_keeps_each_field_but_what_said_when_to_store_it(name: str):
    frame = frame_of(sample(Message, name))
    obeyed = {"deliver_at_ms", "deliver_after_ms", "schedule_key", "ttl_ms", "sequence_id"}
    assert requeued_frame(frame) == (frame_of(Message()) if name in obeyed else frame)


@pytest.mark.parametrize("name", NAMES)
def test_no_field_but_one_is_taken_for_the_schedule_key(name: str):
    assert schedule_key_of(frame_of(sample(Message, name))) == ("text" if name == "schedule_key" else "")


def test_a_walk_gives_each_field_with_its_place():
    frame = frame_of(Message(payload=b"abc", deliver_at_ms=300, schedule_key="k"))
    message = memoryview(frame)[body_at(frame) :]
    tags = {tag: bytes(message[content:end]) for tag, _, content, end in walk_fields(message)}
    assert tags == {
        tag_of("payload", Message): b"abc",
        tag_of("deliver_at_ms", Message): encode_varint(300),
        tag_of("schedule_key", Message): b"k",
    }
    assert tag_of("message", consumer_pb2.Delivery) == message_fields.FRAME_TAG
